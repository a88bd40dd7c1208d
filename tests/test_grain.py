"""Grain's own datasets and loaders as data of a run."""

import numpy as np
import pytest

from experiments import data

grain = pytest.importorskip("grain")


class Source:
    def __len__(self):
        return 6

    def __getitem__(self, index):
        image = np.random.default_rng(index).integers(0, 255, (9, 8, 3), np.uint8)
        return {"image": image, "label": image[..., 0] % 2}


class Invert(grain.transforms.Map):
    def map(self, element):
        return {**element, "image": 255 - element["image"]}


class Shade(grain.transforms.RandomMap):
    def random_map(self, element, rng):
        return {**element, "image": element["image"] // np.uint8(rng.integers(1, 50))}


class Some(grain.transforms.Filter):
    def filter(self, element):
        return True


def own(source):
    return data.Own(source, data.Geometry((9, 8), 3), classes=2, name="grains")


def loader(*operations):
    sampler = grain.samplers.IndexSampler(
        6, shard_options=grain.sharding.NoSharding(), shuffle=True, num_epochs=1, seed=3
    )
    return grain.DataLoader(data_source=Source(), sampler=sampler, operations=operations)


@pytest.mark.parametrize(
    "source",
    [
        grain.MapDataset.source(Source()).map(Invert()),
        loader(Invert()),
        loader(Invert(), grain.transforms.Batch(2)),
    ],
    ids=["dataset", "loader", "loader of batches"],
)
def test_examples(source):
    found = own(source)
    assert len(found) == 6
    image, label = found.example(4, np.random.default_rng(0))
    np.testing.assert_array_equal(image, 255 - Source()[4]["image"])
    np.testing.assert_array_equal(label, Source()[4]["label"])


def test_random_numbers_are_a_function_of_the_step():
    found = own(loader(Shade()))
    images = [found.example(1, np.random.default_rng(seed))[0] for seed in (5, 5, 6)]
    np.testing.assert_array_equal(images[0], images[1])
    assert np.any(images[0] != images[2])
    held_out = [found.example(1, None)[0] for _ in range(2)]
    np.testing.assert_array_equal(*held_out)


def test_what_has_no_numbers_is_refused():
    with pytest.raises(data.DataError, match=r"grains: its DataLoader has a Some, .*RandomMap"):
        own(loader(Some()))
    with pytest.raises(data.DataError, match=r"cannot go on where a run stopped.*MapDataset"):
        own(grain.MapDataset.source(Source()).to_iter_dataset())
    with pytest.raises(data.DataError, match=r"leave out what repeats them"):
        own(grain.MapDataset.source(Source()).repeat())
