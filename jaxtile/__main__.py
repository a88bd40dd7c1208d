"""The command `jaxtile`: the programs of the repository, wherever it is installed.

    jaxtile train --config=configs/quickstart.py --workdir=runs/quickstart

`jaxtile NAME` is `python -m experiments.NAME` in a checkout. What is installed has the folders
`models`, `experiments` and `configs` in `jaxtile/_programs`, where only this command looks: their
names are too common to be put into other people's environments.
"""

from __future__ import annotations

import difflib
import importlib.util
import os
import pathlib
import runpy
import signal
import sys

from ._version import __version__

PROGRAMS = {
    "train": "train a model as a config file says",
    "predict": "apply a trained model to an image of any size",
    "compare": "two runs or more, side by side",
    "plan": "plan a model for a budget of memory",
    "largest": "the largest image that trains within a budget, per policy",
    "gigapixel": "steps on images in host memory, larger than the device",
    "sweep": "measure models x sizes x policies",
    "report": "a page about a sweep",
    "bench": "jaxtile beside plain JAX, and PyTorch",
    "grids": "time and memory of finer and finer grids",
    "scaling": "the time of a step on many devices, on paper",
    "calibrate": "measure what operations cost on this device, for the planner",
}
_NEEDED = {"absl": "absl-py", "ml_collections": "ml_collections", "tifffile": "tifffile"}


def main() -> None:
    """Run the program that the command line names."""
    name, *arguments = sys.argv[1:] or ["help"]
    if name in ("help", "--help", "-h"):
        lines = [f"  {program:<10} {what}" for program, what in PROGRAMS.items()]
        _say("\n".join(["usage: jaxtile PROGRAM [--help] ...\n", *lines]))
        return
    if name == "--version":
        _say(f"jaxtile {__version__}")
        return
    if name not in PROGRAMS:
        near = difflib.get_close_matches(name, PROGRAMS, 1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        sys.exit(f"error: {name!r} is not one of {', '.join(PROGRAMS)}{hint}")
    missing = [p for m, p in _NEEDED.items() if importlib.util.find_spec(m) is None]
    if missing:
        sys.exit(
            f"error: `jaxtile {name}` needs {', '.join(missing)}: pip install 'jaxtile[train]', or "
            "in a checkout pip install '.[train]'"
        )
    _find_programs()
    sys.argv[1:] = arguments
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # importing takes seconds: end without a trace
    runpy.run_module(f"experiments.{name}", run_name="__main__", alter_sys=True)


def _say(text: str) -> None:
    """Somebody may have read enough, as `head` has, and closed the pipe."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(128 + signal.SIGPIPE)


def _find_programs() -> None:
    """Put their folder first in the path, and then the one in which the command was given.

    Processes that a program starts look there too, in the same order.
    """
    installed = pathlib.Path(__file__).parent / "_programs"
    folder = installed if installed.is_dir() else installed.parents[1]
    first = [str(folder), os.getcwd()]
    sys.path[:0] = first
    old = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([*first, *([old] if old else [])])
    os.environ["PYTHONSAFEPATH"] = "1"


if __name__ == "__main__":
    main()
