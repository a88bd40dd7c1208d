"""The search behind `jaxtile.plan`: solve, compile, read the bytes, solve again.

The solver finds the fastest schedule within an allowance of bytes, by a simple model of memory. The
model is wrong (XLA packs and fuses, libraries have scratch space); the compiler is right. So what
the solver finds is compiled, without the parts of a compilation that take long
(`jaxtile.compiled_bytes`), and its bytes correct the allowance. If a schedule of 4 GiB by the model
takes 5 GiB compiled, and the budget is 4 GiB, the solver is asked for 3.2 GiB next. The best one is
compiled as it will run. If autotuning made it larger, it counts as one that does not fit.

Limits: a few schedules are compiled, not all; a faster one that fits may be missed.
"""

from __future__ import annotations

import dataclasses
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from .._amounts import format_bytes, format_ms
from .._errors import TilingError
from .._memory.compiled import Bytes, compiled_bytes
from .._memory.estimate import given_and_made
from ..policy import Outline
from .absent import as_moved
from .assignment import Assignments
from .candidates import as_assignment, assigned, solved
from .costs import Costs
from .descent import Descent
from .kernels import grids, strips
from .measuring import COMPARING, step_seconds
from .model import Model
from .plan import Plan
from .solver import ChosenStretch, fastest, measured, smallest
from .spans import Spans
from .stage import Candidate

TIME_LIMIT = 60.0  # seconds, after which a schedule that fits is good enough
TIME_LIMIT_ELSEWHERE = 300.0  # the same, if no device waits: two cores compile one in 50 to 130 s
_CANDIDATES = 6  # schedules that are compiled, once one fits
_MORE_CANDIDATES = 12  # as long as none does
_FULL = 0.95  # of the budget: not worth compiling again for what is left of it
_AIM = 0.985  # of the budget: where the next schedule should lie
_WORTH = 0.01  # of the time: a gain that is worth compiling, or searching, again
_STEEP = 1.1  # times the time of what just does not fit: there is something between
_RUN = 3  # schedules that are run, if that is wanted
_RIVAL = 1.25  # times the estimated time: what may be faster after all
_IMPROVABLE = 2.0  # times another's estimated time: what takes longer is not searched further
_SLOW = 1.5  # times plain's time: worth searching again
_SHARES = (0.9, 1.0)  # of the room: from what is found for less, the search may get further
_KINDS = ("solver", "descent")  # of schedules, by where they come from


class BudgetError(ValueError):
    """No schedule fits the budget. `smallest` is the smallest number of bytes that was reached."""

    def __init__(self, message: str, smallest: int):
        super().__init__(message)
        self.smallest = smallest


@dataclasses.dataclass(frozen=True)
class Terms:
    """What a schedule must keep to, and how long it may be looked for."""

    budget: int
    costs: Costs
    host: int = 0
    """Bytes of host memory, for results that wait there and for arguments."""
    platform: str | None = None
    """Of a device that is not there; None: the device is here."""
    moved: int = 0
    """Bytes of arguments that should lie in host memory: if the device is not there, a step moves
    them."""
    measure: bool = False
    """May schedules be run, to see which is the fastest?"""
    steps: float = math.inf
    """That will be taken, which says how long such a comparison may last."""
    time_limit: float = TIME_LIMIT
    progress: Callable[[str], None] | None = None

    def say(self, line: str) -> None:
        if self.progress is None:
            print(line, file=sys.stderr, flush=True)
        else:
            self.progress(line)


