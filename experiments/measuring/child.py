"""A program that ends when the one that started it does, however that ends.

    run_child("experiments.cell", options, limit, environment)

A sweep that is killed has no time to end the cell that it waits for, which would go on and hold the
device. So the sweep keeps one end of a pipe open, and nothing is ever written to it: the other end
reports its end as soon as the sweep is gone.
"""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
import threading


def run_child(
    module: str, argument: str, limit: float, environment: dict[str, str]
) -> subprocess.CompletedProcess:
    """`python -m MODULE ARGUMENT`, and what it printed. `subprocess.TimeoutExpired` ends it too."""
    reading, writing = os.pipe()
    try:
        return subprocess.run(
            [sys.executable, "-m", __name__, module, argument],
            stdin=reading,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=limit,
            env=environment,
        )
    finally:
        os.close(reading)
        os.close(writing)


def _end_with_the_pipe() -> None:
    os.read(sys.__stdin__.fileno(), 1)
    os._exit(1)


def main() -> None:
    threading.Thread(target=_end_with_the_pipe, daemon=True).start()
    sys.argv = sys.argv[1:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
