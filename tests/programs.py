"""Programs in processes of their own, which need not import JAX: it takes longer than they do.

They are forks of one process that has imported much and started nothing. What a program imports
besides, its command line, environment, output and exit status are its own, as if it were started by
`python -m`. Signals, limits and several processes at once are tested with `subprocess`.
"""

import multiprocessing
import os
import pathlib
import runpy
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).parent.parent
IMPORTED = [
    f"experiments.{name}"
    for name in ("program.command", "training.run", "training.summary", "training.pictures")
]


def python(*command: str, env: dict[str, str] | None = None, together: bool = False):
    """As `subprocess.run([sys.executable, "-m", ...])`, or `"-c"`, in the folder of the project.

    What is written to the two streams is kept apart, or `together` in the first.
    """
    forks = multiprocessing.get_context("forkserver")
    forks.set_forkserver_preload(IMPORTED)
    with tempfile.TemporaryDirectory() as folder:
        names = ("said", "said" if together else "complained")
        files = [pathlib.Path(folder, name) for name in names]
        process = forks.Process(target=_run, args=(command, env or dict(os.environ), files))
        process.start()
        process.join(600)
        if process.is_alive():
            process.kill()
            process.join()
        said = [file.read_text() for file in dict.fromkeys(files)]
    return subprocess.CompletedProcess(command, process.exitcode, *said)


def _run(command: tuple[str, ...], env: dict[str, str], files: list[pathlib.Path]) -> None:
    for number, file in enumerate(files, 1):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    os.environ.clear()
    os.environ.update(env)
    os.chdir(ROOT)
    sys.path[:0] = filter(None, env.get("PYTHONPATH", "").split(os.pathsep))
    kind, body, *arguments = command
    sys.argv = [kind if kind == "-c" else body, *arguments]
    if kind == "-c":
        exec(compile(body, "<string>", "exec"), {"__name__": "__main__"})
    else:
        runpy.run_module(body, run_name="__main__", alter_sys=True)
