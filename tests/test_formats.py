"""Slides, pyramids and volumes, each in a file made by that format's own writer."""

import sys

import nibabel
import numpy as np
import openslide
import pydicom
import pytest
import tifffile
from PIL import Image as Pillow
from pydicom.dataset import FileDataset, FileMetaDataset
from pydicom.uid import CTImageStorage, ExplicitVRLittleEndian, generate_uid

from experiments import data
from experiments.images import ImageError, create_image, open_image
from experiments.images._slide import open_slide
from experiments.program.config import base

RNG = np.random.default_rng(0)


def write_slide(path, image, description=""):
    """As Aperio's scanners write it: pages of JPEG-like tiles, each smaller, and a thumbnail."""
    tiles = {"tile": (64, 64), "compression": "zlib", "photometric": "rgb", "metadata": None}
    with tifffile.TiffWriter(path) as file:
        file.write(image, description=description, **tiles)
        if description:
            file.write(image[::8, ::8], photometric="rgb", metadata=None)  # a thumbnail
        file.write(image[::2, ::2], description=description, subfiletype=1, **tiles)
        file.write(image[::4, ::4], description=description, subfiletype=1, **tiles)


@pytest.mark.parametrize("name", ["slide.svs", "slide.tif"])
def test_the_levels_of_a_slide(tmp_path, name):
    image = RNG.integers(0, 256, (400, 360, 3), np.uint8)
    description = "Aperio Image Library v12\n400x360|AppMag = 20|MPP = 0.5" if "svs" in name else ""
    write_slide(tmp_path / name, image, description)
    for level, step in enumerate((1, 2, 4)):
        with open_image(tmp_path / name, level=level) as found:
            np.testing.assert_array_equal(found[10:60, 20:80], image[::step, ::step][10:60, 20:80])
    with pytest.raises(ImageError, match=r"has 3 resolutions, and no level 3"):
        open_image(tmp_path / name, level=3)


def test_a_slide_by_openslide(tmp_path):
    """Which reads the same files, and others that we cannot write."""
    image = RNG.integers(0, 256, (400, 360, 3), np.uint8)
    write_slide(tmp_path / "slide.tif", image)
    assert openslide.OpenSlide(tmp_path / "slide.tif").level_count == 3
    with open_slide(tmp_path / "slide.tif", 1) as found:
        np.testing.assert_array_equal(found[10:60, 20:80], image[::2, ::2][10:60, 20:80])
    (tmp_path / "slide.mrxs").write_text("no slide")
    with pytest.raises(ImageError, match=r"slide\.mrxs: OpenSlide cannot open it"):
        open_image(tmp_path / "slide.mrxs")


def test_nifti(tmp_path):
    volume = RNG.integers(-1000, 1000, (7, 9, 11), np.int16)  # (Z, Y, X)
    place = (slice(2, 5), slice(1, 9), slice(0, 10))
    for name in ("scan.nii", "scan.nii.gz"):
        nibabel.save(nibabel.Nifti1Image(volume.T, np.eye(4)), tmp_path / name)
        with open_image(tmp_path / name, dimensions=3) as found:
            assert (found.shape, found.dtype) == ((7, 9, 11, 1), np.int16)
            np.testing.assert_array_equal(found[place][..., 0], volume[place])
    scaled = nibabel.Nifti1Image(volume.T, np.eye(4))
    scaled.header.set_slope_inter(0.5, 3)
    nibabel.save(scaled, tmp_path / "scaled.nii")
    want = np.asarray(nibabel.load(tmp_path / "scaled.nii").dataobj).T
    with open_image(tmp_path / "scaled.nii", dimensions=3) as found:
        assert found.dtype == np.float32
        np.testing.assert_allclose(found[place][..., 0], want[place])
    with pytest.raises(ImageError, match=r"is a volume.*set `data.dimensions` to 3"):
        open_image(tmp_path / "scan.nii")


def write_dicom(path, plane, z, without=(), **fields):
    meta = FileMetaDataset()
    meta.MediaStorageSOPClassUID, meta.TransferSyntaxUID = CTImageStorage, ExplicitVRLittleEndian
    meta.MediaStorageSOPInstanceUID = generate_uid()
    file = FileDataset(path, {}, file_meta=meta, preamble=b"\0" * 128)
    file.Rows, file.Columns = plane.shape[-2:]
    file.SamplesPerPixel, file.PhotometricInterpretation = 1, "MONOCHROME2"
    file.BitsAllocated, file.BitsStored, file.HighBit = 16, 12, 11
    file.PixelRepresentation = 0
    file.ImagePositionPatient, file.ImageOrientationPatient = [0, 0, z], [1, 0, 0, 0, 1, 0]
    for name, value in fields.items():
        setattr(file, name, value)
    file.PixelData = plane.astype("<u2").tobytes()
    for name in without:
        delattr(file, name)
    pydicom.dcmwrite(path, file, enforce_file_format=True)


