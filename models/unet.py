"""U-Net, as Ronneberger et al. (2015) drew it and as its Chainer implementation computes it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from jaxtile import nn, ops

from ._sizes import check_image, check_size
from .resnet50 import Trunk
from .vgg16 import BLOCKS

_LETTERS = "abcd"  # of what a level computes, one after the other


class UNet(nnx.Module):
    """U-Net. The defaults are the reference graph: 572 pixels in, 388 out, 31,100,354 weights.

    Names: level `i` goes down as `d{i}a` (its input), `d{i}b`, `d{i}c` (and with VGG16's encoder
    `d{i}d`, where there is a third convolution; ResNet-50's has the names of `ResNet50`), and comes
    up as `u{i}a` (up-sampled), `u{i}b` (with the skip), `u{i}c`, `u{i}d`; `.pre` is before
    normalisation and ReLU, `.drop` after dropout, `d{i}cc` the cropped skip; then `score`, `loss`.

    As in the reference: dropout follows the two deepest levels, and the skip of the upper one is
    taken after it; the last up-sampling gives as many channels as level 1 has, not as level 0.

    Args:
      in_channels: channels of the image.
      classes: channels of the score.
      channels: of level 0, doubled from level to level; or of every level.
      depth: how many times the image is halved.
      encoder: `"plain"`, two convolutions in a level; `"vgg16"`, the five blocks of VGG16; or
        `"resnet50"`, its first convolution and its stages, below the image itself. The last two
        want `padding="SAME"`; `load_weights` takes their weights. `channels` are those of the first
        convolution. On the way up to ResNet-50's first, they are half of them, then a quarter.
      blocks, frozen, stride_first: of ResNet-50's encoder, as in `ResNet50`.
      padding: `"VALID"`, the output being smaller than the image; or `"SAME"`.
      norm: None, `"batch"` or `"group"` (8 channels a group, or all), before each ReLU.
      upsampling: `"transposed"` (2 x 2 transposed convolution), or `"bilinear"` or `"nearest"`
        followed by a 1 x 1 convolution.
      spatial: spatial axes: 1, 2 or 3.
      dropout: rate.
      dtype: of the computation; None takes it from image and weights.
      param_dtype: of the weights.
      rngs: as `nnx.Rngs(0)`.
    """

    def __init__(
        self,
        in_channels: int = 1,
        classes: int = 2,
        *,
        channels: int | Sequence[int] = 64,
        depth: int | None = None,
        encoder: str = "plain",
        blocks: Sequence[int] = (3, 4, 6, 3),
        frozen: bool = False,
        stride_first: bool = False,
        padding: str = "VALID",
        norm: str | None = None,
        upsampling: str = "transposed",
        spatial: int = 2,
        dropout: float = 0.5,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        rngs: nnx.Rngs,
    ):
        _one_of("encoder", encoder, ("plain", "vgg16", "resnet50"))
        _one_of("padding", padding, ("VALID", "SAME"))
        _one_of("norm", norm, (None, "batch", "group"))
        _one_of("upsampling", upsampling, ("transposed", "bilinear", "nearest"))
        _one_of("spatial", spatial, (1, 2, 3))
        types = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
        self.resnet = nnx.data(None)
        if encoder == "plain":
            widths = upwards = _widths(channels, depth)
            counts = [2] * len(widths)
        elif encoder == "vgg16":
            _check_encoder(encoder, len(BLOCKS) - 1, channels, depth, padding)
            widths = upwards = tuple(channels * block[0] for block in BLOCKS)
            counts = [len(block) for block in BLOCKS]
        else:
            _check_encoder(encoder, len(blocks) + 1, channels, depth, padding)
            self.resnet = Trunk(
                in_channels=in_channels,
                blocks=blocks,
                width=channels,
                spatial=spatial,
                stride_first=stride_first,
                frozen=frozen,
                momentum=0.9,
                folded=False,
                **types,
            )
            widths, counts = self.resnet.widths, [0] * len(self.resnet.widths)
            upwards = tuple(max(1, channels * 2**i // 4) for i in range(len(widths) - 1))
        self.depth, self.padding, self.upsampling = len(widths) - 1, padding, upsampling
        self.in_channels, self.spatial = in_channels, spatial
        self.encoder, self.norm = encoder, norm
        self.levels = tuple(_LETTERS[: count + 1] for count in counts)
        # As in the paper: deviation sqrt(2 / n) for n inputs of a neuron.
        convs = {"kernel_init": nnx.initializers.he_normal(), **types}

        def conv(source: str, target: str, n_in: int, n_out: int) -> None:
            kernel = (3,) * spatial
            layer = nn.Conv(n_in, n_out, kernel, padding=padding, use_bias=norm is None, **convs)
            setattr(self, f"conv_{source}_{target[-1]}", layer)
            if norm == "batch":
                setattr(self, f"norm_{target}", nn.BatchNorm(n_out, momentum=0.9, **types))
            elif norm == "group":
                groups = max(1, n_out // 8) if n_out % 8 == 0 else 1
                setattr(self, f"norm_{target}", nnx.GroupNorm(n_out, groups, **types))

        n_in = in_channels
        for i, n in enumerate(widths):
            for source, target in pairwise(self.levels[i]):
                conv(f"d{i}{source}", f"d{i}{target}", n_in, n)
                n_in = n
        for i in reversed(range(self.depth)):
            below = self._below(i)
            n_below = widths[-1] if i == self.depth - 1 else upwards[i + 1]
            n_up = upwards[max(i, 1)]
            if upsampling == "transposed":
                two = (2,) * spatial
                up = nn.ConvTranspose(n_below, n_up, two, two, padding="VALID", **convs)
            else:
                up = nn.Conv(n_below, n_up, (1,) * spatial, **convs)
            setattr(self, f"upconv_{below}_u{i}a", up)
            conv(f"u{i}b", f"u{i}c", widths[i] + n_up, upwards[i])
            conv(f"u{i}c", f"u{i}d", upwards[i], upwards[i])
        self.conv_u0d_score = nn.Conv(upwards[0], classes, (1,) * spatial, **convs)
        self.dropout = nn.Dropout(dropout, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """The score of each class at each position of the output."""
        check_image("UNet", x.shape, self.spatial, self.in_channels)
        check_size("UNet", x.shape, self._fits)
        skips = []
        for i in range(self.depth + 1):
            x = self._down(x, i)
            if i >= self.depth - 1:
                x = checkpoint_name(self.dropout(x), f"d{i}{self.levels[i][-1]}.drop")
            skips.append(x)
        for i in reversed(range(self.depth)):
            x = self._up(x, self._below(i), f"u{i}a")
            skip = checkpoint_name(ops.center_crop(skips[i], x.shape[1:-1]), f"d{i}cc")
            x = checkpoint_name(jnp.concatenate([skip, x], -1), f"u{i}b")
            x = self._conv(x, f"u{i}b", f"u{i}c")
            x = self._conv(x, f"u{i}c", f"u{i}d")
        return checkpoint_name(self.conv_u0d_score(x), "score")

    def loss(self, x: jax.Array, labels: jax.Array) -> jax.Array:
        """Mean softmax cross-entropy; positions labelled -1 do not count."""
        return checkpoint_name(ops.softmax_cross_entropy(self(x), labels), "loss")

    def encoder_blocks(self) -> list[list[nn.Conv]]:
        """The convolutions of each level on the way down."""
        return [
            [getattr(self, f"conv_d{i}{source}_{target}") for source, target in pairwise(letters)]
            for i, letters in enumerate(self.levels)
        ]

    def _below(self, i: int) -> str:
        """What is up-sampled to level `i`."""
        if i == self.depth - 1:
            return f"d{self.depth}{self.levels[self.depth][-1]}"
        return f"u{i + 1}d"

    def output_size(self, n: int) -> int:
        """The size of the score along an axis of `n` pixels."""
        return n if self.padding == "SAME" else n - 4 * (3 * 2**self.depth - 2)

    def _down(self, x: jax.Array, i: int) -> jax.Array:
        """Level `i`, from the one above it."""
        if self.resnet is not None:
            return self.resnet.level(x, i) if i else x
        if i:
            x = checkpoint_name(ops.max_pool(x), f"d{i}a")
        for source, target in pairwise(self.levels[i]):
            x = self._conv(x, f"d{i}{source}", f"d{i}{target}")
        return x

    def _conv(self, x: jax.Array, source: str, target: str) -> jax.Array:
        x = checkpoint_name(getattr(self, f"conv_{source}_{target[-1]}")(x), f"{target}.pre")
        norm = getattr(self, f"norm_{target}", None)
        return checkpoint_name(nnx.relu(x if norm is None else norm(x)), target)

    def _up(self, x: jax.Array, source: str, target: str) -> jax.Array:
        if self.upsampling != "transposed":
            x = ops.upsample(x, method=self.upsampling)
        x = checkpoint_name(getattr(self, f"upconv_{source}_{target}")(x), f"{target}.pre")
        return checkpoint_name(nnx.relu(x), target)

    def _fits(self, n: int) -> bool:
        lost = 4 if self.padding == "VALID" else 0
        for _ in range(self.depth):
            n -= lost
            if n <= 0 or n % 2:
                return False
            n //= 2
        for level in range(self.depth + 1):
            n = (2 * n if level else n) - lost
        return n > 0


def _widths(channels: int | Sequence[int], depth: int | None) -> tuple[int, ...]:
    if isinstance(channels, int):
        widths = tuple(channels * 2**i for i in range((4 if depth is None else depth) + 1))
    else:
        widths = tuple(channels)
        if depth is not None and depth != len(widths) - 1:
            raise ValueError(
                f"`channels` (={widths}) has {len(widths)} levels, which is a depth of "
                f"{len(widths) - 1}, but `depth` is {depth}"
            )
    if len(widths) < 2 or min(widths) < 1:
        raise ValueError(f"`channels` (={channels}) and `depth` (={depth}) must be positive")
    return widths


def _check_encoder(
    encoder: str, levels: int, channels: Any, depth: int | None, padding: str
) -> None:
    if not isinstance(channels, int) or depth not in (None, levels) or padding != "SAME":
        raise ValueError(
            f"`encoder={encoder!r}` wants `padding='SAME'` and `channels` of its first "
            f"convolution, a number, and has a `depth` of {levels}; given are {padding!r}, "
            f"{channels} and {depth}"
        )


def _one_of(what: str, value: Any, allowed: tuple[Any, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"`{what}` (={value!r}) must be one of {', '.join(map(repr, allowed))}")
