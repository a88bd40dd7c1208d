"""How long operations take on a device: times that were measured, and rates.

The planner must know which of two schedules is faster without running them. A convolution, say, is
taken to last as long as it was seen to last: tables have times by class, that is of convolutions
with this kernel, these channels and types, on so many positions. What was not seen is taken to last
as long as its arithmetic or its memory traffic, whichever is longer, and at least as long as it
takes to start it: 340 GFLOP at 340 TFLOP/s take 1 ms, if they move less than 2.9 GB at 2.9 TB/s.

Tables of two devices are built in. `jaxtile.plan(..., measure=True)` times the classes that it does
not know, and adds them to the device's own table, a file at `measured_path()`.
"""

from __future__ import annotations

import bisect
import dataclasses
import json
import os
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from .._graph.operations import Operation
from .._graph.sample import Sample


class Timing(NamedTuple):
    """Of one class of operations, on so many positions: seconds forwards, and of the gradients."""

    positions: int
    forward: float
    gradient: float


class Duration(NamedTuple):
    """Seconds of an operation, and of a share of its positions: straight lines between points."""

    whole: float
    shares: tuple[float, ...]
    seconds: tuple[float, ...]

    def of(self, shares: np.ndarray) -> np.ndarray:
        return np.interp(shares, self.shares, self.seconds)

    def at(self, share: float) -> float:
        """Of one share: NumPy takes six times as long for a single number."""
        upper = bisect.bisect_right(self.shares, share)
        if upper in (0, len(self.shares)):
            return self.seconds[0 if upper == 0 else -1]
        (x, y), (left, right) = (
            self.shares[upper - 1 : upper + 1],
            self.seconds[upper - 1 : upper + 1],
        )
        return left + (right - left) * (share - x) / (y - x)


