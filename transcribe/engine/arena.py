"""The one buffer that intermediates share, and where each of them goes in it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

ALIGNMENT = 64  # bytes: a cache line, and what vector loads want


def aligned(nbytes: int) -> int:
    """`nbytes` rounded up to whole cache lines."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def place(storages: Sequence[tuple[int, int, int]]) -> tuple[list[int], int]:
    """Offsets for storages given as (bytes, first step, last step), and the size of the arena that holds them.

    Largest first; each takes the tightest gap left by the storages that live at the same time as it does.
    """
    offsets = [0] * len(storages)
    placed: list[int] = []
    total = 0
    for index in sorted(range(len(storages)), key=lambda i: -storages[i][0]):
        size, born, dies = storages[index]
        size = aligned(size)
        neighbours = sorted(
            (offsets[i], aligned(storages[i][0])) for i in placed if storages[i][1] <= dies and born <= storages[i][2]
        )
        best: tuple[int, int] | None = None  # (gap, offset)
        end = 0
        for offset, length in neighbours:
            gap = offset - end
            if gap >= size and (best is None or gap < best[0]):
                best = (gap, end)
            end = max(end, offset + length)
        offsets[index] = end if best is None else best[1]
        placed.append(index)
        total = max(total, offsets[index] + size)
    return offsets, total


class Arena:
    """A buffer that grows to the largest plan that has run, and only then moves."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.buffer = torch.empty(0, dtype=torch.uint8, device=device)

    def reserve(self, nbytes: int) -> bool:
        """Make room; True if the buffer moved. What pointed into the old one must be dropped before."""
        if nbytes <= self.buffer.numel():
            return False
        self.buffer = torch.empty(0, dtype=torch.uint8, device=self.device)  # never hold the old and the new one
        with torch.inference_mode(False):  # so that it can be written in either mode
            self.buffer = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
        return True

    def tensor(self, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """The slice at `offset` as a contiguous tensor."""
        count = 1
        for size in shape:
            count *= size
        return self.buffer[offset : offset + count * dtype.itemsize].view(dtype).view(shape)

    def poison(self, offset: int, nbytes: int) -> None:
        """Fill a released slice: 0xFF bytes are NaN in every float type and -1 in every integer type."""
        self.buffer[offset : offset + nbytes].fill_(0xFF)
