"""VGG16 and ResNet-50 from 2048 to 32768 pixels, bfloat16, under budgets. For a GPU.

    python -m experiments.sweep --config=configs/sweep_gpu.py --workdir=runs/sweep_gpu

Expect: 60 cells; those that do not fit are recorded as such. Not measured yet.
"""

from experiments.program.config import sweep


def get_config():
    config = sweep(("vgg16", "resnet50"))
    config.sizes = (2048, 4096, 8192, 16384, 32768)
    config.dtypes = ("bfloat16",)
    config.policies = (
        *("plain", "sqrt", "budget:64GiB", "budget:24GiB", "budget:8GiB", "budget:2GiB"),
    )
    config.limit_seconds = 1200
    config.compare = False
    return config
