"""A 3-D U-Net with group norms segments synthetic cells in volumes of 512^3, bfloat16. For a GPU.

    python -m experiments.train --config=configs/unet_volume.py --workdir=runs/unet_volume

Not run as a whole yet. On an H200 with jax 0.11.2 a step of the network alone takes 1.6 s and 54.2
GiB; for 1024^3 (`--config.data.size=1024`) it took 48 s, within 125 GiB, before convolutions of
volumes became faster.
"""

from experiments.program.config import base


def get_config():
    widths = (32, 64, 128, 256)
    config = base("unet", channels=widths, padding="SAME", norm="group", dropout=0.0)
    config.policy = "budget:60GiB"
    config.dtype = "bfloat16"
    config.data.dimensions = 3
    config.data.size = 512
    config.data.augment = True
    config.train.steps = 200
    config.train.optimiser = "adamw"
    config.train.learning_rate = 1e-3
    config.train.warmup_steps = 10
    config.eval.every = 100
    config.checkpoint.every = 50
    return config
