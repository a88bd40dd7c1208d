"""Random convolutional networks: chains, skips, concatenations and U-shapes of the ops that
networks are made of.

A network is drawn as a list of plain tuples, so that a failing one can be read and pasted.
"""

from __future__ import annotations

import dataclasses
import os
import random
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st
from jax import lax
from jax.ad_checkpoint import checkpoint_name

import jaxtile

from .support import conv, max_pool

EXAMPLES = int(os.environ.get("EXAMPLES", "60"))
"""In each of the long tests: as many as fit between others, or as there are nights."""

CHANNELS = 2
ACTIVATIONS = {
    "relu": jax.nn.relu,
    "sigmoid": jax.nn.sigmoid,
    "gelu": jax.nn.gelu,
    "shifted": lambda x: jnp.cos(x) + 1.5,
    "unit": lambda x: x / jnp.sqrt((x**2).sum(-1, keepdims=True) + 1e-3),
}


@dataclasses.dataclass(frozen=True)
class Network:
    """A drawn network, its input and its schedule."""

    layers: tuple[tuple, ...]
    shape: tuple[int, ...]
    tiles: Any
    policy: Any
    seed: int
    loss: str = ""
    """Does it return a loss: "alone", or "beside" the last result?"""

    @property
    def args(self):
        rng = np.random.default_rng(self.seed)
        kernels = jnp.asarray(
            rng.standard_normal((len(self.layers) + 1, 5, 5, CHANNELS, CHANNELS)) * 0.5
        )
        return kernels, jnp.asarray(rng.standard_normal(self.shape))

    def __call__(self, kernels, x):
        tensors = [x]
        for index, layer in enumerate(self.layers):
            new = _apply(layer, tensors, kernels[index])
            if min(new.shape[1:3]) >= 3:
                tensors.append(checkpoint_name(new, f"layer{index}"))
        if self.loss:
            loss = jnp.sin(tensors[-1]).mean() + (kernels**2).mean() + x.sum() / x.size
            return loss if self.loss == "alone" else (loss, tensors[-1])
        # Behind a normalisation some gradients cancel to rounding noise, which has no relative
        # error. The last output gives every gradient a part of order one to be compared with.
        return (
            tensors[-1],
            (tensors[len(tensors) // 2] ** 2).mean((1, 2)),
            (kernels**2).sum() + x.sum(),
        )


def _common(a, b):
    """Both cropped to the smaller size, the first from its middle."""
    height, width = (min(a.shape[d], b.shape[d]) for d in (1, 2))
    top, left = (a.shape[1] - height) // 2, (a.shape[2] - width) // 2
    return a[:, top : top + height, left : left + width], b[:, :height, :width]


def _apply(layer, tensors, kernel):
    op, *params = layer
    x = tensors[-1]
    match op:
        case "conv":
            height, width, stride, padding, dilation, bias = params
            if padding == "VALID" and min(x.shape[1:3]) < 9:
                padding = "SAME"
            out = conv(x, kernel[:height, :width], stride, padding, rhs_dilation=(dilation, 1))
            return out + bias
        case "depthwise":
            return conv(x, kernel[:3, :3, :1], feature_group_count=CHANNELS)
        case "transposed":
            size, stride = params
            if max(x.shape[1:3]) > 20:
                return x
            return lax.conv_transpose(x, kernel[:size, :size], (stride, stride), "SAME")
        case "max_pool":
            size, stride, padding = params
            return max_pool(x, size, stride, padding)
        case "average_pool":
            window = (1, 3, 2, 1)
            summed = lax.reduce_window(x, 0.0, lax.add, window, (1, 1, 2, 1), "SAME")
            return summed / lax.reduce_window(
                jnp.ones_like(x), 0.0, lax.add, window, (1, 1, 2, 1), "SAME"
            )
        case "act":
            return ACTIVATIONS[params[0]](x)
        case "batch_norm":
            mean, var = x.mean((0, 1, 2)), x.var((0, 1, 2))
            return (x - mean) * lax.rsqrt(var + 1e-3) + kernel[0, 0, 0]
        case "one_pass_norm":
            mean, square = x.mean((0, 1, 2)), (x * x).mean((0, 1, 2))
            return (x - mean) * lax.rsqrt(jnp.maximum(square - mean**2, 0) + 1e-3)
        case "gram":
            gram = jnp.einsum("nhwc,nhwd->ncd", x, x) / (x.shape[1] * x.shape[2])
            return jnp.tanh(jnp.einsum("nhwc,ncd->nhwd", x, gram))
        case "dense":
            weights = jnp.sin(jnp.arange(x[0].size).reshape(x.shape[1:])) * kernel[0, 0, 0]
            score = jnp.einsum("nhwc,hwc->n", jnp.tanh(x), weights) / x.shape[1]
            return x * jax.nn.sigmoid(score)[:, None, None, None]
        case "instance_norm":
            return (x - x.mean((1, 2), keepdims=True)) / (1 + jnp.abs(x).max((1, 2), keepdims=True))
        case "row_norm":
            return x - x.mean(2, keepdims=True) * 0.5
        case "squeeze_excite":
            return x * jax.nn.sigmoid(x.mean((1, 2)) @ kernel[0, 0])[:, None, None]
        case "dropout":
            return jnp.where(jax.random.bernoulli(jax.random.key(params[0]), 0.7, x.shape), x, 0)
        case "resize":
            method, height, width = params
            return jax.image.resize(x, (x.shape[0], height, width, CHANNELS), method)
        case "repeat":
            return jnp.repeat(jnp.repeat(x, 2, 1), 2, 2) if max(x.shape[1:3]) <= 16 else x
        case "skip":
            a, b = _common(tensors[params[0] % len(tensors)], x)
            return a + 0.5 * b
        case "concatenate":
            both = jnp.concatenate(_common(tensors[params[0] % len(tensors)], x), -1)
            return conv(both, jnp.concatenate([kernel[:1, :1], kernel[1:2, :1]], 2))
        case "pad":
            before, after = params
            return jnp.pad(
                x,
                ((0, 0), (before, after), (after, 0), (0, 0)),
                mode="constant",
                constant_values=0.5,
            )
        case "crop":
            return x[:, 1:, :-1] if min(x.shape[1:3]) > 4 else x
        case "every_second":
            return x[:, ::2, 1::2] if min(x.shape[1:3]) > 8 else x
        case "flip":
            return jnp.flip(x, params[0])
        case "join":
            return jnp.concatenate([x, x[:, :3]], 1) if x.shape[1] <= 16 else x
        case "coordinates":
            return (
                x + jnp.linspace(0, 1, x.shape[1])[:, None, None] * jnp.arange(x.shape[2])[:, None]
            )
        case "per_position":
            big = jnp.broadcast_to(kernel.reshape(-1)[: x.shape[2], None], x.shape[1:])
            return x * big
        case "branch":
            # After a norm the mean is 0, and rounding would say which branch is taken.
            flag = kernel[0, 0, 0, 0] > 0 if params[0] else x.mean() > 0.03
            return lax.cond(flag, *(lambda x, o=o: _apply(o, [x], kernel) for o in params[1:]), x)
        case "layers":
            first, second = params

            @jax.checkpoint
            def body(x, kernel):
                return _apply(second, [_apply(first, [x], kernel)], kernel), jnp.cos(x).mean()

            x, means = lax.scan(body, x, jnp.stack([kernel, kernel[::-1], -kernel]))
            return x + means.sum()
        case "per_sample":
            scales = 1 + kernel[0, 0, 0, 0] * jnp.arange(len(x))
            return jax.vmap(lambda x, s: conv(x[None], kernel[:3, :3] * s)[0])(x, scales)
        case "update":
            row, width = params[0] % x.shape[1], 1 + params[1] % 3
            x = x.at[:, row].set(kernel[0, 0, 0, 0]).at[..., 0].multiply(jnp.cos(x[..., 1]))
            return x.at[:, -2:, :width].add(x[:, :2, -width:])
        case "crop_at_run_time":
            return lax.dynamic_slice_in_dim(x, (kernel[0, 0, 0, 0] > 0).astype(int), 3, params[0])
    raise AssertionError(op)


_small = st.integers(1, 3)
_same_size = st.sampled_from(
    [
        ("conv", 3, 3, 1, "SAME", 1, 0.5),
        ("conv", 5, 1, 1, "SAME", 2, 0.5),
        ("batch_norm",),
        ("dense",),
        ("act", "relu"),
        ("act", "shifted"),
        ("dropout", 3),
        ("flip", 1),
    ]
)
_layer = st.one_of(
    st.tuples(
        st.just("conv"),
        st.integers(1, 5),
        st.integers(1, 4),
        _small,
        st.sampled_from(["SAME", "VALID", ((2, 0), (1, 3)), ((1, 1), (0, 2))]),
        st.integers(1, 2),
        st.floats(-1, 1),
    ),
    st.tuples(
        st.just("conv"),
        st.just(3),
        st.just(3),
        st.just(1),
        st.just("SAME"),
        st.just(1),
        st.just(0.5),
    ),
    st.tuples(st.just("depthwise")),
    st.tuples(st.just("transposed"), st.integers(1, 4), st.integers(1, 3)),
    st.tuples(
        st.just("max_pool"),
        st.integers(2, 3),
        st.integers(1, 2),
        st.sampled_from(["SAME", "VALID"]),
    ),
    st.tuples(st.just("average_pool")),
    st.tuples(st.just("act"), st.sampled_from(sorted(ACTIVATIONS))),
    st.tuples(st.just("batch_norm")),
    st.tuples(st.just("one_pass_norm")),
    st.tuples(st.just("gram")),
    st.tuples(st.just("dense")),
    st.tuples(st.just("instance_norm")),
    st.tuples(st.just("row_norm")),
    st.tuples(st.just("squeeze_excite")),
    st.tuples(st.just("dropout"), st.integers(0, 9)),
    st.tuples(
        st.just("resize"),
        st.sampled_from(["nearest", "bilinear"]),
        st.integers(4, 17),
        st.integers(4, 17),
    ),
    st.tuples(st.just("repeat")),
    st.tuples(st.just("skip"), st.integers(0, 9)),
    st.tuples(st.just("skip"), st.integers(0, 9)),
    st.tuples(st.just("concatenate"), st.integers(0, 9)),
    st.tuples(st.just("pad"), st.integers(0, 3), st.integers(0, 3)),
    st.tuples(st.just("crop")),
    st.tuples(st.just("every_second")),
    st.tuples(st.just("flip"), st.sampled_from([1, 2, (1, 2)])),
    st.tuples(st.just("join")),
    st.tuples(st.just("coordinates")),
    st.tuples(st.just("per_position")),
    st.tuples(st.just("branch"), st.booleans(), _same_size, _same_size),
    st.tuples(st.just("branch"), st.booleans(), _same_size, _same_size),
    st.tuples(st.just("layers"), _same_size, _same_size),
    st.tuples(st.just("per_sample")),
    st.tuples(st.just("update"), st.integers(0, 9), st.integers(0, 9)),
    st.tuples(st.just("crop_at_run_time"), st.integers(1, 2)),
)


@st.composite
def networks(draw) -> Network:
    layers = tuple(draw(st.lists(_layer, min_size=1, max_size=8)))
    shape = (draw(st.integers(1, 2)), draw(st.integers(5, 20)), draw(st.integers(5, 20)), CHANNELS)
    policies = jax.checkpoint_policies
    saved = [f"layer{i}" for i in sorted(draw(st.sets(st.integers(0, len(layers) - 1))))]
    policy = draw(
        st.sampled_from(
            [
                None,
                None,
                policies.save_only_these_names(*saved),
                policies.save_only_these_names(*saved),
                policies.save_and_offload_only_these_names(
                    names_which_can_be_saved=saved[::3],
                    names_which_can_be_offloaded=[*{*saved} - {*saved[::3]}],
                    offload_src="device",
                    offload_dst="pinned_host",
                ),
                policies.dots_saveable,
                policies.everything_saveable,
            ]
        )
    )
    loss = draw(st.sampled_from(["", "", "alone", "alone", "beside"]))
    network = Network(layers, shape, (1, 1), policy, draw(st.integers(0, 99)), loss)
    uses = _uses(network)
    # A grid must not be finer than the smallest stored value; a reduction's operand counts as one.
    maps = [network.shape, *(u.shape for u in uses if len(u.shape) == 4 and min(u.shape[1:3]) > 1)]
    limit = [min(s[d] for s in maps) for d in (1, 2)]
    grids = st.tuples(*(st.integers(1, min(8, n)) for n in limit))
    tiles = draw(grids)
    stored = sorted({u.name for u in uses if u.name.startswith("layer")})
    if stored and draw(st.booleans()):
        chosen = draw(st.sets(st.sampled_from(stored), max_size=3))
        any_grid = st.none() | st.just("whole") | grids
        tiles = {name: draw(any_grid) for name in sorted(chosen)}
        tiles[...] = draw(any_grid)
    if draw(st.integers(0, 3)) == 0:
        return dataclasses.replace(
            network, tiles="whole", policy=RandomPolicy(draw(st.integers(0, 999)))
        )
    return dataclasses.replace(network, tiles=tiles)


@dataclasses.dataclass(frozen=True)
class RandomPolicy:
    """Sees the whole graph, and decides about every result by chance."""

    seed: int

    def choose(self, outline: jaxtile.policy.Outline) -> dict:
        chance = random.Random(self.seed)
        share = chance.random()

        def choice(lengths) -> jaxtile.policy.Choice:
            grid = tuple(chance.randint(1, max(1, min(7, n))) for n in lengths)
            fewer = tuple(chance.randint(1, n) for n in grid)
            spec, place = chance.choice([None, "whole", grid, grid]), "device"
            for other, often in (("host", 0.2), ("passing", 0.4), ("restored", 0.3)):
                place = other if chance.random() < often else place
            return jaxtile.policy.Choice(spec, place, forward=chance.choice([None, fewer]))

        smallest = [
            min(n) for n in zip(*(p.lengths for p in outline.parts if p.tiled), strict=True)
        ]
        choices = {
            p.name: choice(p.lengths) for p in outline.parts if p.tiled and chance.random() < share
        }
        return choices | {...: choice(smallest or (1, 1))}


def _uses(network: Network):
    explanation = jaxtile.explain(
        network, *network.args, in_axes=(None, (1, 2)), tiles=(1, 1), policy=network.policy
    )
    return [use for region in explanation.regions for use in (*region.reads, *region.writes)]


def in_strips(network: Network) -> Network:
    """The same layers on one higher image, in strips, with all results in host memory."""
    names = [f"layer{i}" for i in range(len(network.layers))]
    policy = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=names,
        offload_src="device",
        offload_dst="pinned_host",
    )
    _, height, width, channels = network.shape
    shape = 1, 3 * height + 12, width, channels
    network = dataclasses.replace(network, shape=shape, policy=policy, tiles=(1, 1))
    maps = [u.shape[1] for u in _uses(network) if len(u.shape) == 4 and min(u.shape[1:3]) > 1]
    strips = min([height, *maps, 5 + network.seed % 7])
    return dataclasses.replace(network, tiles=(strips, 1))
