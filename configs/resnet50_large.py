"""ResNet-50 classifies textures of 8192 x 8192, with exact batch statistics, bfloat16. For a GPU.

    python -m experiments.train --config=configs/resnet50_large.py --workdir=runs/resnet50_large

Expect: a step in 24 GiB, at 1.13x the time of plain JAX by the planner's prediction. Quality and
time are not measured yet.
"""

from experiments.config import base


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
