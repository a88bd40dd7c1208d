"""Volumes and traces, end to end: drawn or from files, trained in tiles, predicted to files."""

import json
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tifffile
from flax import nnx

import jaxtile
import models
from experiments import data, predict, train
from experiments.data._scan import windows
from experiments.images import ImageError, create_image, open_image
from experiments.program.config import base
from experiments.training.learner import Learner
from experiments.training.trained import load_trained

from .support import assert_close, normal


def config_for(dimensions=3, **options):
    config = base("unet", channels=(2, 4), padding="SAME", dropout=0.0, **options)
    config.data.dimensions, config.data.size = dimensions, 12
    config.data.train_images, config.data.eval_images = 2, 1
    return config


@pytest.mark.slow
@pytest.mark.parametrize("dimensions", [1, 3])
def test_a_step_is_exact_in_tiles(dimensions):
    config = config_for(dimensions, norm="batch")
    config.dtype = "float64"
    learner = Learner(config)
    batch = next(data.Batches(data.load(config.data, "train", seed=0), 1, seed=0))
    params, variables = jax.tree.map(
        lambda x: x.astype(jnp.float64) if jnp.issubdtype(x.dtype, jnp.floating) else x,
        tuple(learner.weights()),
    )

    def step(loss):
        fun = jax.jit(jax.value_and_grad(loss, has_aux=True))
        return fun(params, variables, batch.images, batch.labels)

    axes = learner.in_axes(2)
    tiled = jaxtile.checkpoint(learner.loss, in_axes=axes, tiles=(2,) * dimensions)
    assert_close(step(tiled), step(learner.loss))


@pytest.mark.slow
def test_a_resnet_of_volumes_is_exact_in_tiles():
    """With batch statistics; the image is small, and so is the network."""
    model = models.ResNet50(
        3, in_channels=1, blocks=(1,), width=2, spatial=3, param_dtype=jnp.float64, rngs=nnx.Rngs(0)
    )
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)

    def loss(params, image):
        return nnx.merge(graphdef, params, rest, copy=True).loss(image, jnp.array([1, 2]))

    image = normal(1, 2, 20, 18, 17, 1)
    tiled = jaxtile.checkpoint(loss, in_axes=(None, (1, 2, 3)), tiles=(2, 1, 2))
    assert_close(jax.jit(jax.grad(tiled))(params, image), jax.jit(jax.grad(loss))(params, image))


def test_drawn_cells_of_three_dimensions():
    config = config_for()
    config.data.size, config.data.augment = 24, True
    found = data.load(config.data, "train", seed=0)
    image, mask = found.example(0, np.random.default_rng(1))
    assert (image.shape, mask.shape, image.dtype) == ((24, 24, 24, 1), (24, 24, 24), np.uint8)
    assert image[mask == 1].mean() > image[mask == 0].mean() + 10
    plain, again = (found.example(0, None)[1] for _ in range(2))
    np.testing.assert_array_equal(plain, again)
    assert plain.sum() == mask.sum()  # flipped and turned, not computed


@pytest.mark.parametrize("suffix", [".npy", ".zarr", ".tif", "raw.tif"])
def test_windows_of_a_volume(tmp_path, suffix):
    values = np.random.default_rng(0).integers(0, 60000, (7, 20, 18), np.uint16)
    path = tmp_path / f"volume{suffix}"
    if suffix.endswith(".tif"):
        packed = {} if suffix == "raw.tif" else {"tile": (16, 16), "compression": "zlib"}
        tifffile.imwrite(path, values, photometric="minisblack", **packed)
    else:
        with create_image(path, values.shape, values.dtype, dimensions=3) as written:
            written[2:7, 0:20, 0:18] = values[2:]
            written[0:2, 0:20, 0:18] = values[:2]
    with open_image(path, dimensions=3) as volume:
        assert (volume.shape, volume.dtype) == ((7, 20, 18, 1), np.uint16)
        np.testing.assert_array_equal(volume[2:6, 3:20, 1:17][..., 0], values[2:6, 3:20, 1:17])
        found = np.zeros(values.shape, int)
        for window in windows(volume.shape, volume.block, at_once=50):
            found[window] += 1
            assert volume[window].size
        assert (found == 1).all()
        with pytest.raises(IndexError, match="planes 5 to 8"):
            volume[5:8, 0:1, 0:1]
    if suffix == ".npy":
        np.save(path, values[0])
        with pytest.raises(ImageError, match=r"a volume is \(D, H, W\) or .* has 2 dimensions"):
            open_image(path, dimensions=3)


