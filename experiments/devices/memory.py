"""What the device's allocator says of its memory."""

from __future__ import annotations

import os
import resource

import jax


def memory_of_device() -> dict[str, int]:
    """Its figures; nothing on a CPU."""
    return jax.local_devices()[0].memory_stats() or {}


def host_memory() -> int:
    """Bytes of this machine, or those that this process may have, if these are fewer."""
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    allowed, _ = resource.getrlimit(resource.RLIMIT_AS)
    return machine if allowed == resource.RLIM_INFINITY else min(machine, allowed)


class Peak:
    """The most bytes that were handed out since this was made, if it can be seen.

    The allocator's own peak never goes down, and a GPU's compiler, which runs each convolution with
    many algorithms and their scratch space, can take more than any step after it.
    """

    def __init__(self) -> None:
        self.before = self._ever()

    def observed(self) -> int | None:
        """None if the device does not say, or more had been handed out before."""
        now = self._ever()
        return now if self.before is not None and now > self.before else None

    @staticmethod
    def _ever() -> int | None:
        return memory_of_device().get("peak_bytes_in_use")
