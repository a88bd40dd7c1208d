"""The models in PyTorch, to compare with: one training step, in a process of its own.

    python -m experiments.peers '{"model": "vgg16", "size": 1024, "checkpoint": true}'

Prints a JSON object: seconds per step (median), and the peak of memory beyond weights and image, on
a GPU. Channels last, cuDNN's fastest algorithms; batch norm uses and updates batch statistics.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from typing import Any

from .measuring.problems import REFERENCES, shape_of
from .measuring.torch_models import blocks


def measure(
    model: str, size: int, batch: int, dtype: str, checkpoint: bool, warmup: int, repeats: int
) -> dict[str, Any]:
    import torch
    from torch.utils.checkpoint import checkpoint as again

    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    torch.backends.cudnn.benchmark = True
    parts, loss = blocks(model)
    options = {"device": device, "dtype": getattr(torch, dtype)}
    network = torch.nn.ModuleList(parts).to(**options, memory_format=torch.channels_last)
    for level in network.modules():
        if type(level).__name__ == "Level":
            type(level).checkpoint = checkpoint
    shape = shape_of(model, batch or None, size or None)
    image = torch.randn(shape[0], shape[3], *shape[1:3], **options)
    image = image.contiguous(memory_format=torch.channels_last)

    def scores(x):
        for part in network:
            in_blocks = checkpoint and model != "unet"
            x = again(part, x, use_reentrant=False) if in_blocks else part(x)
        return x

    with torch.no_grad():
        shape_of_scores = scores(image).shape
    classes = REFERENCES[model].classes
    labels = None
    if classes is not None:
        where = (shape_of_scores[0], *shape_of_scores[2:])
        labels = torch.randint(classes, where, device=device)

    def step() -> float:
        began = time.perf_counter()
        network.zero_grad(set_to_none=False)
        value = loss(scores(image), labels)
        value.backward()
        found = value.item()
        if device == "cuda":
            torch.cuda.synchronize()
        del value, found
        return time.perf_counter() - began

    before = 0
    for i in range(warmup + 1):
        step()
        if device == "cuda" and i == warmup - 1:
            torch.cuda.empty_cache()
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    seconds = statistics.median(step() for _ in range(repeats))
    peak = torch.cuda.max_memory_allocated() - before if device == "cuda" else None
    return {"seconds": seconds, "temporary_bytes": peak, "version": torch.__version__}


def main() -> None:
    options = {"size": 0, "batch": 0, "dtype": "float32", "checkpoint": False}
    options |= {"warmup": 2, "repeats": 5} | json.loads(sys.argv[1])
    print(json.dumps(measure(**options)), flush=True)


if __name__ == "__main__":
    main()
