"""Images on disk, read and written window by window, never whole.

>>> import pathlib, tempfile
>>> import numpy as np
>>> folder = tempfile.TemporaryDirectory()
>>> path = pathlib.Path(folder.name, "image.npy")
>>> with create_image(path, (40, 30, 3), np.uint8) as image:
...     image[10:20, 0:30] = np.full((10, 30, 3), 7, np.uint8)
>>> with open_image(path) as image:
...     print(image.shape, image.dtype, image[8:12, 5:7][:, 0, 0])
(40, 30, 3) uint8 [0 0 7 7]
>>> folder.cleanup()

`_base.py` says what an image is; `_open.py`, `_tiff.py`, `_colours.py`, `_geo.py`, `_ome.py`,
`_raw.py`, `_slide.py` and `_volumes.py` read, `_resize.py` resizes, `_create.py` and `_pyramid.py`
write.
What is wrong with a file is an `ImageError`, which names it.
"""

from ._base import Image as Image
from ._base import ImageError as ImageError
from ._create import WritableImage as WritableImage
from ._create import create_image as create_image
from ._geo import shifted as shifted
from ._open import SUFFIXES as SUFFIXES
from ._open import is_image_name as is_image_name
from ._open import open_image as open_image
from ._open import suffix_of as suffix_of
from ._pyramid import Meaning as Meaning
from ._resize import resized as resized
