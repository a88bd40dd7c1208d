"""A trained network on an image of any size, from disk to disk.

`network.py` says what a network is here, and where in an image its result lies. `pixels.py` reads
an image as the network takes it. `whole_image.py` joins the two, tile by tile.
"""
