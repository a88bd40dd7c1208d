"""VGG16 segments mosaics of textures of 32768 x 32768, a gigapixel each, bfloat16. For a GPU.

    python -m experiments.train --config=configs/vgg16_mosaic.py --workdir=runs/vgg16_mosaic

A class for each of a million positions of `pool5` teaches more in a step than one class for an
image, from which `configs/vgg16_gigapixel.py` learns nothing in 50 steps. Not run at this size yet.
In small, on a CPU, these 50 steps reach an accuracy of 0.45, where a guess has 0.17:

    python -m experiments.train --config=configs/vgg16_mosaic.py --workdir=runs/small \
        --config.model.width=8 --config.data.size=512 --config.policy=tiled:2x2 \
        --config.train.learning_rate=1e-3 --config.dtype=float32
"""

from experiments.program.config import base


def get_config():
    config = base("vgg16", dense=True)
    config.policy = "budget:24GiB"
    config.dtype = "bfloat16"
    config.data.kind = "mosaics"
    config.data.size = 32768
    config.data.channels = 3
    config.data.classes = 6
    config.data.train_images = 12
    config.data.eval_images = 3
    config.train.steps = 50
    config.train.learning_rate = 2e-4
    config.train.warmup_steps = 5
    config.eval.every = 25
    config.eval.tile = 4096
    config.checkpoint.every = 25
    return config
