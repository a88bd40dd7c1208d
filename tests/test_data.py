"""Datasets: what an example is, what can be wrong with a folder, and the order of batches."""

import os
import re
import threading
import time
import types

import hypothesis
import jax
import numpy as np
import pytest
import tifffile
from hypothesis import strategies
from PIL import Image as pillow
from scipy import ndimage

from experiments import data, images
from experiments.data import DataError, _scan, _synthetic, _textures
from experiments.data._scale import as_bytes, as_they_are, is_nodata
from experiments.devices.hosts import Devices
from experiments.images import ImageError
from experiments.training.feed import Feed


def load(split="train", label_size=None, seed=0, **changed):
    options = {
        "kind": "folder",
        "path": "",
        "labels": "masks",
        "dimensions": 2,
        "options": {},
        "size": 16,
        "resize": 0,
        "level": 0,
        "regions": "",
        "channels": 1,
        "classes": 3,
        "dtype": "uint8",
        "class_names": (),
        "mask_values": (),
        "ignored": (),
        "nodata": (),
        "files_outside": False,
        "train_images": 6,
        "eval_images": 4,
        "eval_fraction": 0.25,
        "augment": False,
        "on_bad_file": "error",
    }
    options = types.SimpleNamespace(**{**options, **changed})
    options.path = str(options.path)
    dataset = data.load(options, split, seed=seed)
    if label_size is not None:
        dataset.take_labels(label_size)
    return dataset


def generator(seed=0):
    return np.random.default_rng(seed)


@pytest.fixture
def masks(tmp_path):
    """Eight images of 40 x 30 whose masks are their values modulo 3."""
    for folder in ("images", "masks"):
        (tmp_path / folder).mkdir()
    for i in range(8):
        image = generator(i).integers(0, 255, (40, 30), np.uint8)
        tifffile.imwrite(tmp_path / "images" / f"{i}.tif", image, tile=(16, 16))
        pillow.fromarray(image % 3).save(tmp_path / "masks" / f"{i}.png")
    return tmp_path


@pytest.mark.parametrize("channels", [1, 3])
def test_cells(channels):
    dataset = load(kind="cells", size=(96, 128), channels=channels, classes=2)
    assert (len(dataset), dataset.classes) == (6, 2)
    assert (dataset.shape, dataset.label_shape) == ((96, 128, channels), (96, 128))
    image, mask = dataset.example(2, generator())
    assert image.shape == dataset.shape
    assert (image.dtype, mask.dtype) == (np.uint8, np.uint8)
    assert set(np.unique(mask)) == {0, 1}
    again, _ = load(kind="cells", size=(96, 128), channels=channels, classes=2).example(2, None)
    np.testing.assert_array_equal(image, again)
    held_out = load("eval", kind="cells", size=(96, 128), channels=channels, classes=2)
    others = [held_out.example(i, None)[0] for i in range(4)]
    others += [dataset.example(i, None)[0] for i in (0, 1, 3, 4, 5)]
    others += [load(kind="cells", size=(96, 128), channels=channels, seed=1).example(2, None)[0]]
    assert not any(np.array_equal(image, other) for other in others)
    inner = load(kind="cells", size=(96, 128), channels=channels, label_size=(90, 100))
    np.testing.assert_array_equal(inner.example(2, None)[1], mask[3:93, 14:114])


def test_no_threshold_finds_the_cells():
    for seed in range(3):
        image, mask = _synthetic.draw_cells(generator(seed), 256, 256, 1)
        assert 0.1 < mask.mean() < 0.4
        bright = [image[..., 0] > level for level in range(60, 200, 4)]
        best = max((b & (mask == 1)).sum() / (b | (mask == 1)).sum() for b in bright)
        assert 0.3 < best < 0.8


def test_textures():
    dataset = load(kind="textures", size=48, channels=3, classes=4, train_images=8)
    assert (dataset.shape, dataset.label_shape) == ((48, 48, 3), ())
    examples = [dataset.example(i, generator(i)) for i in range(8)]
    assert [int(label) for _, label in examples] == [0, 1, 2, 3] * 2
    assert all(type(label) is np.int32 for _, label in examples)
    assert all(image.std() > 15 for image, _ in examples)


def test_mosaics():
    """Squares of one class each; all classes are as frequent as each other."""
    dataset = load(kind="mosaics", size=(90, 64), channels=3, classes=6, train_images=2)
    assert (dataset.shape, dataset.label_shape) == ((90, 64, 3), (90, 64))
    image, mask = dataset.example(0, generator(0))
    squares = mask[::12, ::8]
    np.testing.assert_array_equal(mask, squares.repeat(12, 0).repeat(8, 1)[:90])
    assert sorted(np.bincount(squares.ravel())) == [10, 10, 11, 11, 11, 11]
    assert image.std() > 15
    assert not np.array_equal(mask, dataset.example(1, generator(0))[1])
    with pytest.raises(ValueError, match="at most 255"):  # 255 does not count
        load(kind="mosaics", classes=256)
    with pytest.raises(ValueError, match="must be 2 for textures"):
        load(kind="mosaics", dimensions=3)


