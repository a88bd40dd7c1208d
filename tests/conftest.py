"""Tests compare with the untransformed function in float64.

The CPU passes for eight devices: programs use one of them unless a test asks for more. Python
looks for garbage less often: traced programs are many objects that stay.

Programs that tests start inherit which signals are ignored. In the background of a shell, or under
`nohup`, some are, and a program respects that; a test that sends them must not depend on it. They
keep compiled modules, as they do for users, even if this process was told not to.
"""

import gc
import os
import pathlib
import signal

from . import FLAGS

os.environ.setdefault("XLA_FLAGS", FLAGS)
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

import jax
import pytest

gc.set_threshold(20_000)
jax.config.update("jax_enable_x64", True)
if "xla_force_host_platform_device_count" not in os.environ["XLA_FLAGS"]:
    jax.config.update("jax_num_cpu_devices", 8)
for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
    if signal.getsignal(number) == signal.SIG_IGN:
        signal.signal(number, signal.SIG_DFL)


MAPS = pathlib.Path("/proc/self/maps")  # of Linux


@pytest.fixture(autouse=True, scope="module")
def few_mappings():
    """Each compiled program is mapped into memory in pieces, of which Linux allows a process 65,530
    by default: with all long tests in one process, XLA aborted. So programs are given up in time.
    """
    yield
    if MAPS.exists() and MAPS.read_bytes().count(b"\n") > 20_000:
        jax.clear_caches()
        gc.collect()


@pytest.fixture
def settings_restored(monkeypatch):
    """For training in this process: it sets flags, and keeps compiled programs in its folder."""
    from jax.experimental.compilation_cache import compilation_cache

    monkeypatch.setenv("XLA_FLAGS", os.environ.get("XLA_FLAGS", ""))
    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    before = {name: getattr(jax.config, name) for name in names}
    compilation_cache.reset_cache()
    yield
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()
