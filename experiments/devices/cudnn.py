"""Convolutions with a fixed order of additions, at the speed of tuned ones.

XLA tries cuDNN's algorithms ("engines") for every convolution and takes the fastest. A few of them
add by atomic operations, in an order that differs from run to run. XLA's own flag against them,
`xla_gpu_exclude_nondeterministic_ops`, also ends the trying: it takes the first engine that cuDNN
names, which made a step of VGG16 1.40 times as long on an H200.

So the engines are kept out where cuDNN looks for them. Each engine carries notes about its
numerics, and one note says that its results are not deterministic. This file asks the loaded
library for the engines of a convolution's two gradients, and for their notes. It writes those that
may not be used into a file of the form that cuDNN reads when `CUDNN_ERRATA_JSON_FILE` names it.
(Convolutions themselves, forwards, have a fixed order in all engines.)
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import json
import math
import os
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

VARIABLE = "CUDNN_ERRATA_JSON_FILE"
_LIBRARY = "libcudnn.so.9"

# Numbers of cudnn_graph.h, which does not change them within a major version.
_CONVOLUTION, _ENGINE, _GRAPH, _TENSOR = 1, 2, 15, 17
_HANDLE, _DATA_TYPE, _INT64, _FLOAT, _DOUBLE, _MODE, _NOTE, _DESCRIPTOR = 0, 1, 3, 4, 5, 7, 11, 15
_NONDETERMINISTIC = 4  # a note
_NOTES = 16  # more than there are
_TYPES = {"float32": 0, "float64": 1, "float16": 2, "bfloat16": 9}
_SAMPLES = ((2, 64, 64), (2, 1, 1), (3, 32, 32), (2, 64, 1), (2, 64, 16), (3, 64, 1))
"""Dimensions, channels of the image, and of the kernel: fewer of these are groups."""
_GRADIENTS = {"ConvBwdFilter": (11, 712), "ConvBwdData": (12, 706)}  # descriptor, first attribute


class CudnnError(RuntimeError):
    """cuDNN is not there, or does not answer as expected."""


def exclude_unordered(path: pathlib.Path) -> int:
    """Keep engines without a fixed order out of this process; how many there are.

    Call it when the device is known and before anything is compiled. A file of rules that the user
    has named is kept and added to.
    """
    rules = [
        {"rule_id": f"{operation}_eng{engine}", "operation": operation, "engine": engine}
        for operation, engine in unordered_engines()
    ]
    named = os.environ.get(VARIABLE)
    if named and pathlib.Path(named) != path:
        rules = json.loads(pathlib.Path(named).read_text())["rules"] + rules
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"version": 1, "rules": rules}, indent=1))
    os.environ[VARIABLE] = str(path)
    return len(rules)


def unordered_engines() -> list[tuple[str, int]]:
    """Engines of gradients that cuDNN notes as nondeterministic, or says nothing about."""
    library = _Library()
    try:
        return [
            (operation, engine)
            for operation in _GRADIENTS
            for engine, ordered in sorted(library.engines(operation).items())
            if not ordered
        ]
    finally:
        library.close()


class _Library:
    """The cuDNN that the process has loaded, and a handle to it."""

    def __init__(self) -> None:
        try:
            self.calls = ctypes.CDLL(_LIBRARY, mode=os.RTLD_NOLOAD | os.RTLD_NOW)
        except OSError as error:
            raise CudnnError(f"{_LIBRARY} is not loaded") from error
        self.handle = ctypes.c_void_p()
        self.made: list[ctypes.c_void_p] = []
        self._call("cudnnCreate", ctypes.byref(self.handle))

    def close(self) -> None:
        for made in reversed(self.made):
            self.calls.cudnnBackendDestroyDescriptor(made)
        self.calls.cudnnDestroy(self.handle)

    def engines(self, operation: str) -> dict[int, bool]:
        """Engine: is it known to add in a fixed order, whatever it is given?

        An engine can be asked about for convolutions that it can do, so several are tried.
        """
        found: dict[int, bool] = {}
        last = 0
        for graph in self._graphs(operation):
            count = ctypes.c_int64()
            self._get(graph, 802, _INT64, ctypes.byref(count), 1)
            last = max(last, count.value)
            for index in range(count.value):
                notes = self._notes(graph, index)
                if notes is not None:
                    found[index] = found.get(index, True) and _NONDETERMINISTIC not in notes
        if not any(found.values()):
            raise CudnnError(f"no engine of {operation} has a fixed order")
        return {index: found.get(index, False) for index in range(last)}

    def _graphs(self, operation: str) -> Iterator[ctypes.c_void_p]:
        """Small convolutions of every type; those that cuDNN does not know are left out."""
        for name, sample in itertools.product(_TYPES, _SAMPLES):
            with contextlib.suppress(CudnnError):
                yield self._graph(operation, name, *sample)

    def _graph(
        self, operation: str, name: str, dimensions: int, channels: int, of_kernel: int
    ) -> ctypes.c_void_p:
        code, width = _TYPES[name], _DOUBLE if name == "float64" else _FLOAT
        tensors = [
            self._tensor(1, code, (64, of_kernel, *(3,) * dimensions)),  # the kernel
            self._tensor(2, code, (2, channels, *(16,) * dimensions)),  # the image
            self._tensor(3, code, (2, 64, *(16,) * dimensions)),  # the result
        ]
        ones = (1,) * dimensions
        computed = [_TYPES["float64" if name == "float64" else "float32"]]
        convolution = self._descriptor(
            _CONVOLUTION,
            (100, _DATA_TYPE, ctypes.c_int, computed),
            (101, _MODE, ctypes.c_int, [1]),
            *((102 + i, _INT64, ctypes.c_int64, ones) for i in range(4)),
            (106, _INT64, ctypes.c_int64, [dimensions]),
        )
        kind, first = _GRADIENTS[operation]
        number = ctypes.c_double if width == _DOUBLE else ctypes.c_float
        described = self._descriptor(
            kind,
            (first, width, number, [1]),
            (first + 1, width, number, [0]),
            (first + 2, _DESCRIPTOR, ctypes.c_void_p, [convolution]),
            *(
                (first + 3 + i, _DESCRIPTOR, ctypes.c_void_p, [tensor])
                for i, tensor in enumerate(tensors)
            ),
        )
        made: ctypes.c_void_p = self._descriptor(
            _GRAPH,
            (800, _HANDLE, ctypes.c_void_p, [self.handle]),
            (801, _DESCRIPTOR, ctypes.c_void_p, [described]),
        )
        return made

    def _tensor(self, number: int, code: int, shape: Sequence[int]) -> ctypes.c_void_p:
        """Channels last, as XLA lays images out on recent devices."""
        _, channels, *spatial = shape
        inner = [channels * math.prod(spatial[i + 1 :]) for i in range(len(spatial))]
        strides = [channels * math.prod(spatial), 1, *inner]
        return self._descriptor(
            _TENSOR,
            (901, _DATA_TYPE, ctypes.c_int, [code]),
            (902, _INT64, ctypes.c_int64, shape),
            (903, _INT64, ctypes.c_int64, strides),
            (906, _INT64, ctypes.c_int64, [number]),
            (900, _INT64, ctypes.c_int64, [16]),
        )

    def _notes(self, graph: ctypes.c_void_p, index: int) -> list[int] | None:
        """The numerical notes of an engine; None if it cannot do this."""
        try:
            engine = self._descriptor(
                _ENGINE,
                (1300, _DESCRIPTOR, ctypes.c_void_p, [graph]),
                (1301, _INT64, ctypes.c_int64, [index]),
            )
        except CudnnError:
            return None
        notes = (ctypes.c_int * _NOTES)()
        count = self._get(engine, 1303, _NOTE, notes, _NOTES)
        return notes[:count]

    def _descriptor(self, kind: int, *attributes: tuple[int, int, Any, Sequence[Any]]) -> Any:
        made = ctypes.c_void_p()
        self._call("cudnnBackendCreateDescriptor", kind, ctypes.byref(made))
        self.made.append(made)
        for name, of, c_type, values in attributes:
            array = (c_type * len(values))(*(getattr(v, "value", v) for v in values))
            self._call(
                "cudnnBackendSetAttribute", made, name, of, ctypes.c_int64(len(values)), array
            )
        self._call("cudnnBackendFinalize", made)
        return made

    def _get(self, descriptor: Any, name: int, of: int, into: Any, number: int) -> int:
        count = ctypes.c_int64()
        place = (descriptor, name, of, ctypes.c_int64(number), ctypes.byref(count), into)
        self._call("cudnnBackendGetAttribute", *place)
        return count.value

    def _call(self, name: str, *arguments: Any) -> None:
        if status := getattr(self.calls, name)(*arguments):
            raise CudnnError(f"{name} answers {status}")
