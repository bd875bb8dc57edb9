"""y = x Wᵀ + b where W stays packed: rows are expanded a tile at a time.

This is the torch path, which defines what the kernels compute. A tile of W's rows is expanded into scratch and
multiplied, so the whole weight never exists in expanded form.
"""

from __future__ import annotations

from typing import Protocol, TypeAlias

import torch
from torch import Tensor


class Packed(Protocol):
    """A weight in blocks, as the file has it: [outputs, inputs]."""

    shape: tuple[int, ...]

    def dequantize(self, dtype: torch.dtype, rows: slice, out: Tensor | None) -> Tensor:
        """Expand some rows, into `out` [rows, inputs] if it is given."""
        ...

    def select_rows(self, index: Tensor) -> Packed:
        """The rows at `index`, int64 [count], still packed."""
        ...


Weight: TypeAlias = Tensor | Packed

TILE_BYTES = 1 << 21
"""Expanded bytes a tile: what one core's second-level cache holds. Measured on the embedding of a 27 M model."""


def weight_rows(weight: Weight) -> int:
    """The number of outputs."""
    return weight.shape[0]


def _tile_rows(weight: Weight, dtype: torch.dtype) -> int:
    return max(1, min(weight.shape[0], TILE_BYTES // (weight.shape[-1] * dtype.itemsize)))


def scratch_bytes(weight: Weight, dtype: torch.dtype) -> int:
    """Bytes of scratch that `packed_linear` needs: one expanded tile, or none if W is of the dtype already."""
    if isinstance(weight, Tensor) and weight.dtype == dtype:
        return 0
    return _tile_rows(weight, dtype) * weight.shape[-1] * dtype.itemsize


def packed_linear(x: Tensor, weight: Weight, bias: Tensor | None, out: Tensor, scratch: Tensor | None = None) -> Tensor:
    """x [rows, inputs] times W [outputs, inputs] transposed, into `out` [rows, outputs] of x's dtype.

    `scratch` is a uint8 tensor of at least `scratch_bytes`, allocated when None.
    """
    if isinstance(weight, Tensor) and weight.dtype == x.dtype:
        return _multiply(x, weight, bias, out)
    count, width = weight.shape[0], weight.shape[-1]
    rows = _tile_rows(weight, x.dtype)
    if scratch is None:
        scratch = torch.empty(scratch_bytes(weight, x.dtype), dtype=torch.uint8, device=x.device)
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
    if bias is None:
        return torch.mm(x, weight.t(), out=out)
    return torch.addmm(bias, x, weight.t(), out=out)
