"""Predictions from file to file are those of the plain network on the whole image."""

import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tifffile

from experiments import predict, tasks
from experiments.images import create_image, open_image
from experiments.predicting.network import Network
from experiments.predicting.pixels import Pixels
from experiments.predicting.whole_image import _limit
from experiments.program.config import base
from experiments.training.checkpoints import Checkpoints
from experiments.training.learner import Learner

from .programs import python
from .support import conv, normal

ROOT = pathlib.Path(__file__).parent.parent


def trained(
    folder, model="unet", *, colours=3, classes=4, dtype="float64", mask_values=(), **options
):
    """The folder of a run that never took a step."""
    config = base(model, **options)
    config.dtype = dtype
    config.data.channels, config.data.classes = colours, classes
    config.data.mask_values = mask_values
    folder.mkdir()
    (folder / "config.json").write_text(config.to_json())
    learner = Learner(config)
    weights = learner.weights()
    checkpoints = Checkpoints(folder / "checkpoints", keep=1)
    checkpoints.save(0, {"params": weights.params, "variables": weights.variables}, {})
    checkpoints.close()
    return jax.jit(lambda images: learner.scores(weights, images))


def image_file(path, height, width, channels=3, dtype=np.uint8):
    values = np.random.default_rng(0).integers(
        0, np.iinfo(dtype).max, (height, width, channels), dtype
    )
    with create_image(path, values.shape, dtype) as image:
        image[:height, :width] = values
    return values


def run(workdir, image, out, **options):
    given = {
        "tile": 16,
        "level": None,
        "range": None,
        "probabilities": False,
        "dtype": "float32",
        **options,
    }
    predict.run(types.SimpleNamespace(workdir=workdir, image=str(image), out=str(out), **given))


def padded(values, height, width):
    missing = (0, height - values.shape[0]), (0, width - values.shape[1]), (0, 0)
    return np.pad(values, missing, mode="edge")[None]


def test_a_mask_has_the_values_that_masks_had_in_tiles_that_are_compressed(tmp_path):
    scores = trained(
        tmp_path / "run", classes=2, mask_values=(7, 300), channels=2, depth=1, padding="SAME"
    )
    values = image_file(tmp_path / "image.npy", 22, 18)
    run(tmp_path / "run", tmp_path / "image.npy", tmp_path / "mask.tif")
    with tifffile.TiffFile(tmp_path / "mask.tif") as file:
        page = file.pages[0]
        assert (page.is_tiled, page.compression.name) == (True, "ADOBE_DEFLATE")
        found = page.asarray()
    want = np.array([7, 300], np.uint16)[scores(values[None])[0].argmax(-1)]
    np.testing.assert_array_equal(found, want)
    assert found.dtype == np.uint16
    assert [f.name for f in tmp_path.iterdir() if f.name.startswith(".")] == []


@pytest.mark.slow
def test_segmentation_of_any_size(tmp_path, capsys):
    scores = trained(tmp_path / "run", channels=4, depth=1, padding="SAME", norm="batch")
    values = image_file(tmp_path / "image.tif", 45, 37)
    run(tmp_path / "run", tmp_path / "image.tif", tmp_path / "mask.tif")
    want = scores(padded(values, 46, 38))[0, :45, :37]
    with open_image(tmp_path / "mask.tif", mask=True) as mask:
        assert (mask.shape, mask.dtype) == ((45, 37, 1), np.uint8)
        np.testing.assert_array_equal(mask[:45, :37][..., 0], want.argmax(-1))
    printed = capsys.readouterr().out
    assert "mask.tif: 45 x 37 pixels; the network saw 46 x 38" in printed
    assert "tile by tile" in printed
    assert "megapixels/s" in printed

    out = tmp_path / "probabilities.npy"
    run(tmp_path / "run", tmp_path / "image.tif", out, probabilities=True)
    np.testing.assert_allclose(np.load(out), jax.nn.softmax(want), atol=1e-6)


