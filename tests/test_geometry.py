"""Interval arithmetic, and another system's tile plan stated with it."""

import functools
import json
import pathlib

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxtile._geometry import Stencil, Window, hull, owned, partition

from .support import conv, max_pool, parametrize_few

DATA = pathlib.Path(__file__).parent / "data"

stencils = st.builds(
    Stencil,
    kernel=st.integers(1, 5),
    stride=st.integers(1, 4),
    dilation=st.integers(1, 3),
    base_dilation=st.integers(1, 3),
    before=st.integers(-3, 5),
)


def reads(stencil: Stencil, output: int) -> set[int]:
    """By brute force: the inputs that one output reads."""
    first = output * stencil.stride - stencil.before
    taps = [first + k * stencil.dilation for k in range(stencil.kernel)]
    return {t // stencil.base_dilation for t in taps if t % stencil.base_dilation == 0}


@given(stencils, st.integers(-4, 9), st.integers(1, 6))
def test_demand_holds_everything_that_is_read_and_no_more(stencil, lo, size):
    read = set().union(*(reads(stencil, o) for o in range(lo, lo + size)))
    first, last = stencil.demand(lo, lo + size)
    assert read <= set(range(first, last))
    if stencil.dilation == stencil.base_dilation == 1:
        assert first == min(read)
        assert last == max(read) + 1


@given(st.integers(1, 40), st.integers(1, 40))
def test_every_position_is_owned_once(length, tiles):
    tiles = min(tiles, length)
    window = partition(0, length, tiles)
    counts = owned(window, length)
    assert counts.min() >= 1
    assert window.stops.max() == length
    positions = [p for s, n in zip(window.starts, counts, strict=True) for p in range(s, s + n)]
    assert positions == list(range(length))


@given(st.integers(1, 20), st.lists(st.integers(-8, 24), min_size=1, max_size=5), st.integers(1, 9))
def test_a_hull_stays_inside_and_holds_what_was_demanded(length, starts, size):
    demand = Window(0, np.array(starts), size)
    window = hull([demand], length)
    assert window.starts.min() >= 0
    assert window.stops.max() <= length
    for start, lo, hi in zip(starts, window.starts, window.stops, strict=True):
        assert set(range(max(start, 0), min(start + size, length))) <= set(range(lo, hi))


REFERENCE = json.loads((DATA / "tiles_conv_pool.json").read_text())
STENCILS = {
    "conv2d": Stencil(kernel=3, before=1),
    "maxpool2d": Stencil(kernel=2, stride=2),
}


def reach(stencil: Stencil, lo: int, hi: int) -> tuple[int, int]:
    """The outputs that read at least one of the inputs `[lo, hi)`: the converse of the demand."""
    first = lo * stencil.base_dilation + stencil.before - (stencil.extent - 1)
    last = (hi - 1) * stencil.base_dilation + stencil.before
    return -(-first // stencil.stride), last // stencil.stride + 1


def clip(lo: int, hi: int, length: int) -> tuple[int, int, int, int]:
    """`[lo, hi)` inside `[0, length)`, and how far it stuck out before and after."""
    return max(lo, 0), min(hi, length), max(-lo, 0), max(hi - length, 0)


def record(op, position, index, coord, spans, nexts, *, tile=(), op_index=None):
    """One record of the plan from (unclipped lo, hi, length) per axis, columns first."""
    clipped = [clip(lo, hi, length) for lo, hi, length in spans]
    is_conv = op == "conv2d"
    return {
        "op": op,
        "position": position,
        "op_index": op_index,
        "coord": list(coord),
        "otileshape": [],
        "padding": [p for _, _, before, after in clipped for p in (before, after)]
        if is_conv
        else [],
        "inpslidx": [e for lo, hi, _, _ in clipped for e in (lo, hi - 1)],
        "internal": [int(p == 0) for _, _, b, a in clipped for p in (b, a)] if is_conv else [],
        "realidx": [e for lo, hi, _ in spans for e in (lo, hi - 1)],
        "ndtsize": list(tile),
        "local_first": index,
        "next_position": nexts,
    }


def sizes(spans):
    return [min(hi, n) - max(lo, 0) for lo, hi, n in spans]


def walk(network, spans, coord, forwards: bool):
    """The plan of one tile.

    Demand from the last op to the first, or reach from the first to the last.
    """
    ops = network if not forwards else network[::-1]
    conv_index = -1
    first = record(
        "fake" if forwards else "fake-bp", None, False, coord, spans, -11, op_index=[-11, -11]
    )
    first["otileshape"] = sizes(spans)
    records = [first]
    previous = -99
    for i, op in enumerate(ops):
        stencil = STENCILS[op["op"]]
        lengths = op["in_hw"][::-1] if forwards else op["out_hw"][::-1]
        produced = sizes(spans)
        inside = [clip(*span)[:2] for span in spans]
        step = stencil.demand if forwards else functools.partial(reach, stencil)
        spans = [(*step(lo, hi), n) for (lo, hi), n in zip(inside, lengths, strict=True)]
        if op["op"] == "maxpool2d":  # pools are recorded clipped
            spans = [(*clip(*span)[:2], span[2]) for span in spans]
        is_conv = op["op"] == "conv2d"
        tile = [n // g for n, g in zip(op["out_hw"], REFERENCE["grid_hw"], strict=True)]
        local_first = is_conv and forwards
        entry = record(
            op["op"],
            op["position"],
            local_first,
            coord,
            spans,
            previous,
            tile=tile if forwards else (),
        )
        entry["op_index"] = [i, 0 if is_conv else conv_index]
        entry["otileshape"] = produced if forwards else sizes(spans)
        records.append(entry)
        previous = op["position"]
    return records, spans


@pytest.mark.parametrize("tile", REFERENCE["tiles"], ids=lambda t: f"{t['coord']}")
def test_the_reference_plan(tile):
    network, (rows, columns) = REFERENCE["network"], tile["coord"]
    size = [n // g for n, g in zip(network[0]["in_hw"], REFERENCE["grid_hw"], strict=True)]
    starts = [columns * size[1], rows * size[0]]
    spans = [
        (s, s + n, total)
        for s, n, total in zip(starts, size[::-1], network[0]["in_hw"][::-1], strict=True)
    ]
    backward, reached = walk(network, spans, tile["coord"], forwards=False)
    forward, _ = walk(
        network,
        [(max(lo, 0), min(hi, n), n) for lo, hi, n in reached],
        tile["coord"],
        forwards=True,
    )
    assert backward == tile["b_info"]
    assert forward == tile["f_info"]
    assert tile["bwd_out_shape"] == sizes(reached)
    out_tile = [n // g for n, g in zip(network[-1]["out_hw"], REFERENCE["grid_hw"], strict=True)]
    assert tile["fwd_out_shape"] == out_tile
    assert tile["fwd_smaller"] == (np.prod(out_tile) < np.prod(sizes(reached)))


@parametrize_few("tiles", [(4, 4), (2, 4), (1, 3)])
def test_the_reference_run(tiles):
    import jaxtile

    values = json.loads((DATA / "tiles_conv_pool_values.json").read_text())
    image = np.array(values["input_image"])[None, :, :, None]
    w1, w2 = (np.array(values["recovered_weights"][k])[:, :, None, None] for k in ("w1", "w2"))

    def network(x):
        return max_pool(conv(max_pool(conv(x, w1)), w2))

    tiled = jaxtile.checkpoint(network, in_axes=((1, 2),), tiles=tiles)
    output, gradient = tiled(image), jax.grad(lambda x: tiled(x).sum())(image)
    np.testing.assert_allclose(output[0, :, :, 0], values["output_4x4_replayed"], atol=1e-4)
    np.testing.assert_allclose(gradient[0, :, :, 0], values["ref_input_grad"], atol=1e-4)
