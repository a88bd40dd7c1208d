"""VGG16 segments mosaics of textures of 32768 x 32768, a gigapixel each, bfloat16. For a GPU.

    python -m experiments.train --config=configs/vgg16_gigapixel.py --workdir=runs/vgg16_gigapixel

Expect, on an H200 with jax 0.11.2: the first step after 80 s, of which the compiler tries
algorithms for 54, once per workdir; a step in 8.5 GiB and 4.8 s, 225 megapixels/s, without waiting
for data; all of it in about seven minutes. The loss falls from 2.4 to 0.27. The accuracy on three
held-out images is 0.92 and the mean IoU 0.86 (when a step took 5.7 s); a guess has 0.17.

A class for each of a million positions of `pool5` teaches more in a step than one class for an
image: with one, 50 steps are not enough for textures of any size. In small, on a CPU, these 50
steps reach an accuracy of 0.45:

    python -m experiments.train --config=configs/vgg16_gigapixel.py --workdir=runs/small \
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
