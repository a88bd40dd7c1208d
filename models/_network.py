"""A model of any library as two functions: what training, evaluation and prediction call.

`network` makes a `Network` of a class or function that a config names. What it makes may be a
module of Flax NNX, Linen, Haiku or Equinox, or anything with `init` and `apply` of its own. The
models of this repository are NNX modules, and nothing here knows them.

Images come as (N, ..., C): a batch, spatial axes, channels last. A model that wants another layout
says so in an attribute `layout`: `"NC..."`, `"C..."` or `"...C"`; without N it takes one image.
Equinox's is `"C..."` unless it says otherwise.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Mapping
from typing import Any

import flax.linen
import jax
import jax.numpy as jnp
from flax import nnx

from ._create import maker
from ._names import call, parameters
from ._weights import load_pretrained

_LAYOUTS = ("N...C", "NC...", "C...", "...C")
_IN_TRAINING = {  # names that libraries have for the mode, and what they are in training
    **dict.fromkeys(("train", "training", "is_training"), True),
    **dict.fromkeys(("deterministic", "inference", "use_running_average"), False),
}

Made = Callable[[], Any]


@dataclasses.dataclass(frozen=True)
class Network:
    """A model as functions of its weights.

    `apply` is called as `apply(weights, state, images, train=...)`, with images (N, ..., C), and
    returns scores, (N, ..., classes) or (N, classes), and the state after the call.
    """

    init: Callable[[jax.Array], tuple[Any, Any]]
    """From images, of which only the shape counts, to weights and state: a function of the seed."""
    apply: Callable[..., tuple[jax.Array, Any]]
    library: str
    pretrained: Callable[[str], tuple[Any, Any, list[str]]] | None = None
    """From a file to weights and state, and remarks for the user."""


def network(name: str, options: Mapping[str, Any], *, seed: int, **offered: Any) -> Network:
    """The model that a config names, as functions.

    It is made with `options` and, where it has parameters of these names, with `rngs`, `key`,
    `seed` and those of `offered`: what the data and the program say (`in_channels`, `classes`).
    """
    make = maker(name)
    offered = {"seed": seed, **offered}

    def made() -> Any:
        random = {"rngs": nnx.Rngs(seed), "key": jax.random.key(seed)}
        return call(make, f"the model {name!r}", options, {**offered, **random})

    if _is_class_of(make, "haiku", "Module"):
        return _of_haiku_class(make, made, seed)
    model = _looked_at(made)
    if isinstance(model, nnx.Module):
        return _of_nnx(made, seed)
    if isinstance(model, flax.linen.Module):
        return _of_linen(model, seed)
    with_state = isinstance(model, tuple) and len(model) == 2
    if _is_a(model[0] if with_state else model, "equinox", "Module"):
        return _of_equinox(made, seed, with_state)
    if _is_a(model, "haiku", "Transformed") or _is_a(model, "haiku", "TransformedWithState"):
        return _of_haiku(model, seed)
    if hasattr(model, "init") and hasattr(model, "apply"):
        return _of_functions(model, seed)
    raise ValueError(
        f"the model {name!r} makes a {type(model).__name__}, which is no module of Flax, Haiku or "
        "Equinox, and has no `init(key, images)` and `apply(weights, state, images, train, key)`"
    )


def _looked_at(made: Made) -> Any:
    """What is made, without computing a number."""
    seen: list[Any] = []
    jax.eval_shape(lambda: seen.append(made()))
    return seen[0]


def _is_a(thing: Any, module: str, name: str) -> bool:
    """Of a library that need not be installed; if it is not imported, nothing is of it."""
    return module in sys.modules and isinstance(thing, getattr(sys.modules[module], name))


def _is_class_of(thing: Any, module: str, name: str) -> bool:
    if module not in sys.modules or not isinstance(thing, type):
        return False
    return issubclass(thing, getattr(sys.modules[module], name))


def _mode(fun: Callable[..., Any], train: bool) -> dict[str, bool]:
    """What a call is told of the mode: whichever name it has for it."""
    named = parameters(fun)[0]
    return {n: train == in_training for n, in_training in _IN_TRAINING.items() if n in named}


def _of_nnx(made: Made, seed: int) -> Network:
    def split(model: Any) -> Any:
        return nnx.split(model, nnx.Param, nnx.RngKey, ...)

    model = nnx.eval_shape(made)
    graphdef, _, keys, _ = split(model)
    run = _laid_out(model)

    def init(images: jax.Array) -> tuple[Any, Any]:
        _, params, _, variables = split(made())
        return params, variables

    def apply(
        params: Any, variables: Any, images: jax.Array, *, train: bool, own_statistics: bool = False
    ) -> tuple[jax.Array, Any]:
        known = jax.tree.map(lambda _: jax.random.key(seed), keys)
        model = nnx.merge(graphdef, params, known, variables, copy=True)
        if not train:
            model.eval()
        if own_statistics:
            model.set_attributes(use_running_average=False, raise_if_not_found=False)
        scores = run(lambda x: model(x, **_mode(model.__call__, train)), images)
        return scores, split(model)[3]

    def pretrained(path: str) -> tuple[Any, Any, list[str]]:
        model = made()
        remarks = load_pretrained(model, path)
        _, params, _, variables = split(model)
        return params, variables, remarks

    return Network(init, apply, "nnx", pretrained)


def _of_linen(module: flax.linen.Module, seed: int) -> Network:
    run = _laid_out(module)

    def init(images: jax.Array) -> tuple[Any, Any]:
        keys = dict(zip(("params", "dropout"), jax.random.split(jax.random.key(seed)), strict=True))
        mode = _mode(module.__call__, False)
        # `run` returns what the function does, which here are the variables.
        found = dict(run(lambda x: module.init(keys, x, **mode), images, scores=False))
        return found.pop("params", {}), _counted(found)

    def apply(
        params: Any, variables: Any, images: jax.Array, *, train: bool
    ) -> tuple[jax.Array, Any]:
        state, key = variables["state"], _key(seed, variables)
        changed: dict[str, Any] = {}

        def scores(x: jax.Array) -> jax.Array:
            found, new = module.apply(
                {"params": params, **state},
                x,
                **_mode(module.__call__, train),
                rngs={"dropout": key},
                mutable=list(state) if train else [],
            )
            changed.update(new)
            return found

        return run(scores, images), _counted({**state, **changed}, variables)

    return Network(init, apply, "linen")


def _of_haiku_class(make: type, made: Made, seed: int) -> Network:
    """A class of Haiku: a module of it is made anew whenever it is called."""
    import haiku

    def forward(images: jax.Array, **mode: bool) -> jax.Array:
        return made()(images, **mode)

    modes = {train: _mode(make.__call__, train) for train in (True, False)}
    return _of_haiku(haiku.transform_with_state(forward), seed, modes, getattr(make, "layout", ""))


def _of_haiku(
    model: Any, seed: int, modes: dict[bool, dict[str, bool]] | None = None, layout: str = ""
) -> Network:
    """What `hk.transform` or `hk.transform_with_state` returns."""
    stateful = _is_a(model, "haiku", "TransformedWithState")
    run = _laid_out(layout or "N...C")
    written = getattr(model.init, "_original_fn", lambda images: images)
    told = modes or {train: _mode(written, train) for train in (True, False)}

    def init(images: jax.Array) -> tuple[Any, Any]:
        key = jax.random.key(seed)
        found = run(lambda x: model.init(key, x, **told[True]), images, scores=False)
        params, state = found if stateful else (found, {})
        return params, _counted(state)

    def apply(
        params: Any, variables: Any, images: jax.Array, *, train: bool
    ) -> tuple[jax.Array, Any]:
        state, key, weights = variables["state"], _key(seed, variables), _cast(params, images.dtype)
        changed = [state]

        def scores(x: jax.Array) -> jax.Array:
            if not stateful:
                return model.apply(weights, key, x, **told[train])
            found, changed[0] = model.apply(weights, state, key, x, **told[train])
            return found

        return run(scores, images), _counted(changed[0], variables)

    return Network(init, apply, "haiku")


def _of_equinox(made: Made, seed: int, with_state: bool) -> Network:
    """A module, or a module and its state."""
    import equinox as eqx

    new = made if with_state else eqx.nn.make_with_state(made)

    def split(model: Any) -> tuple[Any, Any, Any]:
        params, rest = eqx.partition(model, eqx.is_inexact_array)
        return params, *eqx.partition(rest, eqx.is_array)

    model, _ = _looked_at(new)
    static = split(model)[2]
    run = _laid_out(getattr(model, "layout", "C..."))
    named = parameters(type(model).__call__)[0]

    def init(images: jax.Array) -> tuple[Any, Any]:
        model, state = new()
        params, arrays, _ = split(model)
        return params, _counted({"arrays": arrays, "model": state})

    def apply(
        params: Any, variables: Any, images: jax.Array, *, train: bool
    ) -> tuple[jax.Array, Any]:
        held, key = variables["state"], _key(seed, variables)
        weights = _cast(params, images.dtype)
        model = eqx.nn.inference_mode(eqx.combine(weights, held["arrays"], static), not train)
        keys = {"key": jax.random.split(key, len(images))} if "key" in named else {}
        if "state" not in named:
            return run(lambda x, **key: model(x, **key), images, **keys), _counted(held, variables)

        def with_state(x: jax.Array, **key: jax.Array) -> tuple[jax.Array, Any]:
            return model(x, jax.tree.map(lambda leaf: leaf, held["model"]), **key)  # used up

        scores, state = run(with_state, images, stateful=True, **keys)
        return scores, _counted({**held, "model": state}, variables)

    return Network(init, apply, "equinox")


def _of_functions(model: Any, seed: int) -> Network:
    """The interface itself: `init(key, images)`, `apply(weights, state, images, train=, key=)`."""
    run = _laid_out(model)

    def init(images: jax.Array) -> tuple[Any, Any]:
        key = jax.random.key(seed)
        params, state = run(lambda x: model.init(key, x), images, scores=False)
        return params, _counted(state)

    def apply(
        params: Any, variables: Any, images: jax.Array, *, train: bool
    ) -> tuple[jax.Array, Any]:
        key, changed = _key(seed, variables), [variables["state"]]

        def scores(x: jax.Array) -> jax.Array:
            found, changed[0] = model.apply(params, changed[0], x, train=train, key=key)
            return found

        return run(scores, images), _counted(changed[0], variables)

    return Network(init, apply, "functions")


def _counted(state: Any, before: Any = None) -> dict[str, Any]:
    """The state of a model, and how often it was used, so that each time draws other numbers."""
    count = jnp.uint32(0) if before is None else before["count"] + jnp.uint32(1)
    return {"state": state, "count": count}


def _key(seed: int, variables: Any) -> jax.Array:
    return jax.random.fold_in(jax.random.key(seed), variables["count"])


def _cast(params: Any, dtype: Any) -> Any:
    """Weights in the images' type, for libraries whose layers do not compute in another than their
    own.
    """
    return jax.tree.map(
        lambda x: x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x, params
    )


def _laid_out(model: Any) -> Callable[..., Any]:
    """A function that calls another with images as the model wants them, and turns the scores
    back. With `stateful` that one returns a state beside them, which all images share.
    """
    layout = model if isinstance(model, str) else getattr(model, "layout", "N...C")
    if layout not in _LAYOUTS:
        raise ValueError(f"the model's `layout` (={layout!r}) must be one of {_LAYOUTS}")
    first, one_by_one = "C." in layout, "N" not in layout

    def run(
        fun: Callable[..., Any],
        images: jax.Array,
        *,
        scores: bool = True,
        stateful: bool = False,
        **per_image: jax.Array,
    ) -> Any:
        given = jnp.moveaxis(images, -1, 1) if first else images
        if not scores:
            return fun(given[0] if one_by_one else given)
        if one_by_one:
            axes = (0, None) if stateful else 0
            fun = jax.vmap(fun, out_axes=axes, axis_name="batch")
        found = fun(given, **per_image)
        values, state = found if stateful else (found, None)
        if not isinstance(values, jax.Array):
            raise TypeError(
                f"the model returns a {type(values).__name__}, where one array is wanted: scores"
            )
        if first and values.ndim == images.ndim:
            values = jnp.moveaxis(values, 1, -1)
        return (values, state) if stateful else values

    return run