def test_segmentation_without_padding(tmp_path, capsys):
    """The map is smaller; 16 bits and an alpha channel become 8 bits and one grey value."""
    scores = trained(tmp_path / "run", colours=1, channels=2, depth=1, padding="VALID")
    values = image_file(tmp_path / "image.npy", 33, 40, 4, np.uint16)
    run(
        *(tmp_path / "run", tmp_path / "image.npy", tmp_path / "mask.npy"),
        tile=7,
        range=["0", "65535"],
    )
    colours = np.rint(values[..., :3] / 65535 * 255).astype(int)
    grey = (colours.sum(-1, keepdims=True) + 1) // 3
    want = scores(padded(grey.astype(np.uint8), 34, 40)).argmax(-1)[0]
    np.testing.assert_array_equal(np.load(tmp_path / "mask.npy")[..., 0], want[:17, :24])
    printed = capsys.readouterr().out
    assert (
        "17 x 24 pixels; its first pixel is pixel (8, 8) of the image; the network saw" in printed
    )


def test_pixels_without_data_that_training_did_not_leave_out(tmp_path, capsys):
    """The file says that there are such; the network takes them as any others, which is said."""
    trained(tmp_path / "run", colours=1, channels=2, depth=1, padding="SAME")
    tags = [(42113, "s", 0, "255", True)]
    tifffile.imwrite(tmp_path / "image.tif", np.zeros((16, 16), np.uint8), extratags=tags)
    run(tmp_path / "run", tmp_path / "image.tif", tmp_path / "mask.npy")
    printed = capsys.readouterr().out
    assert "image.tif says that pixels of 255.0 have no data, but the network was" in printed
    assert "without `data.nodata = (255.0,)`" in printed
    (tmp_path / "run/config.json").write_text(
        (tmp_path / "run/config.json").read_text().replace('"nodata": []', '"nodata": [255]')
    )
    run(tmp_path / "run", tmp_path / "image.tif", tmp_path / "mask.npy")
    assert "have no data" not in capsys.readouterr().out


@pytest.mark.slow
def test_values_that_are_not_of_8_bits(tmp_path, capsys):
    """By the range of training, by the image's own, or by what the command says; it is printed."""
    scores = trained(tmp_path / "run", colours=1, channels=4, depth=1, padding="SAME")
    config = json.loads((tmp_path / "run/config.json").read_text())
    for name in ("range", "ignored", "files_outside"):  # of a run of an earlier version
        del config["data"][name]
    (tmp_path / "run/config.json").write_text(json.dumps(config))
    values = image_file(tmp_path / "image.tif", 24, 20, 1, np.uint16) // 20  # up to 3276
    with create_image(tmp_path / "image.tif", values.shape, np.uint16) as image:
        image[:24, :20] = values

    def check(low, high, words, **options):
        run(tmp_path / "run", tmp_path / "image.tif", tmp_path / "mask.npy", **options)
        pixels = np.clip(np.rint((values - float(low)) / (high - low) * 255), 0, 255)
        want = scores(pixels.astype(np.uint8)[None]).argmax(-1)[0]
        np.testing.assert_array_equal(np.load(tmp_path / "mask.npy")[..., 0], want)
        printed = capsys.readouterr().out
        assert f"uint16: values from {low} to {high} become 8 bits, {words}" in printed
        assert ("warning: values from" in printed) == (high < values.max())

    own = int(values.min()), int(values.max())
    check(*own, "the image's range: the network was trained on 8 bits")
    check(0, 4095, "as --range says", range=["0", "4095"])
    (tmp_path / "run/data.json").write_text('{"range": [0, 2000]}')
    check(0, 2000, "the range of the training images")
    with pytest.raises(SystemExit, match=r"error: --range=7 must be two numbers, as 0,4095"):
        check(0, 1, "", range=["7"])


@pytest.mark.slow
def test_classification(tmp_path, capsys):
    scores = trained(tmp_path / "run", "resnet50", blocks=(1, 1), width=4)
    values = image_file(tmp_path / "image.npy", 45, 37)
    run(tmp_path / "run", tmp_path / "image.npy", tmp_path / "class.json")
    want = jax.nn.softmax(scores(values[None]))[0]
    record = json.loads((tmp_path / "class.json").read_text())
    np.testing.assert_allclose([record["probabilities"][str(i)] for i in range(4)], want, atol=1e-6)
    assert record["class"] == str(int(want.argmax()))
    assert f"{want.max():.5f}"[:-1] in capsys.readouterr().out
    with pytest.raises(SystemExit, match=r"error: --out=.*is written as \.json"):
        run(tmp_path / "run", tmp_path / "image.npy", tmp_path / "class.tif")


