"""Zarr stores at an address, by a real server that sometimes fails."""

import functools
import http.server
import threading
import types

import numpy as np
import pytest

from experiments import data
from experiments.images import ImageError, _ome, create_image, open_image
from experiments.program.config import base

VALUES = np.random.default_rng(0).integers(0, 256, (700, 600, 3), np.uint8)


class Handler(http.server.SimpleHTTPRequestHandler):
    def do_GET(self):
        self.server.asked.append(self.path)
        if self.server.asked.count(self.path) <= self.server.failures:
            self.send_error(503)
        else:
            super().do_GET()

    def log_message(self, *_):
        pass


@pytest.fixture
def server(tmp_path):
    """Serves the folder; `failures`: how often each file fails first."""
    handler = functools.partial(Handler, directory=tmp_path)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as found:
        found.asked, found.failures = [], 0
        thread = threading.Thread(target=found.serve_forever)
        thread.start()
        yield types.SimpleNamespace(at=f"http://127.0.0.1:{found.server_port}", server=found)
        found.shutdown()
        thread.join()


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


def test_what_is_not_there(tmp_path, server, monkeypatch):
    retries = {"max_retries": 1, "initial_delay": "1ms", "max_delay": "1ms"}
    monkeypatch.setattr(_ome, "_CONTEXT", {"http_request_retries": retries})
    with pytest.raises(ImageError, match=r"^http://127\.0\.0\.1:1/image\.zarr: cannot be reached"):
        open_image("http://127.0.0.1:1/image.zarr")
    with pytest.raises(ImageError, match=r"without a zarr array"):
        open_image(f"{server.at}/nothing.zarr")
    (tmp_path / "bad.url").write_text("ftp://somewhere")
    with pytest.raises(ImageError, match=r"must hold an address.*not 'ftp://somewhere'"):
        open_image(tmp_path / "bad.url")
