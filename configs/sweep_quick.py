"""A sweep over policies: AlexNet on images of two sizes, on two CPU cores.

    python -m experiments.sweep --config=configs/sweep_quick.py --workdir=runs/sweep

Expect: eight cells of about a minute each; results in `runs/sweep/results.jsonl`. Of plain JAX's
86 and 289 MiB, `passing:1x4x4` needs 0.40 and 0.27, `budget:64MiB` 0.53 and 0.19: the same budget
for four times the pixels. `sqrt`, which has no tiles, needs 0.93 and 0.90.
"""

from experiments.program.config import sweep


def get_config():
    config = sweep(("alexnet",), batches=(1,))
    config.sizes = (512, 1024)
    config.policies = ("plain", "sqrt", "passing:1x4x4", "budget:64MiB")
    config.repeats = 3
    return config
