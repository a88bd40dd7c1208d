"""When memory does not suffice: say what was tried, and what would fit."""

from __future__ import annotations

import os
import resource
import shlex
import sys
from typing import Any

import jax

import jaxtile
import policies
from policies import Plan, format_bytes

from ..devices.memory import memory_of_device
from .step import Step

_SHARE = 0.85  # of the memory: the rest is the allocator's, and other arrays'


class Stopped(Exception):
    """The run cannot go on. The text is for the user."""


class OutOfMemory:
    """A context in which running out of memory ends with advice."""

    def __init__(self, step: Step, policy: Any = None):
        self.step, self.policy = step, policy

    def __enter__(self) -> OutOfMemory:
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if isinstance(error, policies.BudgetError):
            command = command_with_policy(f"budget:{-(-error.smallest // 2**20)}MiB")
            raise Stopped(f"{error}\nThis would work:\n  {command}") from None
        if isinstance(error, jax.errors.JaxRuntimeError) and "RESOURCE_EXHAUSTED" in str(error):
            raise Stopped(self._advice(error)) from None

    def _advice(self, error: Exception) -> str:
        """The policy and its bytes; then a plan for most of the memory, tried by compiling it."""
        step, limit = self.step, memory_limit()
        text = step.learner.config.policy
        lines = [f"out of memory: {str(error).splitlines()[0]}"]
        policy = policies.resolve(text) if self.policy is None else self.policy
        needs = format_bytes(jaxtile.compiled_bytes(step.traced(policy).lower()).total)
        lines.append(f"policy {text}: a step needs {needs} of {format_bytes(limit)}")
        if isinstance(policy, Plan):
            lines.append(str(policy))
        budget = int(_SHARE * limit)
        try:
            plan = step.plan(budget)
        except policies.BudgetError as nothing:
            return "\n".join([*lines, f"Nothing fits: {nothing}"])
        command = command_with_policy(f"budget:{budget // 2**20}MiB")
        lines.append(f"This needs {format_bytes(plan.measured_bytes)}:\n  {command}")
        return "\n".join(lines)


def memory_limit() -> int:
    """Bytes of the device; on a CPU, of the machine or of this process, if that has a limit."""
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    allowed, _ = resource.getrlimit(resource.RLIMIT_AS)
    machine = machine if allowed == resource.RLIM_INFINITY else min(machine, allowed)
    return memory_of_device().get("bytes_limit", machine)


def command_with_policy(policy: str) -> str:
    """This program's command line, with another policy."""
    arguments = [a for a in sys.argv[1:] if not a.lstrip("-").startswith("config.policy=")]
    return shlex.join(["python", "-m", "jaxtile", "train", *arguments, f"--config.policy={policy}"])