@dataclasses.dataclass(frozen=True)
class Costs:
    """Rates of one device."""

    device: str
    flops: Mapping[str, float]
    """Operations per second of convolutions and contractions, by type."""
    bandwidth: float
    """Bytes per second of device memory."""
    host_bandwidth: float | None
    """Bytes per second between device and host; None: there is no separate host memory."""
    start: float
    """Seconds to start one operation."""
    loop: float
    """Seconds that a tile loop takes per tile, besides its operations."""
    tile: float
    """Time of an operation in a tile, relative to the same positions untiled."""
    backward: Mapping[str, float]
    """Time of the gradient relative to the operation, by kind; `other` for all other kinds."""

    applies_clamps: bool = False
    """Does a convolution apply a ReLU that follows it along the way?"""
    long: tuple[int, float] = (2**63, 1.0)
    """From so many elements of an array on, a convolution takes so many times as long: a library's
    fast kernels count in 32 bits. Tiles can be smaller, and should be from so many bytes on: there
    the compiler also tries kernels that take a thousand times as long as the fastest."""
    classes: Mapping[str, tuple[Timing, ...]] = dataclasses.field(default_factory=dict)
    """What was measured of convolutions and the like: by class, the fewest positions first."""

    def seconds(self, operation: Operation) -> float:
        """Time of the forward operation, by its arithmetic and its traffic."""
        rate = self.flops.get(operation.output.dtype, self.flops["float32"])
        arithmetic = 2 * operation.macs / rate
        return max(arithmetic, operation.traffic / self.bandwidth, self.start)

    def durations(self, operation: Operation, sample: Sample | None) -> tuple[Duration, Duration]:
        """Of an operation and of its gradient; `sample` is its main equation."""
        known = self.classes.get(sample.shape_class) if sample else None
        if sample is None or not known:
            factor = self.backward.get(operation.kind, self.backward["other"])
            seconds = self.seconds(operation)
            before = 2 * sample.gathered / self.bandwidth if sample else 0.0
            forward = self._by_rate(seconds + before)
            gradient = self._by_rate(factor * seconds + 2 * before)  # of both operands
        else:
            counts = [t.positions for t in known]
            forward = self._measured(sample, counts, [t.forward for t in known])
            gradient = self._measured(sample, counts, [t.gradient for t in known])
        if sample is not None and operation.kind == "convolution":
            forward, gradient = (self._with_long(sample, d) for d in (forward, gradient))
        if sample is None:
            return forward, gradient
        first, back = self._beside(sample)
        return self._with(first, forward), self._with(back, gradient)

    def _beside(self, sample: Sample) -> tuple[float, float]:
        """What the rest of its operation takes, forwards and backwards."""
        forward, gradient = self._passing(sample.prepared)
        for chain in sample.chains:
            if known := self.classes.get(chain.shape_class):
                counts = [t.positions for t in known]
                forward += self._measured(chain, counts, [t.forward for t in known]).whole
                gradient += self._measured(chain, counts, [t.gradient for t in known]).whole
            else:
                (result,) = chain.equation.out_avals
                both = self._passing(result.size * result.dtype.itemsize)
                forward, gradient = forward + both[0], gradient + both[1]
        return forward, gradient

    def _passing(self, size: int) -> tuple[float, float]:
        """Of a result of so many bytes: about as much is read as is written."""
        forward = 2 * size / self.bandwidth
        return forward, self.backward["other"] * forward

    def _with(self, seconds: float, duration: Duration) -> Duration:
        """Of something, and of what takes so long in proportion."""
        points = zip(duration.shares, duration.seconds, strict=True)
        both = tuple(t + self.tile * share * seconds for share, t in points)
        return Duration(duration.whole + seconds, duration.shares, both)

    def _by_rate(self, whole: float) -> Duration:
        """A part of it takes as much less, but no less than it takes to start it."""
        in_tile = max(self.tile * whole, self.start)
        return Duration(whole, (self.start / in_tile, 1.0), (self.start, in_tile))

    def _measured(self, sample: Sample, counts: Sequence[int], times: Sequence[float]) -> Duration:
        """Between what was measured, straight lines; beyond it, in proportion."""
        positions = sample.positions()
        shares = [n / positions for n in counts]
        beyond = max(1.0, shares[-1]) * 2
        line = (
            [0.0, *shares, beyond],
            [min(self.start, times[0]), *times, times[-1] * beyond / shares[-1]],
        )
        return Duration(float(np.interp(1.0, *line)), tuple(line[0]), tuple(line[1]))

    def _with_long(self, sample: Sample, duration: Duration) -> Duration:
        """Of a convolution, if it has too long an array, or a share of its positions has."""
        if sample.gathered:  # in pieces that are not too long
            return duration
        most, factor = self.long
        arrays = (*sample.equation.in_avals, *sample.equation.out_avals)
        elements = max(x.size for x in arrays)
        size = max(x.size * x.dtype.itemsize for x in arrays)
        whole = duration.whole * (factor if elements >= most else 1)
        if (share := most / size) > duration.shares[-1]:
            return duration._replace(whole=whole)
        points = list(zip(duration.shares, duration.seconds, strict=True))
        longest = duration.at(share)
        points = [
            *((s, t) for s, t in points if s < share),
            (share * (1 - 1e-9), longest),
            *((s, factor * t) for s, t in [(share, longest), *points] if s >= share),
        ]
        return Duration(whole, *(tuple(x) for x in zip(*points, strict=True)))

    def save(self, path: str | os.PathLike[str]) -> None:
        file = pathlib.Path(path)
        file.parent.mkdir(parents=True, exist_ok=True)
        unfinished = file.with_name(f"{file.name}.{os.getpid()}")
        unfinished.write_text(json.dumps(dataclasses.asdict(self), indent=1) + "\n")
        unfinished.replace(file)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Costs:
        try:
            found = json.loads(pathlib.Path(path).read_text())
            long = tuple(found.get("long", cls.long))
            return cls(**found | {"classes": _timings(found.get("classes", {})), "long": long})
        except (AttributeError, TypeError, ValueError) as error:
            raise ValueError(
                f"{path} is not a table of costs ({error}): measure it anew, or delete it to use "
                "the one that is built in"
            ) from error


def _timings(classes: Mapping[str, Any]) -> dict[str, tuple[Timing, ...]]:
    return {name: tuple(Timing(*t) for t in times) for name, times in classes.items()}