def test_errors_are_one_line_before_anything_runs(tmp_path, monkeypatch):
    workdir, image, out = tmp_path / "run", tmp_path / "image.npy", tmp_path / "mask.tif"
    trained(workdir, channels=2, depth=1)
    image_file(image, 8, 8)
    image_file(tmp_path / "five.npy", 30, 30, 5)
    np.save(tmp_path / "float.npy", np.zeros((30, 30, 3), np.float32))
    image_file(tmp_path / "large.npy", 30, 30)
    for arguments, words in [
        ((workdir, tmp_path / "none.tif", out), "none.tif: there is no such file"),
        ((tmp_path / "none", image, out), "none is not there: name the folder of a training run"),
        ((workdir, image, image), "is the image itself"),
        ((workdir, image, out), "8 x 8 pixels is too small: the network needs at least 17"),
        ((workdir, tmp_path / "five.npy", out), "has 5 channels"),
        ((workdir, tmp_path / "float.npy", out), "all its values are 0.0: --range=LOW,HIGH"),
        ((workdir, tmp_path / "large.npy", tmp_path / "none" / "mask.tif"), "there is no folder"),
        ((workdir, tmp_path / "large.npy", tmp_path / "mask.png"), "a name that ends in .tif"),
    ]:
        with pytest.raises(SystemExit) as stopped:
            run(*arguments)
        assert stopped.value.code.startswith("error: ")
        assert words in stopped.value.code
        assert "\n" not in stopped.value.code

    def full(*_):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")

    monkeypatch.setattr(Pixels, "__getitem__", full)
    with pytest.raises(SystemExit, match="tiles of 16 pixels need too much memory: try --tile=8"):
        run(workdir, tmp_path / "large.npy", out)
    assert not [f for f in tmp_path.iterdir() if "mask" in f.name]


def test_the_program(tmp_path):
    trained(tmp_path / "run", channels=2, depth=1, padding="SAME", dtype="float32")
    image_file(tmp_path / "image.tif", 20, 20)

    given = {"workdir": "run", "image": "image.tif", "out": "mask.npy"}
    flags = [f"--{name}={tmp_path / file}" for name, file in given.items()]
    done = python("-m", "experiments.predict", *flags)
    assert done.returncode == 0, done.stderr[-2000:]
    assert np.load(tmp_path / "mask.npy").shape == (20, 20, 1)


