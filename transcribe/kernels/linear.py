"""y = x Wᵀ + b where W stays packed.

A few rows of x, as in decoding, are multiplied by the C kernels: W is expanded as it is read, sums are float32, and the
result of a row has the same bits whatever the number of rows up to `FEW_ROWS`. On AMX they do so for any number of rows
of bfloat16 activations. Elsewhere many rows, as in an encoder, share the cost of expanding W: a tile of its rows is
expanded into scratch and multiplied by torch, so the whole weight never exists in expanded form. Without the kernels
torch does both.
"""

from __future__ import annotations

import math
from typing import Protocol, TypeAlias

import torch
from gguf import GGMLQuantizationType
from torch import Tensor

from . import native
from .library import chosen


class Packed(Protocol):
    """A weight in blocks, as the file has it: [outputs, inputs]."""

    shape: tuple[int, ...]
    type: GGMLQuantizationType
    data: Tensor
    """uint8 [outputs, bytes of a row]."""

    def dequantize(self, dtype: torch.dtype, rows: slice, out: Tensor | None) -> Tensor:
        """Expand some rows, into `out` [rows, inputs] if it is given."""
        ...

    def select_rows(self, index: Tensor) -> Packed:
        """The rows at `index`, int64 [count], still packed."""
        ...


Weight: TypeAlias = Tensor | Packed

FEW_ROWS = 16
"""Up to so many rows of x the kernels read and expand W as they multiply, and steps.py strings operations together."""

CROSSOVER = 3, 1 << 20
"""How many times as many rows still favour the kernels: on x86's vectors where torch would need W expanded, and for
bfloat16 activations on AMX tiles, which means always. Measured against the tiles below, and without expanding: there
the kernels are as fast within a tenth, and oneDNN takes 15 to 50 ms to compile each form of product that it meets.
Elsewhere nobody has measured, and it is once."""

TILE_BYTES = 1 << 22
"""Expanded bytes a tile. Measured at 375 rows: float32 comes within a tenth of a product with an expanded weight.
Smaller tiles lose to the overhead of each product; larger ones gain only in bfloat16 with thousands of inputs."""


def data_and_format(weight: Weight) -> tuple[Tensor, GGMLQuantizationType | None]:
    """A weight as the kernels take it: the format is None where the data are its values."""
    return (weight, None) if isinstance(weight, Tensor) else (weight.data, weight.type)


def _tile_rows(weight: Weight, dtype: torch.dtype) -> int:
    """Rows of W in a tile, as many in each where that goes: oneDNN compiles a product for every form, and keeps it."""
    most = max(1, TILE_BYTES // (weight.shape[-1] * dtype.itemsize))
    return math.ceil(weight.shape[0] / math.ceil(weight.shape[0] / most))


def _by_kernels(weight: Weight, dtype: torch.dtype, rows: int) -> bool:
    path = chosen().path
    vectors, tiles = CROSSOVER
    if path == "amx" and dtype == torch.bfloat16:
        times = tiles
    elif path in ("neon", "portable") or (isinstance(weight, Tensor) and weight.dtype == dtype):
        times = 1
    else:
        times = vectors
    return rows <= FEW_ROWS * times and native.can_multiply(*data_and_format(weight), dtype)


def scratch_bytes(weight: Weight, dtype: torch.dtype, rows: int) -> int:
    """Bytes of scratch that `packed_linear` needs for `rows` rows of activations."""
    if _by_kernels(weight, dtype, rows):
        return native.prepared_bytes(*data_and_format(weight), dtype, rows, weight.shape[-1])
    if isinstance(weight, Tensor) and weight.dtype == dtype:
        return 0
    return _tile_rows(weight, dtype) * weight.shape[-1] * dtype.itemsize


def packed_linear(x: Tensor, weight: Weight, bias: Tensor | None, out: Tensor, scratch: Tensor | None = None) -> Tensor:
    """x [rows, inputs] times W [outputs, inputs] transposed, into `out` [rows, outputs] of x's dtype.

    `scratch` is a uint8 tensor of at least `scratch_bytes`, allocated when None.
    """
    if _by_kernels(weight, x.dtype, x.shape[0]):
        native.multiply(x, *data_and_format(weight), bias, out, scratch)
        return out
    if isinstance(weight, Tensor) and weight.dtype == x.dtype:
        return _multiply(x, weight, bias, out)
    count, width = weight.shape[0], weight.shape[-1]
    rows = _tile_rows(weight, x.dtype)
    if scratch is None:
        scratch = torch.empty(scratch_bytes(weight, x.dtype, x.shape[0]), dtype=torch.uint8, device=x.device)
    tile = scratch[: rows * width * x.dtype.itemsize].view(x.dtype).view(rows, width)
    for start in range(0, count, rows):
        stop = min(start + rows, count)
        part = tile[: stop - start]
        if isinstance(weight, Tensor):
            part.copy_(weight[start:stop])
        else:
            weight.dequantize(x.dtype, rows=slice(start, stop), out=part)
        _multiply(x, part, None if bias is None else bias[start:stop], out[:, start:stop])
    return out


def _multiply(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> Tensor:
    if 1 < len(x) <= FEW_ROWS and x.is_cpu:  # one by one: torch's sums depend on the number of rows
        for i in range(len(x)):
            _multiply(x[i : i + 1], weight, bias, out[i : i + 1])
        return out
    if bias is None:
        return torch.mm(x, weight.t(), out=out)
    return torch.addmm(bias, x, weight.t(), out=out)
