"""Finding the files of a folder and their labels, before any of them is opened.

What is wrong here is wrong with the folder rather than with one file, and is always an error.
"""

from __future__ import annotations

import csv
import dataclasses
import functools
import io
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from ..images import SUFFIXES, is_image_name, suffix_of
from ._dataset import DataError


@dataclasses.dataclass(frozen=True)
class Item:
    image: Path
    label: Path | int | tuple[int, ...]
    """A mask's file, a class, or all classes that there are."""


@dataclasses.dataclass(frozen=True)
class Listing:
    path: Path
    items: tuple[Item, ...]
    labels: str
    ignored: int
    """Files that are no images, by their names, or that no label speaks of."""
    class_names: tuple[str, ...] = ()
    """Where the labels have names."""


def listing(options: Any, split: str, *, seed: int) -> Listing:
    """The files of one split of the folder `options.path`, and their labels.

    * `labels="masks"`: `images/NAME.png` goes with `masks/NAME.tif`; suffixes may differ.
    * `labels="targets"`: the same with `targets/NAME.tif`, numbers instead of classes.
    * `labels="folders"`: `CLASS/NAME.png`. Classes are numbered in alphabetical order.
    * `labels="csv"`: `labels.csv`, in UTF-8, with the columns `file` and `label`. Labels are all
      numbers, from 0, or all names, which are numbered in alphabetical order. Files lie in the
      folder of `labels.csv` or below, or with `files_outside` anywhere.
    * `labels="tags"`: the same with any number of labels for a file, as `crack;rust`, or none.

    If there are folders `train` and `eval` in it, each of this form, they are the splits. If there
    are none, the last `eval_fraction` of the files, shuffled by `seed`, is for evaluation.
    """
    path, labels, classes = Path(options.path), options.labels, options.classes
    volumes = options.dimensions == 3
    listings = {
        "masks": functools.partial(_with_masks, volumes=volumes),
        "targets": functools.partial(_with_masks, kind="target", volumes=volumes),
        "folders": functools.partial(_in_class_folders, volumes=volumes),
        "csv": functools.partial(_in_table, files_outside=options.files_outside),
        "tags": functools.partial(_with_tags, files_outside=options.files_outside),
    }
    if labels not in listings:
        raise ValueError(f"`labels` (={labels!r}) must be one of {', '.join(map(repr, listings))}")
    if not path.is_dir():
        raise DataError(path, "there is no such folder")
    folders = _folders_of_splits(path)
    if folders:
        found = listings[labels](list(folders.values()), classes)
        items, ignored = found[list(folders).index(split)]
    else:
        ((items, ignored),) = listings[labels]([path], classes)
        order = np.random.default_rng(seed).permutation(len(items))
        kept = len(items) - round(len(items) * options.eval_fraction)
        order = order[:kept] if split == "train" else order[kept:]
        items = [items[i] for i in sorted(order)]
    if not items:
        raise DataError(
            folders.get(split, path),
            f"no image is left for the split {split!r} (`eval_fraction` is "
            f"{options.eval_fraction}; {ignored} files were ignored; images end in "
            f"{', '.join(SUFFIXES)})",
        )
    names = _class_names(labels, list(folders.values()) or [path], options.files_outside)
    return Listing(path, tuple(items), labels, ignored, names)


def _class_names(labels: str, folders: list[Path], files_outside: bool) -> tuple[str, ...]:
    """In the order of their numbers; () if classes have numbers only."""
    if labels == "folders":
        return tuple(sorted({e.name for f in folders for e in f.iterdir() if _is_class(e)}))
    if labels in ("csv", "tags"):
        rows = [row for f in folders for row in _table(f, files_outside, labels == "tags")]
        found = {tag for row in rows for tag in (row.tags if labels == "tags" else (row.label,))}
        return () if any(label.isdecimal() for label in found) else tuple(sorted(found))
    return ()


