"""Apply a trained model to an image of any size, exactly, from disk to disk.

    python -m experiments.predict --workdir=runs/quickstart --image=huge.tif --out=mask.tif

The image is read window by window and the result written tile by tile; neither is ever whole in
memory, and there are no seams: the result is that of the network on the whole image.

* A network that segments writes the class of each pixel: its number or, if `data.mask_values` gave
  it one, its value; or with `--probabilities` those of all classes, (H, W, classes). The file may
  be .tif (BigTIFF: tiled, compressed, with a pyramid, the names and colours of classes, and the
  georeference of the image), .npy, .zarr or .ome.zarr (with pyramid, names and colours). A network
  without padding gives a map smaller than the image; which pixel is its first is printed.
* A network that classifies prints the probability of each class, and writes JSON.

Some networks do not take every size: a U-Net that halves the image four times takes multiples of
16. Then the image is continued at the bottom and on the right by copies of its last row and column,
to the next size that fits. The result is that of the network on that image, cropped again.

Pixels become 8 bits and as many channels as the network has, by the rules of the training data:
values that are not of 8 bits by the range of the training images. If these were of 8 bits, it is
the image's own range, which takes one more pass over it, or what `--range=0,4095` says.

What is written is in a folder NAME.part until it is whole. If the program is stopped or killed, the
same command goes on there, and the result has the same bytes. After an error nothing is left.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import pathlib
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from absl import flags, logging

import jaxtile
from jaxtile._amounts import digits

from . import data
from .data import Scale, not_listed, range_of
from .images import Image, ImageError, open_image, resized
from .predicting.network import Map, Network, PredictionError, times
from .predicting.pixels import writing
from .predicting.whole_image import classify, segment
from .program.command import start
from .program.config import ConfigError
from .program.files import write_atomically
from .program.progress import Now, duration
from .training.checkpoints import CheckpointError
from .training.trained import load_trained

_TILES = {1: 2**20, 2: 1024, 3: 128}  # of networks with so many axes: about as many positions


def with_scale(network: Network, image: Image, given: Sequence[str] | None) -> Network:
    """The network with the range that it takes this image's pixels by, which is printed."""
    said = _range(given) if given else None
    if image.dtype == np.uint8 or network.learned.pixels != np.uint8:
        if said is not None:
            print(f"--range has no effect: {image.dtype} is taken as it is", flush=True)
        return network
    scale, origin = network.scale, "the range of the training images"
    if said is not None:
        scale, origin = said, "as --range says"
    if scale is None:
        low, high = range_of(image, network.nodata)
        if low == high:
            raise ImageError(image.path, f"all its values are {low}: --range=LOW,HIGH is needed")
        scale, origin = Scale(low, high), "the image's range: the network was trained on 8 bits"
    print(f"{image.dtype}: values from {scale} become 8 bits, {origin}", flush=True)
    return dataclasses.replace(network, scale=scale)


def _range(given: Sequence[str]) -> Scale:
    try:
        low, high = map(float, given)
        return Scale(low, high)
    except ValueError as error:
        text = ",".join(given)
        raise ConfigError(f"--range={text} must be two numbers, as 0,4095") from error


def load_network(workdir: str | os.PathLike) -> Network:
    """The best weights of a training run."""
    trained, noted = load_trained(workdir), data.noted(pathlib.Path(workdir))
    options, learner = trained.config.data, trained.learner
    names = noted.get("class_names") or [str(i) for i in range(options.classes)]
    limits = data.read_range(pathlib.Path(workdir)) or options.get("range")
    return Network(
        *(learner.scores, trained.weights, options.channels, learner, names),
        Scale(*limits) if limits else None,
        options.mask_values if learner.config.task in ("auto", "segmentation") else (),
        options.nodata,
        options.resize,
        options.level,
    )


def define_flags() -> None:
    flags.DEFINE_string("workdir", None, "folder of a training run", required=True)
    flags.DEFINE_string("image", None, "a file, or a folder of planes", required=True)
    flags.DEFINE_string(
        "out", None, ".tif, .npy, .zarr or .ome.zarr; .json for a class", required=True
    )
    flags.DEFINE_integer("level", None, "of a pyramid; by default the one of training")
    flags.DEFINE_integer(
        "tile", None, "pixels of the result along a tile; by default 1024, of volumes 128", 1
    )
    flags.DEFINE_list("range", None, "values that become 0 and 255, if they are not of 8 bits")
    flags.DEFINE_bool("probabilities", False, "write the probabilities of all classes")
    flags.DEFINE_enum("dtype", "float16", ["float16", "float32"], "of probabilities")


def main(argv: list[str]) -> None:
    del argv
    logging.set_verbosity(logging.ERROR)
    run(flags.FLAGS)


def run(options: Any) -> None:
    """The program. What a user can mend ends it with one line."""
    try:
        _run(options)
    except (
        *(CheckpointError, ConfigError, ImageError, PredictionError, jaxtile.TilingError),
        *(ImportError, OSError),
    ) as error:
        sys.exit(f"error: {' '.join(str(error).split())}")


