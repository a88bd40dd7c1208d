"""How many bytes a compiled program needs, as the compiler says.

What XLA fuses, in which order it runs kernels and how it packs their results cannot be told from a
traced function, so the bytes of a program are known only once it is compiled. But most of the time
of a compilation is spent after the bytes are decided: on a GPU, on timing many algorithms for each
convolution; on a CPU, on optimising machine code. Without these a program is compiled in seconds.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax


@dataclasses.dataclass(frozen=True)
class Bytes:
    """Bytes of a program, by kind: on the device, but for `host`."""

    arguments: int
    outputs: int
    aliases: int
    """Outputs that lie in donated arguments, and so are counted twice above."""
    temporaries: int
    host: int = 0
    """Temporaries in host memory, if the device has memory of its own."""

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
            analysis.host_temp_size_in_bytes,
        )


# What takes long and comes after buffers are assigned.
_SKIPPED = {
    "cpu": {"xla_backend_optimization_level": 0},
    "gpu": {"xla_gpu_autotune_level": 0},
}


def compiled_bytes(lowered: Any, platform: str | None = None) -> Bytes:
    """The bytes of a program, from a fast compilation that only serves to read them.

    On a CPU they are the bytes of the program as it will run. On a GPU they may be a little too
    few: the algorithm that autotuning chooses may want more scratch space than the one that is
    compiled here. If the bytes must be certain, ask `Bytes.of(lowered.compile())`.

    Args:
      lowered: what `jax.jit(fun).lower(*args)` gives.
      platform: `cpu`, `gpu` or `tpu`; by default, where JAX runs.

    >>> import jax, jax.numpy as jnp, jaxtile
    >>> step = jax.grad(lambda w, x: jnp.sum(jnp.sin(x @ w)))
    >>> shapes = [jax.ShapeDtypeStruct((n, 64), "float32") for n in (64, 1024)]
    >>> jaxtile.compiled_bytes(jax.jit(step).lower(*shapes)).arguments
    278528
    """
    if not hasattr(lowered, "compile"):
        raise TypeError(f"{lowered!r} is not lowered: give `jax.jit(fun).lower(*args)`")
    options = _SKIPPED.get(platform or jax.default_backend(), {})
    return Bytes.of(lowered.compile(compiler_options=options))