@pytest.mark.parametrize("label", [0, 1, 2, 4])
def test_a_texture_is_as_its_definition_says(label):
    """Without its noise: seen through a mean over small windows, which keeps the pattern."""
    size = (150, 2200)  # more than one window, along both axes
    image = _textures.draw_texture(generator(7), label, 6, *size, 1)[..., 0].astype(float)
    rng = generator(7)
    level, kind = divmod(label, 3)
    angle = np.pi * (level + rng.uniform(-0.2, 0.2)) / 2
    period, phases = rng.uniform(9, 14), rng.uniform(0, 2 * np.pi, 2)
    contrast = rng.uniform(25, 60)
    y, x = np.mgrid[: size[0], : size[1]]
    along = np.cos(angle) * x + np.sin(angle) * y
    across = np.cos(angle) * y - np.sin(angle) * x
    if kind == 2:
        table = rng.uniform(-1, 1, (64, 64))
        cells = np.floor(along * 3 / period), np.floor(across / period)
        pattern = table[tuple(c.astype(int) % 64 for c in cells)]
    else:
        pattern = np.sin(2 * np.pi / period * along + phases[0])
    if kind == 1:
        pattern *= np.sin(np.pi / period * across + phases[1])
    points = 128 + 20 * rng.standard_normal((5, 39), np.float32)
    light = ndimage.map_coordinates(points, [y / 60, x / 60], order=1)
    noise = image - np.clip(contrast * pattern + light, 0, 255)
    inside = (image > 0) & (image < 255)
    assert abs(noise[inside].mean() + 0.5) < 0.2  # fractions are cut off
    assert abs(noise[inside].std() - 12) < 0.5
    for shift in ((0, 1), (1, 0), (60, 0), (0, 2048)):
        other = noise[shift[0] :, shift[1] :]
        same = np.corrcoef(other.ravel(), noise[: other.shape[0], : other.shape[1]].ravel())[0, 1]
        assert abs(same) < 0.05


def test_threads_draw_the_same_texture(monkeypatch):
    drawn = [_textures.draw_texture(generator(), 1, 6, 200, 5000, 3)]
    monkeypatch.setattr(_textures, "_MANY", 1)
    drawn += [_textures.draw_texture(generator(), 1, 6, 200, 5000, 3) for _ in range(2)]
    assert all(np.array_equal(drawn[0], image) for image in drawn[1:])


def test_synthetic_images_need_a_size():
    with pytest.raises(ValueError, match="`size` must be given for cells"):
        load(kind="cells", size=0)
    with pytest.raises(ValueError, match="no kind of data 'cell'; did you mean 'cells'"):
        load(kind="cell")


def test_windows_of_images_and_masks_agree(masks):
    dataset = load(path=masks)
    assert (len(dataset), dataset.shape, dataset.label_shape) == (6, (16, 16, 1), (16, 16))
    windows = set()
    for index in range(len(dataset)):
        for seed in range(3):
            image, mask = dataset.example(index, generator(seed))
            np.testing.assert_array_equal(image[..., 0] % 3, mask)
            windows.add(image.tobytes())
    assert len(windows) == 18
    image, mask = dataset.example(0, None)
    whole = tifffile.imread(masks / dataset.name(0))
    np.testing.assert_array_equal(image[..., 0], whole[12:28, 7:23])


def test_labels_in_the_centre(masks):
    dataset = load(path=masks, size=0, label_size=(20, 10), augment=True)
    assert (dataset.shape, dataset.label_shape) == ((40, 30, 1), (20, 10))
    for seed in range(4):
        image, mask = dataset.example(1, generator(seed))
        np.testing.assert_array_equal(image[10:30, 10:20, 0] % 3, mask)
    with pytest.raises(ValueError, match=r"a label of \(15, 16\) .* \(16, 16\)"):
        load(path=masks, label_size=(15, 16))


def test_augmentation_reaches_all_symmetries(masks):
    dataset = load(path=masks, size=16, augment=True)
    whole = {}
    for seed in range(60):
        image, mask = data._dataset.augmented(
            np.arange(16).reshape(4, 4, 1), np.arange(16).reshape(4, 4), generator(seed)
        )
        np.testing.assert_array_equal(image[..., 0], mask)
        whole[image.tobytes()] = image
    assert len(whole) == 8
    image, mask = dataset.example(3, generator(5))
    np.testing.assert_array_equal(image[..., 0] % 3, mask)


def test_splits_are_apart_and_repeatable(masks):
    names = [
        {d.name(i) for i in range(len(d))}
        for d in (load(path=masks), load("eval", path=masks), load("eval", path=masks, seed=7))
    ]
    assert len(names[0]) == 6
    assert len(names[1]) == 2
    assert not names[0] & names[1]
    assert names[1] != names[2]
    with pytest.raises(DataError, match=rf"{masks.name}.*no image is left for the split 'eval'"):
        load("eval", path=masks, eval_fraction=0.0)


def test_folders_of_splits(masks):
    for split, numbers in {"train": (0, 1, 2), "eval": (3,)}.items():
        for folder, suffix in (("images", "tif"), ("masks", "png")):
            (masks / split / folder).mkdir(parents=True)
            for i in numbers:
                file = masks / folder / f"{i}.{suffix}"
                file.rename(masks / split / folder / file.name)
        if split == "train":
            with pytest.raises(DataError, match="no folder 'eval'"):
                load(path=masks)
    assert len(load(path=masks)) == 3
    assert load("eval", path=masks).name(0) == "eval/images/3.tif"


def test_masks_and_images_must_match(masks):
    (masks / "images" / ".hidden.png").write_text("")
    (masks / "images" / "notes.txt").write_text("")
    assert load(path=masks).ignored == 2
    (masks / "images" / "1.png").write_text("")
    with pytest.raises(DataError, match=r"images: 1\.png and 1\.tif"):
        load(path=masks)
    (masks / "images" / "1.png").unlink()
    (masks / "masks" / "2.png").unlink()
    with pytest.raises(DataError, match=r"1 files have no mask .*images.2\.tif"):
        load(path=masks)
    (masks / "images" / "2.tif").unlink()
    (masks / "images" / "3.tif").unlink()
    with pytest.raises(DataError, match=r"1 files have no image .*masks.3\.png"):
        load(path=masks)
    with pytest.raises(DataError, match="nowhere: there is no such folder"):
        load(path=masks / "nowhere")


