"""Images on disk: every format against the whole array, and every way a file can be bad."""

import json
import os
import sys
import zlib

import hypothesis
import numpy as np
import pytest
import tensorstore
import tifffile
from hypothesis import strategies
from PIL import Image as pillow

from experiments import images
from experiments.images import ImageError, _open, _tiff, create_image, open_image


def values(*shape, dtype=np.uint8):
    rng = np.random.default_rng(0)
    if np.dtype(dtype).kind == "f":
        return rng.normal(size=shape).astype(dtype)
    return rng.integers(0, min(np.iinfo(dtype).max, 60000), shape, dtype, endpoint=True)


def tiff(**arguments):
    return lambda path, array: tifffile.imwrite(path, array, **arguments)


def planar(**arguments):
    def write(path, array):
        tifffile.imwrite(path, np.moveaxis(array, -1, 0), planarconfig="separate", **arguments)

    return write


def pages(path, array):
    with tifffile.TiffWriter(path) as writer:
        for channel in np.moveaxis(array, -1, 0):
            writer.write(channel, metadata=None, contiguous=False, compression="zlib")


def pyramid(path, array):
    tile = {"tile": (16, 16), "photometric": "rgb", "compression": "zlib"}
    with tifffile.TiffWriter(path, bigtiff=True) as writer:
        writer.write(array, subifds=2, **tile)
        writer.write(array[::2, ::2], subfiletype=1, **tile)
        writer.write(array[::4, ::4], subfiletype=1, **tile)


def flat_pyramid(path, array):
    tile = {"tile": (16, 16), "photometric": "rgb", "metadata": None}
    with tifffile.TiffWriter(path) as writer:
        writer.write(array, **tile)
        writer.write(array[::2, ::2], subfiletype=1, **tile)


def zarr(driver):
    def write(path, array):
        spec = {"driver": driver, "kvstore": {"driver": "file", "path": str(path)}}
        tensorstore.open(spec, create=True, dtype=array.dtype, shape=array.shape).result().write(
            array
        ).result()

    return write


def png(mode=None):
    def write(path, array):
        image = pillow.fromarray(array)
        image.save(path) if mode is None else image.convert(mode).save(path)

    return write


FORMATS = {
    "tiff striped": (".tif", values(61, 47, 3), tiff(photometric="rgb", rowsperstrip=7)),
    "tiff deflate": (".tif", values(61, 47, 3), tiff(compression="zlib", rowsperstrip=7)),
    "tiff lzw tiled": (".tif", values(61, 47, 3), tiff(compression="lzw", tile=(16, 32))),
    "tiff rgba": (".tiff", values(61, 47, 4), tiff(tile=(16, 16), photometric="rgb")),
    "tiff predictor": (
        ".tif",
        values(61, 47, dtype=np.uint16),
        tiff(tile=(16, 16), compression="zstd", predictor=True),
    ),
    "tiff big-endian": (".tif", values(61, 47, dtype=np.uint16), tiff(byteorder=">")),
    "tiff float": (".tif", values(61, 47, dtype=np.float32), tiff(bigtiff=True)),
    "tiff bool": (".tif", values(61, 47) > 99, tiff(photometric="minisblack")),
    "tiff planes tiled": (
        ".tif",
        values(61, 47, 3),
        planar(tile=(16, 16), compression="zlib", photometric="rgb"),
    ),
    "tiff planes": (".tif", values(61, 47, 3), planar(photometric="rgb")),
    "tiff pages": (".tif", values(61, 47, 5), pages),
    "tiff pages that are rows": (".tif", values(61, 47, 5), tiff()),
    "tiff rows, deflate": (".tif", values(61, 47, 2), tiff(compression="zlib")),
    "tiff pyramid": (".tif", values(61, 47, 3), pyramid),
    "tiff flat pyramid": (".tif", values(64, 48, 3), flat_pyramid),
    "npy": (".npy", values(61, 47, 3), np.save),
    "npy fortran": (".npy", np.asfortranarray(values(61, 47, dtype=np.int32)), np.save),
    "zarr 2": (".zarr", values(61, 47, 3), zarr("zarr")),
    "zarr 3": (".zarr", values(61, 47, dtype=np.uint16), zarr("zarr3")),
    "png": (".png", values(61, 47, 3), png()),
    "png rgba": (".PNG", values(61, 47, 4), png()),
    "png grey": (".png", values(61, 47), png()),
    "png 16 bits": (".png", values(61, 47, dtype=np.uint16), png()),
    "png 1 bit": (".png", values(61, 47) > 99, png()),
}