class Search:
    """Schedules of one function, and what the compiler said of those that were tried."""

    def __init__(self, outline: Outline, traced: Callable[[Any], Any], terms: Terms):
        """`traced`: from a policy to the traced step; from None to the plain one."""
        self.outline, self.traced, self.terms = outline, traced, terms
        self.budget, self.say, self.began = terms.budget, terms.say, time.perf_counter()
        self.costs = Assignments(outline, terms.costs)
        self.model = Model(self.costs.facts, terms.costs)
        fixed, on_host = given_and_made(traced(None))
        self.fixed = fixed - terms.moved
        self.host = self.aim = max(terms.host - on_host - terms.moved, 0)
        """Bytes of host memory for results that wait there, and how many a schedule should need
        by the model.
        """
        self._prepare(grids(outline), strips(outline) if self.aim else [])
        everything = ChosenStretch(0, 0, len(self.tables.cuts) - 1)
        self.plain = measured(self.tables, (everything,))
        self.trials: dict[Candidate, Bytes] = {}
        self.lowered: dict[Candidate, Any] = {}
        self.compiled: dict[Candidate, Any] = {}
        """As they will run."""
        self.tuning = 0.0  # seconds of the last such compilation

    def _prepare(self, *grids: Sequence[tuple[int, ...]]) -> None:
        """What finds schedules with these grids: all sorts of them, and strips, beside which
        transfers run. If there are strips, results wait in host memory with these only.
        """
        self.grids = grids
        self._smallest: list[Candidate] = []
        self.tables, self.spans = self.model.stretches(grids[0]), Spans(self.costs, grids[0])
        self._look_anew()

    def _look_anew(self) -> None:
        every, strips = self.grids
        self.descent = Descent(self.costs, every, host=0 if strips else self.aim)
        self.strips = Descent(self.costs, strips, host=self.aim) if strips else None

    def run(self) -> Plan:
        while True:
            while not self._tried_enough() and (candidate := self._next()) is not None:
                self._try(candidate)
            while self._best() is None and (left := {*self._last_resorts()} - {*self.trials}):
                self._try(min(left, key=lambda c: c.peak))
            fits = self._best()
            # The budget that an error names must work: every search tries these.
            chosen = fits or min(self._last_resorts(), key=self._size)
            if self.terms.platform is None:
                self._try(chosen, as_it_runs=True)
            else:
                self.say("plan: not compiled as it will run, since the device is not here")
            found = self.trials[chosen]
            if self._fits(found):
                return self._raced(chosen) if self.terms.measure else self._plan(chosen, found)
            if fits is None:
                raise self._too_small(found.total)

    def _raced(self, chosen: Candidate) -> Plan:
        """The fastest of a few schedules that fit, as they run; `chosen`, if steps are too few."""
        all_steps = self.terms.steps * chosen.seconds
        if self.tuning > COMPARING * all_steps:
            self.say(
                f"plan: not compared with others: compiling one takes {self.tuning:.0f} s, and "
                f"all steps about {all_steps:.0f} s"
            )
            return self._plan(chosen, self.trials[chosen])
        began, rivals = time.perf_counter(), [chosen]
        allowed = dict.fromkeys(_KINDS, chosen.peak)
        for rival in sorted(self.candidates(allowed), key=lambda c: c.seconds)[:_RUN]:
            if rival not in self.trials and rival.seconds < _RIVAL * chosen.seconds:
                self._try(rival)
        fits = [c for c, found in self.trials.items() if self._fits(found)]
        rivals += sorted((c for c in fits if c != chosen), key=lambda c: c.seconds)
        times: dict[Candidate, float] = {}
        for rival in rivals[:_RUN]:
            spent = time.perf_counter() - began
            if times and spent + self.tuning > COMPARING * all_steps:
                break
            if rival not in self.compiled:
                self._try(rival, as_it_runs=True)
            if not self._fits(self.trials[rival]):
                continue
            try:
                times[rival] = step_seconds(self.lowered[rival], self.compiled[rival])
            except jax.errors.JaxRuntimeError as error:
                self.say(f"plan: this schedule did not run here: {str(error).splitlines()[0]}")
                continue
            self.say(
                f"plan: a step of {_stages(rival)} takes {format_ms(times[rival])} ms "
                f"(estimated {format_ms(rival.seconds)})"
            )
        best = min(times, key=times.__getitem__, default=chosen)
        self.say(f"plan: compared {len(times)} in {time.perf_counter() - began:.1f} s")
        return self._plan(best, self.trials[best], times.get(best))

    def _last_resorts(self) -> list[Candidate]:
        """Tried if nothing else fits: the smallest, and plain JAX, which can be smaller yet."""
        return [*self.smallest(), solved(self.model, self.tables, self.plain)]

    def _tried_enough(self) -> bool:
        most = _MORE_CANDIDATES if self._best() is None else _CANDIDATES
        return len(self.trials) >= most or self.fixed >= self.budget

    def _best(self) -> Candidate | None:
        """The fastest schedule that was found to fit."""
        fits = [c for c, found in self.trials.items() if self._fits(found)]
        return min(fits, key=lambda c: c.seconds, default=None)

    def _fits(self, found: Bytes) -> bool:
        return found.total <= self.budget and found.host <= self.host

    def _size(self, candidate: Candidate) -> tuple[bool, int]:
        """The smallest first; what host memory cannot hold last."""
        found = self.trials[candidate]
        return found.host > self.host, found.total

    def _next(self) -> Candidate | None:
        """The schedule to compile next; None if it is not worth it."""
        best = self._best()
        if best is not None:
            full = self.trials[best].total > _FULL * self.budget
            steep = best.seconds > _STEEP * min(c.seconds for c in self.trials)
            if (full and not steep) or time.perf_counter() > self.began + self.terms.time_limit:
                return None
        allowed = {kind: self._allowance(kind) for kind in _KINDS}
        most = format_bytes(self.fixed + max(allowed.values()))
        self.say(f"plan: looking for a schedule of {most}")
        found = [c for c in self.candidates(allowed) if c not in self.trials]
        candidate = min(found, key=self._rank) if found else self.smallest()[0]
        slower = best is not None and candidate.seconds > (1 - _WORTH) * best.seconds
        return None if slower or candidate in self.trials else candidate

    def _rank(self, candidate: Candidate) -> tuple[float, int]:
        """Faster ones first; of those that are as fast, but for rounding, the simplest."""
        return round(candidate.seconds / self.plain.seconds, 6), len(candidate.stages)

    def _allowance(self, kind: str) -> float:
        """Bytes of the model at which the compiled program should just fit.

        They are taken to be in proportion, as in the smallest trial that does not fit, or else in
        the largest that does. Between these two they are taken to grow along a straight line; the
        answer is in the middle, if that has them lie outside. The model errs differently in
        schedules of each kind.
        """
        wanted = self.budget - self.fixed
        trials = [
            (c.peak, found.temporaries) for c, found in self.trials.items() if c.source == kind
        ]
        if not trials:
            return wanted
        fits = max(((x, y) for x, y in trials if y <= wanted), default=(0.0, 0))
        misfits = [(x, y) for x, y in trials if y > wanted and x > fits[0]]
        if not misfits:
            return max(fits[0] * _AIM * wanted / max(fits[1], 1), fits[0])
        x, y = min(misfits)
        if not fits[0]:
            return min(x * _AIM * wanted / y, 0.98 * x)
        guess = fits[0] + (x - fits[0]) * (_AIM * wanted - fits[1]) / (y - fits[1])
        return guess if guess > fits[0] else (fits[0] + x) / 2

    def _try(self, candidate: Candidate, as_it_runs: bool = False) -> None:
        """Compile a schedule and note its bytes, unless the function refuses one of its grids."""
        began = time.perf_counter()
        try:
            if candidate not in self.lowered:
                self.lowered[candidate] = self.traced(self._plan(candidate)).lower()
        except TilingError as error:
            self._leave_out(candidate, error)
            return
        lowered = self.lowered[candidate]
        self.say(
            f"plan: {_stages(candidate)}, {candidate.seconds / self.plain.seconds:.2f}x "
            f"plain's time, {format_bytes(self.fixed + candidate.peak)} estimated, after "
            f"{began - self.began:.1f} s; compiling" + (" as it will run" if as_it_runs else "")
        )
        if as_it_runs:
            begun = time.perf_counter()
            self.compiled[candidate] = lowered.compile()
            self.tuning = time.perf_counter() - begun
            found = Bytes.of(self.compiled[candidate])
        else:
            found = as_moved(compiled_bytes(lowered, self.terms.platform), self.terms.moved)
        self.trials[candidate], self.fixed = found, found.fixed
        verdict = "fits" if found.total <= self.budget else "is too much for"
        self.say(
            f"plan: compiled in {time.perf_counter() - began:.1f} s, {format_bytes(found.total)}: "
            f"{verdict} {format_bytes(self.budget)}"
            + (f"; {format_bytes(found.host)} in host memory" if found.host else "")
        )
        if found.host > self.host:
            self.say(f"plan: host memory has room for {format_bytes(self.host)} only")
            self.aim = int(self.aim * _AIM * self.host / found.host)
            self._look_anew()

    def _leave_out(self, candidate: Candidate, error: TilingError) -> None:
        """A grid that the function refuses is not tried again: the finest of a candidate's."""
        grids = [candidate.rest.grid, *(stage.grid for stage in candidate.stages)]
        used = [grid for each in self.grids for grid in each if grid in grids]
        if not used:
            raise error
        finest = max(used, key=math.prod)
        self._prepare(*([grid for grid in each if grid != finest] for each in self.grids))

    def _too_small(self, least: int) -> BudgetError:
        return BudgetError(
            f"no schedule fits a budget of {format_bytes(self.budget)} ({self.budget:,} bytes): "
            f"arguments and results alone take {format_bytes(self.fixed)}; the smallest budget "
            f"found to work is {format_bytes(least)} ({least:,} bytes)",
            least,
        )

    def candidates(self, allowed: Mapping[str, float]) -> list[Candidate]:
        """Schedules within the allowance of their kind."""
        found, begun = list[Candidate](), []
        rooms = [share * allowed["solver"] for share in _SHARES if allowed["solver"] > 0]
        for solution in filter(None, (fastest(self.tables, room) for room in rooms)):
            candidate = solved(self.model, self.tables, solution)
            begun.append(as_assignment(self.costs, self.model, self.tables, solution))
            # Schedules of both kinds are compared by one estimate.
            seconds = self.costs.estimate(begun[-1]).seconds
            found.append(dataclasses.replace(candidate, seconds=seconds))
        within, best = self.spans.fastest(allowed["descent"]), None
        if self.strips is not None:
            *_, best = [self.strips.fastest(share * allowed["descent"]) for share in _SHARES]
        limit = math.inf if best is None else best.seconds
        known = [self.costs.estimate(a).seconds for a in (*begun, within) if a is not None]
        if best is None or min(known, default=math.inf) < _IMPROVABLE * limit:
            other, before = self.descent.fastest(allowed["descent"], begun, within), math.inf
            while other is not None and other.seconds > _SLOW * self.plain.seconds:
                if other.seconds > (1 - _WORTH) * before:
                    break
                before = other.seconds
                other = self.descent.fastest(allowed["descent"], begun)
            best = other if other is not None and other.seconds < limit else best
        found += [] if best is None else [assigned(self.costs, best.assignment)]
        return list(dict.fromkeys(found))

    def smallest(self) -> list[Candidate]:
        """By the estimate, the smallest of each kind, and the smallest of these first."""
        if not self._smallest:
            descents = filter(None, (self.descent, self.strips))
            found = [assigned(self.costs, d.smallest().assignment) for d in descents]
            found.append(solved(self.model, self.tables, smallest(self.tables)))
            self._smallest = sorted(found, key=lambda c: c.peak)
        return self._smallest

    def _plan(
        self, candidate: Candidate, found: Bytes | None = None, seconds: float | None = None
    ) -> Plan:
        return Plan(
            stages=candidate.stages,
            rest=candidate.rest,
            source=candidate.source,
            fingerprint=self.outline.fingerprint,
            device=self.terms.costs.device,
            budget=self.budget,
            estimated_bytes=int(self.fixed + candidate.peak),
            measured_bytes=None if found is None else found.total,
            seconds=candidate.seconds,
            plain_seconds=self.plain.seconds,
            plain_bytes=int(self.fixed + self.plain.peak),
            measured_seconds=seconds,
            host_bytes=0 if found is None else found.host,
        )


def _stages(candidate: Candidate) -> str:
    return "1 stage" if len(candidate.stages) == 1 else f"{len(candidate.stages)} stages"
