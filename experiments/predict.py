"""Apply a trained model to an image of any size, exactly, from disk to disk.

    python -m experiments.predict --workdir=runs/quickstart --image=huge.tif --out=mask.tif

The image is read window by window and the result written tile by tile; neither is ever whole in
memory, and there are no seams: the result is that of the network on the whole image.

* A network that segments writes the class of each pixel (uint8), or with `--probabilities` those of
  all classes, (H, W, classes), as .tif, .npy or .zarr. One without padding gives a map smaller than
  the image; which pixel is its first is printed.
* A network that classifies prints the probability of each class, and writes JSON.

Some networks do not take every size: a U-Net that halves the image four times takes multiples of
16. Then the image is continued at the bottom and on the right by copies of its last row and column,
to the next size that fits. The result is that of the network on that image, cropped again.

Pixels become 8 bits and as many channels as the network has, by the rules of the training data:
values that are not of 8 bits by the range of the training images. If these were of 8 bits, it is
the image's own range, which takes one more pass over it, or what `--range=0,4095` says.

Whatever ends it before the end (an error, a full disk, Ctrl-C, SIGTERM, SIGHUP), a result that is
not whole is removed.
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
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags, logging

import jaxtile

from .checkpoints import CheckpointError
from .config import ConfigError, start
from .data import Scale, range_of, read_bytes, read_range
from .images import Image, ImageError, create_image, open_image
from .program import undone
from .progress import Bar, duration
from .task import load_trained
from .workdir import write_atomically

_FARTHEST = 256  # pixels that an image may be continued by

Progress = Callable[[int, int], Any]


class PredictionError(ValueError):
    """Why this network cannot be applied to this image. The text is for the user."""


@dataclasses.dataclass(frozen=True)
class Network:
    """A trained network, as this program needs it."""

    scores: Callable[[Any, jax.Array], jax.Array]
    """Of weights and images of 8 bits: (B, h, w, classes), or (B, classes)."""
    weights: Any
    channels: int
    classes: Sequence[str]
    output_size: Callable[[int], int] | None
    """Of the map of scores, along an axis of the image; None: there is no map."""
    scale: Scale | None = None
    """Of pixels that are not of 8 bits."""

    def size_error(self, height: int, width: int) -> str | None:
        """Why it does not take an image of this size."""
        shape = jax.ShapeDtypeStruct((1, height, width, self.channels), jnp.uint8)
        try:
            jax.eval_shape(self.scores, self.weights, shape)
        except (ValueError, TypeError) as error:
            return str(error)
        return None

    def fitting(self, n: int) -> int:
        """The first size from `n` on that it takes."""
        for size in range(n, n + _FARTHEST):
            if self.size_error(size, size) is None:
                return size
        raise PredictionError(self.size_error(n, n))


class Pixels:
    """An image as a network takes it: a batch of one, 8 bits a channel, of at least its size."""

    dtype = np.dtype(np.uint8)

    def __init__(
        self, image: Image, size: tuple[int, int], channels: int, scale: Scale | None = None
    ):
        self.image, self.shape, self.scale = image, (1, *size, channels), scale

    def __getitem__(self, place: tuple[slice, ...]) -> np.ndarray:
        # Beyond the image's last row and column there is that row and column again.
        inside = [
            slice(min(p.start, n - 1), min(p.stop, n))
            for p, n in zip(place[1:3], self.image.shape, strict=False)
        ]
        missing = [
            (0, (p.stop - p.start) - (q.stop - q.start))
            for p, q in zip(place[1:3], inside, strict=True)
        ]
        values = read_bytes(self.image, inside, self.shape[3], self.scale)
        return np.pad(values, (*missing, (0, 0)), mode="edge")[None]


class Unbatched:
    """A sink for a batch of one that writes to an image."""

    def __init__(self, image: Any):
        self.image = image

    def __setitem__(self, place: tuple[slice, ...], tile: np.ndarray) -> None:
        with _writing(self.image.path):
            self.image[place[1:3]] = tile[0]


@dataclasses.dataclass(frozen=True)
class Map:
    """Where in the image the result of a network that segments lies."""

    padded: tuple[int, int]
    """The size that the network sees."""
    size: tuple[int, int]
    """The size of the result."""
    offset: tuple[int, int]
    """The pixel of the image that the result's first one belongs to."""

    @classmethod
    def of(cls, network: Network, shape: Sequence[int]) -> Map:
        padded = tuple(network.fitting(n) for n in shape[:2])
        size = tuple(network.output_size(n) for n in shape[:2])
        if min(size) < 1:
            needed = next(n for n in range(1, 1 << 20) if network.output_size(n) > 0)
            raise PredictionError(
                f"an image of {_times(shape)} pixels is too small: the network needs at least "
                f"{needed} along each axis"
            )
        offset = tuple((n - network.output_size(n)) // 2 for n in padded)
        return cls(padded, size, offset)


def segment(
    network: Network,
    image: Image,
    out: str | os.PathLike,
    *,
    tile: int,
    probabilities: str | None = None,
    progress: Progress | None = None,
) -> Map:
    """Write the class of each pixel, or the probabilities of all classes in the given type."""
    check_image(image)
    area = Map.of(network, image.shape)
    height, width = area.size
    classes = np.uint8 if len(network.classes) <= 256 else np.uint16

    def result(weights: Any, images: jax.Array) -> jax.Array:
        scores = network.scores(weights, images)[:, :height, :width]
        if probabilities:
            return jax.nn.softmax(scores).astype(probabilities)
        return scores.argmax(-1).astype(classes)

    shape = (*area.size, len(network.classes)) if probabilities else area.size
    tiles = tuple(math.ceil(n / tile) for n in area.size)
    run = jaxtile.stream(result, in_axes=(None, (1, 2)), tiles=tiles)
    with _writing(out):
        created = create_image(out, shape, probabilities or classes)
    with created as written, undone(written.abandon):
        source = Pixels(image, area.padded, network.channels, network.scale)
        run(network.weights, source, out=Unbatched(written), progress=progress)
    return area


@contextlib.contextmanager
def _writing(out: str | os.PathLike) -> Iterator[None]:
    """What the system or a library says, as that the disk is full, with the name of the file."""
    try:
        yield
    except ImageError:
        raise
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise PredictionError(f"{out} cannot be written: {reason}") from error


def classify(
    network: Network, image: Image, *, tile: int, progress: Progress | None = None
) -> np.ndarray:
    """The probability of each class, of the whole image."""
    check_image(image)
    size = image.shape[:2]
    if error := network.size_error(*size):
        raise PredictionError(error)
    run = jaxtile.stream(
        lambda weights, images: jax.nn.softmax(network.scores(weights, images))[0],
        in_axes=(None, (1, 2)),
        tiles=tuple(math.ceil(n / tile) for n in size),
    )
    source = Pixels(image, size, network.channels, network.scale)
    return np.asarray(run(network.weights, source, progress=progress))


def check_image(image: Image) -> None:
    """Raise an error for what training refuses too."""
    if image.shape[2] > 4:
        raise ImageError(image.path, f"has {image.shape[2]} channels, where at most 4 can be")


def with_scale(network: Network, image: Image, given: Sequence[str] | None) -> Network:
    """The network with the range that it takes this image's pixels by, which is printed."""
    if image.dtype == np.uint8:
        return network
    scale, origin = network.scale, "the range of the training images"
    if given:
        try:
            low, high = map(float, given)
            scale, origin = Scale(low, high), "as --range says"
        except ValueError as error:
            text = ",".join(given)
            raise ConfigError(f"--range={text} must be two numbers, as 0,4095") from error
    if scale is None:
        low, high = range_of(image)
        if low == high:
            raise ImageError(image.path, f"all its values are {low}: --range=LOW,HIGH is needed")
        scale, origin = Scale(low, high), "the image's range: the network was trained on 8 bits"
    print(f"{image.dtype}: values from {scale} become 8 bits, {origin}", flush=True)
    return dataclasses.replace(network, scale=scale)


def load_network(workdir: str | os.PathLike) -> Network:
    """The best weights of a training run."""
    trained = load_trained(workdir)
    data = trained.config.data
    names = [str(i) for i in range(data.classes)]
    task = trained.task
    limits = read_range(pathlib.Path(workdir)) or data.get("range")
    return Network(
        *(task.scores, trained.weights, data.channels, names, task.output_size),
        Scale(*limits) if limits else None,
    )


def define_flags() -> None:
    flags.DEFINE_string("workdir", None, "folder of a training run", required=True)
    flags.DEFINE_string("image", None, ".tif, .npy, .zarr, .png or .jpg", required=True)
    flags.DEFINE_string("out", None, ".tif, .npy or .zarr; .json for a class", required=True)
    flags.DEFINE_integer("tile", 1024, "pixels of the result along a tile", lower_bound=1)
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
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        tile = options.tile
        sys.exit(f"error: tiles of {tile} pixels need too much memory: try --tile={tile // 2}")
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
        image = stack.enter_context(open_image(options.image))
        network = load_network(options.workdir)
        check_image(image)
        network = with_scale(network, image, options.range)
        progress = stack.enter_context(_Tiles())
        began = time.perf_counter()
        if network.output_size is None:
            _check_json(out)
            found = classify(network, image, tile=options.tile, progress=progress)
            _write_classes(out, options.image, network, found)
        else:
            dtype = options.dtype if options.probabilities else None
            area = segment(
                network, image, out, tile=options.tile, probabilities=dtype, progress=progress
            )
            print(f"{out}: {_times(area.size)} pixels{_where(area, image.shape)}")
        if network.scale is not None and (cut := network.scale.beyond()):
            print(f"warning: {cut}")
        seconds, pixels = time.perf_counter() - began, math.prod(image.shape[:2]) / 1e6
        print(
            f"{pixels:.1f} megapixels in {duration(seconds)}, compilation included: "
            f"{pixels / seconds:.2f} megapixels/s on {jax.devices()[0].device_kind}"
        )


class _Tiles:
    """A bar, as soon as it is known how many tiles there are; plain lines for every tenth."""

    def __init__(self) -> None:
        self.bar: Bar | None = None

    def __call__(self, done: int, total: int) -> None:
        self.bar = self.bar or Bar("tile", total, every=math.ceil(total / 10))
        self.bar.advance()

    def __enter__(self) -> _Tiles:
        return self

    def __exit__(self, *exception: Any) -> None:
        if self.bar is not None:
            self.bar.__exit__(*exception)


def _check_json(out: pathlib.Path) -> None:
    if out.suffix != ".json":
        raise ConfigError(f"--out={out}: this network gives one class, which is written as .json")
    if not os.access(out.parent, os.W_OK):
        raise ConfigError(f"--out={out}: {out.parent} is not a folder that can be written to")


def _write_classes(out: pathlib.Path, image: str, network: Network, found: np.ndarray) -> None:
    probabilities = {name: float(p) for name, p in zip(network.classes, found, strict=True)}
    ranked = sorted(probabilities, key=probabilities.__getitem__, reverse=True)
    for name in ranked[:10]:
        print(f"{name:>12} {probabilities[name]:.6f}")
    record = {"image": str(image), "class": ranked[0], "probabilities": probabilities}
    with _writing(out):
        write_atomically(out, json.dumps(record, indent=2) + "\n")


def _where(area: Map, shape: Sequence[int]) -> str:
    """What a user must know to lay the result over the image."""
    text = f"; its first pixel is pixel {area.offset} of the image" if any(area.offset) else ""
    if area.padded != tuple(shape[:2]):
        text += f"; the network saw {_times(area.padded)}, the last row and column repeated"
    return text


def _times(size: Sequence[int]) -> str:
    return f"{size[0]} x {size[1]}"


if __name__ == "__main__":
    define_flags()
    start(main, "nothing was written")
