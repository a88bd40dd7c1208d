"""What a plan is: stages, as a policy, as text, as JSON and as a picture."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import pathlib
from types import EllipsisType
from typing import Any

from .._amounts import format_bytes, format_ms
from ..policy import Choice, Choices, Outline
from .picture import draw
from .stage import PlannedStage


@dataclasses.dataclass(frozen=True)
class Plan:
    """A schedule for one function at one size; a policy for `jaxtile.checkpoint`. `print` it."""

    stages: tuple[PlannedStage, ...]
    rest: Choice
    source: str
    """`solver` or `descent`: what found it."""
    fingerprint: str
    device: str
    budget: int | None
    estimated_bytes: int
    measured_bytes: int | None
    seconds: float
    plain_seconds: float
    plain_bytes: int
    measured_seconds: float | None = None
    """Of a step, if it was run."""
    host_bytes: int = 0
    """Compiled, in host memory: of results that wait there, and of their cotangents."""

    @property
    def choices(self) -> Choices:
        """What `jaxtile.checkpoint` is told."""
        found: dict[str | EllipsisType, Choice] = {...: self.rest}
        for stage in self.stages:
            found.update(stage.choices.items())
        return found

    def choose(self, outline: Outline) -> Choices:
        if outline.fingerprint != self.fingerprint:
            raise ValueError(
                "this plan was made for another function, or for other shapes or types: make one "
                "for these arguments with `jaxtile.plan`"
            )
        names = {part.name for part in outline.parts}
        unknown = [repr(n) for n in self.choices if n is not ... and n not in names]
        if unknown:
            raise ValueError(
                f"this plan is damaged: it stores {', '.join(unknown[:3])}, which the function "
                "does not have: make one with `jaxtile.plan`"
            )
        return self.choices

    def explain(self) -> str:
        """Which results are stored, recomputed or offloaded, on which grids; bytes and time."""
        rows = [("from", "to", "operations", "mode", "stored afterwards", "works in", "ms")]
        for s in self.stages:
            names = [f"{n} (host)" if n in s.offloaded else n for n in s.stored]
            stored = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if names[4:] else "")
            stored += f": {format_bytes(s.stored_bytes)}" if names else "-"
            stored += f"; {len(s.passing)} passing" if s.passing else ""
            stored += f"; {len(s.restored)} restored" if s.restored else ""
            working, ms = format_bytes(s.working_bytes), format_ms(s.seconds)
            rows.append((s.first, s.last, str(s.operations), s.mode, stored, working, ms))
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        lines = [
            "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip()
            for row in rows
        ]
        budget = "none" if self.budget is None else format_bytes(self.budget)
        compiled = (
            "not compiled" if self.measured_bytes is None else format_bytes(self.measured_bytes)
        )
        lines += [
            f"bytes: budget {budget}, estimated {format_bytes(self.estimated_bytes)}, "
            f"compiled {compiled}"
            + (f" and {format_bytes(self.host_bytes)} in host memory" if self.host_bytes else "")
            + f"; plain estimated {format_bytes(self.plain_bytes)}",
            f"time: estimated {format_ms(self.seconds)} ms, "
            f"{self.seconds / self.plain_seconds:.2f}x plain, with the costs of {self.device}",
        ]
        if self.measured_seconds is not None:
            lines[-1] += f"; a step was run and took {format_ms(self.measured_seconds)} ms"
        lines.append(
            "time is more than operations, which `explain` counts: copies, loops and the slower "
            "kernels of small tiles. Estimated bytes are by a model of the schedule, those of "
            "`jaxtile.memory` by the trace; compiled ones are the compiler's in both, and hold"
        )
        return "\n".join(lines)

    __str__ = explain

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it as JSON."""
        pathlib.Path(path).write_text(json.dumps(self.as_json(), indent=1) + "\n")

    def as_json(self) -> dict[str, Any]:
        """What `save` writes."""
        found = dataclasses.asdict(self)
        found["stages"] = [s._asdict() for s in self.stages]
        found["rest"] = self.rest._asdict()
        return {"jaxtile": "plan", "version": 1, **found}

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Plan:
        try:
            return cls.from_json(json.loads(pathlib.Path(path).read_text()))
        except KeyError as error:
            raise ValueError(f"{path} is not a plan: it has no {error}") from error
        except (TypeError, ValueError) as error:
            raise ValueError(f"{path} is not a plan: {error}") from error

    @classmethod
    def from_json(cls, found: Any) -> Plan:
        """From what `as_json` gives."""
        if not isinstance(found, dict):
            raise ValueError("it is no JSON object")
        found = dict(found)
        if found.pop("jaxtile") != "plan" or found.pop("version") != 1:
            raise ValueError("it was written by another version")

        def with_tuples(fields: Any) -> dict[str, Any]:
            pairs = dict(fields).items()
            return {name: tuple(x) if isinstance(x, list) else x for name, x in pairs}

        stages = tuple(PlannedStage(**with_tuples(s)) for s in found.pop("stages"))
        rest = Choice(**with_tuples(found.pop("rest")))
        plan = cls(stages=stages, rest=rest, **found)
        plan._check_types()
        return plan

    def _check_types(self) -> None:
        """Raise an error if what should be a number or a grid is not: a file may hold anything."""
        found = [dataclasses.asdict(self), *(s._asdict() for s in self.stages)]
        for name, value in itertools.chain(*(f.items() for f in found)):
            number = isinstance(value, int | float) or (
                value is None and name in ("budget", "measured_bytes", "measured_seconds")
            )
            if name.endswith(("bytes", "seconds", "budget", "operations")) and not number:
                raise ValueError(f"{name} (={value!r}) must be a number")
        for each in [self.rest, *(Choice(s.grid, forward=s.forward) for s in self.stages)]:
            for grid, others in ((each.grid, (None, "whole")), (each.forward, (None,))):
                tiles = isinstance(grid, tuple) and all(isinstance(n, int) and n > 0 for n in grid)
                if not (tiles or grid in others):
                    raise ValueError(f"grid (={grid!r}) must be tiles along axes, 'whole' or none")

    def draw(self, path: str | os.PathLike[str]) -> None:
        """A picture: bytes live over the schedule, stored results as bars. Needs matplotlib."""
        compiled = self.measured_bytes
        title = (
            f"estimated {format_bytes(self.estimated_bytes)}"
            + (f", compiled {format_bytes(compiled)}" if compiled else "")
            + f", {self.seconds / self.plain_seconds:.2f}x plain's time"
        )
        draw(path, self.stages, self.estimated_bytes, self.budget, title)
