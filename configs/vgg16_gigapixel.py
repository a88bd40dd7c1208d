"""VGG16 classifies textures of 32768 x 32768, a gigapixel each, bfloat16. For a GPU.

    python -m experiments.train --config=configs/vgg16_gigapixel.py --workdir=runs/vgg16_gigapixel

Expect: a step in 19.3 GiB (plain JAX would need 1.28 TiB) and 18 s, 60 megapixels/s, on an H200,
where six steps and an evaluation were run; with --config.policy=budget:16GiB in 14.8 GiB (compiled
only). These times are from before the classifier was stated as products of matrices and
deterministic runs were tuned. Before the first step, the GPU's compiler tries algorithms for a
minute or more (once: they are kept in the workdir). Quality is not measured.
"""

from experiments.program.config import base


def get_config():
    config = base("vgg16")
    config.policy = "budget:24GiB"
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
