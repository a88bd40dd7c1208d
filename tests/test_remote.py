"""Zarr stores at an address, by a real server that sometimes fails."""

import contextlib
import functools
import http.server
import socket
import subprocess
import sys
import threading
import time
import types
import urllib.parse
import urllib.request

import numpy as np
import pytest

from experiments import data
from experiments.images import ImageError, _ome, create_image, open_image
from experiments.program.config import base

from .support import parametrize_few

VALUES = np.random.default_rng(0).integers(0, 256, (700, 600, 3), np.uint8)


class Handler(http.server.SimpleHTTPRequestHandler):
    def do_GET(self):
        self.server.asked.append(self.path)
        if self.server.asked.count(self.path) <= self.server.failures:
            self.send_error(503)
        else:
            super().do_GET()

    def end_headers(self):
        self.send_header("ETag", '"1"')  # S3 has it
        super().end_headers()

    def log_message(self, *_):
        pass


@contextlib.contextmanager
def serving(folder, port=0, failures=0):
    """A server of the folder; `failures`: how often each file fails first."""
    handler = functools.partial(Handler, directory=folder)
    with http.server.ThreadingHTTPServer(("127.0.0.1", port), handler) as server:
        server.asked, server.failures = [], failures
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield types.SimpleNamespace(at=f"http://127.0.0.1:{server.server_port}", server=server)
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture
def server(tmp_path):
    with serving(tmp_path) as found:
        yield found


