"""Training examples by the weights of their classes."""

import collections

import numpy as np
import pytest
from PIL import Image as Pillow

from experiments import data
from experiments.data._weighted import cells
from experiments.program.config import ConfigError, base, check

SIZE = (300, 520)  # two cells by three


@pytest.fixture
def options(tmp_path):
    """Three images whose pixels say where they are; class 2 is 10 and 20 pixels of two."""
    for name in ("images", "masks"):
        (tmp_path / name).mkdir()
    rows, columns = np.indices(SIZE)
    for i, name in enumerate("abc"):
        pixels = np.stack([rows, columns % 256, rows // 256 + 2 * (columns // 256)], -1)
        np.save(tmp_path / f"images/{name}.npy", pixels.astype("u1"))
        mask = np.zeros(SIZE, np.uint8)
        mask[:, 260:] = 100
        mask[280, 480 : 480 + 10 * i] = 200
        mask[100:120] = 255
        np.save(tmp_path / f"masks/{name}.npy", mask)
    found = base("unet").data
    found.kind, found.path, found.size, found.channels = "folder", str(tmp_path), 21, 3
    found.classes, found.mask_values, found.ignored = 3, (0, 100, 200), (255,)
    found.eval_fraction = 0.0
    return found


def weighed(options, folder, weights):
    train = data.load(options, "train", seed=0)
    lines = data.examine(train, train, folder, weights=weights)
    return train, lines


def drawn(train, number):
    """Which images, and which values of their masks at the centres of windows."""
    found = collections.Counter()
    with data.Batches(train, 1, seed=3) as batches:
        for _ in range(number):
            batch = next(batches)
            y, x, far = batch.images[0, 10, 10].astype(int)
            mask = np.load(f"{train.path}/masks/{batch.names[0][-5]}.npy")
            found[batch.names[0][-5], mask[y + 256 * (far % 2), x + 256 * (far // 2)]] += 1
    return found


def test_centres_are_of_the_classes_by_their_weights(options, tmp_path):
    train, lines = weighed(options, tmp_path, (0, 1, 3))
    assert "25.0% of class 1, 75.0% of class 2" in lines[-1]
    found = drawn(train, 400)
    assert {value for _, value in found} == {100, 200}
    assert abs(sum(n for (_, value), n in found.items() if value == 200) - 300) < 35
    assert "a" not in {name for name, value in found if value == 200}  # it has none
    assert abs(found["c", 200] - 200) < 40  # two thirds of these pixels are there
    again, _ = weighed(options, tmp_path, (0, 1, 3))  # with what was kept
    assert drawn(again, 40) == drawn(train, 40)


def test_windows_at_the_edge_hold_the_pixel(options, tmp_path):
    options.size = 64
    train, _ = weighed(options, tmp_path, (0, 0, 1))
    for i in range(10):
        _, label = train.example(2, np.random.default_rng(i))
        assert (label == 2).any()


def test_images_of_classes(tmp_path):
    for name, number in (("common", 9), ("rare", 1)):
        (tmp_path / name).mkdir()
        for i in range(number):
            pixels = np.full((8, 8), i, np.uint8)
            Pillow.fromarray(pixels).save(tmp_path / name / f"{i}.png")
    found = base("resnet50").data
    found.kind, found.path, found.labels, found.size = "folder", str(tmp_path), "folders", 8
    found.eval_fraction = 0.0
    train, lines = weighed(found, tmp_path, (1, 1))
    assert "training images are drawn by `data.class_weights`: 50.0% of class 0" in lines[-1]
    with data.Batches(train, 100, seed=0) as batches:
        assert abs(next(batches).labels.sum() - 50) < 15


def test_classes_that_are_not_there(options, tmp_path):
    options.path = str(tmp_path)
    for name in "abc":
        np.save(tmp_path / f"masks/{name}.npy", np.zeros(SIZE, np.uint8))
    with pytest.raises(ValueError, match=r"no training example .* there are 468000, 0, 0"):
        weighed(options, tmp_path, (0, 1, 3))


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"kind": "cells"}, "is for files .* here they are 'cells' and 'masks'"),
        ({"labels": "tags"}, "here they are 'folder' and 'tags'"),
        ({"class_weights": (1, 2, 3)}, "must be 2 numbers"),
        ({"class_weights": (0, 0)}, "not all 0"),
        ({"class_weights": (1, -1)}, "not negative"),
        ({"regions": "regions"}, "both say where windows lie: use one"),
    ],
)
def test_what_is_wrong(changes, words):
    config = base("unet")
    config.data.kind, config.data.path, config.data.class_weights = "folder", "x", (1, 4)
    check(config)
    config.data.update(changes)
    with pytest.raises(ConfigError, match=words):
        check(config)


def test_cells_are_few_and_small():
    assert cells((512, 512, 512)) == (32, (16, 16, 16))
    assert cells((1000,)) == (65536, (1,))