def _run(options: Any) -> None:
    out = pathlib.Path(options.out)
    if out.resolve() == pathlib.Path(options.image).resolve():
        raise ConfigError(f"--out={out} is the image itself")
    with contextlib.ExitStack() as stack:
        network = load_network(options.workdir)
        image = open_image(options.image, network.learned.spatial, _level(options, network))
        if warning := not_listed(
            image.path, image.nodata, image.dtype, network.nodata, trained=True
        ):
            print(warning, flush=True)
        image = stack.enter_context(resized(image, network.resize) if network.resize else image)
        if options.probabilities and not network.learned.task.has_probabilities:
            raise ConfigError("--probabilities: this network's task has none")
        network = with_scale(network, image, options.range)
        tile = options.tile or _TILES[network.learned.spatial]
        stack.enter_context(_enough_memory(tile))
        progress = stack.enter_context(_Tiles())
        began = time.perf_counter()
        if not network.learned.task.dense:
            _check_json(out)
            found = classify(network, image, tile=tile, progress=progress)
            _write_classes(out, options.image, network, found)
        else:
            dtype = options.dtype if options.probabilities else None
            area, limit = segment(
                network, image, out, tile=tile, probabilities=dtype, progress=progress
            )
            progress.now.close()
            print(f"{out}: {times(area.size)} pixels{_where(area, image.shape)}; {limit}")
        if network.scale is not None and (cut := network.scale.beyond()):
            print(f"warning: {cut}")
        seconds, pixels = time.perf_counter() - began, math.prod(image.shape[:-1]) / 1e6
        print(
            f"{digits(pixels)} megapixels in {duration(seconds)}, compilation included: "
            f"{digits(pixels / seconds)} megapixels/s on {jax.devices()[0].device_kind}"
        )


@contextlib.contextmanager
def _enough_memory(tile: int) -> Iterator[None]:
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise PredictionError(
            f"tiles of {tile} pixels need too much memory: try --tile={tile // 2}"
        ) from error


def _level(options: Any, network: Network) -> int:
    return network.level if options.level is None else options.level


class _Tiles:
    """One line that says how far it is: live on a terminal, and every few seconds elsewhere."""

    def __init__(self) -> None:
        self.now = Now(self._left)
        self.there, self.done, self.total, self.began = 0, 0, 0, 0.0

    def go_on(self, there: int) -> None:
        self.there = there
        if there:
            self.now(f"going on: {there} tiles are there already")

    def __call__(self, done: int, total: int) -> None:
        if done == self.there + 1:  # the first that was computed, compilation included
            self.began = time.perf_counter()
            self.now("tile by tile")
        self.done, self.total = done, total

    def finish(self) -> None:
        self.done = 0
        self.now("writing the file")

    def _left(self) -> str:
        """How many tiles; and how long it takes, by those after the first."""
        if self.done <= self.there:
            return ""
        each = (time.perf_counter() - self.began) / max(1, self.done - self.there - 1)
        return f"tile {self.done}/{self.total}; {duration(each * (self.total - self.done))} left"

    def __enter__(self) -> _Tiles:
        self.now.__enter__()
        self.now("compiling, and the first tile")
        return self

    def __exit__(self, *exception: Any) -> None:
        self.now.close()


def _check_json(out: pathlib.Path) -> None:
    if out.suffix != ".json":
        raise ConfigError(f"--out={out}: this network gives one class, which is written as .json")
    if not os.access(out.parent, os.W_OK):
        raise ConfigError(f"--out={out}: {out.parent} is not a folder that can be written to")


def _write_classes(out: pathlib.Path, image: str, network: Network, found: np.ndarray) -> None:
    task = network.learned.task
    if not task.has_probabilities:
        print(*found.tolist())
        with writing(out):
            record = {"image": str(image), "values": found.tolist()}
            write_atomically(out, json.dumps(record, indent=2) + "\n")
        return
    probabilities = {name: float(p) for name, p in zip(network.classes, found, strict=True)}
    ranked = sorted(probabilities, key=probabilities.__getitem__, reverse=True)
    for name in ranked[:10]:
        print(f"{name:>12} {probabilities[name]:.6f}")
    chosen = {"class": ranked[0]}
    if task.label_channels is not None:
        chosen = {"classes": [name for name in ranked if probabilities[name] > 0.5]}
    record = {"image": str(image), **chosen, "probabilities": probabilities}
    with writing(out):
        write_atomically(out, json.dumps(record, indent=2) + "\n")


def _where(area: Map, shape: Sequence[int]) -> str:
    """What a user must know to lay the result over the image."""
    text = f"; its first pixel is pixel {area.offset} of the image" if any(area.offset) else ""
    if area.padded != tuple(shape[:-1]):
        text += f"; the network saw {times(area.padded)}, the last row and column repeated"
    return text


if __name__ == "__main__":
    define_flags()
    start(main, "the same command goes on, if NAME.part is there")
