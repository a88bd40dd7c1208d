"""Labelled images for training: synthetic ones, and folders of files.

    dataset = load(options, "train", seed=0)
    image, label = dataset.example(3, np.random.default_rng(0))  # uint8 (H, W, C)
    with Batches(dataset, batch_size=2, seed=0, start=step) as batches:
        batch = next(batches)  # what any run with this seed sees at this step

A label is a class (an int32), or a mask: a class for each position (uint8), where 255 does not
count. `_dataset.py` says what a dataset is, `_synthetic.py` and `_textures.py` draw, `_listing.py`
finds files and their labels, `_folder.py` reads windows of them, `_examine.py` and `_scan.py` look
at whole files, `_scale.py` makes bytes of pixels, `_batches.py` puts examples in order.
"""

from __future__ import annotations

from typing import Any

from ._batches import Batch as Batch
from ._batches import Batches as Batches
from ._batches import evaluation as evaluation
from ._dataset import IGNORED as IGNORED
from ._dataset import DataError as DataError
from ._dataset import Dataset as Dataset
from ._dataset import Geometry, pair
from ._examine import examine as examine
from ._examine import read_range as read_range
from ._folder import Folder as Folder
from ._listing import listing
from ._scale import Scale as Scale
from ._scale import read_bytes as read_bytes
from ._scan import range_of as range_of
from ._synthetic import Cells as Cells
from ._synthetic import Textures as Textures

_SYNTHETIC = {"cells": Cells, "textures": Textures}
_EVALUATION_START = 2**31  # beyond any index of a training image, however many there are


def load(
    options: Any,
    split: str,
    *,
    seed: int,
    size: int | tuple[int, int] | None = None,
    label_size: int | tuple[int, int] | None = None,
) -> Dataset:
    """The dataset that `options` describes.

    Args:
      options: has the attributes
        kind: `"cells"` and `"textures"` are synthetic; `"folder"` is files.
        path, labels: of a folder, and how it says its labels, see `listing`.
        size: of the window of an image that is an example, random in training and in the centre in
          evaluation: an integer, (H, W), or 0 for whole images.
        channels: 1 or 3.
        classes: how many there are.
        mask_values: in masks, the value of each class; () for 0, 1, 2 and so on.
        ignored: in masks, the values of what does not count.
        files_outside: whether a table of labels may name files outside its folder.
        train_images, eval_images: how many synthetic images.
        eval_fraction: of a folder without `train` and `eval` in it.
        augment: whether training examples are flipped and turned at random.
        on_bad_file: `"error"`, or `"skip"` to go on without the file.
      split: `"train"` or `"eval"`, which have no image in common.
      seed: of the synthetic images, and of a folder's split.
      size: of the window, where it is not `options.size`.
      label_size: of masks, where smaller than the window: its centre.
    """
    if split not in ("train", "eval"):
        raise ValueError(f"`split` (={split!r}) must be 'train' or 'eval'")
    window = options.size if size is None else size
    geometry = Geometry(pair(window), pair(label_size), options.channels, options.augment)
    if options.kind in _SYNTHETIC:
        return _drawn(options, split, geometry, seed)
    if options.kind != "folder":
        known = ", ".join(map(repr, (*_SYNTHETIC, "folder")))
        raise ValueError(f"`kind` (={options.kind!r}) must be one of {known}")
    return Folder(
        listing(options, split, seed=seed),
        geometry,
        classes=options.classes,
        mask_values=options.mask_values,
        ignored_values=options.ignored,
        on_bad_file=options.on_bad_file,
    )


def _drawn(options: Any, split: str, geometry: Geometry, seed: int) -> Dataset:
    number, start = options.train_images, 0
    if split == "eval":
        number, start = options.eval_images, _EVALUATION_START
    make = _SYNTHETIC[options.kind]
    return make(number, geometry, classes=options.classes, seed=seed, start=start)
