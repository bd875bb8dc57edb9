"""A quantised weight as the file has it: packed rows, expanded only where and when they are used."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from transcribe.kernels.dequantize import dequantize


@dataclass(frozen=True, eq=False)
class PackedTensor:
    """A weight in one of ggml's block formats.

    type: the block format.
    shape: logical, PyTorch order.
    data: uint8 [rows, row_bytes], rows = prod(shape[:-1]); rows stand alone, so any of them may be sliced or
    joined.
    """

    type: GGMLQuantizationType
    shape: tuple[int, ...]
    data: torch.Tensor

    @property
    def nbytes(self) -> int:
        """Bytes that type and shape call for."""
        block, size = GGML_QUANT_SIZES[self.type]
        return math.prod(self.shape) // block * size

    @property
    def device(self) -> torch.device:
        return self.data.device

    def select_rows(self, index: torch.Tensor) -> PackedTensor:
        """The rows at `index`, int64 [n] on the same device, still packed: [n, shape[-1]]."""
        return PackedTensor(self.type, (len(index), self.shape[-1]), self.data[index])

    def dequantize(self, dtype: torch.dtype = torch.float32, rows: slice = slice(None),
                   out: torch.Tensor | None = None) -> torch.Tensor:
        """Expand all rows to `shape`, or a slice of them to [n, shape[-1]].

        `out`, [n, shape[-1]] of any float dtype, is written into if given, and then decides the dtype.
        """
        if rows == slice(None):
            if out is not None:
                out = out.view(math.prod(self.shape[:-1]), self.shape[-1])
            return dequantize(self.data, self.type, dtype, out).view(self.shape)
        return dequantize(self.data[rows], self.type, dtype, out)

    def to(self, device: torch.device | str) -> PackedTensor:
        """The same packed bytes on another device."""
        return PackedTensor(self.type, self.shape, self.data.to(device))