@pytest.fixture
def folder(tmp_path):
    for split, number in (("train", 2), ("eval", 1)):
        for kind in ("images", "masks"):
            (tmp_path / "files" / split / kind).mkdir(parents=True)
        for i in range(number):
            image = np.random.default_rng(i).integers(0, 4000, (14, 17, 15), np.uint16)
            mask = (image > 2000).astype(np.uint8) * 9
            tifffile.imwrite(tmp_path / f"files/{split}/images/{i}.tif", image)
            np.save(tmp_path / f"files/{split}/masks/{i}.npy", mask)
    return tmp_path / "files"


@pytest.mark.slow
@pytest.mark.usefixtures("settings_restored")
def test_train_and_predict_volumes_of_a_folder(folder, tmp_path, capsys):
    """Whole held-out files are evaluated in tiles, and a prediction is the plain network's."""
    config = config_for()
    config.data.kind, config.data.path, config.data.mask_values = "folder", str(folder), (0, 9)
    config.train.steps, config.eval.tile, config.policy = 2, 8, "tiled:2x2x2"
    assert train.train(config, str(tmp_path / "run")) == 0
    printed = capsys.readouterr().out
    assert "2 images of 12 x 12 x 12 x 1 and 1 to evaluate" in printed
    assert "1 held-out image, whole, tile by tile" in printed
    assert (tmp_path / "run" / "predictions.png").exists()
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    counted = json.loads(lines[-1])["counted"]
    assert sum(counted) == 14 * 17 * 15

    image = folder / "eval" / "images" / "0.tif"
    options = {"tile": 8, "range": None, "level": None, "probabilities": False, "dtype": "float32"}
    given = types.SimpleNamespace(
        workdir=tmp_path / "run", image=str(image), out=str(tmp_path / "mask.npy"), **options
    )
    predict.run(given)
    trained = load_trained(tmp_path / "run")
    low, high = data.read_range(tmp_path / "run")
    pixels = np.rint((tifffile.imread(image) - low) / (high - low) * 255).clip(0, 255)
    padded = np.pad(pixels, [(0, 0), (0, 1), (0, 1)], "edge").astype(np.uint8)[None, ..., None]
    scores = trained.learner.scores(trained.weights, padded)[0, :, :17, :15]
    want = 9 * np.asarray(scores.argmax(-1))
    np.testing.assert_array_equal(np.load(tmp_path / "mask.npy")[..., 0], want)


@pytest.mark.slow
@pytest.mark.usefixtures("settings_restored")
@pytest.mark.parametrize(("dimensions", "size", "budget"), [(2, 128, 1400), (3, 24, 900)])
def test_a_unet_with_the_encoder_of_resnet50_trains_within_a_budget(
    dimensions, size, budget, tmp_path
):
    encoder = {"encoder": "resnet50", "blocks": (1,)}
    config = base("unet", channels=4, padding="SAME", norm="batch", dropout=0.0, **encoder)
    config.data.dimensions, config.data.size = dimensions, size
    config.data.train_images, config.data.eval_images = 2, 1
    config.train.steps, config.policy = 2, f"budget:{budget}KiB"
    assert train.train(config, str(tmp_path)) == 0
    found = json.loads((tmp_path / "summary.json").read_text())["bytes"]
    assert found["compiled"] <= budget * 1024 < found["plain_compiled"]


@pytest.mark.parametrize("name", ["mask.tif", "mask.nii.gz"])
def test_a_volume_has_names_of_its_own(tmp_path, name):
    words = r"a volume is written to a name that ends in \.npy, \.zarr, \.ome\.zarr"
    with pytest.raises(ImageError, match=words):
        create_image(tmp_path / name, (4, 5, 6), np.uint8, dimensions=3)
    assert not list(tmp_path.iterdir())