def _folders_of_splits(path: Path) -> dict[str, Path]:
    """`train` and `eval`, or nothing."""
    folders = {name: path / name for name in ("train", "eval") if (path / name).is_dir()}
    if len(folders) == 1:
        (there,) = folders
        absent = "eval" if there == "train" else "train"
        raise DataError(path, f"has a folder {there!r} but no folder {absent!r}: it needs both")
    return folders


Found = list[tuple[list[Item], int]]
"""For each folder, its items, and how many files were ignored."""


def _with_masks(folders: list[Path], classes: int, kind: str = "mask", *, volumes: bool) -> Found:
    if kind == "mask" and not 2 <= classes <= 255:
        raise ValueError(f"`classes` (={classes}) of masks must be 2 to 255")
    found = []
    for folder in folders:
        images, ignored = _by_stem(folder / "images", volumes)
        masks, ignored_masks = _by_stem(folder / f"{kind}s", volumes)
        for there, absent, lacking in ((images, masks, kind), (masks, images, "image")):
            alone = sorted(str(there[stem]) for stem in there.keys() - absent.keys())
            if alone:
                raise DataError(
                    folder,
                    f"{len(alone)} files have no {lacking} of the same name: {_some(alone)}",
                )
        items = [Item(images[stem], masks[stem]) for stem in sorted(images)]
        found.append((items, ignored + ignored_masks))
    return found


def _by_stem(folder: Path, volumes: bool) -> tuple[dict[str, Path], int]:
    if not folder.is_dir():
        raise DataError(folder, f"there is no such folder; it goes with {_other(folder)}")
    files, ignored = _images(folder, volumes)
    stems: dict[str, Path] = {}
    for file in files:
        stem = file.name if file.is_dir() else file.name[: -len(suffix_of(file))]
        stem = stem.removesuffix(".zarr").removesuffix(".ome")
        if stem in stems:
            raise DataError(folder, f"{stems[stem].name} and {file.name} have one name")
        stems[stem] = file
    return stems, ignored


def _other(folder: Path) -> str:
    return "`masks` or `targets`" if folder.name == "images" else "`images`"


def _with_tags(folders: list[Path], classes: int, *, files_outside: bool) -> Found:
    tables = [_table(folder, files_outside, True) for folder in folders]
    names = sorted({tag for table in tables for row in table for tag in row.tags})
    numbered = all(name.isdecimal() for name in names)
    known = list(map(str, range(classes))) if numbered else names
    if len(known) > classes or not {*names} <= {*known}:
        raise DataError(
            tables[0][0].table,
            f"has {len(names)} labels ({_some(names)}), but `classes` is {classes}",
        )
    return [
        ([Item(row.file, tuple(known.index(tag) for tag in row.tags)) for row in table], 0)
        for table in tables
    ]


def _in_class_folders(folders: list[Path], classes: int, *, volumes: bool) -> Found:
    inside = [
        {entry.name: entry for entry in sorted(folder.iterdir()) if _is_class(entry)}
        for folder in folders
    ]
    names = sorted(set().union(*inside))
    if len(names) != classes:
        raise DataError(
            folders[0].parent if len(folders) > 1 else folders[0],
            f"has {len(names)} folders of classes ({_some(names)}), but `classes` is {classes}",
        )
    found = []
    for entries in inside:
        items, ignored = [], 0
        for name, entry in entries.items():
            files, others = _images(entry, volumes)
            items += [Item(file, names.index(name)) for file in files]
            ignored += others
        found.append((items, ignored))
    return found


def _is_class(entry: Path) -> bool:
    return entry.is_dir() and not entry.name.startswith(".")