@pytest.mark.parametrize("name", FORMATS)
def test_windows_are_slices(tmp_path, name):
    suffix, array, write = FORMATS[name]
    path = tmp_path / f"image{suffix}"
    write(path, array)
    whole = array.reshape(*array.shape[:2], -1)
    whole = np.uint8(255) * whole if array.dtype == bool else whole
    with open_image(str(path)) as image:
        assert image.shape == whole.shape
        assert image.dtype == (np.uint8 if array.dtype == bool else array.dtype)

        @hypothesis.settings(max_examples=12, deadline=None, derandomize=True)
        @hypothesis.given(strategies.data())
        def check(data):
            ends = [
                sorted(data.draw(strategies.tuples(*[strategies.integers(0, size)] * 2)))
                for size in array.shape[:2]
            ]
            (y0, y1), (x0, x1) = ends
            window = image[y0:y1, x0:x1]
            assert window.dtype == image.dtype
            np.testing.assert_array_equal(window, whole[y0:y1, x0:x1])

        check()
        np.testing.assert_array_equal(image[:, :], whole)


def as_mask(path, **options):
    with open_image(path, mask=True, **options) as found:
        return found[(slice(None),) * (len(found.shape) - 1)]


def same_by_window(path, expected):
    with open_image(path) as image:
        assert (image.shape, image.dtype) == (expected.shape, expected.dtype)
        np.testing.assert_array_equal(image[:, :], expected)
        np.testing.assert_array_equal(image[3:17, 5:20], expected[3:17, 5:20])


@pytest.mark.parametrize("transparent", [None, 2, b"\x00\x80"])
@pytest.mark.filterwarnings("error")
def test_palettes_of_images_are_colours_and_of_masks_indices(tmp_path, transparent):
    path, array = tmp_path / "image.png", values(20, 30) % 4
    palette = values(4, 3)
    image = pillow.fromarray(array)
    image.putpalette(palette.tobytes())
    image.save(path, **({} if transparent is None else {"transparency": transparent}))
    np.testing.assert_array_equal(as_mask(path)[..., 0], array)
    same_by_window(path, palette[array])


@pytest.mark.parametrize("options", [{}, {"tile": (16, 16), "compression": "zlib"}])
@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
def test_palettes_of_tiffs(tmp_path, options, dtype):
    path, array = tmp_path / "image.tif", values(40, 30, dtype=dtype)
    palette = values(2 ** (8 * array.itemsize), 3)
    options |= {"photometric": "palette", "colormap": palette.T.astype(np.uint16) * 257}
    tifffile.imwrite(path, array, **options)
    np.testing.assert_array_equal(as_mask(path)[..., 0], array)
    same_by_window(path, palette[array])


def test_palettes_of_volumes(tmp_path):
    array, palettes = values(4, 20, 30), values(2, 256, 3)
    maps = palettes.transpose(0, 2, 1).astype(np.uint16) * 257
    for name, used in (("one.tif", maps[[0, 0, 0, 0]]), ("two.tif", maps[[0, 0, 0, 1]])):
        with tifffile.TiffWriter(tmp_path / name) as writer:
            for plane, colours in zip(array, used, strict=True):
                options = {"photometric": "palette", "colormap": colours, "contiguous": False}
                writer.write(plane, metadata=None, **options)
        np.testing.assert_array_equal(as_mask(tmp_path / name, dimensions=3)[..., 0], array)
    with open_image(tmp_path / "one.tif", dimensions=3) as image:
        np.testing.assert_array_equal(image[1:3, 2:9, :], palettes[0][array][1:3, 2:9])
    with pytest.raises(ImageError, match=r"two\.tif: its pages have different palettes"):
        open_image(tmp_path / "two.tif", dimensions=3)
    with pytest.raises(ImageError, match=r"one\.tif: has a palette, and 4 channels of indices"):
        open_image(tmp_path / "one.tif")


