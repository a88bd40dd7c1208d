"""VGG16 classifies textures of 32768 x 32768, a gigapixel each, bfloat16. For a GPU.

    python -m experiments.train --config=configs/vgg16_gigapixel.py --workdir=runs/vgg16_gigapixel

Expect: a step in 23.4 GiB and 5.8 s, 185 megapixels/s, on an H200 with jax 0.11.2, where six steps
were run, and run again with the same bits after a kill -9. The first step came after 143 s, of
which the compiler tried algorithms for 97, once per workdir; with the workdir's after 24 s. (Tiles
are a little smaller since then, because of that time; it was not measured again.) In 50 steps of
one image each nothing is learned yet: with images of 384 x 384 the accuracy is that of a guess
after 50 steps, and 0.5 to 0.6 after 200 at a learning rate of 3e-5.
"""

from experiments.program.config import base


def get_config():
    config = base("vgg16", pooled=True)
    config.policy = "budget:24GiB"
    config.dtype = "bfloat16"
    config.data.kind = "textures"
    config.data.size = 32768
    config.data.channels = 3
    config.data.classes = 6
    config.data.train_images = 12
    config.data.eval_images = 3
    config.train.steps = 50
    config.train.learning_rate = 3e-5
    config.train.warmup_steps = 5
    config.eval.every = 25
    config.eval.tile = 4096
    config.checkpoint.every = 25
    return config
