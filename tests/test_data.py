"""Datasets: what an example is, what can be wrong with a folder, and the order of batches."""

import re
import threading
import time
import types

import hypothesis
import numpy as np
import pytest
import tifffile
from hypothesis import strategies
from PIL import Image as pillow

from experiments import data
from experiments.data import DataError, _folder, _synthetic
from experiments.images import ImageError


def load(split="train", label_size=None, seed=0, **changed):
    options = {
        "kind": "folder",
        "path": "",
        "labels": "masks",
        "size": 16,
        "channels": 1,
        "classes": 3,
        "mask_values": (),
        "train_images": 6,
        "eval_images": 4,
        "eval_fraction": 0.25,
        "augment": False,
        "on_bad_file": "error",
    }
    options = types.SimpleNamespace(**{**options, **changed})
    options.path = str(options.path)
    return data.load(options, split, seed=seed, label_size=label_size)


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


def test_synthetic_images_need_a_size():
    with pytest.raises(ValueError, match="`size` must be given for cells"):
        load(kind="cells", size=0)
    with pytest.raises(ValueError, match=r"`kind` \(='cell'\) must be one of 'cells'"):
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
    with pytest.raises(ValueError, match=r"`label_size` \(=\(15, 16\)\) .* \(16, 16\)"):
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
        r"4\.tif: its shape \(9, 30, 1\) is smaller than `size`, \(16, 16\)",
    ),
    "float": (
        lambda f: tifffile.imwrite(f / "images/4.tif", np.zeros((40, 30), np.float32)),
        r"4\.tif: its values are float32; convert",
    ),
    "channels": (
        lambda f: tifffile.imwrite(
            f / "images/4.tif",
            np.zeros((40, 30, 6), np.uint8),
            photometric="minisblack",
            planarconfig="contig",
        ),
        r"4\.tif: has 6 channels",
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
        r"4\.png: holds the value 3; with 3 classes a mask has 0, 1, 2 and",
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


def test_255_does_not_count(masks):
    pillow.fromarray(np.full((40, 30), 255, np.uint8)).save(masks / "masks" / "4.png")
    dataset = load(path=masks, seed=1)
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
        (None, "there is no such file"),
    ],
)
def test_tables_of_labels(tmp_path, text, pattern):
    for name in "ab":
        pillow.fromarray(np.zeros((20, 20), np.uint8)).save(tmp_path / f"{name}.png")
    if text is not None:
        (tmp_path / "labels.csv").write_text(text)
    options = {"path": tmp_path, "labels": "csv", "classes": 2, "eval_fraction": 0.0}
    if pattern is not None:
        with pytest.raises(DataError, match=rf"labels\.csv: .*{pattern}"):
            load(**options)
        return
    dataset = load(**options)
    labels = {dataset.name(i): int(dataset.example(i, None)[1]) for i in range(2)}
    assert labels == {"a.png": 0, "b.png": 1}
    assert dataset.ignored == 0


def test_channels_and_depths():
    rgb = np.array([[[10, 20, 31]]], np.uint8)
    np.testing.assert_array_equal(_folder.as_bytes(rgb, 1), [[[20]]])
    np.testing.assert_array_equal(_folder.as_bytes(rgb, 3), rgb)
    rgba = np.array([[[10, 20, 31, 99]]], np.uint8)
    np.testing.assert_array_equal(_folder.as_bytes(rgba, 3), rgb)
    np.testing.assert_array_equal(_folder.as_bytes(rgb[..., :2], 3), [[[10, 10, 10]]])
    np.testing.assert_array_equal(_folder.as_bytes(rgb.astype(np.uint16) * 256 + 9, 3), rgb)


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


def test_an_epoch_has_every_example_once(masks):
    dataset = load(path=masks)
    with data.Batches(dataset, 2, seed=0) as batches:
        names = [name for _ in range(6) for name in next(batches).names]
    for epoch in (names[:6], names[6:]):
        assert sorted(epoch) == sorted(dataset.name(i) for i in range(6))
    assert names[:6] != names[6:]


def test_an_error_comes_at_its_step(masks):
    dataset = load(path=masks, seed=1)
    with data.Batches(dataset, 1, seed=0, prefetch=0) as batches:
        step = [next(batches).names[0] for _ in range(6)].index("images/4.tif")
    pillow.fromarray(np.full((40, 30), 9, np.uint8)).save(masks / "masks" / "4.png")
    with data.Batches(load(path=masks, seed=1), 1, seed=0, prefetch=3) as batches:
        for expected in range(step):
            assert next(batches).step == expected
        for _ in range(2):
            with pytest.raises(DataError, match=r"4\.png: holds the value 9"):
                next(batches)


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


def test_black_and_white_masks_must_be_declared(masks):
    """255 does not count, so masks of 0 and 255 would silently train on background alone."""
    for file in (masks / "masks").glob("*.png"):
        mask = np.asarray(pillow.open(file))
        pillow.fromarray(np.where(mask == 1, 255, 0).astype(np.uint8)).save(file)
    with pytest.raises(DataError, match=r"only 0 and 255.*`data.mask_values` to \(0, 255\)"):
        load(path=masks, classes=2)
    dataset = load(path=masks, classes=2, mask_values=(0, 255))
    image, mask = dataset.example(0, None)
    np.testing.assert_array_equal(mask, image[..., 0] % 3 == 1)
    ignoring = load(path=masks, classes=2, mask_values=(0, 1))
    np.testing.assert_array_equal(ignoring.example(0, None)[1], np.where(mask == 1, 255, 0))
    with pytest.raises(ValueError, match="must have 2 values"):
        load(path=masks, classes=2, mask_values=(0, 1, 2))
