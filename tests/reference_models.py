"""The models at the sizes of the reference graphs, as shapes only, and the reference's facts."""

from __future__ import annotations

import functools
import json
import pathlib

import jax
from flax import nnx

import jaxtile
import models

_DATA = pathlib.Path(__file__).parent / "data"


@functools.cache
def facts(name: str) -> dict:
    return json.loads((_DATA / f"{name}.json").read_text())


def shape(*dims: int, dtype: str = "float32") -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(dims, dtype)


def abstract(make) -> nnx.Module:
    """A model whose weights are shapes."""
    return nnx.eval_shape(lambda: make(rngs=nnx.Rngs(0)))


def count(model: nnx.Module, method: str, *args) -> jaxtile.Operations:
    graphdef, state = nnx.split(model)

    def run(state, *args):
        return getattr(nnx.merge(graphdef, state), method)(*args)

    return jaxtile.operations(run, state, *args)


@functools.cache
def unet() -> jaxtile.Operations:
    labels = shape(8, 388, 388, dtype="int32")
    return count(abstract(models.UNet), "loss", shape(8, 572, 572, 1), labels)


@functools.cache
def resnet50() -> jaxtile.Operations:
    model = abstract(functools.partial(models.ResNet50, folded=True))
    return count(model, "probabilities", shape(10, 224, 224, 3))


@functools.cache
def alexnet() -> jaxtile.Operations:
    return count(abstract(models.AlexNet), "loss", shape(128, 224, 224, 3))


@functools.cache
def local_cnn() -> jaxtile.Operations:
    labels = shape(256, dtype="int32")
    return count(abstract(models.LocalCNN), "evaluate", shape(256, 41, 41, 1), labels)


def parameters(model: nnx.Module) -> dict[str, tuple[int, ...]]:
    """Shapes of the weights, by path."""
    leaves, _ = jax.tree.flatten_with_path(nnx.to_pure_dict(nnx.state(model, nnx.Param)))
    return {".".join(str(k.key) for k in path): leaf.shape for path, leaf in leaves}
