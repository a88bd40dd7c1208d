"""Labelled images for training: synthetic ones, and folders of files.

    dataset = load(options, "train", seed=0)
    image, label = dataset.example(3, np.random.default_rng(0))  # uint8 (H, W, C)
    with Batches(dataset, batch_size=2, seed=0, start=step) as batches:
        batch = next(batches)  # what any run with this seed sees at this step

A label is a class (an int32), or a mask: a class for each position (uint8), where 255 does not
count. `_dataset.py` says what a dataset is, `_synthetic.py` and `_textures.py` draw, `_listing.py`
finds files and their labels, `_folder.py` reads windows of them, `_regions.py` and `_weighted.py`
say where these may lie, `_examine.py` and `_scan.py` look at whole files, `_scale.py` makes bytes
of pixels, `_own.py` and `_grain.py` take anybody's data, `_batches.py` puts examples in order.
"""

from __future__ import annotations

import functools
import pathlib
from collections.abc import Callable
from typing import Any

import models

from ._batches import Batch as Batch
from ._batches import Batches as Batches
from ._batches import evaluation as evaluation
from ._dataset import IGNORED as IGNORED
from ._dataset import DataError as DataError
from ._dataset import Dataset as Dataset
from ._dataset import Geometry, sizes
from ._examine import examine as examine
from ._examine import note as note
from ._examine import noted as noted
from ._examine import read_range as read_range
from ._examine import statistics as statistics
from ._folder import Folder as Folder
from ._listing import listing
from ._own import Own as Own
from ._regions import read_regions
from ._scale import Scale as Scale
from ._scale import check_channels as check_channels
from ._scale import not_listed as not_listed
from ._scale import read_pixels as read_pixels
from ._scan import range_of as range_of
from ._synthetic import Cells as Cells
from ._synthetic import Mosaics as Mosaics
from ._synthetic import Textures as Textures

_SYNTHETIC = {"cells": Cells, "mosaics": Mosaics, "textures": Textures}
_EVALUATION_START = 2**31  # beyond any index of a training image, however many there are


def load(
    options: Any,
    split: str,
    *,
    seed: int,
    size: int | tuple[int, ...] | None = None,
) -> Dataset:
    """The dataset that `options` describes.

    Args:
      options: has the attributes
        kind: `"cells"`, `"mosaics"` and `"textures"` are synthetic; `"folder"` is files; anybody's
          own is `"my_package.data:MyDataset"`, see `_own.py`.
        options: more arguments of one's own.
        dimensions: of images, 2; of volumes, 3.
        path, labels: of a folder, and how it says its labels, see `listing`.
        size: of the window of an image that is an example, random in training and in the centre in
          evaluation: an integer, (H, W), or 0 for whole images.
        level: of pyramids, which resolution is read; 0 is the finest.
        resize: pixels along a side that whole images get before windows are taken; 0: none.
        channels: of images; grey and colours become each other, of others there must be as many.
        classes: how many there are.
        class_names: of all of them, where files or anybody's own data do not say; or ().
        mask_values: in masks, the value of each class; () for 0, 1, 2 and so on.
        ignored: in masks, the values of what does not count.
        regions: a folder in `path` with regions that training windows lie in, see `_regions.py`.
        class_weights: by which training examples are drawn, see `_weighted.py`; `examine` takes
          them.
        nodata: values of pixels that hold no data: there labels do not count.
        files_outside: whether a table of labels may name files outside its folder.
        train_images, eval_images: how many synthetic images.
        eval_fraction: of a folder without `train` and `eval` in it.
        augment: whether training examples are flipped and turned at random.
        on_bad_file: `"error"`, or `"skip"` to go on without the file.
      split: `"train"` or `"eval"`, which have no image in common.
      seed: of the synthetic images, and of a folder's split.
      size: of the window, where it is not `options.size`.
    """
    if split not in ("train", "eval"):
        raise ValueError(f"`split` (={split!r}) must be 'train' or 'eval'")
    window = options.size if size is None else size
    dimensions = options.dimensions
    geometry = Geometry(
        *(sizes(window, dimensions), options.channels, options.augment, dimensions),
        *(options.resize, options.level),
    )
    found = maker(options.kind)(options, split, geometry, seed)
    found.class_names = list(options.class_names) or found.class_names
    return found


def maker(kind: str) -> Callable[[Any, str, Geometry, int], Dataset]:
    """What makes the datasets of a kind, of options, split, geometry and seed."""
    built_in = {**dict.fromkeys(_SYNTHETIC, _drawn), "folder": _of_files}
    found = models.find(kind, built_in, "kind of data")
    return found if kind in built_in else functools.partial(_own, found)


def _own(make: Any, options: Any, split: str, geometry: Geometry, seed: int) -> Dataset:
    offered = {
        "split": split,
        "seed": seed,
        "size": geometry.size,
        **{name: options[name] for name in ("path", "channels", "classes")},
    }
    name = options.kind
    source = models.call(make, f"the kind of data {name!r}", options.options, offered)
    return Own(source, geometry, classes=options.classes, name=name)


def _of_files(options: Any, split: str, geometry: Geometry, seed: int) -> Dataset:
    found = Folder(
        listing(options, split, seed=seed),
        geometry,
        classes=options.classes,
        dtype=options.dtype,
        mask_values=options.mask_values,
        ignored_values=options.ignored,
        nodata=options.nodata,
        on_bad_file=options.on_bad_file,
    )
    if options.regions and split == "train":
        sizes = {i.image: h.size for i, h in zip(found.items, found.headers, strict=True)}
        folder = pathlib.Path(options.path, options.regions)
        found.regions = read_regions(folder, sizes, geometry.dimensions)
    return found


def _drawn(options: Any, split: str, geometry: Geometry, seed: int) -> Dataset:
    number, start = options.train_images, 0
    if split == "eval":
        number, start = options.eval_images, _EVALUATION_START
    make = _SYNTHETIC[options.kind]
    return make(number, geometry, classes=options.classes, seed=seed, start=start)
