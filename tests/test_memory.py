"""Memory is bounded by the tile, and no step of a loop touches a whole array."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxtile
from jaxtile._run.ordering import zeros_after

from .support import conv


def network(params, x):
    for w in params:
        x = jax.nn.relu(conv(x, w))
    return x


def compiled(fun, size: int, channels: int = 16, layers: int = 8):
    shape = jax.ShapeDtypeStruct
    params = [shape((3, 3, channels, channels), jnp.float32)] * layers
    image = shape((1, size, size, channels), jnp.float32)
    step = jax.jit(jax.value_and_grad(lambda p, x: jnp.mean(fun(p, x) ** 2), (0, 1)))
    return step.lower(params, image).compile()


def tiled(tiles, **options):
    return jaxtile.checkpoint(network, in_axes=(None, (1, 2)), tiles=tiles, **options)


@pytest.mark.slow
def test_eight_convolutions_hold_one_tile():
    plain = compiled(network, 512).memory_analysis().temp_size_in_bytes
    ours = compiled(tiled((8, 8)), 512).memory_analysis().temp_size_in_bytes
    assert ours <= 0.30 * plain


def test_memory_does_not_grow_with_the_number_of_tiles():
    few, many = (
        compiled(tiled((n, n)), 128, 4).memory_analysis().temp_size_in_bytes for n in (4, 16)
    )
    assert many <= few


# A loop may name a whole array, read a window of it and write a window of it; anything else would
# cost its whole size in every step.
_IN_PLACE = {
    "parameter",
    "get-tuple-element",
    "tuple",
    "while",
    "dynamic-slice",
    "dynamic-update-slice",
    "bitcast",
}


def whole_array_instructions(hlo: str, shape: str) -> list[str]:
    """Instructions in loops that produce an array of this shape other than in place."""
    computations = dict(
        re.findall(r"^(?:ENTRY )?%?([\w.\-]+) [^\n]*\{\n(.*?)^\}", hlo, re.M | re.S)
    )
    pending = re.findall(r"body=%?([\w.\-]+)", hlo)
    assert pending, "there is no loop"
    seen, found = set(), []
    while pending:
        name = pending.pop()
        if name in seen:
            continue
        seen.add(name)
        for line in computations[name].splitlines():
            match = re.search(r"= (\S+) ([\w\-]+)\(", line)
            if match is None:
                continue
            called = re.findall(r"(?:calls|to_apply|body)=%?([\w.\-]+)", line)
            in_place = match[2] in _IN_PLACE or (
                match[2] in ("fusion", "call") and _updates_in_place(called, computations)
            )
            if match[1].startswith(shape) and not in_place:
                found.append(line.strip())
            if not (match[2] == "fusion" and in_place):
                pending.extend(called)
    return found


def _updates_in_place(called: list[str], computations: dict[str, str]) -> bool:
    """A fusion whose result is an update of a window of its operand.

    The whole array appears in it, but is not copied.
    """
    roots = [line for name in called for line in computations[name].splitlines() if "ROOT" in line]
    if any(re.search(r"(fusion|call)\(", root) for root in roots):
        deeper = [c for root in roots for c in re.findall(r"(?:calls|to_apply)=%?([\w.\-]+)", root)]
        return _updates_in_place(deeper, computations)
    return bool(roots) and all("dynamic-update-slice(" in root for root in roots)


@pytest.mark.parametrize(
    ("size", "skip"), [(64, False), (61, False), (61, True)], ids=["divides", "does not", "skips"]
)
def test_no_loop_copies_or_scans_a_whole_array(size, skip):
    hlo = compiled(tiled((8, 8), skip=skip), size, 4, 3).as_text()
    assert whole_array_instructions(hlo, f"f32[1,{size},{size},4]") == []


def test_the_check_finds_a_copy():
    """A loop that adds to a whole array in every step."""

    def body(x, i):
        return x + jax.lax.dynamic_slice(x, (0, i, 0, 0), (1, 1, 64, 4)).sum(), None

    step = jax.jit(lambda x: jax.lax.scan(body, x, jnp.arange(8))[0])
    hlo = step.lower(jnp.ones((1, 64, 64, 4), jnp.float32)).compile().as_text()
    assert whole_array_instructions(hlo, "f32[1,64,64,4]")


def test_stored_values_are_the_only_whole_arrays_between_regions():
    """Storing one more value costs one more array (and its cotangent), not a copy of everything."""
    from jax.ad_checkpoint import checkpoint_name

    def named(params, x):
        for i, w in enumerate(params):
            x = checkpoint_name(jax.nn.relu(conv(x, w)), f"layer{i}")
        return x

    def bytes_with(*names):
        policy = jax.checkpoint_policies.save_only_these_names(*names)
        fun = jaxtile.checkpoint(named, in_axes=(None, (1, 2)), tiles=(8, 8), policy=policy)
        return compiled(fun, 128, 8).memory_analysis().temp_size_in_bytes

    array = 128 * 128 * 8 * 4
    assert bytes_with("layer3") - bytes_with() <= 2.1 * array


@pytest.mark.parametrize("element", [1.5, np.inf, np.nan])
def test_accumulators_are_zeros_that_the_compiler_does_not_know(element):
    """Else all zeros of a shape are one array, which is held for others and copied for a loop."""

    def zeros(x):
        one = jnp.ones((), x.dtype)  # the cotangent of a loss is a constant
        return zeros_after([one], [x])((3,), x.dtype)

    x = jnp.full((2, 2), element)
    assert not np.asarray(jax.jit(zeros)(x)).any()
    assert "is-finite" in jax.jit(zeros).lower(x).compile().as_text()


def _pooled(p, x):
    return jnp.tanh(conv(x, p["a"]).mean((1, 2)) @ p["m"]).sum()


def _mean_of_a_map(p, x):
    return (conv(x, p["a"]) @ p["m"]).mean()


@pytest.mark.parametrize("head", [_pooled, _mean_of_a_map])
def test_a_head_that_reduces_stores_no_map(head):
    """The last map is accumulated in both directions: only what a tile has of it is there."""
    params = {"a": jnp.ones((3, 3, 3, 32), jnp.float32), "m": jnp.ones((32, 5), jnp.float32)}
    image = jax.ShapeDtypeStruct((1, 256, 256, 3), np.uint8)
    fun = lambda p, x: head(p, x.astype(jnp.float32))  # noqa: E731
    tiled = jaxtile.checkpoint(fun, in_axes=(None, (1, 2)), tiles=(16, 16))
    stored = sum(region.stored_bytes for region in tiled.explain(params, image).regions)
    compiled = jaxtile.compiled_bytes(jax.jit(jax.value_and_grad(tiled)).lower(params, image))
    the_map = 256 * 256 * 32 * 4
    assert stored <= 128
    assert compiled.temporaries < the_map / 10
