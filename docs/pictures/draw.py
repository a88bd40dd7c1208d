"""Draw the pictures of the documentation: `python docs/pictures/draw.py` writes them anew.

* `house.svg`: the rooms of the repository, and who imports whom; read from the source files.
* `halo.svg`: what one tile reads, from a pool back through two convolutions to the image.

Only the standard library is used, and the result is the same everywhere: a test compares the files
with what this script makes.
"""

from __future__ import annotations

import pathlib

from halo import halo
from house import house


def pictures() -> dict[str, str]:
    """The text of each file."""
    return {"house.svg": house(), "halo.svg": halo()}


if __name__ == "__main__":
    for name, picture in pictures().items():
        (pathlib.Path(__file__).parent / name).write_text(picture)
