"""Steps, one ahead: while a step runs, the next one is handed to the device already.

A device that is handed a step only when the numbers of the last one have arrived stands still in
between, for 3 to 6 ms on an H200: of a step of 30 ms that is a tenth or more. Before an evaluation,
a checkpoint and the end no other step is begun, since these are about the state as it is then.

Long steps are taken one by one: they gain nothing, and a signal to stop would wait for two of them.
So are those of several processes, which ask each other before each step whether one was told to
stop, and get the answer behind the step that runs.

A step that is not finite changes nothing, and nor does one that was begun behind it (`step`). So
what the run saves then is what came before the first of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

import jax

from .feed import Feed, Sent
from .instruments import Clock
from .run import Run

_LONG = 1.0  # seconds of a step


class Begun(NamedTuple):
    batch: Sent
    values: dict[str, jax.Array]
    """Its numbers, once they are there."""

    @property
    def is_done(self) -> bool:
        return all(x.is_ready() for x in self.values.values())


class Ahead:
    """The steps of a run, in order."""

    def __init__(self, run: Run, feed: Feed, clock: Clock, now: Callable[[str], None]):
        self.run, self.feed, self.clock, self.now = run, feed, clock, now
        self.running: Begun | None = None
        self._failed: Exception | None = None

    def next(self, *, last: bool) -> tuple[dict[str, float], Sent]:
        """The numbers of the next step, and its batch, which is used up. `last`: begin no other.

        If another one cannot be begun, its error comes when it is asked for.
        """
        if self._failed is not None:
            raise self._failed
        if self.running is None:
            self.clock.begin()
            self.running = self._begun()
        running, self.running = self.running, None
        if not last and self._overlaps():
            try:
                self.running = self._begun(running)
            except Exception as error:
                self._failed = error
        values = {name: float(x) for name, x in jax.device_get(running.values).items()}
        running.batch.delete()
        self.clock.end()
        return values, running.batch

    def _overlaps(self) -> bool:
        """May another step begin while this one runs?"""
        run = self.run
        alone = run.devices.processes == 1 and not run.on_disk
        return alone and self.clock.last < _LONG and not run.pauses_after(run.done + 1)

    def _begun(self, before: Begun | None = None) -> Begun:
        if before is None:
            drawn = self.run.config.data.kind != "folder"
            self.now(f"{'drawing' if drawn else 'reading'} the first batch")
        began = time.perf_counter()
        batch = next(self.feed)
        if before is None or before.is_done:  # else the device had something to do
            self.clock.waited += time.perf_counter() - began
        self.now("the first step")
        return Begun(batch, self.run.begin(batch))
