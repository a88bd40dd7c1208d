"""The models in PyTorch."""

from __future__ import annotations

from typing import Any

NAMES = ("vgg16", "resnet50", "unet")


def blocks(model: str) -> tuple[Any, Any]:
    """The model as a list of modules in turn, and its loss; a U-Net is a module of its own."""
    import torch
    from torch import nn

    def conv(n_in: int, n_out: int, size: int, stride: int = 1) -> list[nn.Module]:
        return [
            nn.Conv2d(n_in, n_out, size, stride, size // 2, bias=False),
            nn.BatchNorm2d(n_out),
        ]

    class Bottleneck(nn.Module):
        def __init__(self, n_in: int, width: int, stride: int):
            super().__init__()
            self.body = nn.Sequential(
                *conv(n_in, width, 1),
                nn.ReLU(inplace=True),
                *conv(width, width, 3, stride),
                nn.ReLU(inplace=True),
                *conv(width, 4 * width, 1),
            )
            same = stride == 1 and n_in == 4 * width
            self.skip = nn.Identity() if same else nn.Sequential(*conv(n_in, 4 * width, 1, stride))

        def forward(self, x):
            return torch.relu(self.body(x) + self.skip(x))

    class Level(nn.Module):
        """A level of the U-Net, with all deeper ones inside; convolutions are not padded."""

        def __init__(self, n_in: int, width: int, deeper: int):
            super().__init__()
            self.down = self._convs(n_in, width)
            self.below = Level(width, 2 * width, deeper - 1) if deeper else None
            if self.below is not None:
                self.up = nn.ConvTranspose2d(2 * width, width, 2, 2)
                self.merge = self._convs(2 * width, width)

        @staticmethod
        def _convs(n_in: int, n_out: int) -> nn.Module:
            pairs = [(n_in, n_out), (n_out, n_out)]
            return nn.Sequential(
                *(m for a, b in pairs for m in (nn.Conv2d(a, b, 3), nn.ReLU(inplace=True)))
            )

        def forward(self, x):
            x = self._run(self.down, x)
            if self.below is None:
                return x
            y = self.up(self.below(torch.max_pool2d(x, 2)))
            edge = (x.shape[-1] - y.shape[-1]) // 2
            x = x[..., edge : edge + y.shape[-2], edge : edge + y.shape[-1]]
            return self._run(self.merge, torch.cat([x, y], 1))

        checkpoint = False

        def _run(self, module, x):
            from torch.utils.checkpoint import checkpoint

            return checkpoint(module, x, use_reentrant=False) if Level.checkpoint else module(x)

    if model == "vgg16":
        found, n_in = [], 3
        for widths in ((64,) * 2, (128,) * 2, (256,) * 3, (512,) * 3, (512,) * 3):
            layers: list[nn.Module] = []
            for width in widths:
                layers += [nn.Conv2d(n_in, width, 3, padding=1), nn.ReLU(inplace=True)]
                n_in = width
            found.append(nn.Sequential(*layers, nn.MaxPool2d(2)))
        return found, lambda y, _: y.float().mean()
    if model == "resnet50":
        found, n_in = [nn.Sequential(*conv(3, 64, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, 1))], 64
        for i, number in enumerate((3, 4, 6, 3)):
            for k in range(number):
                found.append(Bottleneck(n_in, 64 << i, 2 if i and not k else 1))
                n_in = 256 << i
        head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2048, 1000))
        return [*found, head], lambda y, t: nn.functional.cross_entropy(y.float(), t)
    return [nn.Sequential(Level(1, 64, 4), nn.Conv2d(64, 2, 1))], (
        lambda y, t: nn.functional.cross_entropy(y.float(), t)
    )
