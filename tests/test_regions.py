"""Training windows lie where people say."""

import json

import numpy as np
import pytest
from PIL import Image as Pillow

from experiments import data
from experiments.data._regions import Polygons
from experiments.program.config import base

SIZE = (200, 300)


@pytest.fixture
def options(tmp_path):
    """An image whose pixels say where they are."""
    for name in ("images", "masks", "regions"):
        (tmp_path / name).mkdir()
    rows, columns = np.indices(SIZE)
    np.save(
        tmp_path / "images/a.npy", np.stack([rows, columns % 256, columns // 256], -1).astype("u1")
    )
    np.save(tmp_path / "masks/a.npy", np.zeros(SIZE, np.uint8))
    found = base("unet").data
    found.kind, found.path, found.size = "folder", str(tmp_path), 20
    found.channels, found.eval_fraction, found.regions = 3, 0.0, "regions"
    return found


def centres(options, number=60):
    dataset = data.load(options, "train", seed=0)
    rngs = [np.random.default_rng(i) for i in range(number)]
    images = [dataset.example(0, rng)[0].astype(int) for rng in rngs]
    middle = np.array([image[10, 10] for image in images])
    return middle[:, 0], middle[:, 1] + 256 * middle[:, 2]


def test_boxes(options, tmp_path):
    (tmp_path / "regions/a.csv").write_text("top,left,bottom,right\n50,100,60,200\n0,290,10,300\n")
    y, x = centres(options)
    corner = x >= 250  # at the edge a window is moved inside
    assert (y[corner] == 10).all()
    assert (x[corner] == 290).all()
    assert ((y >= 50) & (y <= 60) & (x >= 100) & (x <= 200))[~corner].all()
    assert 0 < corner.sum() < 20  # one area in eleven


def test_polygons_with_holes(options, tmp_path):
    ring = [[50, 50], [150, 50], [150, 150], [50, 150], [50, 50]]  # (x, y)
    hole = [[60, 60], [140, 60], [140, 140], [60, 140], [60, 60]]
    feature = {"type": "Feature", "geometry": {"type": "Polygon", "coordinates": [ring, hole]}}
    collection = {"type": "FeatureCollection", "features": [feature]}
    (tmp_path / "regions/a.geojson").write_text(json.dumps(collection))
    y, x = centres(options)
    assert ((y >= 49) & (y <= 150) & (x >= 49) & (x <= 150)).all()
    assert not ((y > 61) & (y < 139) & (x > 61) & (x < 139)).any()


def test_polygons_are_drawn_by_their_areas():
    """A triangle of 50, with a corner at the origin, beside a square of 100."""
    triangle = [np.array([[0, 0], [0, 10], [10, 0.0]])]
    square = [np.array([[20, 20], [20, 30], [30, 30], [30, 20.0]])]
    rng = np.random.default_rng(0)
    points = np.array([Polygons([triangle, square]).draw(rng, SIZE) for _ in range(3000)])
    first = points[:, 0] < 15
    assert abs(first.mean() - 1 / 3) < 0.03
    assert (points[first].sum(1) <= 10).all()


def test_a_tissue_mask_of_another_size(options, tmp_path):
    tissue = np.zeros((20, 30), np.uint8)
    tissue[10, 15:20] = 255
    Pillow.fromarray(tissue).save(tmp_path / "regions/a.png")
    y, x = centres(options)
    assert ((y >= 99) & (y <= 110) & (x >= 149) & (x <= 200)).all()
    assert len(set(x)) > 20


def test_what_lies_outside_of_the_image_is_no_part_of_a_region(options, tmp_path):
    """As where somebody drew over the edge of a slide."""
    (tmp_path / "regions/a.csv").write_text("top,left,bottom,right\n-500,100,100,200\n")
    y, x = centres(options, 200)
    assert ((y <= 100) & (x >= 100) & (x <= 200)).all()
    assert (y > 20).sum() > 100  # and not in a heap at the edge


def test_a_tissue_mask_of_another_shape(options, tmp_path):
    for shape, fits in {(20, 31): True, (21, 30): True, (30, 20): False, (30, 30): False}.items():
        Pillow.fromarray(np.full(shape, 255, np.uint8)).save(tmp_path / "regions/a.png")
        if fits:
            data.load(options, "train", seed=0)
            continue
        words = (
            rf"a\.png: is {shape[0]} x {shape[1]} pixels, .* shape of a\.npy, which is 200 x 300"
        )
        with pytest.raises(data.DataError, match=words):
            data.load(options, "train", seed=0)


def test_two_regions_of_one_image(options, tmp_path):
    for name in ("a.csv", "a.geojson"):
        (tmp_path / "regions" / name).write_text("top,left,bottom,right\n0,0,9,9\n")
    with pytest.raises(data.DataError, match=r"a\.csv and a\.geojson are of one image"):
        data.load(options, "train", seed=0)


@pytest.mark.parametrize(
    "name, text, words",
    [
        ("b.csv", "", r"has no regions for a\.npy"),
        ("a.csv", "x,y\n1,2\n", r"a\.csv: are no regions: KeyError 'top'"),
        (
            "a.csv",
            "top,left,bottom,right\n900,0,999,9\n",
            r"rows 900 to 999 .* outside of the image",
        ),
        ("a.csv", "top,left,bottom,right\n0,0,nan,9\n", "corners that are not finite"),
        ("a.geojson", '{"type": "FeatureCollection", "features": []}', "has no region"),
    ],
)
def test_what_is_wrong(options, tmp_path, name, text, words):
    (tmp_path / "regions" / name).write_text(text)
    with pytest.raises(data.DataError, match=words):
        data.load(options, "train", seed=0)
