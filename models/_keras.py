"""Weights of `keras.applications`' ResNet50 and VGG16, under torchvision's names and in its layout.

The differences that matter:

* kernels are `HWIO` and `IO`, and a flattened map is in the order `HWC`;
* Keras' `preprocess_input` for these two makes BGR of RGB, and only subtracts a mean: the first
  kernel is turned over, so that it takes RGB, and `MEAN` and `STD` are what remains to be done to
  pixels from 0 to 1;
* ResNet50 has biases before its batch norms, which move the mean, and another epsilon, which is
  part of the variance; and it has the strides elsewhere (`stride_first`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

MEAN, STD = (0.48503, 0.45796, 0.40760), 1 / 255
_EPSILON = 1.001e-5
_NORM = {
    "gamma": "weight",
    "beta": "bias",
    "moving_mean": "running_mean",
    "moving_variance": "running_var",
}
_VGG16 = {
    f"block{b}_conv{i}": f"features.{first + 2 * (i - 1)}"
    for b, (first, n) in enumerate([(0, 2), (5, 2), (10, 3), (17, 3), (24, 3)], start=1)
    for i in range(1, n + 1)
}


def is_keras(tensors: Mapping[str, Any]) -> bool:
    """Its names have a slash: `conv1_conv/kernel`."""
    return bool(tensors) and all("/" in name for name in tensors)


def as_torchvision(tensors: Mapping[str, np.ndarray], epsilon: float) -> dict[str, np.ndarray]:
    """The same weights as torchvision has them.

    Args:
      tensors: by layer and variable, as `conv1_conv/kernel`; what comes before is left out.
      epsilon: of the batch norms that they are for.
    """
    layers: dict[str, dict[str, np.ndarray]] = {}
    for name, array in tensors.items():
        layer, variable = name.removesuffix(":0").split("/")[-2:]
        layers.setdefault(layer, {})[variable] = np.asarray(array)
    found: dict[str, np.ndarray] = {}
    dense = "classifier.6" if "block1_conv1" in layers else "fc"
    for layer, variables in layers.items():
        name = _VGG16.get(layer) or _of_resnet(layer)
        name = name or {"fc1": "classifier.0", "fc2": "classifier.3", "predictions": dense}.get(
            layer
        )
        if name is None:
            raise ValueError(f"{layer} is no layer of Keras' ResNet50 or VGG16")
        if "gamma" in variables:
            bias = layers.get(layer.replace("_bn", "_conv"), {}).get("bias", 0)
            variables = dict(
                variables,
                moving_mean=variables["moving_mean"] - bias,
                moving_variance=np.float64(variables["moving_variance"]) + _EPSILON - epsilon,
            )
            found |= {f"{name}.{_NORM[k]}": array for k, array in variables.items()}
            continue
        found[f"{name}.weight"] = _kernel(layer, variables["kernel"])
        if not layer.startswith("conv"):  # ResNet50's are in the norms
            found[f"{name}.bias"] = variables["bias"]
    return found


def _of_resnet(layer: str) -> str | None:
    """
    >>> _of_resnet("conv2_block1_0_conv"), _of_resnet("conv3_block2_1_bn"), _of_resnet("conv1_bn")
    ('layer1.0.downsample.0', 'layer2.1.bn1', 'bn1')
    """
    if layer in ("conv1_conv", "conv1_bn"):
        return layer.removeprefix("conv1_").replace("conv", "conv1").replace("bn", "bn1")
    match = re.fullmatch(r"conv(\d)_block(\d+)_([0-3])_(conv|bn)", layer)
    if not match:
        return None
    stage, block, number, kind = match.groups()
    prefix = f"layer{int(stage) - 1}.{int(block) - 1}"
    if number == "0":
        return f"{prefix}.downsample.{0 if kind == 'conv' else 1}"
    return f"{prefix}.{kind}{number}"


def _kernel(layer: str, kernel: np.ndarray) -> np.ndarray:
    if layer == "fc1":  # of a map of 7 x 7
        n_in, n_out = kernel.shape
        return kernel.reshape(7, 7, n_in // 49, n_out).transpose(3, 2, 0, 1).reshape(n_out, n_in)
    if kernel.ndim == 2:
        return kernel.T
    if layer in ("conv1_conv", "block1_conv1"):
        kernel = kernel[:, :, ::-1]
    return kernel.transpose(3, 2, 0, 1)


def read_h5(path: Path) -> dict[str, np.ndarray]:
    """What Keras wrote: the older `.h5`, with names; or `.weights.h5`, where layers have an
    attribute with theirs, and variables are numbered.
    """
    try:
        import h5py
    except ImportError:
        raise ImportError(f"reading {path} needs h5py: pip install jaxtile[weights]") from None
    found: dict[str, np.ndarray] = {}

    def take(name: str, thing: Any) -> None:
        if not isinstance(thing, h5py.Dataset) or name.startswith("optimizer"):
            return
        *_, folder, variable = name.split("/")
        if folder == "vars":
            folder, number = thing.parent.attrs["name"], len(thing.parent)
            variable = (list(_NORM) if number == 4 else ["kernel", "bias"])[int(variable)]
        found[f"{folder}/{variable}"] = thing[()]

    with h5py.File(path) as file:
        file.visititems(take)
    return found
