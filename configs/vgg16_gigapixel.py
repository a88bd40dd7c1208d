"""VGG16 classifies textures of 32768 x 32768, a gigapixel each, bfloat16. For a GPU.

    python -m experiments.train --config=configs/vgg16_gigapixel.py --workdir=runs/vgg16_gigapixel

Expect: a step in 53.8 GiB on an H200, at 1.28x the time of plain JAX by the planner's prediction.
Quality and time are not measured yet; a step takes tens of seconds.
"""

from experiments.config import base


def get_config():
    config = base("vgg16")
    config.policy = "budget:32GiB"
    config.dtype = "bfloat16"
    config.data.kind = "textures"
    config.data.size = 32768
    config.data.channels = 3
    config.data.classes = 6
    config.data.train_images = 12
    config.data.eval_images = 3
    config.train.steps = 50
    config.train.learning_rate = 1e-5
    config.train.warmup_steps = 5
    config.eval.every = 25
    config.eval.tile = 4096
    config.checkpoint.every = 25
    return config
