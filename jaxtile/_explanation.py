"""What `jaxtile.explain` returns: the regions of a schedule and their cost, as numbers and text."""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Iterator

from ._amounts import format_bytes
from ._regions.grid import GridSpec


@dataclasses.dataclass(frozen=True)
class ArrayUse:
    """An array that a region reads by window or writes by tile.

    Windows and halos are per tiled axis, in order.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int
    window: tuple[int, ...]
    halo: tuple[tuple[int, int], ...]
    """Positions read before and after the tile's own share, in a tile that touches no border."""


@dataclasses.dataclass(frozen=True)
class Exchanged:
    """Bytes of halos that devices send to each other, and how often they add something up.

    The backward pass sends halos once more, where it recomputes; and the cotangents of what earlier
    regions computed.
    """

    forward: int = 0
    """Bytes that the device sends that sends most."""
    backward: int = 0
    forward_in_all: int = 0
    """Bytes that all devices send together."""
    backward_in_all: int = 0
    forward_messages: int = 0
    """Messages that the device sends that sends most."""
    backward_messages: int = 0
    forward_sums: int = 0
    """Sums over devices: statistics, a loss. Those that do not wait for each other count as one, as
    XLA combines them."""
    backward_sums: int = 0
    """Of statistics that are recomputed, of their cotangents, and of the gradients of weights."""


@dataclasses.dataclass(frozen=True)
class RegionReport:
    """One region: one loop over `tiles` tiles, run once forwards and once backwards."""

    index: int
    grid: GridSpec
    """In the backward pass. On a mesh, that of each device."""
    forward_grid: GridSpec
    tiles: int
    """On all devices together."""
    ops: dict[str, int]
    reads: tuple[ArrayUse, ...]
    writes: tuple[ArrayUse, ...]
    passing: tuple[str, ...]
    """Results that are whole in the forward pass only. The backward pass holds their cotangents,
    and computes them again, by window, in each region that reads them."""
    restored: tuple[str, ...]
    """Those that are whole in the forward pass, and computed again in the backward pass, once."""
    stored_bytes: int
    tile_bytes: int
    """Bytes of all values of one tile together: an upper bound of what the loop's body holds."""
    plain_flops: int
    """Forward operations of the region's equations at full size."""
    tiled_flops: int
    """Forward operations over all tiles, halos included."""
    recomputed_flops: int
    """What the backward pass computes again: what derivatives need, and results that were not
    kept."""
    at_once: bool = False
    """Does it lead to the loss, so that each tile is differentiated when it is computed?"""
    devices: tuple[int, ...] = ()
    """Per axis of the grid; on a mesh only."""
    exchanged: Exchanged = Exchanged()
    skipped: int = 0
    """Tiles that the forward pass need not compute, since they read the same as another one; at
    least so many."""

    @property
    def halo_share(self) -> float:
        """The share of the forward operations that is halo, or overlap if sizes do not divide."""
        return max(0.0, 1 - self.plain_flops / self.tiled_flops) if self.tiled_flops else 0.0


@dataclasses.dataclass(frozen=True)
class WholeReport:
    """An equation that runs once, on whole arrays, although it reads tiled values."""

    op: str
    where: str
    """The user's line."""
    reason: str
    bytes: int
    """Of its results, which are held whole, as its operands are."""


@dataclasses.dataclass(frozen=True)
class LayersReport:
    """A scan over layers that stays one: what goes from layer to layer is stored."""

    where: str
    """The user's line."""
    layers: int
    layer: Explanation
    """What each of them does."""


