"""A run of seconds, for the tests of the training program."""

from experiments.program.config import base


def get_config():
    config = base("unet", channels=2, depth=1, padding="SAME", norm="batch", dropout=0.2)
    config.policy = "every:3"
    config.data.size = 32
    config.data.train_images = 8
    config.data.eval_images = 3
    config.train.steps = 120
    config.train.batch_size = 2
    config.train.ema = 0.9
    config.eval.every = 45
    config.eval.batch_size = 2
    config.checkpoint.every = 24
    return config