@pytest.fixture
def bucket(tmp_path, monkeypatch, server):
    """The folder `lab` is a bucket: what S3 is asked for is `GET /bucket/key`."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", server.at)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "somebody")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    (tmp_path / "lab").mkdir()
    return tmp_path / "lab"


@pytest.fixture
def impatient(monkeypatch):
    retries = {"max_retries": 1, "initial_delay": "1ms", "max_delay": "1ms"}
    context = {f"{kind}_request_retries": retries for kind in ("http", "s3")}
    monkeypatch.setattr(_ome, "_CONTEXT", context)


def write(folder, name):
    with create_image(folder / name, VALUES.shape, np.uint8) as image:
        image[:, :] = VALUES


def test_windows_of_a_remote_image_although_requests_fail(tmp_path, server):
    write(tmp_path, "image.ome.zarr")
    write(tmp_path, "plain.zarr")
    server.server.failures = 1
    with open_image(f"{server.at}/image.ome.zarr") as image:
        assert (image.shape, image.dtype) == (VALUES.shape, np.uint8)
        np.testing.assert_array_equal(image[10:60, 520:580], VALUES[10:60, 520:580])
    chunks = {p.removeprefix("/image.ome.zarr/0/") for p in server.server.asked}
    assert {c for c in chunks if c[0].isdigit()} == {f"{c}/0/1" for c in range(3)}
    with open_image(f"{server.at}/image.ome.zarr/", level=1) as image:
        assert image.shape == (350, 300, 3)
    with open_image(f"{server.at}/plain.zarr") as image:
        np.testing.assert_array_equal(image[690:700, 0:20], VALUES[690:, :20])


def test_a_folder_may_name_addresses(tmp_path, server):
    for name in ("images", "masks", "served"):
        (tmp_path / name).mkdir()
    write(tmp_path / "served", "a.zarr")
    (tmp_path / "images" / "a.url").write_text(f"{server.at}/served/a.zarr\n")
    np.save(tmp_path / "masks" / "a.npy", (VALUES[..., 0] > 128).astype(np.uint8))
    options = base("unet").data
    options.kind, options.path, options.size = "folder", str(tmp_path), 64
    options.channels, options.eval_fraction = 3, 0.0
    image, mask = data.load(options, "train", seed=0).example(0, np.random.default_rng(0))
    np.testing.assert_array_equal(mask, image[..., 0] > 128)


@parametrize_few("name", ["image.ome.zarr", "image.zarr"])
def test_a_bucket_of_a_server_that_is_not_amazons(bucket, server, name):
    write(bucket, name)
    server.server.failures = 1
    with open_image(f"s3://lab/{name}") as image:
        np.testing.assert_array_equal(image[10:60, 520:580], VALUES[10:60, 520:580])
    with pytest.raises(ImageError, match=r"^s3://lab/other\.zarr: .* without a zarr array"):
        open_image("s3://lab/other.zarr")


def test_a_server_that_goes_away_and_comes_back(tmp_path):
    write(tmp_path, "image.zarr")
    with serving(tmp_path) as first:
        image = open_image(f"{first.at}/image.zarr")
    read = []
    waiting = threading.Thread(target=lambda: read.append(image[10:60, 520:580]))
    waiting.start()
    time.sleep(1)
    assert not read
    with serving(tmp_path, int(first.at.rpartition(":")[2])):
        waiting.join(timeout=60)
        np.testing.assert_array_equal(read, [VALUES[10:60, 520:580]])


@pytest.mark.usefixtures("impatient")
def test_a_server_that_went_away_is_no_bad_file(tmp_path):
    for name in ("images", "masks"):
        (tmp_path / name).mkdir()
        np.save(tmp_path / name / "a.npy", np.ones((64, 64), np.uint8))
        np.save(tmp_path / name / "b.npy", np.ones((64, 64), np.uint8))
    with create_image(tmp_path / "a.zarr", (64, 64, 1), np.uint8) as image:
        image[:, :] = np.ones((64, 64, 1), np.uint8)
    options = base("unet").data
    options.kind, options.path, options.size = "folder", str(tmp_path), 64
    options.eval_fraction, options.on_bad_file = 0.0, "skip"
    with serving(tmp_path) as found:
        (tmp_path / "images" / "a.npy").unlink()
        (tmp_path / "images" / "a.url").write_text(f"{found.at}/a.zarr")
        train = data.load(options, "train", seed=0)
        assert len(train) == 2
    for index in range(2):
        if train.name(index).endswith("a.url"):
            with pytest.raises(ConnectionError, match=r"a\.url: cannot be reached \("):
                train.example(index, None)
        else:
            train.example(index, None)
    assert not train.skipped


@pytest.mark.usefixtures("impatient")
def test_what_is_not_there(tmp_path, server):
    message = r"^http://127\.0\.0\.1:1/image\.zarr: cannot be reached"
    with pytest.raises(ConnectionError, match=message):
        open_image("http://127.0.0.1:1/image.zarr")
    with pytest.raises(ImageError, match=r"without a zarr array"):
        open_image(f"{server.at}/nothing.zarr")
    (tmp_path / "bad.url").write_text("ftp://somewhere")
    with pytest.raises(ImageError, match=r"must hold an address.*not 'ftp://somewhere'"):
        open_image(tmp_path / "bad.url")


@contextlib.contextmanager
def program(*arguments, port, folder):
    """A server that is a process of its own."""
    with subprocess.Popen(
        [sys.executable, "-m", *arguments], cwd=folder, stderr=subprocess.DEVNULL
    ) as process:
        try:
            for _ in range(600):
                with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
                    break
                time.sleep(0.1)
            yield process
        finally:
            process.kill()


def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def files(folder):
    return {p.relative_to(folder).as_posix(): p for p in folder.rglob("*") if p.is_file()}


@pytest.mark.slow
def test_amazons_protocol_by_moto(tmp_path, monkeypatch):
    pytest.importorskip("moto.server", reason="needs pip install 'moto[s3,server]'")
    boto3 = pytest.importorskip("boto3")
    write(tmp_path, "image.ome.zarr")
    port = free_port()
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "somebody")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    with program("moto.server", "-p", str(port), port=port, folder=tmp_path):
        s3 = boto3.client("s3", region_name="us-east-1")
        s3.create_bucket(Bucket="lab")
        for name, path in files(tmp_path / "image.ome.zarr").items():
            s3.upload_file(str(path), "lab", f"slides/1/{name}")
        with open_image("s3://lab/slides/1", level=1) as image:
            assert image.shape == (350, 300, 3)
        with open_image("s3://lab/slides/1") as image:
            np.testing.assert_array_equal(image[10:60, 520:580], VALUES[10:60, 520:580])
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "")  # nobody
        with pytest.raises(ConnectionError, match=r"cannot be reached .*PERMISSION_DENIED"):
            open_image("s3://lab/slides/1")


@pytest.mark.slow
def test_googles_protocol_by_an_emulator_that_is_killed(tmp_path, monkeypatch):
    pytest.importorskip("gcp_storage_emulator", reason="needs pip install gcp-storage-emulator")
    write(tmp_path, "image.zarr")
    port = free_port()
    at = f"http://127.0.0.1:{port}"
    monkeypatch.setenv("TENSORSTORE_GCS_HTTP_URL", at)
    emulator = ("gcp_storage_emulator", "start", "--host=127.0.0.1", f"--port={port}")
    started = functools.partial(program, *emulator, port=port, folder=tmp_path)
    with started() as process:
        post(f"{at}/storage/v1/b?project=p", b'{"name": "lab"}', "application/json")
        for name, path in files(tmp_path / "image.zarr").items():
            key = urllib.parse.quote(f"image.zarr/{name}", safe="")
            place = f"{at}/upload/storage/v1/b/lab/o?uploadType=media&name={key}"
            post(place, path.read_bytes(), "application/octet-stream")
        image = open_image("gs://lab/image.zarr")
        process.kill()
        process.wait()
        read = []
        waiting = threading.Thread(target=lambda: read.append(image[10:60, 520:580]))
        waiting.start()
        time.sleep(1)
        assert not read
    with started():
        waiting.join(timeout=60)
        np.testing.assert_array_equal(read, [VALUES[10:60, 520:580]])


def post(url, body, kind):
    with urllib.request.urlopen(urllib.request.Request(url, body, {"Content-Type": kind})):
        pass
