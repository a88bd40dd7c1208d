"""VGG16 segments mosaics of textures of 32768 x 32768, a gigapixel each, bfloat16. For a GPU.

    python -m experiments.train --config=configs/vgg16_gigapixel.py --workdir=runs/vgg16_gigapixel

Expect: a step in 22.0 GiB and 5.9 s, 182 megapixels/s, on an H200 with jax 0.11.2. After 25 steps
the accuracy on held-out images is 0.73 and the mean IoU 0.57; a guess has 0.17. The loss falls
from 2.4 to 0.36 in the 38 steps that were run. The first step came after 179 s, of which the
compiler tried algorithms for about 45, once per workdir. (Drawing a mosaic took longer than a step
then; it is faster now, and was not measured again.)

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