def test_dicom(tmp_path):
    """Planes lie where they say, whatever their names; values are in Hounsfield units."""
    volume = RNG.integers(0, 4096, (5, 8, 6), np.uint16)
    folder = tmp_path / "scan"
    folder.mkdir()
    for z, name in enumerate("dbeac"):
        ct = {"RescaleSlope": 1, "RescaleIntercept": -1024}
        write_dicom(folder / f"{name}.dcm", volume[z], 2.5 * z, **ct)
    with open_image(folder, dimensions=3) as found:
        assert (found.shape, found.dtype) == ((5, 8, 6, 1), np.int16)
        np.testing.assert_array_equal(
            found[1:4, 2:8, 0:5][..., 0], volume[1:4, 2:8, :5].astype(int) - 1024
        )
    write_dicom(tmp_path / "one.dcm", volume[0], 0)
    with open_image(tmp_path / "one.dcm") as found:
        np.testing.assert_array_equal(found[0:8, 0:6][..., 0], volume[0])
    with pytest.raises(
        ImageError, match=r"is one image, with 1 frame, where `data.dimensions` is 3"
    ):
        open_image(tmp_path / "one.dcm", dimensions=3)
    write_dicom(tmp_path / "colours.dcm", volume[0], 0, PhotometricInterpretation="PALETTE COLOR")
    with pytest.raises(
        ImageError, match=r"colours\.dcm: has a palette, which is not read of DICOM"
    ):
        open_image(tmp_path / "colours.dcm")
    with open_image(tmp_path / "colours.dcm", mask=True) as found:
        np.testing.assert_array_equal(found[0:8, 0:6][..., 0], volume[0])


def as_read(path, dimensions=2, mask=False):
    with open_image(path, dimensions, mask=mask) as image:
        found = image[tuple(slice(0, n) for n in image.shape[:-1])][..., 0]
        assert found.dtype == image.dtype
        return found


def test_dicom_in_which_0_is_white(tmp_path):
    """Inverted within the bits that are stored, as films and mammograms of other makers look."""
    path, plane = tmp_path / "film.dcm", RNG.integers(0, 4096, (8, 6), np.uint16)
    write_dicom(path, plane, 0, PhotometricInterpretation="MONOCHROME1")
    np.testing.assert_array_equal(as_read(path), 4095 - plane)
    np.testing.assert_array_equal(as_read(path, mask=True), plane)
    write_dicom(path, plane, 0, PhotometricInterpretation="MONOCHROME1", RescaleSlope=2)
    with pytest.raises(ImageError, match=r"film\.dcm: says that 0 is white .* rescalings x 2 \+ 0"):
        open_image(path)


def test_dicom_values_are_what_the_file_says(tmp_path):
    path, plane = tmp_path / "one.dcm", RNG.integers(0, 4096, (8, 6), np.uint16)
    floats = (plane / 7).astype("<f4")
    write_dicom(path, plane, 0, ("PixelData", "PixelRepresentation"), BitsAllocated=32)
    file = pydicom.dcmread(path)
    file.FloatPixelData = floats.tobytes()
    file.save_as(path)
    np.testing.assert_array_equal(as_read(path), floats)
    write_dicom(path, plane, 0, RescaleSlope="", RescaleIntercept="")
    np.testing.assert_array_equal(as_read(path), plane)

    def rescaled(slope, intercept):
        values, group = pydicom.Dataset(), pydicom.Dataset()
        values.RescaleSlope, values.RescaleIntercept = slope, intercept
        group.PixelValueTransformationSequence = [values]
        return group

    frames, all_frames = np.stack([plane, plane[::-1]]), [rescaled(1, -1024)]
    enhanced = {"NumberOfFrames": 2, "SharedFunctionalGroupsSequence": all_frames}
    write_dicom(path, frames, 0, **enhanced)
    found = as_read(path, dimensions=3)
    assert found.dtype == np.int16
    np.testing.assert_array_equal(found, frames.astype(int) - 1024)
    each = [rescaled(0.5, 0), rescaled(2, 1)]
    write_dicom(path, frames, 0, NumberOfFrames=2, PerFrameFunctionalGroupsSequence=each)
    np.testing.assert_array_equal(as_read(path, 3), np.stack([plane / 2, plane[::-1] * 2.0 + 1]))
    write_dicom(path, frames, 0, NumberOfFrames=2, PerFrameFunctionalGroupsSequence=each[:1])
    with pytest.raises(ImageError, match=r"has 2 frames, and says of 1 how to rescale them"):
        open_image(path, 3)


def test_dicom_of_one_bit(tmp_path):
    path, plane = tmp_path / "mask.dcm", RNG.integers(0, 2, (8, 6), np.uint8)
    bits = {"BitsAllocated": 1, "BitsStored": 1, "HighBit": 0}
    write_dicom(path, plane, 0, **bits)
    file = pydicom.dcmread(path)
    file.PixelData = np.packbits(plane.ravel(), bitorder="little").tobytes()
    file.save_as(path)
    np.testing.assert_array_equal(as_read(path, mask=True), plane)


