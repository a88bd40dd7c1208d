"""The reference U-Net: batches of 8 images of 572 x 572, float32, 31 million weights. For a GPU.

    python -m experiments.train --config=configs/unet_572.py --workdir=runs/unet_572

Expect, on an H200: the first step after 54 s; a step in 1.67 GiB where plain JAX takes 10.2, and
0.067 s; 938 of the steps in 160 s, where that run was stopped; an earlier one reached a mean IoU of
0.977 (jax 0.11.2). Both had 512 images, and the first 200 steps waited for them, for 16 of 35 s:
one takes 0.05 s to draw. The 128 of now were not measured.
"""

from experiments.program.config import base


def get_config():
    config = base("unet")
    config.policy = "budget:2GB"
    config.tile_batch = True
    config.data.size = 572
    config.data.train_images = 128
    config.data.eval_images = 32
    config.data.augment = True
    config.train.steps = 1000
    config.train.batch_size = 8
    config.train.learning_rate = 1e-4
    config.train.warmup_steps = 50
    config.eval.every = 200
    config.eval.batch_size = 8
    config.checkpoint.every = 200
    return config
