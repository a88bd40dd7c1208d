"""ResNet-50 classifies textures of 8192 x 8192, with exact batch statistics, bfloat16. For a GPU.

    python -m experiments.train --config=configs/resnet50_large.py --workdir=runs/resnet50_large

Expect, on an H200: a step in 22.3 GiB where plain JAX takes 51.2, and 0.30 s, 222 megapixels/s; all
of it in four and a half minutes (jax 0.11.2). It does not learn much in these 200 steps: the loss
falls from 12 to 2.2, but the accuracy was 0.25 at best, and a guess has 0.17. With one image in a
batch, norms make the means of all images' channels alike.
"""

from experiments.program.config import base


def get_config():
    config = base("resnet50")
    config.policy = "budget:24GiB"
    config.dtype = "bfloat16"
    config.data.kind = "textures"
    config.data.size = 8192
    config.data.channels = 3
    config.data.classes = 6
    config.data.train_images = 48
    config.data.eval_images = 12
    config.train.steps = 200
    config.train.optimiser = "sgd"
    config.train.learning_rate = 0.02
    config.train.weight_decay = 1e-4
    config.train.warmup_steps = 10
    config.eval.every = 50
    config.eval.tile = 4096
    config.checkpoint.every = 50
    return config
