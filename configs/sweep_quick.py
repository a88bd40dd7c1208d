"""A sweep over policies on small images, on two CPU cores.

    python -m experiments.sweep --config=configs/sweep_quick.py --workdir=runs/sweep

Expect: eight cells of about half a minute each; results in `runs/sweep/results.jsonl`.
"""

from experiments.program.config import sweep


def get_config():
    config = sweep(("unet", "alexnet"), batches=(1,))
    config.sizes = (188,)
    config.policies = ("plain", "retained", "sqrt", "recompute_all")
    config.repeats = 3
    return config
