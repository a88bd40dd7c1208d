"""Weights that others trained, in torchvision's layout or in Keras'.

In PyTorch: `safetensors.torch.save_file(model.state_dict(), "resnet50.safetensors")`,
`numpy.savez("resnet50.npz", **{k: v.numpy() for k, v in model.state_dict().items()})`, or
`torch.save(model.state_dict(), "resnet50.pth")`. timm's ResNet-50 has the same names, and its VGG16
others for the classifier alone.

In Keras: the `.h5` that it downloads, `model.save_weights("resnet50.weights.h5")`, or
`numpy.savez("resnet50.npz", **{w.path: w.numpy() for w in model.weights})`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from os import PathLike, fspath
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from flax import nnx

from . import _keras
from ._classifier import Classifier
from ._torch_file import read_torch_file
from .alexnet import AlexNet
from .resnet50 import ResNet50, Trunk
from .unet import UNet
from .vgg16 import VGG16

SUFFIXES = (".safetensors", ".npz", ".pth", ".pt", ".bin", ".h5")
_HEADS = ("fc.", "classifier.")
_OF_TIMM = {  # VGG16
    "pre_logits.fc1": "classifier.0",
    "pre_logits.fc2": "classifier.3",
    "head.fc": "classifier.6",
}
_WRAPPED = "module."  # before all names, by DataParallel


def load_weights(
    model: nnx.Module,
    source: str | PathLike[str] | Mapping[str, Any],
    *,
    skip: Sequence[str] = (),
) -> None:
    """Fill a ResNet50, VGG16, AlexNet, or the encoder of a UNet that is VGG16's or ResNet-50's,
    with weights of torchvision or Keras.

    Nothing is written unless every tensor of the model is there and has the right shape. A
    classifier that the model does not have is left out; any other tensor that the model has no
    place for is an error: it is another network's file.

    Args:
      model: is changed in place.
      source: a `.safetensors`, `.npz`, `.pth`, `.pt` or `.h5` file, or a mapping from names to
        arrays. No code that a file may contain is run.
      skip: prefixes of names to leave as they are, such as `["fc."]` to train a new classifier.
    """
    if isinstance(source, Mapping):
        where, tensors = "the state dict", dict(source)
    else:
        where, tensors = fspath(source), _read(Path(source))
    tensors = _as_torchvision(model, tensors)
    places = [p for p in _places(model) if not p.name.startswith(tuple(skip))]
    missing = [p.name for p in places if p.name not in tensors]
    if missing:
        raise ValueError(
            f"{where} has no tensor {', '.join(missing[:5])}"
            + (f" (nor {len(missing) - 5} more)" if len(missing) > 5 else "")
            + f", which {type(model).__name__} needs; it has {len(tensors)} tensors"
            + (f" such as {', '.join(list(tensors)[:3])}" if tensors else "")
        )
    known = {p.name for p in places}
    heads = [h for h in _HEADS if not any(name.startswith(h) for name in known)]
    ignored = (*heads, *skip)
    surplus = [
        k
        for k in tensors
        if k not in known and not k.startswith(ignored) and not k.endswith("num_batches_tracked")
    ]
    if surplus:
        raise ValueError(
            f"{where} has {len(surplus)} tensors that {type(model).__name__} has no place for, "
            f"such as {surplus[0]}: it belongs to another network"
        )
    arrays = [_converted(p, np.asarray(tensors[p.name]), where) for p in places]
    for place, array in zip(places, arrays, strict=True):
        place.variable[...] = jnp.asarray(array, place.variable[...].dtype)


def load_pretrained(model: nnx.Module, source: str | PathLike[str]) -> list[str]:
    """As `load_weights`, but a classifier that the file lacks, or a last layer of another number
    of classes, stays as it is.

    Returns remarks: what begins anew, and what the weights want pixels to be.
    """
    read = _read(Path(source))
    remarks = []
    try:
        tensors = _as_torchvision(model, read)
        skip = _new(list(_places(model)), tensors)
        load_weights(model, tensors, skip=skip)
    except ValueError as error:
        raise ValueError(f"{fspath(source)}: {error}") from error
    if skip:
        remarks.append(f"{', '.join(skip)} begin anew")
    if isinstance(model, VGG16) and not isinstance(model.classifier, Classifier | None):
        remarks.append("the classifier begins anew")
    if isinstance(model, UNet):
        remarks.append("all after the encoder begins anew")
    if _keras.is_keras(read):
        remarks.append(
            "Keras trained these on BGR, here they take RGB: "
            f"'--config.data.mean={_keras.MEAN}' '--config.data.std=({_keras.STD:.7f},)'"
        )
    return remarks


def _new(places: list[_Place], tensors: Mapping[str, np.ndarray]) -> list[str]:
    """What a file cannot give a model: a classifier, or the last layer of one."""
    heads = [p.name for p in places if p.name.startswith(_HEADS)]
    if not any(name.startswith(_HEADS) for name in tensors):
        return heads
    layer = heads[-1].rpartition(".")[0] if heads else None
    last = [p for p in places if p.name.rpartition(".")[0] == layer]
    return [p.name for p in last] if any(not _fits(p, tensors.get(p.name)) for p in last) else []


def _fits(place: _Place, array: np.ndarray | None) -> bool:
    return array is not None and array.shape[0] == place.variable[...].shape[-1]


def _as_torchvision(model: nnx.Module, tensors: Mapping[str, Any]) -> dict[str, np.ndarray]:
    if not _keras.is_keras(tensors):
        return {_named(name): array for name, array in tensors.items()}
    epsilon = 0.0
    if trunk := _trunk(model):
        if not trunk.stride_first:
            raise ValueError(
                "in Keras' ResNet50 the first convolution of a block has the stride: make the "
                "model with `stride_first=True`"
            )
        epsilon = trunk.conv1.norm.epsilon if trunk.conv1.norm else 0.0
    return _keras.as_torchvision(tensors, epsilon)


def _named(name: str) -> str:
    """
    >>> _named("module.pre_logits.fc1.weight")
    'classifier.0.weight'
    """
    layer, _, variable = name.removeprefix(_WRAPPED).rpartition(".")
    return f"{_OF_TIMM.get(layer, layer)}.{variable}" if layer else variable


class _Place(NamedTuple):
    name: str
    variable: nnx.Variable


def _read(path: Path) -> dict[str, np.ndarray]:
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    try:
        if path.suffix == ".npz":
            with np.load(path) as archive:
                return dict(archive)
        if path.suffix in (".pth", ".pt", ".bin"):
            return read_torch_file(path)
        if path.suffix == ".h5":
            return _keras.read_h5(path)
        if path.suffix == ".safetensors":
            try:
                from safetensors.numpy import load_file
            except ImportError:
                raise ImportError(
                    f"reading {path} needs safetensors: pip install jaxtile[weights]"
                ) from None
            return load_file(path)
    except ImportError:
        raise
    except Exception as error:
        raise ValueError(f"{path} is damaged or not a {path.suffix} file: {error}") from error
    raise ValueError(f"{path} must end in {', '.join(SUFFIXES)}")


def _places(model: nnx.Module) -> Iterator[_Place]:
    """The model's variables, under torchvision's names."""
    if trunk := _trunk(model):
        yield from _resnet(trunk)
        if isinstance(model, ResNet50):
            yield from _layer(model.fc, "fc")
    elif isinstance(model, VGG16):
        yield from _blocks(model.conv_blocks())
        if isinstance(model.classifier, Classifier):
            yield from _classifier(model.classifier, (0, 3, 6))
    elif isinstance(model, UNet) and model.encoder == "vgg16":
        if model.norm is not None:
            raise ValueError(
                f"VGG16's weights are for a UNet without norms, and here `norm` is {model.norm!r}"
            )
        yield from _blocks(model.encoder_blocks())
    elif isinstance(model, AlexNet):
        for i, index in enumerate((0, 3, 6, 8, 10), start=1):
            yield _Place(f"features.{index}.weight", getattr(model, f"conv{i}").kernel)
            yield _Place(f"features.{index}.bias", getattr(model, f"bias{i}"))
        yield from _classifier(model.classifier, (1, 4, 6))
    else:
        raise TypeError(
            f"there are no such weights for {type(model).__name__}: only for ResNet50, VGG16, "
            "AlexNet, and a UNet with `encoder='vgg16'` or `'resnet50'`"
        )


def _trunk(model: nnx.Module) -> Trunk | None:
    """A ResNet-50, or that of a U-Net."""
    found = model.resnet if isinstance(model, UNet) else model
    return found if isinstance(found, Trunk) else None


def _resnet(model: Trunk) -> Iterator[_Place]:
    if model.conv1.norm is None:
        raise ValueError(
            "load into a ResNet50 with batch norm, then fold it with `fold_batch_norm`"
        )
    if model.spatial != 2:
        raise ValueError(
            f"ResNet-50's weights are for images, and this model has {model.spatial} spatial axes"
        )
    yield from _unit(model.conv1, "conv1", "bn1")
    for stage in range(1, len(model.blocks) + 1):
        for i, block in enumerate(getattr(model, f"layer{stage}")):
            prefix = f"layer{stage}.{i}"
            for k in (1, 2, 3):
                unit = getattr(block, f"conv{k}")
                yield from _unit(unit, f"{prefix}.conv{k}", f"{prefix}.bn{k}")
            if block.downsample is not None:
                first, second = f"{prefix}.downsample.0", f"{prefix}.downsample.1"
                yield from _unit(block.downsample, first, second)


def _blocks(blocks: Iterable[Iterable[nnx.Conv]]) -> Iterator[_Place]:
    """Convolutions as VGG16 numbers them: each has a ReLU after it, and each block a pool."""
    index = 0
    for block in blocks:
        for conv in block:
            yield from _layer(conv, f"features.{index}")
            index += 2
        index += 1


def _layer(layer: nnx.Conv | nnx.Linear, name: str) -> Iterator[_Place]:
    yield _Place(f"{name}.weight", layer.kernel)
    yield _Place(f"{name}.bias", layer.bias)


def _unit(unit: Any, conv: str, norm: str) -> Iterator[_Place]:
    yield _Place(f"{conv}.weight", unit.conv.kernel)
    yield _Place(f"{norm}.weight", unit.norm.scale)
    yield _Place(f"{norm}.bias", unit.norm.bias)
    yield _Place(f"{norm}.running_mean", unit.norm.mean)
    yield _Place(f"{norm}.running_var", unit.norm.var)


def _classifier(classifier: Any, indices: tuple[int, int, int]) -> Iterator[_Place]:
    if classifier is not None:
        for layer, index in zip(("fc6", "fc7", "fc8"), indices, strict=True):
            yield from _layer(getattr(classifier, layer), f"classifier.{index}")


def _converted(place: _Place, array: np.ndarray, where: str) -> np.ndarray:
    """From PyTorch's `OIHW` and `OI` to `HWIO` and `IO`.

    A dense layer that is a convolution here is `OI` with `I` in the order `IHW`. In timm it is a
    convolution too.
    """
    shape = place.variable[...].shape
    wanted = {1: shape, 2: shape[::-1], 4: (shape[-1], *shape[-2:-1], *shape[:-2])}[len(shape)]
    dense = (wanted[0], int(np.prod(wanted[1:])))
    if array.shape != wanted and not (len(shape) == 4 and array.shape == dense):
        raise ValueError(
            f"{place.name} in {where} has shape {array.shape}, but the model needs {wanted}"
        )
    array = array.reshape(wanted)
    return array.transpose(2, 3, 1, 0) if len(shape) == 4 else array.T