# Rounded from measurements on two cores, and on an H200 from runs with images of
# 2048 x 2048 x 64 and of 1024 x 1024 x 128. Not from these: the H200's bfloat16 rate and gradient
# of a convolution (the same functions, run by hand), float16 and float64 there (older), and float64
# on the CPU (half of float32). The loop's time there lies between those of both runs, 9 and 0.1 us.
# The program's present sizes give rates that are 3 to 15 % higher there, a loop of 9.6 us, tiles of
# 1.0 and a max pool of 1.7; this table is nearer to whole networks (docs/performance.md).
BUILT_IN = {
    "cpu": Costs(
        device="cpu (built in)",
        flops={"float32": 5.7e10, "bfloat16": 5.6e10, "float64": 2.9e10},
        bandwidth=1.8e10,
        host_bandwidth=None,
        start=7e-6,
        loop=1e-7,
        tile=1.0,
        backward={"convolution": 2.7, "contraction": 2.0, "max_pool": 8.0, "other": 1.0},
    ),
    "gpu": Costs(
        device="NVIDIA H200 (built in)",
        flops={"float32": 3.4e14, "bfloat16": 6.5e14, "float16": 6.5e14, "float64": 3e13},
        bandwidth=2.9e12,
        host_bandwidth=5.2e10,
        start=1.7e-5,
        loop=4e-6,
        tile=1.11,
        backward={"convolution": 2.5, "contraction": 2.0, "max_pool": 2.2, "other": 1.7},
        applies_clamps=True,
        # Without tensor cores: 60 TFLOP/s in float32. (Of one convolution of 64 channels on
        # 4130 x 4130 positions, the fastest kernel took 2.4 ms, and the slowest that was tried 3 s,
        # several times; of 2 GiB and less there was none of that kind.)
        long=(2**31, 10.0),
        # Of the benchmark's models. Shorter calls than 100 us are left out: starting them was part
        # of what was measured.
        classes=_timings(json.loads((pathlib.Path(__file__).parent / "h200.json").read_text())),
    ),
}


def measured_path(device: str | None = None) -> pathlib.Path:
    """Where the measured table of a device is kept; `JAXTILE_COSTS` names another file."""
    if "JAXTILE_COSTS" in os.environ:
        return pathlib.Path(os.environ["JAXTILE_COSTS"])
    cache = pathlib.Path(os.environ.get("XDG_CACHE_HOME", pathlib.Path.home() / ".cache"))
    name = re.sub(r"[^a-z0-9]+", "-", (device or jax.devices()[0].device_kind).lower()).strip("-")
    return cache / "jaxtile" / f"costs-{name}.json"


def costs(device: str | None = None) -> Costs:
    """The table of the default device, or of a GPU that need not be there: measured if there is
    one, else built in. A file that `JAXTILE_COSTS` names may be there only after a measurement.
    """
    path = measured_path(device and pathlib.Path(device).stem)
    if path.exists():
        return Costs.load(path)
    on_cpu = device is None and jax.default_backend() == "cpu"
    return BUILT_IN["cpu" if on_cpu else "gpu"]


def built_in_for_another(device: str | None = None) -> str | None:
    """A warning, if there are no costs of this device and an H200's are used; otherwise None."""
    kind, found = device or jax.devices()[0].device_kind, costs(device)
    if found != BUILT_IN["gpu"] or kind in found.device:
        return None
    return (
        f"no costs of {kind} were measured, so times are those of {found.device}: bytes are right, "
        "but a faster schedule may be missed; `costs=` takes a table of this device"
    )


def has_host_memory() -> bool:
    """Does the device have memory of its own, so that arrays can wait in the host's?"""
    memories = jax.devices()[0].addressable_memories()
    return jax.default_backend() != "cpu" and any(m.kind == "pinned_host" for m in memories)


def host_memory(here: bool) -> int:
    """Bytes of host memory that XLA gives to arrays of a GPU: 64 GiB, unless it is told otherwise.
    If the GPU is here, at most three quarters of this machine's: data and programs need some too.
    """
    given = int(os.environ.get("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", 64)) << 30
    there = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min(given, 3 * there // 4) if here else given
