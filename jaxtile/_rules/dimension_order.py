"""Operands of a convolution as (batch, space, feature) and (space, in, out), and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax import lax

Array = jax.Array


def ordered(params: Mapping[str, Any], rank: int) -> Any:
    """The dimension numbers of operands in this order."""
    last = (0, rank - 1, *range(1, rank - 1))
    kernel = (rank - 1, rank - 2, *range(rank - 2))
    return type(params["dimension_numbers"])(last, kernel, last)


def operands_in_order(params: Mapping[str, Any], lhs: Array, rhs: Array) -> tuple[Array, Array]:
    dims = params["dimension_numbers"]
    out_feature, in_feature, *space = dims.rhs_spec
    return _last(lhs, dims.lhs_spec), lax.transpose(rhs, (*space, in_feature, out_feature))


def cotangent_in_order(params: Mapping[str, Any], cotangent: Array) -> Array:
    return _last(cotangent, params["dimension_numbers"].out_spec)


def as_ordered_by(params: Mapping[str, Any], out: Array) -> Array:
    """A result in this order, with the dimensions where they belong."""
    return _back(out, params["dimension_numbers"].out_spec)


def gradients_as_ordered_by(
    params: Mapping[str, Any], of_lhs: Array, of_rhs: Array
) -> tuple[Array, Array]:
    dims = params["dimension_numbers"]
    out_feature, in_feature, *space = dims.rhs_spec
    places = np.argsort((*space, in_feature, out_feature))
    return _back(of_lhs, dims.lhs_spec), lax.transpose(of_rhs, tuple(places))


def _last(x: Array, spec: tuple[int, ...]) -> Array:
    batch, feature, *space = spec
    return lax.transpose(x, (batch, *space, feature))


def _back(x: Array, spec: tuple[int, ...]) -> Array:
    batch, feature, *space = spec
    return lax.transpose(x, tuple(np.argsort((batch, *space, feature))))