def test_a_prediction_goes_on_where_it_was_stopped(tmp_path, monkeypatch):
    """With the same bytes; what is there is not computed again, unless something has changed."""
    workdir, image, out = tmp_path / "run", tmp_path / "image.npy", tmp_path / "mask.tif"
    trained(workdir, channels=2, depth=1, padding="SAME", dtype="float32")
    image_file(image, 60, 60)
    run(workdir, image, tmp_path / "whole.tif")
    reads, at_most, read = [], 5, Pixels._read

    def counted(self, place):
        if len(reads) == at_most:
            raise KeyboardInterrupt
        reads.append(place)
        return read(self, place)

    monkeypatch.setattr(Pixels, "_read", counted)
    for changed in (False, True):
        reads, at_most = [], 5
        with pytest.raises(KeyboardInterrupt):
            run(workdir, image, out)
        assert sorted(f.name for f in tmp_path.iterdir() if "mask" in f.name) == ["mask.tif.part"]
        there = len((tmp_path / "mask.tif.part" / "written.txt").read_text().split("\n")) - 1
        assert 3 <= there <= 5
        if changed:
            os.utime(image)
        reads, at_most = [], 99
        run(workdir, image, out)
        assert len(reads) == (16 if changed else 16 - there)
        assert out.read_bytes() == (tmp_path / "whole.tif").read_bytes()
        assert sorted(f.name for f in tmp_path.iterdir() if "mask" in f.name) == ["mask.tif"]
        out.unlink()


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, file", [("SIGINT", "a.npy"), ("SIGTERM", "b.zarr"), ("SIGKILL", "c.ome.zarr")]
)
def test_a_program_that_is_stopped_goes_on(tmp_path, name, file):
    trained(tmp_path / "run", channels=2, depth=1, padding="SAME", dtype="float32")
    image_file(tmp_path / "image.npy", 700, 700)
    command = [sys.executable, "-m", "experiments.predict", f"--workdir={tmp_path / 'run'}"]
    command += [f"--image={tmp_path / 'image.npy'}", "--tile=16"]
    run(tmp_path / "run", tmp_path / "image.npy", tmp_path / f"whole-{file}")

    def started():
        given = [*command, f"--out={tmp_path / file}"]
        return subprocess.Popen(
            given, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    program = started()
    while not (tmp_path / f"{file}.part" / "written.txt").exists():
        assert program.poll() is None, program.communicate()
        time.sleep(0.01)
    program.send_signal(signal.Signals[name])
    _, errors = program.communicate(timeout=300)
    if name != "SIGKILL":
        assert program.returncode == 128 + signal.Signals[name], errors
        assert errors.splitlines()[-1].startswith(f"stopped by {name}; the same command goes on")
    printed, errors = started().communicate(timeout=300)
    assert "going on: " in printed, errors
    assert sorted(f.name for f in tmp_path.iterdir() if "part" in f.name) == []
    whole, found = tmp_path / f"whole-{file}", tmp_path / file
    parts = [p.relative_to(whole) for p in whole.rglob("*")] if whole.is_dir() else [""]
    files = (
        [p for p in parts if (whole / p).is_file() and p.name != ".zattrs"] if parts[0] else [""]
    )
    assert all((found / p).read_bytes() == (whole / p).read_bytes() for p in files)
    assert len(files) >= 1


@pytest.mark.slow
def test_masks_have_pyramids_names_colours_and_a_place_on_earth(tmp_path):
    """VALID: the mask begins at pixel (8, 8), and so do its coordinates."""
    workdir = tmp_path / "run"
    trained(workdir, classes=3, colours=1, channels=2, depth=1)
    (workdir / "data.json").write_text('{"class_names": ["sea", "land", "ice"]}')
    geo = [
        (33550, 12, 3, (10.0, 10.0, 0.0), False),
        (33922, 12, 6, (0.0, 0.0, 0.0, 5000.0, 9000.0, 0.0), False),
        (34735, 3, 4, (1, 1, 0, 0), False),
    ]
    image = np.random.default_rng(0).integers(0, 256, (720, 620), np.uint8)
    tifffile.imwrite(tmp_path / "image.tif", image, extratags=geo)
    run(workdir, tmp_path / "image.tif", tmp_path / "mask.tif", tile=1024)
    run(workdir, tmp_path / "image.tif", tmp_path / "mask.ome.zarr", tile=1024)
    with tifffile.TiffFile(tmp_path / "mask.tif") as file:
        mask = file.series[0].levels[0].asarray()
        assert [level.shape for level in file.series[0].levels] == [(704, 604), (352, 302)]
        np.testing.assert_array_equal(file.series[0].levels[1].asarray(), mask[::2, ::2])
        page = file.pages[0]
        classes = json.loads(page.description)["classes"]
        assert [(c["value"], c["name"]) for c in classes] == [(0, "sea"), (1, "land"), (2, "ice")]
        assert page.colormap[:, 1].tolist() == [230 * 257, 159 * 257, 0]
        assert page.tags[33922].value == (-8.0, -8.0, 0.0, 5000.0, 9000.0, 0.0)
        assert page.tags[33550].value == (10.0, 10.0, 0.0)
        assert page.tags[34735].value == (1, 1, 0, 0)
    with open_image(tmp_path / "mask.ome.zarr") as found:
        np.testing.assert_array_equal(found[:, :][..., 0], mask)
    attributes = json.loads((tmp_path / "mask.ome.zarr" / ".zattrs").read_text())
    with open_image(tmp_path / "mask.ome.zarr" / "1") as found:
        assert found.shape == (1, 352, 302)
    assert attributes["image-label"]["properties"][2] == {"label-value": 2, "class": "ice"}


FULL = """
import pathlib, sys
from experiments.program.files import write_atomically
from tests.test_predict import run

folder = pathlib.Path(sys.argv[1])
for name in ("mask.zarr", "mask.npy", "mask.tif"):
    try:
        run(folder / "run", folder / "image.npy", folder / "full" / name, probabilities=True)
    except SystemExit as stopped:
        print(name, stopped.code)
try:
    write_atomically(folder / "full/class.json", "x" * 1_000_000)
except OSError as error:
    print("class.json", error)
print("left:", list((folder / "full").iterdir()))
"""
MOUNT = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-ec"]


def can_mount() -> bool:
    done = subprocess.run([*MOUNT, "mount -t tmpfs tmpfs /mnt"], capture_output=True, check=False)
    return done.returncode == 0


@pytest.mark.skipif(not shutil.which("unshare") or not can_mount(), reason="needs a small disk")
def test_a_full_disk(tmp_path):
    """One of 100 kB, for a result of 640 kB."""
    trained(tmp_path / "run", channels=2, depth=1, padding="SAME", dtype="float32")
    image_file(tmp_path / "image.npy", 200, 200)
    (tmp_path / "full").mkdir()
    mount = f'mount -t tmpfs -o size=100k tmpfs \'{tmp_path}/full\'; exec "$0" "$@"'
    done = subprocess.run(
        [*MOUNT, mount, sys.executable, "-c", FULL, str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    lines = {line.split()[0]: line for line in done.stdout.splitlines() if line}
    for name in ("mask.zarr", "mask.npy", "mask.tif"):
        assert f"error: {tmp_path}/full/{name} cannot be written: " in lines[name]
    for name in ("mask.zarr", "mask.npy", "mask.tif", "class.json"):
        assert "No space left on device" in lines[name]
    assert lines["left:"] == "left: []"


MEMORY = """
import pathlib, statistics, sys
import jax.numpy as jnp, numpy as np
from experiments.images import create_image, open_image
from experiments.predicting.whole_image import segment
from tests.test_predict import Watch, tiny

typical, most = [], []  # the most is an accident of threads: it differs from run to run
for size in (6000, 6000, 10000):  # all have more tiles than are under way; the first one warms up
    seen = []
    path = pathlib.Path(sys.argv[1], f"{len(typical)}.npy")
    with create_image(path, (size, size, 3), np.uint8):
        pass
    with open_image(path) as image:
        segment(tiny(), image, path.with_name("mask.npy"), tile=500, progress=Watch(seen))
    typical.append(statistics.median(seen))
    most.append(max(seen))
print(*((numbers[2] - numbers[1]) / 2**20 for numbers in (typical, most)))
"""


def tiny():
    kernel = jnp.asarray(normal(0, 3, 3, 3, 2), jnp.float32)
    learned = types.SimpleNamespace(
        spatial=2, pixels=np.uint8, lost=0, task=tasks.create("auto", classes=2, dense=True)
    )
    return Network(lambda w, x: conv(x.astype(w.dtype) / 255, w), kernel, 3, learned, ["no", "yes"])


class Watch:
    """A progress line that only looks at the memory."""

    def __init__(self, seen: list[int]):
        self.seen = seen

    def go_on(self, there: int) -> None:
        pass

    def __call__(self, done: int, total: int) -> None:
        self.seen.append(held())

    def finish(self) -> None:
        pass


def held() -> int:
    """Bytes that this process has, without pages of files, which the system can take back."""
    status = pathlib.Path("/proc/self/status").read_text()
    (line,) = (line for line in status.splitlines() if line.startswith("RssAnon"))
    return int(line.split()[1]) * 1024


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="memory is read from /proc")
def test_memory_does_not_grow_with_the_image(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", MEMORY, str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "MALLOC_ARENA_MAX": "1"},  # or each thread keeps what it has freed
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    typical, most = map(float, done.stdout.split())  # MiB
    assert typical < 25
    assert most < 100  # the image has 286, the result of its convolution 763


@pytest.mark.parametrize(
    "clocks, words",
    [
        ([(9.0, 5.0, 0.0), (10.0, 5.95, 0.1)], "the limit was reading: reading took 95% of"),
        ([(9.0, 5.0, 0.0), (10.0, 5.5, 0.9)], "the limit was writing"),
        ([(9.0, 5.0, 0.0), (10.0, 5.5, 0.1)], "the limit was the device: reading took 50% of"),
        ([(9.0, 5.0, 0.0)], "one tile"),
    ],
)
def test_the_limit_is_that_of_the_tiles_after_the_first(clocks, words):
    assert words in _limit(clocks)


def test_the_time_left_is_counted_from_the_first_tile_that_is_computed():
    """Before it there is compilation, and tiles of a program that was stopped."""
    with predict._Tiles() as tiles:
        tiles.go_on(7)
        for done in range(1, 8):
            tiles(done, 16)
        assert (tiles.began, tiles._left()) == (0, "")
        tiles(8, 16)
        assert tiles.began > 0
        tiles(10, 16)
        tiles.began -= 20
        assert tiles._left() == "tile 10/16; 1 min 0 s left"