@pytest.mark.parametrize(
    "without, fields, words",
    [
        (("Rows",), {}, "is DICOM without an image: its header has no Rows"),
        (("BitsAllocated",), {}, "its header has no BitsAllocated"),
        ((), {"BitsAllocated": 12}, "has 12 bits for a value"),
    ],
)
def test_dicom_headers_that_say_too_little(tmp_path, without, fields, words):
    path = tmp_path / "odd.dcm"
    write_dicom(path, np.zeros((8, 6), np.uint16), 0, without, **fields)
    with pytest.raises(ImageError, match=rf"odd\.dcm: .*{words}"):
        open_image(path)


def test_a_folder_with_the_planes_of_two_series(tmp_path):
    for z, name in enumerate(["a1", "a2", "b1"]):
        write_dicom(tmp_path / f"{name}.dcm", np.zeros((8, 6), np.uint16), z % 2)
    with pytest.raises(ImageError, match=r"a1\.dcm and b1\.dcm are planes at one place"):
        open_image(tmp_path, dimensions=3)


def test_a_folder_of_planes(tmp_path):
    volume = RNG.integers(0, 256, (12, 8, 6), np.uint8)
    for z, plane in enumerate(volume):
        Pillow.fromarray(plane).save(tmp_path / f"z{z}.png")  # z10 after z9
    with open_image(tmp_path, dimensions=3) as found:
        np.testing.assert_array_equal(found[3:12, 0:8, 1:4][..., 0], volume[3:, :, 1:4])
    with pytest.raises(ImageError, match=r"12 files.*set `data.dimensions` to 3"):
        open_image(tmp_path)
    Pillow.fromarray(volume[0, 1:]).save(tmp_path / "z12.png")
    with pytest.raises(ImageError, match="its planes differ"):
        open_image(tmp_path, dimensions=3)


def test_volumes_in_a_folder(tmp_path):
    """A folder of planes beside a NIfTI file, each with its mask."""
    volume = RNG.integers(0, 256, (6, 8, 8), np.uint8)
    for name in ("images/a", "masks"):
        (tmp_path / name).mkdir(parents=True)
    for z, plane in enumerate(volume):
        Pillow.fromarray(plane).save(tmp_path / f"images/a/{z}.png")
    for name in ("images/b", "masks/a", "masks/b"):
        values = volume if name == "images/b" else (volume > 128).astype(np.uint8)
        nibabel.save(nibabel.Nifti1Image(values.T, np.eye(4)), tmp_path / f"{name}.nii.gz")
    options = base("unet").data
    options.kind, options.path, options.dimensions, options.size = "folder", str(tmp_path), 3, 6
    options.eval_fraction = 0.0
    found = data.load(options, "train", seed=0)
    assert len(found) == 2
    for i in range(2):
        image, mask = found.example(i, None)
        np.testing.assert_array_equal(image[..., 0], volume[:, 1:7, 1:7])
        np.testing.assert_array_equal(mask, volume[:, 1:7, 1:7] > 128)


def test_a_level_in_training(tmp_path):
    """A mask has the size of the level, or a pyramid too."""
    image = RNG.integers(0, 256, (1040, 1100, 3), np.uint8)
    (tmp_path / "images").mkdir()
    (tmp_path / "masks").mkdir()
    for name in "ab":
        with create_image(tmp_path / f"images/{name}.tif", image.shape, np.uint8) as file:
            file[:, :] = image
    for name, step in (("a", 1), ("b", 2)):
        values = (image[::step, ::step, 0] > 128).astype(np.uint8)
        with create_image(tmp_path / f"masks/{name}.tif", values.shape, np.uint8) as file:
            file[:, :] = values
    tifffile.imwrite(tmp_path / "masks/b.tif", (image[::2, ::2, 0] > 128).astype(np.uint8))
    options = base("unet").data
    options.kind, options.path, options.size, options.level = "folder", str(tmp_path), 0, 1
    options.eval_fraction, options.channels = 0.0, 3
    found = data.load(options, "train", seed=0)
    assert found.shape == (520, 550, 3)
    assert all(found.example(i, None)[1].shape == (520, 550) for i in range(2))


@pytest.mark.parametrize(
    "name, module, extra",
    [
        ("a.nii", "nibabel", "volumes"),
        ("a.dcm", "pydicom", "volumes"),
        ("a.mrxs", "openslide", "slides"),
    ],
)
def test_what_to_install(tmp_path, monkeypatch, name, module, extra):
    (tmp_path / name).write_bytes(b"something")
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match=rf"pip install 'jaxtile\[{extra}\]'"):
        open_image(tmp_path / name, dimensions=2)
