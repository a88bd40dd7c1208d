"""How programs end: real processes get real signals, closed pipes and full disks."""

import pathlib
import resource
import signal
import subprocess
import sys
import time

import pytest

ROOT = pathlib.Path(__file__).parent.parent

# In a library that does not return, as a compiler for a while: a lock that is taken twice.
BLOCKED = """
import ctypes, threading
library, lock = ctypes.CDLL(None), ctypes.create_string_buffer(64)
library.pthread_mutex_lock(lock)
with undone(lambda: print("left in order", flush=True)):
    threading.Timer(0.5, print, ["ready"], {"flush": True}).start()
    library.pthread_mutex_lock(lock)
"""
IN_PYTHON = """
try:
    print("ready", flush=True)
    while True: time.sleep(1000)
finally:
    print("left in order", flush=True)
"""
TWO_STEPS = """
with Noted() as noted:
    print("ready", flush=True)
    while not noted.received: time.sleep(0.01)
    print("noted", noted.received.name, flush=True)
    time.sleep(1000)
"""


def start(body, *, before="", **options):
    lines = "\n".join(f"    {line}" for line in body.strip().splitlines())
    program = (
        f"import time\nfrom experiments.program.ending import *\n{before}\n"
        f'Signals("all is kept")\nwith sentences("all is kept", ValueError):\n{lines}\n'
    )
    return subprocess.Popen(
        [sys.executable, "-c", program],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )


def ended(process):
    out, errors = process.communicate(timeout=100)
    assert "Traceback" not in errors
    return process.returncode, out, errors


@pytest.mark.parametrize(
    "body, number",
    [
        (BLOCKED, signal.SIGINT),
        (IN_PYTHON, signal.SIGINT),
        (IN_PYTHON, signal.SIGTERM),
        (IN_PYTHON, signal.SIGHUP),
    ],
    ids=["blocked-SIGINT", "SIGINT", "SIGTERM", "SIGHUP"],
)
def test_a_signal_ends_a_program_wherever_it_is(body, number):
    process = start(body)
    assert process.stdout.readline() == "ready\n"
    process.send_signal(number)
    code, out, errors = ended(process)
    assert code == 128 + number
    assert errors == f"stopped by {number.name}; all is kept\n"
    assert out == "left in order\n"


@pytest.mark.parametrize("second", [signal.SIGINT, signal.SIGTERM])
def test_the_second_signal_ends_what_the_first_one_did_not(second):
    process = start(TWO_STEPS)
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGINT)
    assert process.stdout.readline() == "noted SIGINT\n"
    process.send_signal(signal.SIGINT)  # at once: it is the same, which was sent twice
    time.sleep(1.1)
    assert process.poll() is None
    process.send_signal(second)
    code, _, errors = ended(process)
    assert code == 128 + second
    assert errors == f"stopped by {second.name}; all is kept\n"


def test_nohup_is_respected():
    process = start(TWO_STEPS, before="import signal; signal.signal(1, signal.SIG_IGN)")
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGHUP)
    process.send_signal(signal.SIGINT)
    assert process.stdout.readline() == "noted SIGINT\n"
    process.kill()
    process.communicate()


def test_nobody_reads_any_more():
    process = start("while True: print('a line', flush=True)")
    assert process.stdout.readline() == "a line\n"
    process.stdout.close()
    assert process.stderr.read() == ""
    assert process.wait(100) == 128 + signal.SIGPIPE


def test_nobody_reads_any_more_and_a_thread_notices_first():
    body = """
with Now(quiet=0.05) as now:
    now("compiling")
    sys.stdin.readline()
    time.sleep(0.5)
    now("reading")
    print("not reached", file=sys.stderr)
"""
    imports = "from experiments.program.progress import Now"
    process = start(body, before=imports, stdin=subprocess.PIPE)
    assert "compiling" in process.stdout.readline()
    process.stdout.close()
    process.stdin.write("go on\n")
    process.stdin.flush()
    assert process.stderr.read() == ""
    assert process.wait(100) == 128 + signal.SIGPIPE


def test_nobody_reads_any_more_is_noted_as_a_signal_is():
    body = """
with Noted() as noted:
    while not noted.received: print("a line", flush=True)
    print("unread", flush=True)
sys.stderr.write(noted.received.name)
"""
    process = start(body)
    assert process.stdout.readline() == "a line\n"
    process.stdout.close()
    assert process.stderr.read() == "SIGPIPE"
    assert process.wait(100) == 0


def test_an_error_of_the_system_is_one_line(tmp_path):
    def small():
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))

    file = tmp_path / "file"
    body = f"with open({str(file)!r}, 'w') as file: file.write('x' * 2000)"
    code, _, errors = ended(start(body, preexec_fn=small))
    assert (code, errors) == (1, "error: File too large\n")
    code, _, errors = ended(start(f"open({str(file / 'nothing')!r})"))
    assert (code, errors) == (1, f"error: {file / 'nothing'}: Not a directory\n")
    picture = tmp_path / "loss.png"
    body = f"""
figure = matplotlib.figure.Figure()
write_figure(figure, pathlib.Path({str(picture)!r}))
"""
    imports = "import matplotlib.figure, pathlib; from experiments.program.files import *"
    code, _, errors = ended(start(body, before=imports, preexec_fn=small))
    assert (code, errors) == (1, f"error: {picture}: File too large\n")
    assert not [*tmp_path.glob("loss*")]
    code, _, errors = ended(start("raise ValueError('what to mend')"))
    assert (code, errors) == (1, "error: what to mend\n")