@pytest.mark.parametrize("bits", [1, 2, 4, 8, 12, 16])
@pytest.mark.parametrize("white", [False, True])
def test_grey_tiffs_are_bright_where_they_look_bright(tmp_path, bits, white):
    path, numbers = tmp_path / "image.tif", values(40, 30, dtype=np.int32) % 2**bits
    array = numbers.astype(np.uint8 if bits <= 8 else np.uint16)
    options = {"photometric": "miniswhite" if white else "minisblack"}
    options |= {} if bits in (1, 8, 16) else {"bitspersample": bits}
    tifffile.imwrite(path, array > 0 if bits == 1 else array, **options)
    np.testing.assert_array_equal(as_mask(path)[..., 0], array)
    expected = 2**bits - 1 - numbers if white else numbers
    expected = expected * 255 // (2**bits - 1) if bits < 8 else expected
    same_by_window(path, expected.astype(array.dtype)[..., None])


def test_white_as_zero_that_cannot_be_inverted(tmp_path):
    tifffile.imwrite(tmp_path / "a.tif", values(20, 30, dtype="f4"), photometric="miniswhite")
    with pytest.raises(ImageError, match=r"a\.tif: says that 0 is white .* 1 x float32"):
        open_image(tmp_path / "a.tif")
    assert as_mask(tmp_path / "a.tif").dtype == np.float32


def test_colours_that_are_not_red_green_and_blue(tmp_path):
    """YCbCr is converted, as Pillow does; what cannot be is named. Masks have their numbers."""
    path, rgb = tmp_path / "a.tif", np.kron(values(3, 4, 3), np.ones((8, 8, 1), np.uint8))
    colours = pillow.fromarray(rgb)
    colours.convert("YCbCr").save(path, compression="tiff_lzw")
    expected = np.asarray(colours.convert("YCbCr").convert("RGB")).astype(int)
    assert np.abs(open_image(path)[0:24, 0:32] - expected).max() <= 1
    assert np.abs(open_image(path)[8:20, 3:30] - expected[8:20, 3:30]).max() <= 1
    np.testing.assert_array_equal(
        open_image(path, mask=True)[0:24, 0:32], np.asarray(colours.convert("YCbCr"))
    )
    for mode, words in (("CMYK", "CMYK"), ("LAB", r"CIE L\*a\*b\*")):
        colours.convert(mode).save(path)
        with pytest.raises(
            ImageError, match=rf"a\.tif: its colours are {words}, .* save it as RGB"
        ):
            open_image(path)
        np.testing.assert_array_equal(
            open_image(path, mask=True)[0:24, 0:32], np.asarray(colours.convert(mode))
        )


def test_slides_of_aperio_whose_jpeg_2000_is_ycbcr(tmp_path):
    import imagecodecs

    rgb = np.kron(values(3, 4, 3), np.ones((16, 16, 1), np.uint8))
    ycbcr = pillow.fromarray(rgb).convert("YCbCr")
    tile = imagecodecs.jpeg2k_encode(np.asarray(ycbcr), level=0, mct=False, codecformat="j2k")
    options = {"shape": rgb.shape, "dtype": "u1", "tile": (48, 64), "photometric": "rgb"}
    tifffile.imwrite(tmp_path / "a.tif", iter([tile]), compression=33003, **options)
    expected = np.asarray(ycbcr.convert("RGB")).astype(int)
    assert np.abs(open_image(tmp_path / "a.tif")[0:48, 0:64] - expected).max() <= 1


def test_one_bit_of_images_is_black_and_white(tmp_path):
    path, array = tmp_path / "image.png", values(20, 30) > 99
    pillow.fromarray(array).save(path)
    np.testing.assert_array_equal(as_mask(path)[..., 0], array)
    same_by_window(path, np.uint8(255) * array[..., None])


@pytest.mark.parametrize("channels", [2, 3, 4])
def test_sixteen_bit_colours_keep_their_bits(tmp_path, channels):
    import imagecodecs

    array = values(20, 30, channels, dtype=np.uint16)
    (tmp_path / "deep.png").write_bytes(imagecodecs.png_encode(array))
    image = open_image(tmp_path / "deep.png")
    assert (image.shape, image.dtype) == (array.shape, np.uint16)
    np.testing.assert_array_equal(image[3:9, 4:8], array[3:9, 4:8])