BAD = {
    "empty": (lambda f: (f / "images/4.tif").write_bytes(b""), r"4\.tif: is empty"),
    "text": (lambda f: (f / "images/4.tif").write_text("no image"), r"4\.tif: is not a TIFF"),
    "small": (
        lambda f: (
            tifffile.imwrite(f / "images/4.tif", np.zeros((9, 30), np.uint8)),
            pillow.fromarray(np.zeros((9, 30), np.uint8)).save(f / "masks/4.png"),
        ),
        r"4\.tif: its shape \(9, 30, 1\) is smaller than `size`, \(16, 16\)$",
    ),
    "channels": (
        lambda f: tifffile.imwrite(
            f / "images/4.tif",
            np.zeros((40, 30, 6), np.uint8),
            photometric="minisblack",
            planarconfig="contig",
        ),
        r"4\.tif: has 6 channels, .* volume, set `data.dimensions` to 3$",
    ),
    "mask size": (
        lambda f: pillow.fromarray(np.zeros((41, 30), np.uint8)).save(f / "masks/4.png"),
        r"4\.png: its shape \(41, 30, 1\) is not that of its image .*4\.tif, \(40, 30, 1\)",
    ),
    "mask colour": (
        lambda f: pillow.fromarray(np.zeros((40, 30, 3), np.uint8)).save(f / "masks/4.png"),
        r"4\.png: a mask has one channel",
    ),
    "mask value": (
        lambda f: pillow.fromarray(np.full((40, 30), 3, np.uint8)).save(f / "masks/4.png"),
        r"4\.png: holds 3 \(256 pixels\), but the 3 classes are 0, 1, 2, and nothing is ignored",
    ),
    "mask cut": (
        lambda f: (f / "masks/4.png").write_bytes((f / "masks/4.png").read_bytes()[:200]),
        r"4\.png: rows .* truncated or corrupt",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_files(masks, name):
    spoil, pattern = BAD[name]
    spoil(masks)
    seed = 1  # with which file 4 is for training

    def read_all(**options):
        dataset = load(path=masks, seed=seed, **options)
        return dataset, [dataset.example(i, generator(i)) for i in range(len(dataset))]

    with pytest.raises(ImageError, match=pattern):
        read_all()
    dataset, examples = read_all(on_bad_file="skip")
    assert list(dataset.skipped) == ["images/4.tif"]
    assert re.search(pattern, dataset.skipped["images/4.tif"])
    for image, mask in examples:
        np.testing.assert_array_equal(image[..., 0] % 3, mask)
    total = sum(batch.count for batch in data.evaluation(dataset, 4))
    assert total == 5, "each good file once"


def test_the_next_good_example_takes_the_place(masks):
    before = load(path=masks, seed=1)
    names = [before.name(i) for i in range(6)]
    place = names.index("images/4.tif")
    expected = before.example((place + 1) % 6, generator(9))
    pillow.fromarray(np.full((40, 30), 9, np.uint8)).save(masks / "masks" / "4.png")
    dataset = load(path=masks, seed=1, on_bad_file="skip")
    image, mask, index = dataset.good_example(place, generator(9))
    assert index == (place + 1) % 6
    np.testing.assert_array_equal(image, expected[0])
    np.testing.assert_array_equal(mask, expected[1])


def test_all_files_are_bad(masks):
    for file in (masks / "masks").iterdir():
        pillow.fromarray(np.full((40, 30), 9, np.uint8)).save(file)
    dataset = load(path=masks, on_bad_file="skip")
    with pytest.raises(DataError, match="all other 5 files are bad"):
        dataset.example(0, generator())
    with pytest.raises(DataError, match="all other 5 files are bad"):
        list(data.evaluation(dataset, 2))
    for file in (masks / "images").iterdir():
        file.write_bytes(b"")
    with pytest.raises(DataError, match=r"all 6 files are bad; first, .*0 bytes"):
        load(path=masks, on_bad_file="skip")


def test_what_is_ignored_does_not_count(masks):
    pillow.fromarray(np.full((40, 30), 255, np.uint8)).save(masks / "masks" / "4.png")
    dataset = load(path=masks, seed=1, ignored=(255, 77))
    index = [dataset.name(i) for i in range(6)].index("images/4.tif")
    assert (dataset.example(index, None)[1] == data.IGNORED).all()


def test_whole_images_have_one_shape(masks):
    tifffile.imwrite(masks / "images/4.tif", np.zeros((41, 30), np.uint8))
    pillow.fromarray(np.zeros((41, 30), np.uint8)).save(masks / "masks/4.png")
    with pytest.raises(DataError, match=r"4\.tif: is \(41, 30\) but .*\.tif is \(40, 30\)"):
        load(path=masks, size=0, seed=1)


def test_classes_are_folders(tmp_path):
    for kind, value in {"dog": 10, "cat": 20}.items():
        (tmp_path / kind).mkdir()
        for i in range(4):
            image = np.full((20, 20, 3), value + i, np.uint8)
            pillow.fromarray(image).save(tmp_path / kind / f"{i}.png")
    dataset = load(path=tmp_path, labels="folders", classes=2, channels=3)
    assert dataset.label_shape == ()
    for i in range(len(dataset)):
        image, label = dataset.example(i, generator())
        assert type(label) is np.int32
        assert (label == 0) == (image.mean() >= 20) == dataset.name(i).startswith("cat")
    with pytest.raises(DataError, match=r"2 folders of classes \(cat, dog\), but `classes` is 3"):
        load(path=tmp_path, labels="folders", classes=3)
    with pytest.raises(DataError, match=r"smaller than `size`, .*; `data.resize` makes images of"):
        load(path=tmp_path, labels="folders", classes=2, size=1000)


@pytest.mark.parametrize(
    "text, pattern",
    [
        ("file,label\na.png,0\nb.png,1\n", None),
        ("label,file\ncat,a.png\ndog,b.png\n", None),
        ("file,label,split\na.png,0,1\n", r"line 1: .*file,label,split"),
        ("file,label\na.png,0\nc.png,1\n", r"line 3: there is no file .*c\.png"),
        ("file,label\na.png,0\n\nb.png,1\n", "line 3: .*a blank line"),
        ("file,label\na.png,0\na.png,1\n", "line 3: .* is in line 2 already"),
        ("file,label\na.png,0\nb.png,2\n", "line 3: label 2, but `classes` is 2"),
        ("file,label\na.png,0\nb.png,dog\n", "line 3: the label 'dog' is a name"),
        ("file,label\na.png\n", "line 2"),
        ("file,label\n", "names no file"),
        (b"file,label\na.png,K\xe4fer\n", r"line 2: is not text in UTF-8 \(byte 0xe4\)"),
        ("file,label\na.png,0\n\x00b.png,1\n", "line 3"),
        ("file,label\n../a.png,0\n", r"line 2: \.\./a\.png lies outside .*`data.files_outside`"),
        ("file,label\n/etc/passwd,0\n", r"line 2: /etc/passwd lies outside"),
        ("file,label\na.png,0\nx/../a.png,1\n", "line 3: .* is in line 2 already"),
        (None, "there is no such file"),
    ],
)
def test_tables_of_labels(tmp_path, text, pattern):
    for name in "ab":
        pillow.fromarray(np.zeros((20, 20), np.uint8)).save(tmp_path / f"{name}.png")
    if text is not None:
        content = text if isinstance(text, bytes) else text.encode()
        (tmp_path / "labels.csv").write_bytes(content)
    options = {"path": tmp_path, "labels": "csv", "classes": 2, "eval_fraction": 0.0}
    if pattern is not None:
        with pytest.raises(DataError, match=rf"labels\.csv: .*{pattern}"):
            load(**options)
        return
    dataset = load(**options)
    labels = {dataset.name(i): int(dataset.example(i, None)[1]) for i in range(2)}
    assert labels == {"a.png": 0, "b.png": 1}
    assert dataset.ignored == 0


def test_tables_that_name_files_elsewhere(tmp_path):
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
        save(tmp_path / name / "a.png", np.full((20, 20), 9 * (name == "there"), np.uint8))
    (tmp_path / "here/link.png").symlink_to(tmp_path / "there/a.png")
    options = {"path": tmp_path / "here", "labels": "csv", "classes": 2, "eval_fraction": 0.0}
    table = tmp_path / "here/labels.csv"
    table.write_text("file,label\n../there/a.png,1\n")
    with pytest.raises(DataError, match="lies outside"):
        load(**options)
    assert load(**options, files_outside=True).example(0, None)[0].max() == 9
    table.write_text("file,label\nlink.png,1\n")  # whoever made the folder put it there
    assert load(**options).example(0, None)[0].max() == 9


def test_channels_and_depths():
    rgb = np.array([[[10, 20, 31]]], np.uint8)
    np.testing.assert_array_equal(as_bytes(rgb, 1), [[[20]]])
    np.testing.assert_array_equal(as_bytes(rgb, 3), rgb)
    rgba = np.array([[[10, 20, 31, 99]]], np.uint8)
    np.testing.assert_array_equal(as_bytes(rgba, 3), rgb)
    np.testing.assert_array_equal(as_bytes(rgb[..., :2], 3), [[[10, 10, 10]]])
    with pytest.raises(ValueError, match="uint16, and no range is known"):
        as_bytes(rgb.astype(np.uint16), 3)


def test_a_mean_of_colours_is_rounded():
    rgb = np.array([[[1, 2, 2], [1, 1, 2]]], np.uint16)
    np.testing.assert_array_equal(as_they_are(rgb, 1, np.dtype("uint16")), [[[2], [1]]])
    np.testing.assert_array_equal(as_they_are(rgb, 1, np.dtype("f4"))[0, 0], np.float32(5 / 3))


def test_nodata_are_numbers():
    values = np.array([[[0, 0], [0, 7]]], np.uint8)
    np.testing.assert_array_equal(is_nodata(values, (0,)), [[True, False]])
    np.testing.assert_array_equal(is_nodata(values, (float("nan"), 0.0)), [[True, False]])
    with pytest.raises(ValueError, match=r"`nodata` \(=\(0, 'x'\)\) must be numbers"):
        is_nodata(values, (0, "x"))
    lowest = np.full((1, 1, 1), np.finfo("f4").min)
    assert is_nodata(lowest, (-3.4028235e38,)), "as GDAL prints it"


@pytest.mark.parametrize(
    ("dtype", "declared", "said"),
    [
        ("f4", "-9999", "(-9999.0,)"),
        ("f4", "nan ", '(float("nan"),)'),
        ("f4", "-3.4028234663852886e+38", "(-3.4028234663852886e+38,)"),
        ("u1", "255", "(255.0,)"),
        ("u1", "-9999", ""),
        ("u1", "nan", ""),
        ("u1", "none", ""),
    ],
)
def test_a_file_that_says_which_pixels_have_no_data(tmp_path, dtype, declared, said):
    """The tag of GDAL is text. A value that no pixel can have is none."""
    for folder in ("images", "masks"):
        (tmp_path / folder).mkdir()
        pixels = np.arange(256).reshape(16, 16) % 3
        tags = [(42113, "s", 0, declared, True)]
        tifffile.imwrite(tmp_path / folder / "0.tif", pixels.astype(dtype), extratags=tags)
    tifffile.imwrite(tmp_path / "masks" / "0.tif", pixels.astype("u1"))
    options = {"path": tmp_path, "eval_fraction": 0.0, "dtype": "float32"}
    lines = data.examine(load(**options), load(**options), tmp_path)
    warnings = [line for line in lines if "have no data" in line]
    assert len(warnings) == bool(said)
    assert all("0.tif says that" in w and f"`data.nodata = {said}`" in w for w in warnings)
    for value in (float(declared),) if said else ():
        listed = load(**options, nodata=(value,)), load(**options, nodata=(np.float32(value),))
        assert not any("have no data" in line for line in data.examine(*listed, tmp_path))


@pytest.fixture
def holes(tmp_path):
    """Three float images of 16 x 16, from 100 to 355, half of them without data; one is empty."""
    for folder in ("images", "masks"):
        (tmp_path / folder).mkdir()
    for i in range(3):
        image = 100 + np.random.default_rng(i).permutation(256).reshape(16, 16).astype("f4")
        image[:, :8] = np.nan
        image[:] = np.nan if i == 2 else image
        np.save(tmp_path / "images" / f"{i}.npy", image)
        np.save(tmp_path / "masks" / f"{i}.npy", np.zeros((16, 16), np.uint8))
    return tmp_path


@pytest.mark.parametrize("value", [np.nan, -9999, 5000])
def test_pixels_without_data_do_not_count_in_the_range(holes, tmp_path_factory, value):
    for file in (holes / "images").iterdir():
        np.save(file, np.nan_to_num(np.load(file), nan=value))
    files = np.stack([np.load(holes / "images" / f"{i}.npy") for i in range(2)])
    good = files[:, :, 8:]
    run = tmp_path_factory.mktemp("run")
    options = {"path": holes, "eval_fraction": 0.0}
    if np.isnan(value):
        with pytest.raises(DataError, match=r"npy: holds values that are not finite"):
            data.examine(load(**options), load(**options), run)
    else:  # what was found with another `nodata` is not taken for this one
        assert data.examine(load(**options), load(**options), run)
    dataset = load(**options, nodata=(value,))
    lines = data.examine(dataset, load(**options, nodata=(value,)), run)
    assert f"values from {good.min():g} to {good.max():g} become 8 bits" in lines[0]
    assert (dataset.scale.low, dataset.scale.high) == (good.min(), good.max())
    image, mask = dataset.example(0, None)
    assert (image[:, 8:].min(), image[:, 8:].max()) != (0, 0)
    assert (image[:, :8] == 0).all()
    assert (mask[:, :8] == data.IGNORED).all()
    assert dataset.scale.beyond() is None, "0 in the place of no data is not a value of the file"


def test_no_pixel_with_data(holes, tmp_path_factory):
    for i in range(3):
        np.save(holes / "images" / f"{i}.npy", np.full((16, 16), np.nan, "f4"))
    options = {"path": holes, "eval_fraction": 0.0, "nodata": (np.nan,)}
    run = tmp_path_factory.mktemp("run")
    with pytest.raises(DataError, match=r"npy: this and the other training images hold no data"):
        data.examine(load(**options), load(**options), run)
    with pytest.raises(DataError, match=r"npy: this and 2 other examples hold no data"):
        data.statistics(load(**options, dtype="float32"), 0)
    with (
        images.open_image(holes / "images" / "0.npy") as image,
        pytest.raises(ImageError, match=r"0\.npy: has no pixel with data"),
    ):
        data.range_of(image, (np.nan,))


def test_pixels_without_data_do_not_count_in_mean_and_deviation(holes):
    good = np.stack([np.load(holes / "images" / f"{i}.npy") for i in range(2)])[:, :, 8:]
    options = {"path": holes, "eval_fraction": 0.0, "dtype": "float32", "augment": True}
    mean, deviation = data.statistics(load(**options, nodata=(np.nan,)), 0)
    np.testing.assert_allclose(mean, [good.mean(dtype=float)], rtol=1e-12)
    np.testing.assert_allclose(deviation, [good.std(dtype=float)], rtol=1e-9)
    with pytest.raises(ImageError, match=r"images/\d\.npy: holds values that are not finite"):
        data.statistics(load(**options), 0)
    with pytest.raises(DataError, match=r"all other 2 files are bad; .* that are not finite"):
        data.statistics(load(**options, on_bad_file="skip"), 0)


def test_values_that_are_not_finite_are_no_pixels(holes):
    """Of a classifier they would make class 0, silently; of a step, one that is not finite."""
    options = {"path": holes, "eval_fraction": 0.0, "dtype": "float32", "size": 0}
    with pytest.raises(ImageError, match=r"images/0\.npy: holds values that are not finite"):
        load(**options).example(0, None)
    assert np.isfinite(load(**options, nodata=(np.nan,)).example(0, None)[0]).all()
    np.save(holes / "images" / "0.npy", np.full((16, 16), 1e6, np.float32))
    with pytest.raises(ImageError, match=r"0\.npy: holds 1e\+06, which `data\.dtype` \(float16\)"):
        load(**options | {"dtype": "float16"}).example(0, None)


def test_statistics_skip_bad_files(masks):
    (masks / "images" / "0.tif").write_bytes((masks / "images" / "0.tif").read_bytes()[:-900])
    options = {"path": masks, "eval_fraction": 0.0, "size": 0}
    kept = np.stack([tifffile.imread(masks / "images" / f"{i}.tif") for i in range(1, 8)]) / 255
    mean, deviation = data.statistics(load(**options, on_bad_file="skip"), 0)
    np.testing.assert_allclose((mean[0], deviation[0]), (kept.mean(), kept.std()))


def test_regions_by_a_mask_with_a_palette(masks):
    """Its first colour is white, but its index is 0."""
    (masks / "regions").mkdir()
    for i in range(8):
        region = np.zeros((40, 30), np.uint8)
        region[20:, 15:] = 1
        image = pillow.fromarray(region)
        image.putpalette([255, 255, 255, 0, 0, 0])
        image.save(masks / "regions" / f"{i}.png")
    found = load(path=masks, regions="regions", size=1)
    whole = {i: tifffile.imread(masks / "images" / f"{i}.tif") for i in range(8)}
    inside = {i: {*np.unique(whole[i][20:, 15:])} for i in whole}
    for i in range(len(found)):
        number = int(found.items[i].image.stem)
        drawn = {int(found.example(i, generator(seed))[0][0, 0, 0]) for seed in range(40)}
        assert drawn <= inside[number]


@pytest.mark.parametrize("dtype", [np.uint16, np.int16, np.int32, np.float32, np.float64])
def test_values_that_are_not_of_8_bits_are_scaled(dtype):
    values = np.linspace(-1000 if dtype != np.uint16 else 0, 4095, 3 * 7 * 50).astype(dtype)
    values = values.reshape(-1, 7, 3)
    scale = data.Scale(float(values.min()), 4095)
    found = as_bytes(values, 3, scale)
    expected = (values.astype(float) - scale.low) / (scale.high - scale.low) * 255
    assert (found.min(), found.max()) == (0, 255)
    np.testing.assert_array_equal(found, np.rint(expected))
    assert scale.beyond() is None
    assert as_bytes(np.full((1, 1, 1), 5000, dtype), 1, scale) == 255
    assert "5000 were met, and what lies beyond" in scale.beyond()


def same(a, b):
    assert (a.step, a.names) == (b.step, b.names)
    np.testing.assert_array_equal(a.images, b.images)
    np.testing.assert_array_equal(a.labels, b.labels)


@hypothesis.settings(
    max_examples=8,
    deadline=None,
    derandomize=True,
    suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture],
)
@hypothesis.given(start=strategies.integers(0, 9), batch_size=strategies.integers(1, 7))
def test_a_run_goes_on_as_it_would_have(masks, start, batch_size):
    dataset = load(path=masks, augment=True)
    with data.Batches(dataset, batch_size, seed=3) as batches:
        expected = [next(batches) for _ in range(12)]
    assert [batch.step for batch in expected] == list(range(12))
    for prefetch in (0, 1):
        with data.Batches(load(path=masks, augment=True), batch_size, 3, start, prefetch) as rest:
            for batch in expected[start:]:
                same(next(rest), batch)


@pytest.mark.parametrize("size", [12, (15, 13)])
def test_lazy_batches_are_the_same_window_by_window(masks, size):
    """Flipped and turned too; and nothing is read before it is asked for."""
    options = {"path": masks, "size": size, "augment": True, "label_size": (8, 8)}
    options |= {} if size == 12 else {"label_size": (11, 9)}
    dataset, lazy = load(**options), load(**options)
    with (
        data.Batches(dataset, 3, seed=3, start=1) as batches,
        data.Batches(lazy, 3, seed=3, start=1, lazy=True) as later,
    ):
        for _ in range(6):
            want, found = next(batches), next(later)
            assert (want.step, want.names) == (found.step, found.names)
            for whole, part in ((want.images, found.images), (want.labels, found.labels)):
                assert (whole.shape, whole.dtype) == (part.shape, part.dtype)
                place = (slice(1, 3), slice(2, 7), slice(0, 8), slice(0, 1))[: whole.ndim]
                np.testing.assert_array_equal(part[place], whole[place])
                part.delete()


def test_an_epoch_has_every_example_once(masks):
    dataset = load(path=masks)
    with data.Batches(dataset, 2, seed=0) as batches:
        names = [name for _ in range(6) for name in next(batches).names]
    for epoch in (names[:6], names[6:]):
        assert sorted(epoch) == sorted(dataset.name(i) for i in range(6))
    assert names[:6] != names[6:]


def test_an_epoch_is_made_before_anybody_asks_for_it(masks, monkeypatch):
    dataset, all_read, read = load(path=masks), threading.Event(), set()
    before = dataset.good_example

    def counted(index, rng):
        read.add(index)
        if len(read) == len(dataset):
            all_read.set()
        return before(index, rng)

    monkeypatch.setattr(dataset, "good_example", counted)
    with data.Batches(dataset, 1, seed=0) as batches:
        batches.begin()
        assert all_read.wait(60)


def test_an_error_comes_at_its_step(masks):
    dataset = load(path=masks, seed=1)
    with data.Batches(dataset, 1, seed=0, prefetch=0) as batches:
        step = [next(batches).names[0] for _ in range(6)].index("images/4.tif")
    pillow.fromarray(np.full((40, 30), 9, np.uint8)).save(masks / "masks" / "4.png")
    with data.Batches(load(path=masks, seed=1), 1, seed=0, prefetch=3) as batches:
        for expected in range(step):
            assert next(batches).step == expected
        for _ in range(2):
            with pytest.raises(DataError, match=r"4\.png: holds 9 \(256 pixels\)"):
                next(batches)


def test_the_next_batch_is_sent_while_a_step_runs(masks):
    dataset = load(path=masks, size=(15, 13))

    def on_device() -> int:
        return sum(x.shape == (2, *dataset.shape) for x in jax.live_arrays())

    with data.Batches(dataset, 2, seed=0) as batches:
        expected = [next(batches) for _ in range(5)]
    with data.Batches(dataset, 2, seed=0) as batches, Feed(batches, Devices()) as feed:
        for batch in expected:
            sent = next(feed)
            np.testing.assert_array_equal(sent.images, batch.images)
            np.testing.assert_array_equal(sent.labels, batch.labels)
            assert sent.names == batch.names
            deadline = time.monotonic() + 60
            while on_device() < 2:  # nobody asks for the second one
                assert time.monotonic() < deadline
                time.sleep(0.001)
            sent.delete()
            assert on_device() == 1


def test_an_error_of_the_feed_comes_at_its_step(masks):
    dataset = load(path=masks)
    with data.Batches(dataset, 1, seed=0) as batches:
        names = [next(batches).names for _ in range(3)]
    (masks / names[2][0]).write_bytes(b"no image any more")
    with data.Batches(dataset, 1, seed=0) as batches, Feed(batches, Devices()) as feed:
        assert [next(feed).names for _ in range(2)] == names[:2]
        with pytest.raises(ImageError, match=names[2][0]):
            next(feed)


def test_closing_ends_the_thread(masks):
    before = threading.active_count()
    batches = data.Batches(load(path=masks), 1, seed=0, prefetch=1)
    next(batches)
    time.sleep(0.02)  # the thread has made the next one, and waits
    batches.close()
    assert threading.active_count() == before
    with pytest.raises(ValueError, match="closed"):
        next(batches)
    with pytest.raises(ValueError, match=r"`batch_size` \(=0\)"):
        data.Batches(load(path=masks), 0, seed=0)


def test_evaluation_fills_the_last_batch(masks):
    dataset = load(path=masks, eval_fraction=0.125)
    batches = list(data.evaluation(dataset, 3))
    assert [batch.count for batch in batches] == [3, 3, 1]
    assert {batch.images.shape for batch in batches} == {(3, 16, 16, 1)}
    names = [name for batch in batches for name in batch.names[: batch.count]]
    assert names == [dataset.name(i) for i in range(7)]
    assert (batches[-1].labels[1:] == data.IGNORED).all()
    textures = load(kind="textures", train_images=4)
    assert list(data.evaluation(textures, 3))[-1].labels.tolist() == [0, -1, -1]


def examined(folder, run, limits=(), **options):
    """Both splits, after all files were looked at; and what the user is told."""
    run.mkdir(exist_ok=True)
    found = [load(split, path=folder, seed=1, **options) for split in ("train", "eval")]
    lines = data.examine(*found, run, limits=limits)
    return *found, "\n".join(lines)


def save(path, array):
    pillow.fromarray(array).save(path)


def test_masks_of_0_and_255(tmp_path):
    """What is not background is in a corner, of one mask, far from any central window."""
    for name in ("images", "masks"):
        (tmp_path / name).mkdir()
    for i in range(8):
        save(tmp_path / f"images/{i}.png", np.zeros((90, 70), np.uint8))
        mask = np.zeros((90, 70), np.uint8)
        mask[85:, 60:] = 255 * (i == 6)
        save(tmp_path / f"masks/{i}.png", mask)
    run, two = tmp_path / "run", {"classes": 2}
    pattern = (
        r"6\.png: holds 255 \(50 pixels\), but the 2 classes are 0, 1, and nothing is ignored. Set "
        r"`data.mask_values` to .* or `data.ignored` to"
    )
    for on_bad_file in ("error", "skip"):  # it may be in every mask: it is never skipped
        with pytest.raises(DataError, match=pattern):
            examined(tmp_path, run, on_bad_file=on_bad_file, **two)
    train, _, text = examined(tmp_path, run, mask_values=(0, 255), **two)
    assert "training pixels: 37,750 of class 0, 50 of class 1" in text
    assert "warning: no held-out pixel is of class 1" in text
    assert train.example(0, None)[1].max() == 0
    train, _, text = examined(tmp_path, run, ignored=(255,), **two)
    assert "training pixels: 37,750 of class 0, 0 of class 1; 50 ignored" in text
    assert "warning: no training pixel is of class 1" in text
    with pytest.raises(ValueError, match=r"255 cannot be a class .* and be ignored"):
        load(path=tmp_path, mask_values=(0, 255), ignored=(255,), **two)
    with pytest.raises(ValueError, match="must have 2 values"):
        load(path=tmp_path, mask_values=(0, 1, 2), **two)


def test_what_was_found_is_kept_until_a_file_changes(masks, tmp_path):
    run, file = tmp_path / "run", masks / "masks/4.tif"
    (masks / "masks/4.png").unlink()
    tifffile.imwrite(file, np.zeros((40, 30), np.uint8))
    _, _, before = examined(masks, run)
    times = file.stat()
    tifffile.imwrite(file, np.full((40, 30), 2, np.uint8))
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert file.stat().st_size == times.st_size
    assert examined(masks, run)[2] == before, "it was not read again"
    with open(run / "scanned.jsonl", "a") as kept:  # as after a kill, and by another program
        kept.write('{"kind": "mask", "file": "x", "found": 3, "state": []}\n[]\n{"kind": "ma')
    os.utime(file)
    after = examined(masks, run)[2]
    assert after != before
    assert examined(masks, run)[2] == after


def test_files_that_cannot_be_read_to_their_end(masks, tmp_path):
    file = masks / "masks/4.png"
    file.write_bytes(file.read_bytes()[:-400])
    with pytest.raises(DataError, match=r"4\.png: rows .* truncated or corrupt"):
        examined(masks, tmp_path / "run")
    for _ in range(2):
        train, _, _ = examined(masks, tmp_path / "run", on_bad_file="skip")
        assert list(train.skipped) == ["images/4.tif"]
        assert len(train) == 5
    save(file, np.zeros((40, 30), np.uint8))
    assert len(examined(masks, tmp_path / "run", on_bad_file="skip")[0]) == 6


def test_masks_of_numbered_objects(masks, tmp_path):
    (masks / "masks/4.png").unlink()
    numbers = np.arange(1200, dtype=np.int32).reshape(40, 30) * 1000
    tifffile.imwrite(masks / "masks/4.tif", numbers)
    for on_bad_file in ("error", "skip"):
        with pytest.raises(DataError, match=r"4\.tif: holds more than 1024 different values"):
            examined(masks, tmp_path / "run", on_bad_file=on_bad_file)


def deep(folder, dtype=np.uint16, highest=4000, lowest=0):
    """Images of more than 8 bits."""
    for i in range(8):
        image = generator(i).integers(lowest, highest, (40, 30)).astype(dtype)
        tifffile.imwrite(folder / "images" / f"{i}.tif", image, tile=(16, 16))
    image[1, 2], image[39, 29] = lowest, highest
    for i in (0, 7):  # one of which is for training
        tifffile.imwrite(folder / "images" / f"{i}.tif", image, tile=(16, 16))


@pytest.mark.parametrize("dtype, lowest", [(np.uint16, 0), (np.int16, -1024), (np.float32, -0.5)])
def test_the_range_that_is_there(masks, tmp_path, dtype, lowest):
    deep(masks, dtype, 4000, lowest)
    train, held_out, text = examined(masks, tmp_path / "run")
    assert f"values from {lowest} to 4000 become 8 bits: the range of the 6 training images" in text
    for dataset in (train, held_out):
        whole = tifffile.imread(masks / dataset.name(0))[12:28, 7:23].astype(float)
        expected = np.rint((whole - lowest) / (4000 - lowest) * 255)
        np.testing.assert_array_equal(dataset.example(0, None)[0][..., 0], expected)
    assert data.read_range(tmp_path / "run") == (lowest, 4000)


def test_a_range_that_is_given(masks, tmp_path):
    deep(masks)
    train, _, text = examined(masks, tmp_path / "run", limits=(0, 65535))
    assert "values from 0 to 65535 become 8 bits: as `data.range` says" in text
    assert train.example(0, None)[0].max() <= 16
    assert data.read_range(tmp_path / "run") == (0, 65535)


def test_a_run_that_goes_on_has_the_range_that_it_began_with(masks, tmp_path):
    deep(masks)
    run = tmp_path / "run"
    before, _, _ = examined(masks, run)
    for i in range(8):
        path = masks / "images" / f"{i}.tif"
        tifffile.imwrite(path, tifffile.imread(path) * 2, tile=(16, 16))
    (run / "checkpoints/24").mkdir(parents=True)
    after, _, text = examined(masks, run)
    assert "values from 0 to 4000 become 8 bits: as when this run began" in text
    assert str(after.scale) == str(before.scale)
    (run / "data.json").write_text('{"range": [7]}')
    with pytest.raises(DataError, match=r"data\.json: is damaged: it must be"):
        examined(masks, run)
    (run / "checkpoints/24").rmdir()
    assert str(examined(masks, run)[0].scale) == "0 to 8000"


def test_ranges_that_cannot_be_found(masks, tmp_path):
    path = masks / "images/4.tif"  # for training, with this seed
    for values, pattern in [
        (np.full((40, 30), 7, np.uint16), r"4\.tif: all values of .* are 7: set `data.range`"),
        (np.full((40, 30), np.nan, np.float32), r"4\.tif: holds values that are not finite"),
    ]:
        tifffile.imwrite(path, values)
        with pytest.raises(DataError, match=pattern):
            examined(masks, tmp_path / "run")
    tifffile.imwrite(path, generator().integers(0, 4000, (40, 30), np.uint16))
    assert examined(masks, tmp_path / "run")[0].scale is not None, "the others have 8 bits"
    other = masks / "images/3.tif"
    tifffile.imwrite(other, np.zeros((40, 30), np.float32))
    with pytest.raises(DataError, match=r"values are .*, but those of .* set `data.range`"):
        examined(masks, tmp_path / "run")
    tifffile.imwrite(path, np.zeros((40, 30), np.uint8))
    tifffile.imwrite(other, np.zeros((40, 30), np.uint8))
    _, held_out, _ = examined(masks, tmp_path / "run")
    tifffile.imwrite(masks / held_out.name(0), np.zeros((40, 30), np.uint16))
    with pytest.raises(DataError, match=r"values are uint16, but those of .* are uint8"):
        examined(masks, tmp_path / "run")


@hypothesis.settings(max_examples=60, deadline=None, derandomize=True)
@hypothesis.given(
    shape=strategies.tuples(*[strategies.integers(1, 90)] * 2),
    block=strategies.tuples(*[strategies.integers(1, 90)] * 2),
    most=strategies.integers(1, 2000),
)
def test_windows_of_a_scan_cover_the_image_once(shape, block, most):
    block = tuple(map(min, block, shape))
    seen = np.zeros(shape, int)
    for window in _scan.windows(shape, block, most):
        seen[window] += 1
        one_block = max(most, block[0] * block[1])
        assert seen[window].size <= (max(most, shape[1]) if block[1] == shape[1] else one_block)
    assert (seen == 1).all()


def test_a_long_scan_shows_its_progress(masks, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(_scan, "_QUIET_SECONDS", -1)
    tifffile.imwrite(masks / "images/4.tif", np.zeros((2500, 2000), np.uint8))
    save(masks / "masks/4.png", np.zeros((2500, 2000), np.uint8))
    examined(masks, tmp_path / "run")
    assert "megapixels of files looked at 5/5" in capsys.readouterr().out
