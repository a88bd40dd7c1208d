"""The models in PyTorch, which must be installed: blocks in turn, stored or recomputed."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from .baselines import IN_TORCH

Loss = Callable[[Tensor, Tensor | None], Tensor]


class Network(nn.Module):
    """A model of `IN_TORCH`; `recompute`: each block is run once more in the backward pass."""

    def __init__(self, model: str, recompute: bool):
        super().__init__()
        if model not in IN_TORCH:
            raise ValueError(f"there is no model {model!r} in PyTorch, only {', '.join(IN_TORCH)}")
        # The blocks of a U-Net are inside its levels.
        self.recompute = recompute and model != "unet"
        if model == "unet":
            blocks = [nn.Sequential(_Level(1, 64, 4, recompute), nn.Conv2d(64, 2, 1))]
        else:
            blocks = _vgg16() if model == "vgg16" else _resnet50()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = _run(block, x, self.recompute)
        return x


def loss_of(model: str) -> Loss:
    """Of scores and labels. VGG16 has no classifier here, and its loss takes no labels."""
    if model == "vgg16":
        return lambda y, _: y.float().mean()
    return lambda y, labels: nn.functional.cross_entropy(y.float(), labels)


def _run(module: nn.Module, x: Tensor, recompute: bool) -> Tensor:
    return checkpoint(module, x, use_reentrant=False) if recompute else module(x)


def _vgg16() -> list[nn.Module]:
    found, n_in = [], 3
    for widths in ((64,) * 2, (128,) * 2, (256,) * 3, (512,) * 3, (512,) * 3):
        layers: list[nn.Module] = []
        for width in widths:
            layers += [nn.Conv2d(n_in, width, 3, padding=1), nn.ReLU(inplace=True)]
            n_in = width
        found.append(nn.Sequential(*layers, nn.MaxPool2d(2)))
    return found


def _resnet50() -> list[nn.Module]:
    stem = nn.Sequential(*_conv(3, 64, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, 1))
    found, n_in = [stem], 64
    for i, number in enumerate((3, 4, 6, 3)):
        for k in range(number):
            found.append(_Bottleneck(n_in, 64 << i, 2 if i and not k else 1))
            n_in = 256 << i
    return [*found, nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2048, 1000))]


def _conv(n_in: int, n_out: int, size: int, stride: int = 1) -> list[nn.Module]:
    return [nn.Conv2d(n_in, n_out, size, stride, size // 2, bias=False), nn.BatchNorm2d(n_out)]


class _Bottleneck(nn.Module):
    def __init__(self, n_in: int, width: int, stride: int):
        super().__init__()
        self.body = nn.Sequential(
            *_conv(n_in, width, 1),
            nn.ReLU(inplace=True),
            *_conv(width, width, 3, stride),
            nn.ReLU(inplace=True),
            *_conv(width, 4 * width, 1),
        )
        same = stride == 1 and n_in == 4 * width
        self.skip = nn.Identity() if same else nn.Sequential(*_conv(n_in, 4 * width, 1, stride))

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.body(x) + self.skip(x))


class _Level(nn.Module):
    """A level of the U-Net, with all deeper ones inside; convolutions are not padded."""

    def __init__(self, n_in: int, width: int, deeper: int, recompute: bool):
        super().__init__()
        self.recompute = recompute
        self.down = self._convs(n_in, width)
        self.below = _Level(width, 2 * width, deeper - 1, recompute) if deeper else None
        if self.below is not None:
            self.up = nn.ConvTranspose2d(2 * width, width, 2, 2)
            self.merge = self._convs(2 * width, width)

    @staticmethod
    def _convs(n_in: int, n_out: int) -> nn.Module:
        pairs = [(n_in, n_out), (n_out, n_out)]
        return nn.Sequential(
            *(m for a, b in pairs for m in (nn.Conv2d(a, b, 3), nn.ReLU(inplace=True)))
        )

    def forward(self, x: Tensor) -> Tensor:
        x = _run(self.down, x, self.recompute)
        if self.below is None:
            return x
        y = self.up(self.below(torch.max_pool2d(x, 2)))
        edge = (x.shape[-1] - y.shape[-1]) // 2
        x = x[..., edge : edge + y.shape[-2], edge : edge + y.shape[-1]]
        return _run(self.merge, torch.cat([x, y], 1), self.recompute)
