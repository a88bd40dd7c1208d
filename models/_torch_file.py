"""What `torch.save` writes, read without PyTorch, and without running any code of the file's.

Such a file is a zip archive: a pickle, and the bytes of each tensor. A pickle may name any function
to call; this reader knows the few that make tensors and dictionaries, and refuses all others.
"""

from __future__ import annotations

import collections
import io
import pickle
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

_STORAGES = {
    "DoubleStorage": np.float64,
    "FloatStorage": np.float32,
    "HalfStorage": np.float16,
    "BFloat16Storage": jnp.bfloat16,
    "LongStorage": np.int64,
    "IntStorage": np.int32,
    "ShortStorage": np.int16,
    "CharStorage": np.int8,
    "ByteStorage": np.uint8,
    "BoolStorage": np.bool_,
}
_INSIDE = ("state_dict", "model", "model_state_dict", "state_dict_ema")


def read_torch_file(path: Path) -> dict[str, np.ndarray]:
    """The tensors of a state dict by name, also if it is part of a checkpoint."""
    if not zipfile.is_zipfile(path):
        raise ValueError("it is no zip archive; torch.save writes one since PyTorch 1.6")
    with zipfile.ZipFile(path) as archive:
        (name,) = [n for n in archive.namelist() if n.endswith("/data.pkl")]
        found = _Reader(archive, name).load()
    for inside in _INSIDE:
        if isinstance(found, Mapping) and isinstance(found.get(inside), Mapping):
            found = found[inside]
            break
    tensors = found if isinstance(found, Mapping) else {}
    tensors = {k: v for k, v in tensors.items() if isinstance(v, np.ndarray)}
    if not tensors:
        raise ValueError(f"it holds no state dict, but a {type(found).__name__}")
    return {str(k).removeprefix("module."): v for k, v in tensors.items()}


class _Reader(pickle.Unpickler):
    def __init__(self, archive: zipfile.ZipFile, name: str):
        super().__init__(io.BytesIO(archive.read(name)))
        self._archive, self._folder = archive, name.removesuffix("data.pkl")

    def find_class(self, module: str, name: str) -> Any:
        known: dict[tuple[str, str], Any] = {
            ("collections", "OrderedDict"): collections.OrderedDict,
            ("torch._utils", "_rebuild_tensor_v2"): _tensor,
            ("torch._utils", "_rebuild_parameter"): lambda tensor, *_: tensor,
        }
        if module == "torch" and name in _STORAGES:
            return np.dtype(_STORAGES[name])
        if (module, name) not in known:
            raise ValueError(
                f"it calls {module}.{name}, and only weights are read: save `model.state_dict()`"
            )
        return known[module, name]

    def persistent_load(self, pid: Any) -> np.ndarray:
        _, dtype, key, *_ = pid
        return np.frombuffer(self._archive.read(f"{self._folder}data/{key}"), dtype)


def _tensor(
    storage: np.ndarray, offset: int, size: Sequence[int], stride: Sequence[int], *_: Any
) -> np.ndarray:
    last = offset + sum((n - 1) * s for n, s in zip(size, stride, strict=True))
    if min((offset, *size, *stride), default=0) < 0 or (0 not in size and last >= len(storage)):
        raise ValueError("a tensor reaches beyond its data")
    steps = [s * storage.itemsize for s in stride]
    return np.lib.stride_tricks.as_strided(storage[offset:], size, steps).copy()
