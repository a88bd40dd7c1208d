"""The public face: `jaxtile.checkpoint`, and `jaxtile.explain`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax

from ._errors import TilingError, check_callable
from ._explain import report
from ._explanation import Explanation
from ._graph.nodes import Policy
from ._graph.trace import Traced
from ._plan.planner import Budget
from ._regions.grid import Tiles
from ._regions.regions import Schedule
from ._schedule import Options, scheduled, tiled
from .policy import GraphPolicy


def checkpoint(
    fun: Callable[..., Any],
    *,
    in_axes: Any,
    tiles: Tiles = "whole",
    policy: Policy | GraphPolicy | str | None = None,
    budget: int | str | None = None,
    mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh | None = None,
    mesh_axes: Sequence[str | None] | None = None,
    static_argnums: int | Sequence[int] = (),
    skip: bool = False,
) -> Tiled:
    """Evaluate and differentiate `fun` tile by tile, with exact halos.

    The result has the signature, the value and the gradients of `fun`. What differs is the memory:
    values that `policy` saves are held as whole arrays, and everything else exists only inside one
    tile at a time, where the backward pass computes it again. For a function that works pixel by
    pixel this is, in plain Python::

        def tiled(params, image):
            return concatenate([jax.checkpoint(fun)(params, tile) for tile in split(image)])

    For convolutions, pools, skips, resizing and the rest, each tile reads as much of its neighbours
    as it needs (the halo); reductions over a tiled axis (batch statistics, a global pool, a loss)
    are accumulated over all tiles first.

    Args:
      fun: any JAX function of pytrees; it is traced, not rewritten.
      in_axes: as in `jax.vmap`, a pytree prefix of the arguments. `None`: not tiled. A tuple: the
        array axes that are tiled, in order. All tuples have the same length; `None` in a tuple
        stands for an axis that this array does not have.
      tiles: tiles per tiled axis; sizes need not divide. Or a mapping from the name of a stored
        value to the grid of the region that computes it, with the key `...` for all other regions.
        The grid `"whole"`, the default, recomputes a region untiled, as `jax.checkpoint` does; the
        grid `None` leaves it untiled and unrecomputed, as plain JAX.
      policy: what is stored: any function of `jax.checkpoint_policies` that saves or offloads;
        `None` stores nothing inside. Or one that sees the whole graph: a name, as "sqrt"
        (`policies.names()` lists them), a `jaxtile.Plan`, or an object as `jaxtile.policy`
        describes it; `tiles` then goes to what it recomputes whole.
      budget: instead of a policy, bytes that a training step may take, as "6GiB": the fastest
        schedule that fits is planned when the function is first traced, and kept for these shapes.
        `jaxtile.plan` makes the same plan beforehand, to look at and to save.
      mesh: devices to distribute tiled arrays over. Each device owns a block of every stored value,
        and runs `tiles` tiles of its own in every region; it receives what these read of other
        blocks before the region runs. `"whole"` and `None` are one piece per device. What is not
        tiled, weights for instance, is on every device.
      mesh_axes: per tiled axis, the name of the mesh axis that it is distributed over, or None.
        Tile the batch axis too for data parallelism: `in_axes=(None, (0, 1, 2))`,
        `mesh_axes=("data", "rows", "cols")`. Sizes need not divide.
      static_argnums: as in `jax.checkpoint`, numbers of positional arguments that `fun` gets as
        they are, not traced: it may branch on them. They have None in `in_axes`. Strings, functions
        and bools are static wherever they are, and so are the numbers that a module has as
        attributes (an Equinox module, say); other numbers are traced, as by `jax.jit`.
      skip: may tiles be skipped? A tile that reads the same as another one, bit for bit, as in the
        background of an image, is not computed: it gets what that one got. In the backward pass
        neither is a tile whose cotangents are all zero. Costs one tile more of memory. The result
        is the same, but where plain JAX has 0 times infinity in the gradient, which is 0 here.
        Not on a mesh.

    >>> import jax, jax.numpy as jnp, jaxtile
    >>> def blur(kernel, image):
    ...     return jnp.tanh(jax.lax.conv(image, kernel, (1, 1), "SAME"))
    >>> tiled = jaxtile.checkpoint(blur, in_axes=(None, (2, 3)), tiles=(4, 4))
    >>> kernel, image = jnp.ones((1, 1, 3, 3)) / 9, jnp.arange(256.0).reshape(1, 1, 16, 16)
    >>> bool(jnp.allclose(tiled(kernel, image), blur(kernel, image)))
    True

    On many devices the same call needs no other change (here on a mesh of one):

    >>> mesh = jax.make_mesh((1, 1), ("rows", "cols"))
    >>> tiled = jaxtile.checkpoint(
    ...     blur, in_axes=(None, (2, 3)), tiles=(4, 4), mesh=mesh, mesh_axes=("rows", "cols")
    ... )
    >>> bool(jnp.allclose(tiled(kernel, image), blur(kernel, image)))
    True

    What it is going to do can be asked before it runs:

    >>> tiled.explain(kernel, image).regions[0].grid
    (4, 4)

    Put `jit` outermost: each call traces `fun` anew. Inside another `jaxtile.checkpoint` the
    result is traced as the plain `fun`; the outermost schedule wins. `grad`, `vjp`, `jvp`, `vmap`
    and what is made of them are defined; on a mesh, `jvp` is not.
    """
    check_callable(fun)
    chosen = policy_within(budget, policy, skip)
    options = Options.of(in_axes, tiles, chosen, mesh, mesh_axes, static_argnums, skip)
    return Tiled(
        fun, tiled(fun, options), lambda args, kwargs: scheduled(fun, args, kwargs, options)
    )


def explain(fun: Callable[..., Any], *args: Any, in_axes: Any, **options: Any) -> Explanation:
    """Describe what `checkpoint(fun, in_axes=in_axes, **options)(*args)` does, without running it.

    Arguments may be arrays or `jax.ShapeDtypeStruct`s. With `skip`, and tiled arguments that are
    arrays, regions say how many of their tiles read the same as another one. On a mesh, regions
    also say what devices send each other; the mesh may be a `jax.sharding.AbstractMesh`, of devices
    that are not here.

    >>> import jax, jaxtile
    >>> def blur(kernel, image):
    ...     return jax.lax.conv(image, kernel, (1, 1), "SAME")
    >>> kernel = jax.ShapeDtypeStruct((1, 1, 3, 3), "float32")
    >>> image = jax.ShapeDtypeStruct((1, 1, 64, 64), "float32")
    >>> explanation = jaxtile.explain(blur, kernel, image, in_axes=(None, (2, 3)), tiles=(4, 4))
    >>> explanation.regions[0].reads[0].halo
    ((1, 1), (1, 1))
    """
    return checkpoint(fun, in_axes=in_axes, **options).explain(*args)


def policy_within(budget: int | str | None, policy: Any, skip: bool) -> Any:
    """The policy that keeps a budget, if there is one; otherwise the given policy."""
    if budget is not None and policy is not None:
        raise TilingError(
            f"`budget` (={budget!r}) and `policy` (={policy!r}) both say what is stored: give one "
            "of them"
        )
    return policy if budget is None else Budget(budget, skip)


class Tiled:
    """What `checkpoint` returns: a function that runs in tiles, and can say how."""

    def __init__(
        self,
        fun: Callable[..., Any],
        run: Callable[..., Any],
        schedule: Callable[[tuple[Any, ...], dict[str, Any]], tuple[Schedule, Traced]],
    ):
        functools.update_wrapper(self, fun, updated=())
        self._fun, self._run, self._schedule = fun, run, schedule

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._run(*args, **kwargs)

    def __get__(self, instance: Any, owner: type | None = None) -> Callable[..., Any]:
        """In the body of a class it is a method, as a function is."""
        return self if instance is None else functools.partial(self, instance)

    def __repr__(self) -> str:
        return f"jaxtile.checkpoint({self._fun!r})"

    def explain(self, *args: Any, **kwargs: Any) -> Explanation:
        """What it does for these arguments, without running it: see `jaxtile.explain`."""
        return report(*self._schedule(args, kwargs))
