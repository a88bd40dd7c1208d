"""Cells of three dimensions: ellipsoids on an uneven background with noise; some are hollow, and
are no cells.
"""

from __future__ import annotations

import math

import numpy as np

_VOLUME_PER_CELL = 32**3 * 0.45
"""Voxels: about a fifth of the volume is cells."""


def draw_volume(rng: np.random.Generator, *shape: int) -> tuple[np.ndarray, np.ndarray]:
    """Volume (..., C) and mask (...), both uint8; of any number of axes."""
    *size, channels = shape
    light, mask = np.zeros(size, np.float32), np.zeros(size, np.uint8)
    number = max(2, round(math.prod(size) / _VOLUME_PER_CELL ** (len(size) / 3)))
    for i in range(number):
        hollow = i % 3 == 2
        where, distance = _ellipsoid(rng, size)
        shown = (distance < 1) & ((distance > 0.6) if hollow else True) & (mask[where] == 0)
        light[where][shown] = rng.uniform(30, 70)
        if not hollow:
            mask[where][shown] = 1
    for axis, n in enumerate(size):  # brighter on one side than on the other, along each axis
        slope = np.linspace(-1, 1, n, dtype=np.float32) * np.float32(rng.uniform(-12, 12))
        light += slope.reshape([n if d == axis else 1 for d in range(len(size))])
    image = np.empty((*size, channels), np.uint8)
    for channel in range(channels):
        noise = rng.standard_normal(size, np.float32) * np.float32(15)
        image[..., channel] = np.clip(90 + light + noise, 0, 255)
    return image, mask


def _ellipsoid(rng: np.random.Generator, size: list[int]) -> tuple[tuple[slice, ...], np.ndarray]:
    """Its bounding box within the volume, and there the squared distance, 1 at the rim."""
    axes, centre = rng.uniform(5, 12, len(size)), rng.uniform(0, size)
    where, distance = [], np.zeros((1,) * len(size), np.float32)
    for d, (n, radius, c) in enumerate(zip(size, axes, centre, strict=True)):
        start, stop = max(0, int(c - radius)), min(n, int(c + radius) + 2)
        along = ((np.arange(start, stop, dtype=np.float32) - c) / radius) ** 2
        distance = distance + along.reshape([-1 if k == d else 1 for k in range(len(size))])
        where.append(slice(start, stop))
    return tuple(where), distance
