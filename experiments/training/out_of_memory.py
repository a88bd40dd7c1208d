"""When memory does not suffice: with a budget, go on with a smaller one; otherwise say what fits.

A budget is kept by what the compiler says. The device may have less: others use it, the allocator
has gaps, the compiler itself needs room. Then the run plans anew, for less, and goes on from its
last checkpoint, as after an interruption. What it came to is kept in `budgets.jsonl`, so that a run
that goes on begins with it.
"""

from __future__ import annotations

import json
import math
import pathlib
import shlex
import sys
from typing import Any

import jax

import jaxtile
import policies
from policies import Plan, format_bytes

from ..devices.memory import host_memory, memory_of_device
from .step import Step

_SHARE = 0.85  # of the memory: the rest is the allocator's, and other arrays'
_LESS = 0.8  # of a budget that did not suffice
_BUDGET = "budget:"


class Stopped(Exception):
    """The run cannot go on. The text is for the user."""


class Replan(Exception):
    """There is a smaller budget now. The text is for the user."""


class Budgets:
    """The policy of a run as text; a budget is the last one that was not too much."""

    def __init__(self, policy: str, folder: pathlib.Path, *, alone: bool):
        """`alone`: is there one process? Several would have to come to the same budget."""
        self.policy, self.file, self.alone = policy, folder / "budgets.jsonl", alone
        self.shrunk: list[dict[str, Any]] = []
        """From the budget of the config on."""
        lines = self.file.read_text().splitlines() if self.file.exists() else []
        for line in map(json.loads, lines):
            if line["policy"] == self.policy:
                self._take(line)

    def shrink(self, error: Exception, done: int, needed: float = math.inf) -> str | None:
        """Take a smaller budget, after so many steps; a text about it. None: there is no budget.

        `needed`: bytes of the step that failed, if they are known.
        """
        if not self.policy.startswith(_BUDGET) or not self.alone:
            return None
        before = policies.parse_bytes(self.policy.removeprefix(_BUDGET))
        less = int(min(_LESS * min(before, needed), _SHARE * memory_limit())) // 2**20
        line = {
            "policy": self.policy,
            "instead": f"{_BUDGET}{less}MiB",
            "step": done,
            "error": str(error).splitlines()[0],
        }
        if less < 1:
            return None
        with self.file.open("a") as file:
            file.write(json.dumps(line) + "\n")
        self._take(line)
        instead = f"planning for {less} MiB instead of {format_bytes(before)}"
        return f"out of memory: {line['error']}\n{instead}"

    def _take(self, line: dict[str, Any]) -> None:
        self.shrunk.append(line)
        self.policy = line["instead"]


class OutOfMemory:
    """A context in which running out of memory ends with a smaller budget, or with advice."""

    def __init__(self, step: Step, budgets: Budgets, done: int, policy: Any = None):
        self.step, self.budgets, self.done, self.policy = step, budgets, done, policy

    def __enter__(self) -> OutOfMemory:
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if isinstance(error, policies.BudgetError):
            raise Stopped(self._too_small(error)) from None
        if isinstance(error, jax.errors.JaxRuntimeError) and "RESOURCE_EXHAUSTED" in str(error):
            planned = isinstance(self.policy, Plan)
            needed = self.policy.measured_bytes + self.step.batch_bytes if planned else math.inf
            if (told := self.budgets.shrink(error, self.done, needed)) is not None:
                raise Replan(told) from None
            raise Stopped(self._advice(error)) from None

    def _too_small(self, error: policies.BudgetError) -> str:
        if shrunk := self.budgets.shrunk:
            tried = ", ".join([shrunk[0]["policy"], *(line["instead"] for line in shrunk[:-1])])
            return (
                f"out of memory with {tried}; and with less nothing fits: {error}\nFree memory of "
                "the device, or take a smaller data.size or train.batch_size"
            )
        command = command_with_policy(f"{_BUDGET}{-(-error.smallest // 2**20)}MiB")
        return f"{error}\nThis would work:\n  {command}"

    def _advice(self, error: Exception) -> str:
        """The policy and its bytes; then a plan for most of the memory, tried by compiling it."""
        step, limit, text = self.step, memory_limit(), self.budgets.policy
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
        command = command_with_policy(f"{_BUDGET}{budget // 2**20}MiB")
        lines.append(f"This needs {format_bytes(plan.measured_bytes)}:\n  {command}")
        return "\n".join(lines)


def memory_limit() -> int:
    """Bytes of the device; a CPU has the host's."""
    return memory_of_device().get("bytes_limit", host_memory())


def command_with_policy(policy: str) -> str:
    """This program's command line, with another policy."""
    arguments = [a for a in sys.argv[1:] if not a.lstrip("-").startswith("config.policy=")]
    return shlex.join(["python", "-m", "jaxtile", "train", *arguments, f"--config.policy={policy}"])
