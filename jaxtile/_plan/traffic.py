"""What a loop moves between the device and the host, and how long it waits for that."""

from __future__ import annotations

import dataclasses

from .states import Mode

_ENDS = 3  # strips of a loop during which nothing else is computed, or sent


@dataclasses.dataclass
class Traffic:
    """Bytes that a loop moves from host memory and to it."""

    fetched: float = 0.0
    sent: float = 0.0
    added: float = 0.0
    """Fetched too, to be added to and sent."""

    def waited(self, mode: Mode, computing: float, link: float) -> float:
        """Seconds beyond those of computing. In strips transfers run beside that, both ways at
        once, but for the tiles at the ends, and for sums: one is sent before it is fetched again.
        """
        together = (self.fetched + self.sent + self.added) / link
        if not mode.strips:
            return together
        assert isinstance(mode.grid, tuple)
        ends = min(1.0, _ENDS / mode.grid[0])
        beside = max(self.fetched + self.added, self.sent) / link
        return ends * together + (1 - ends) * (max(0.0, beside - computing) + self.added / link)
