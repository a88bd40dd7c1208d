"""The models in PyTorch, to compare with: one training step, in a process of its own.

    python -m experiments.peers '{"model": "vgg16", "size": 1024, "checkpoint": true}'

Prints a JSON object: seconds per step (median), and the peak of memory beyond weights and image, on
a GPU. Channels last, cuDNN's fastest algorithms; batch norm uses and updates batch statistics.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from .measuring.problems import REFERENCES, shape_of
from .measuring.torch_models import Network, loss_of

_DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@dataclasses.dataclass(frozen=True)
class Options:
    """What is measured."""

    model: str
    size: int = 0
    """Height and width; 0: the reference's."""
    batch: int = 0
    """Images; 0: the reference's."""
    dtype: str = "float32"
    checkpoint: bool = False
    """Whether blocks are recomputed."""
    warmup: int = 2
    repeats: int = 5


def measure(options: Options) -> dict[str, Any]:
    """Seconds and bytes of a step."""
    step = training_step(options)
    before, on_gpu = 0, _DEVICE == "cuda"
    for i in range(options.warmup + 1):
        step()
        if on_gpu and i == options.warmup - 1:
            torch.cuda.empty_cache()
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    seconds = statistics.median(step() for _ in range(options.repeats))
    peak = torch.cuda.max_memory_allocated() - before if on_gpu else None
    return {"seconds": seconds, "temporary_bytes": peak, "version": torch.__version__}


def training_step(options: Options) -> Callable[[], float]:
    """A function that computes the loss and all gradients, and returns the seconds it took."""
    torch.manual_seed(0)
    torch.backends.cudnn.benchmark = True
    loss = loss_of(options.model)
    types = {"device": _DEVICE, "dtype": getattr(torch, options.dtype)}
    network = Network(options.model, options.checkpoint)
    network.to(**types, memory_format=torch.channels_last)
    shape = shape_of(options.model, options.batch or None, options.size or None)
    image = torch.randn(shape[0], shape[3], *shape[1:3], **types)
    image = image.contiguous(memory_format=torch.channels_last)
    labels = _labels(options.model, network, image)

    def step() -> float:
        began = time.perf_counter()
        network.zero_grad(set_to_none=False)
        value = loss(network(image), labels)
        value.backward()
        value.item()
        if _DEVICE == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - began

    return step


def _labels(model: str, network: Network, image: torch.Tensor) -> torch.Tensor | None:
    with torch.no_grad():
        shape = network(image).shape
    classes = REFERENCES[model].classes
    if classes is None:
        return None
    return torch.randint(classes, (shape[0], *shape[2:]), device=_DEVICE)


def main() -> None:
    options = Options(**json.loads(sys.argv[1]))
    print(json.dumps(measure(options)), flush=True)


if __name__ == "__main__":
    main()