def _in_table(folders: list[Path], classes: int, *, files_outside: bool) -> Found:
    tables = [_table(folder, files_outside) for folder in folders]
    rows = [row for table in tables for row in table]
    numbers = [row for row in rows if row.label.isdecimal()]
    if numbers and len(numbers) < len(rows):
        name = next(row for row in rows if not row.label.isdecimal())
        raise DataError(
            name.table,
            f"line {name.line}: the label {name.label!r} is a name, but {numbers[0].label!r} in "
            f"line {numbers[0].line} is a number: use one or the other",
        )
    names = sorted({row.label for row in rows}) if not numbers else []
    if len(names) > classes:
        raise DataError(
            tables[0][0].table,
            f"has {len(names)} labels ({_some(names)}), but `classes` is {classes}",
        )
    found = []
    for folder, table in zip(folders, tables, strict=True):
        items = []
        for row in table:
            label = int(row.label) if numbers else names.index(row.label)
            if label >= classes:
                raise DataError(
                    row.table, f"line {row.line}: label {label}, but `classes` is {classes}"
                )
            items.append(Item(row.file, label))
        named = {row.file for row in table}
        inside = [file for file in folder.iterdir() if file.is_file()]
        found.append((items, sum(file not in named for file in inside) - 1))
    return found


@dataclasses.dataclass(frozen=True)
class _Row:
    table: Path
    line: int
    file: Path
    label: str

    @property
    def tags(self) -> tuple[str, ...]:
        return tuple(t.strip() for t in self.label.split(";") if t.strip())


def _table(folder: Path, files_outside: bool, may_lack: bool = False) -> list[_Row]:
    path = folder / "labels.csv"
    if not path.is_file():
        raise DataError(path, "there is no such file; it has the columns file,label")
    rows: dict[Path, _Row] = {}
    reader = csv.reader(io.StringIO(_text(path), newline=""))
    try:
        header = [column.strip() for column in next(reader, [])]
        if sorted(header) != ["file", "label"]:
            raise DataError(path, f"line 1: the columns must be file,label, not {','.join(header)}")
        for cells in reader:
            row = _row(path, reader.line_num, header, cells, (files_outside, may_lack))
            if row.file in rows:
                raise DataError(
                    path, f"line {row.line}: {row.file} is in line {rows[row.file].line} already"
                )
            rows[row.file] = row
    except csv.Error as error:
        raise DataError(path, f"line {reader.line_num}: is no line of a table ({error})") from error
    if not rows:
        raise DataError(path, "names no file")
    return list(rows.values())


def _row(
    table: Path, line: int, header: list[str], cells: list[str], allowed: tuple[bool, bool]
) -> _Row:
    outside, may_lack = allowed
    cells = [cell.strip() for cell in cells]
    needed = [c for n, c in zip(header, cells, strict=False) if n == "file" or not may_lack]
    if len(cells) != 2 or not all(needed):
        found = ",".join(cells) or "a blank line"
        raise DataError(table, f"line {line}: a file and a label, not {found}")
    values = dict(zip(header, cells, strict=True))
    folder = table.parent
    file = Path(os.path.normpath(folder / values["file"]))
    if not (outside or file.is_relative_to(os.path.normpath(folder))):
        raise DataError(
            table,
            f"line {line}: {values['file']} lies outside {folder}. If that is meant, set "
            "`data.files_outside` to True",
        )
    if not file.exists():
        raise DataError(table, f"line {line}: there is no file {file}")
    return _Row(table, line, file, values["label"])


def _text(path: Path) -> str:
    content = path.read_bytes()
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        raise DataError(
            path,
            f"line {line}: is not text in UTF-8 (byte {content[error.start]:#04x}): save it as "
            "UTF-8",
        ) from error


def _images(folder: Path, volumes: bool) -> tuple[list[Path], int]:
    """Files with a known suffix; of volumes also folders, with a file for each plane."""
    entries = sorted(folder.iterdir())
    files = [e for e in entries if is_image_name(e) or (volumes and _is_class(e))]
    return files, len(entries) - len(files)


def _some(names: Iterable[str]) -> str:
    names = list(names)
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
