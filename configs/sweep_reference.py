"""All models at their reference sizes, under the whole catalogue of policies. For a GPU.

    python -m experiments.sweep --config=configs/sweep_reference.py --workdir=runs/sweep_reference

Expect: 65 cells of half a minute to three minutes each, most of it compilation. Eleven of the
U-Net's thirteen have been run, on an H200: docs/performance.md.
"""

from experiments.program.config import sweep


def get_config():
    config = sweep(("vgg16", "unet", "resnet50", "alexnet", "local_cnn"))
    config.policies = (
        *("plain", "store_all", "retained", "store_convs", "every:4", "sqrt"),
        *("lower_sets:6GB", "recompute_all", "budget:8GiB", "budget:4GiB", "budget:2GiB"),
        *("budget:1GiB", "budget:512MiB"),
    )
    config.repeats = 10
    return config
