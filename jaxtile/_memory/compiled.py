"""Bytes of a compiled program: the compiler is the model of its own memory.

What XLA fuses, in which order it runs kernels and how it packs their results cannot be foretold
from a traced function. But most of what makes a compilation slow comes after all that: on a GPU,
timing many algorithms for each convolution; on a CPU, optimising machine code. So a program is
compiled without these, in seconds, and its bytes are read.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax


@dataclasses.dataclass(frozen=True)
class Bytes:
    """Bytes on the device, by kind."""

    arguments: int
    outputs: int
    aliases: int
    """Outputs that lie in donated arguments, and so are counted twice above."""
    temporaries: int

    @property
    def fixed(self) -> int:
        """What no schedule changes: arguments and outputs."""
        return self.arguments + self.outputs - self.aliases

    @property
    def total(self) -> int:
        return self.fixed + self.temporaries

    @classmethod
    def of(cls, executable: Any) -> Bytes:
        """What XLA says of a compiled program."""
        analysis = executable.memory_analysis()
        return cls(
            analysis.argument_size_in_bytes,
            analysis.output_size_in_bytes,
            analysis.alias_size_in_bytes,
            analysis.temp_size_in_bytes,
        )


# What takes long and comes after buffers are assigned.
_SKIPPED = {
    "cpu": {"xla_backend_optimization_level": 0},
    "gpu": {"xla_gpu_autotune_level": 0},
}


def compiled_bytes(lowered: Any, platform: str | None = None) -> Bytes:
    """The bytes of a program, compiled only to read them: several times faster than to run it.

    On a CPU they are those of the program as it will run. On a GPU an algorithm that autotuning
    chooses may want more scratch space than the first that is suggested, so that a promise about
    the bytes needs `Bytes.of(lowered.compile())` in the end.

    Args:
      lowered: what `jax.jit(fun).lower(*args)` gives.
      platform: `cpu`, `gpu` or `tpu`; by default, where JAX runs.

    >>> import jax, jax.numpy as jnp, jaxtile
    >>> step = jax.grad(lambda w, x: jnp.sum(jnp.sin(x @ w)))
    >>> shapes = [jax.ShapeDtypeStruct((n, 64), "float32") for n in (64, 1024)]
    >>> jaxtile.compiled_bytes(jax.jit(step).lower(*shapes)).arguments
    278528
    """
    options = _SKIPPED.get(platform or jax.default_backend(), {})
    return Bytes.of(lowered.compile(compiler_options=options))