@dataclasses.dataclass(frozen=True)
class Explanation:
    """The regions of a schedule and their cost. `print` it."""

    regions: tuple[RegionReport, ...]
    plain_flops: int
    """Forward operations of the untransformed function."""
    global_flops: int
    """Those of them that run once, outside all regions."""
    whole: tuple[WholeReport, ...] = ()
    """What runs once, on whole arrays, although it reads tiled values."""
    scans: tuple[LayersReport, ...] = ()
    """Scans over layers that are not unrolled."""

    @property
    def forward_flops(self) -> int:
        own = self.global_flops + sum(r.tiled_flops for r in self.regions)
        return own + sum(s.layers * s.layer.forward_flops for s in self.scans)

    @property
    def step_flops(self) -> int:
        """Forward and backward.

        A pullback counts as twice the forward pass; a region is computed once more before it.
        """
        return 3 * self.forward_flops + self.recomputed_flops

    @property
    def recomputed_flops(self) -> int:
        own = sum(r.recomputed_flops for r in self.regions)
        return own + sum(s.layers * s.layer.recomputed_flops for s in self.scans)

    @property
    def overhead(self) -> float:
        """Operations of a training step, halos and recomputation included, relative to plain."""
        return self.step_flops / (3 * self.plain_flops) if self.plain_flops else 1.0

    @property
    def stored_bytes(self) -> int:
        own = sum(r.stored_bytes for r in self.regions) + sum(w.bytes for w in self.whole)
        return own + sum(s.layers * s.layer.stored_bytes for s in self.scans)

    @property
    def tile_bytes(self) -> int:
        own = [r.tile_bytes for r in self.regions]
        return max([*own, *(s.layer.tile_bytes for s in self.scans)], default=0)

    def __str__(self) -> str:
        lines = [line for region in self.regions for line in _region_lines(region)]
        for s in self.scans:
            stored = format_bytes(s.layers * s.layer.stored_bytes)
            lines += [
                f"scan: {s.layers} layers at {s.where}, one after the other, store {stored}; each:",
                textwrap.indent(str(s.layer), "  "),
            ]
        for w in self.whole:
            lines.append(
                f"whole: {w.op} at {w.where} runs once, on whole arrays: {w.reason}\n"
                f"  stores {format_bytes(w.bytes)}, beside its operands"
            )
        lines.append(
            f"in all: stores {format_bytes(self.stored_bytes)}, largest tile "
            f"{format_bytes(self.tile_bytes)}; a training step does "
            f"{self.overhead:.2f}x the operations of the plain function "
            f"({_count(3 * self.plain_flops)}); recomputation is "
            f"{_share(self.recomputed_flops / max(1, self.step_flops))} of them"
        )
        lines.append(
            "operations are counted, and are not time: `jaxtile.plan` estimates that, with copies, "
            "loops and the slower kernels of small tiles. Bytes are those of single arrays: what a "
            "whole step needs, `jaxtile.memory` says"
        )
        return "\n".join(lines)


def _share(part: float) -> str:
    """
    >>> _share(0.0), _share(2e-4), _share(0.031)
    ('none', 'less than 0.1%', '3.1%')
    """
    if 0 < part < 0.0005:
        return "less than 0.1%"
    return f"{part:.1%}" if part else "none"


def _region_lines(region: RegionReport) -> Iterator[str]:
    ops = ", ".join(f"{n} {op}" for op, n in region.ops.items())
    forwards = "" if region.forward_grid == region.grid else f"{_grid(region.forward_grid)} and "
    backwards = f"backwards {_grid(region.grid)}" if forwards else _grid(region.grid)
    once = ", both passes at once" if region.at_once else ""
    yield f"region {region.index}: {forwards}{backwards}{once}{_devices(region)}; {ops}"
    for verb, uses in (("reads", region.reads), ("writes", region.writes)):
        for use in uses:
            yield (
                f"  {verb:6} {use.name} {use.dtype}{list(use.shape)}, "
                f"{format_bytes(use.bytes)}{_window(use)}"
                + (_fate(use, region) if verb == "writes" else "")
            )
    yield (
        f"  stores {format_bytes(region.stored_bytes)}; one tile holds at most "
        f"{format_bytes(region.tile_bytes)}; forward {_count(region.tiled_flops)} operations, "
        f"{_share(region.halo_share)} of them in more tiles than one"
    )
    if region.skipped:
        skipped = f"at least {region.skipped} of {region.tiles} tiles"
        yield f"  skips {skipped}, which read the same as others"
    if region.devices:
        sent = region.exchanged
        yield (
            f"  each device sends at most {format_bytes(sent.forward)} forwards and "
            f"{format_bytes(sent.backward)} backwards; all together "
            f"{format_bytes(sent.forward_in_all)} and {format_bytes(sent.backward_in_all)}"
        )


def _fate(use: ArrayUse, region: RegionReport) -> str:
    """What becomes of a result, if it is not kept."""
    if use.name in region.passing:
        return ", passing: its cotangent is whole in the backward pass"
    return ", restored in the backward pass" if use.name in region.restored else ""


def _grid(grid: GridSpec) -> str:
    if not isinstance(grid, tuple):
        return "untiled" if grid is None else "untiled, recomputed"
    return " x ".join(map(str, grid)) + " tiles"


def _devices(region: RegionReport) -> str:
    return f" on each of {' x '.join(map(str, region.devices))} devices" if region.devices else ""


def _window(use: ArrayUse) -> str:
    if not use.window:
        return ""
    halo = ", ".join(f"{before}+{after}" for before, after in use.halo)
    return f", window {' x '.join(map(str, use.window))}, halo {halo}"


def _count(n: float) -> str:
    for unit in ("", "k", "M", "G", "T"):
        if n < 1000:
            return f"{n:.3g}{unit}"
        n /= 1000
    return f"{n:.3g}P"