def test_jpeg(tmp_path):
    pillow.fromarray(values(24, 32, 3)).save(tmp_path / "image.jpg")
    expected = np.asarray(pillow.open(tmp_path / "image.jpg"))
    image = open_image(tmp_path / "image.jpg")
    assert image.whole
    np.testing.assert_array_equal(image[3:20, 5:31], expected[3:20, 5:31])


def test_jpeg_in_tiff(tmp_path):
    array = np.broadcast_to(np.arange(64, dtype=np.uint8)[:, None, None], (64, 64, 3))
    path = tmp_path / "image.tif"
    tifffile.imwrite(path, array, tile=(32, 32), compression="jpeg", photometric="rgb")
    np.testing.assert_array_equal(open_image(path)[5:50, 20:60], tifffile.imread(path)[5:50, 20:60])


def test_a_window_decodes_only_what_it_touches(tmp_path, monkeypatch):
    """4.5 GiB if it were decoded whole: 157 x 157 tiles of 256 x 256."""
    path = tmp_path / "huge.tif"
    size, tile = 40_000, 256
    across = -(-size // tile)
    marked = 70 * across + 33

    def tiles():
        for index in range(across * across):
            yield zlib.compress(bytes([77]) * tile * tile * 3) if index == marked else b""

    with tifffile.TiffWriter(path, bigtiff=True) as writer:
        writer.write(
            tiles(),
            shape=(size, size, 3),
            dtype=np.uint8,
            tile=(tile, tile),
            compression="zlib",
            photometric="rgb",
        )
    assert path.stat().st_size < 2**20
    decoded = []
    decode = _tiff._Reader._decode
    monkeypatch.setattr(_tiff._Reader, "_decode", lambda *a: decoded.append(a[1:]) or decode(*a))
    with open_image(path) as image:
        assert image.shape == (size, size, 3)
        y, x = 70 * tile, 33 * tile
        window = image[y - 10 : y + 10, x - 10 : x + 10]
        assert window.sum() == 77 * 3 * 100
        assert len(decoded) == 4
        assert image[y : y + tile, x : x + tile].min() == 77
        assert len(decoded) == 4, "the four tiles are kept"
        monkeypatch.setattr(_tiff, "CACHE_BYTES", 2 * tile * tile * 3)
        image[y - 1 : y + 1, x : x + 5 * tile]
        reader = image._read.__self__
        assert sum(segment.nbytes for segment in reader.cache.values()) <= _tiff.CACHE_BYTES


def test_windows_beyond_the_image_are_refused(tmp_path):
    np.save(tmp_path / "a.npy", values(10, 12))
    image = open_image(tmp_path / "a.npy")
    for bad in [np.s_[0:11, 0:3], np.s_[0:3, -1:3], np.s_[4:3, 0:1], np.s_[0:3, 0:4:2]]:
        with pytest.raises(IndexError, match=r"a\.npy.*\(10, 12, 1\)"):
            image[bad]
    with pytest.raises(IndexError, match=r"image\[y0:y1, x0:x1\]"):
        image[3]


def test_bad_files(tmp_path):
    def bad(name, pattern, content=None):
        path = tmp_path / name
        if content is not None:
            path.write_bytes(content)
        with pytest.raises(ImageError, match=rf"{name}.*{pattern}") as caught:
            open_image(path)[:, :]
        assert caught.value.path == path

    array = values(64, 64, 3)
    for suffix in (".tif", ".npy", ".png", ".jpg"):
        bad(f"missing{suffix}", "no such file")
        bad(f"empty{suffix}", "empty", b"")
        bad(f"text{suffix}", "is not a", b"not an image, although the name says so")
        source = tmp_path / f"good{suffix}"
        if suffix == ".npy":
            np.save(source, array)
        elif suffix == ".tif":
            tifffile.imwrite(source, array, compression="zlib", rowsperstrip=8)
        else:
            pillow.fromarray(array).save(source)
        content = source.read_bytes()
        bad(f"half{suffix}", "(truncated|corrupt)", content[: len(content) // 2])
        bad(f"stub{suffix}", "(truncated|corrupt|is not a)", content[:7])
    bad("good.gif", r"suffix '\.gif' is not one of \.tif, .*\.png", b"GIF89a")

    content = bytearray((tmp_path / "good.tif").read_bytes())
    with tifffile.TiffFile(tmp_path / "good.tif") as file:
        offset = file.pages[0].dataoffsets[3]
    content[offset : offset + 40] = bytes(40)
    bad("garbled.tif", "strip 3 cannot be decoded: the file is corrupt", bytes(content))
    (tmp_path / "garbled.tif").write_bytes(content)
    assert open_image(tmp_path / "garbled.tif")[0:24, :].shape == (24, 64, 3), "the rest is good"

    np.save(tmp_path / "four.npy", np.zeros((2, 3, 4, 5), np.uint8))
    bad("four.npy", "4 dimensions")
    np.save(tmp_path / "none.npy", np.zeros((0, 3), np.uint8))
    bad("none.npy", "no pixel")
    np.save(tmp_path / "complex.npy", np.zeros((3, 3), complex))
    bad("complex.npy", "complex128")
    np.save(tmp_path / "pickle.npy", np.array([{}]), allow_pickle=True)
    bad("pickle.npy", "not an array")
    with tifffile.TiffWriter(tmp_path / "differ.tif") as writer:
        writer.write(array, photometric="rgb", metadata=None)
        writer.write(array[:20], photometric="rgb", metadata=None)
    bad("differ.tif", "its pages differ")
    tifffile.imwrite(tmp_path / "stack.tif", np.zeros((5, 20, 30, 3), np.uint8), photometric="rgb")
    bad("stack.tif", "stack of images")
    (tmp_path / "group.zarr" / "0").mkdir(parents=True)
    bad("group.zarr", "without a zarr array.*: 0")
    (tmp_path / "group.zarr" / "zarr.json").write_text("{")
    bad("group.zarr", "is not a zarr array")


def test_a_corrupt_zarr_chunk(tmp_path):
    path = tmp_path / "image.zarr"
    with create_image(path, (20, 20), np.uint8) as image:
        image[:, :] = values(20, 20)
    (path / "0.0.0").write_bytes(b"garbage")
    with pytest.raises(ImageError, match=r"image\.zarr.*truncated or corrupt"):
        open_image(path)[:, :]


@pytest.mark.parametrize(
    "name, write",
    [
        ("a.npy", np.save),
        ("fortran.npy", lambda path, array: np.save(path, np.asfortranarray(array))),
        ("plain.tif", tiff(photometric="rgb")),
        ("planes.tif", planar(photometric="rgb")),
        ("tiled.tif", tiff(photometric="rgb", tile=(64, 64))),
        ("strips.tif", tiff(photometric="rgb", compression="zlib", rowsperstrip=16)),
    ],
)
def test_a_file_that_is_shortened_while_it_is_open(tmp_path, name, write):
    """Mapped into memory, it would end the process with SIGBUS."""
    path = tmp_path / name
    write(path, values(512, 512, 3))
    image = open_image(path)
    assert image[0:2, 0:2].shape == (2, 2, 3)
    os.truncate(path, 5000)
    for window in (np.s_[200:512, 0:512], np.s_[300:301, 500:512]):
        with pytest.raises(ImageError, match=rf"{name}: .*truncated"):
            image[window]
    image.close()


@pytest.mark.parametrize("driver", ["zarr", "zarr3"])
def test_a_zarr_chunk_beyond_memory(tmp_path, driver):
    """Only the metadata are there, so there is nothing to decode; it must not come to that."""
    path = tmp_path / "image.zarr"
    spec = {"driver": driver, "kvstore": {"driver": "file", "path": str(path)}}
    shape = (2**20, 2**20, 3)
    tensorstore.open(
        spec,
        create=True,
        dtype=np.uint16,
        shape=shape,
        chunk_layout=tensorstore.ChunkLayout(chunk_shape=shape),
    ).result()
    pattern = r"image\.zarr: its chunks, 1048576 x 1048576 x 3 of uint16, take 6144\.0 GiB each"
    with pytest.raises(ImageError, match=pattern):
        open_image(path)


def test_large_zarr_chunks_are_read_if_there_is_memory_for_all(tmp_path, monkeypatch):
    array = values(40, 50)
    with create_image(tmp_path / "a.zarr", (1024, 1024), np.uint8) as image:
        image[500:540, 500:550] = array
    image = open_image(tmp_path / "a.zarr")
    monkeypatch.setattr(_open, "_LARGE", 1)
    np.testing.assert_array_equal(image[500:540, 500:550][..., 0], array)
    monkeypatch.setattr(_open, "free_memory", lambda: 6 * 512 * 512)
    assert image[0:512, 0:1024].shape == (512, 1024, 1), "two chunks fit"
    with pytest.raises(ImageError, match=r"a\.zarr: .* this window needs 4 of them"):
        image[511:513, 511:513]


def test_blocks_are_what_is_decoded_at_once(tmp_path):
    for name, write, block in [
        ("a.npy", np.save, (1, 50)),
        ("fortran.npy", lambda p, a: np.save(p, np.asfortranarray(a)), (60, 1)),
        ("tiled.tif", tiff(tile=(16, 32)), (16, 32)),
        ("strips.tif", tiff(compression="zlib", rowsperstrip=8), (8, 50)),
        ("plain.tif", tiff(), (1, 50)),
        ("a.png", png(), (1, 50)),
    ]:
        write(tmp_path / name, values(60, 50))
        assert open_image(tmp_path / name).block == block, name
    with create_image(tmp_path / "a.zarr", (600, 50), np.uint8):
        pass
    assert open_image(tmp_path / "a.zarr").block == (512, 50)


def test_large_images_need_windows(tmp_path, monkeypatch):
    pillow.fromarray(values(20, 30)).save(tmp_path / "a.png")
    monkeypatch.setattr(_open, "LARGEST_WHOLE", 500)
    with pytest.raises(ImageError, match=r"a\.png: 20 x 30 pixels .* tiled TIFF"):
        open_image(tmp_path / "a.png")
    monkeypatch.setattr(_open, "LARGEST_WHOLE", 5000)
    monkeypatch.setattr(pillow, "MAX_IMAGE_PIXELS", 100)
    assert open_image(tmp_path / "a.png")[0:1, 0:1].shape == (1, 1, 1)


def test_missing_packages(tmp_path, monkeypatch):
    tifffile.imwrite(tmp_path / "a.tif", values(8, 8))
    monkeypatch.setitem(sys.modules, "tifffile", None)
    with pytest.raises(ImportError, match=r"a\.tif.*pip install tifffile.*jaxtile\[train\]"):
        open_image(tmp_path / "a.tif")


def test_missing_codec(tmp_path, monkeypatch):
    path = tmp_path / "a.tif"
    tifffile.imwrite(path, values(32, 32), compression="zstd")

    def decode(*arguments, **keywords):
        raise ValueError("<COMPRESSION.ZSTD: 50000> requires the 'imagecodecs' package")

    with open_image(path) as image:
        monkeypatch.setattr(image._read.__self__, "decode", decode)
        with pytest.raises(ImageError, match=r"a\.tif.*pip install imagecodecs"):
            image[:, :]


@pytest.mark.parametrize("suffix", [".tif", ".tiff", ".npy", ".zarr"])
@pytest.mark.parametrize(
    "shape, dtype",
    [((33, 21), np.uint8), ((33, 21, 3), np.uint8), ((33, 21, 5), np.float32)],
)
def test_what_is_written_is_read(tmp_path, suffix, shape, dtype):
    array = values(*shape, dtype=dtype)
    path = tmp_path / f"out{suffix}"
    for _ in range(2):  # the second replaces the first
        with create_image(path, shape, dtype) as image:
            for y in range(0, 33, 10):
                image[y : y + min(10, 33 - y), 0:20] = array[y : y + 10, 0:20]
            assert not path.exists() or _ == 1
    array[:, 20:] = 0
    with open_image(path) as image:
        assert image.dtype == dtype
        np.testing.assert_array_equal(image[:, :], array.reshape(33, 21, -1))
    assert os.listdir(tmp_path) == [path.name]


@pytest.mark.parametrize("suffix", [".tif", ".npy", ".zarr"])
def test_an_exception_leaves_nothing(tmp_path, suffix):
    def write():
        with create_image(tmp_path / f"out{suffix}", (9, 9), np.uint8) as image:
            image[0:2, 0:2] = np.ones((2, 2), np.uint8)
            raise RuntimeError

    with pytest.raises(RuntimeError):
        write()
    assert os.listdir(tmp_path) == []


def test_bad_writes(tmp_path):
    with pytest.raises(ImageError, match=r"out\.png: .*\.tif"):
        create_image(tmp_path / "out.png", (9, 9), np.uint8)
    with pytest.raises(ImageError, match="no folder"):
        create_image(tmp_path / "nowhere" / "out.npy", (9, 9), np.uint8)
    image = create_image(tmp_path / "out.npy", (9, 9, 2), np.uint8)
    with pytest.raises(ValueError, match=r"out\.npy: values of shape \(2, 2\)"):
        image[0:2, 0:2] = np.zeros((2, 2), np.uint8)
    with pytest.raises(ValueError, match=r"out\.npy: values of dtype int64"):
        image[0:2, 0:2] = np.zeros((2, 2, 2), np.int64)
    image.close()
    with pytest.raises(ValueError, match=r"out\.npy: is closed"):
        image[0:2, 0:2] = np.zeros((2, 2, 2), np.uint8)


def test_is_image_name(tmp_path):
    assert images.is_image_name(tmp_path / "a.TIF")
    assert not images.is_image_name(tmp_path / ".a.tif")
    assert not images.is_image_name(tmp_path / "a.txt")


def ome(path, version, values, axes):
    """A group with one resolution, as the format's writers lay it out."""
    driver = {2: "zarr", 3: "zarr3"}[version]
    store = {"driver": "file", "path": str(path / "0")}
    metadata = {"shape": values.shape}
    if version == 2:
        metadata |= {"chunks": [*[1] * (values.ndim - 2), 16, 16], "dtype": values.dtype.str}
    else:
        metadata |= {"data_type": str(values.dtype)}
    spec = {"driver": driver, "kvstore": store, "metadata": metadata, "create": True}
    tensorstore.open(spec).result().write(values).result()
    scales = [{"axes": [{"name": a} for a in axes], "datasets": [{"path": "0"}]}]
    if version == 2:
        (path / ".zgroup").write_text('{"zarr_format": 2}')
        (path / ".zattrs").write_text(json.dumps({"multiscales": scales}))
    else:
        group = {"zarr_format": 3, "node_type": "group"}
        group["attributes"] = {"ome": {"version": "0.5", "multiscales": scales}}
        (path / "zarr.json").write_text(json.dumps(group))


@pytest.mark.parametrize("version", [2, 3])
def test_ome_zarr(tmp_path, version):
    """Axes of any order; channels become last, and a single time or plane is no axis."""
    values = np.random.default_rng(0).integers(0, 60000, (1, 5, 1, 40, 30), np.uint16)
    ome(tmp_path / "a.ome.zarr", version, values, "tczyx")
    with open_image(tmp_path / "a.ome.zarr") as image:
        assert (image.shape, image.dtype) == ((40, 30, 5), np.uint16)
        np.testing.assert_array_equal(
            image[7:21, 3:30], np.moveaxis(values[0, :, 0, 7:21, 3:30], 0, -1)
        )
    volume = values[0, :, 0]
    ome(tmp_path / "b.zarr", version, volume, "zyx")
    with open_image(tmp_path / "b.zarr", dimensions=3) as image:
        np.testing.assert_array_equal(image[1:4, 2:9, 0:30][..., 0], volume[1:4, 2:9])
    with pytest.raises(ImageError, match=r"5 positions along 'z': set `data.dimensions` to 3"):
        open_image(tmp_path / "b.zarr")


def test_tiles_of_jpeg_that_threads_decode_at_once(tmp_path):
    """Of a file that was just opened: what tifffile looks up in it then must not move the place
    that another thread reads from.
    """
    image = np.random.default_rng(0).integers(0, 250, (512, 512, 3), np.uint8)
    tiles = {"tile": (128, 128), "photometric": "rgb", "compression": "jpeg"}
    tifffile.imwrite(tmp_path / "slide.tif", image, **tiles)
    expected = tifffile.imread(tmp_path / "slide.tif")
    for _ in range(60):
        with open_image(tmp_path / "slide.tif") as found:
            np.testing.assert_array_equal(found[:512, :512], expected)
