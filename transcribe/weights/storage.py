"""The bytes of one weights file as torch storage, mapped or read. Torch is imported with the first tensor."""

from __future__ import annotations

import ctypes
import mmap as maps
import sys
import warnings
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, TypeVar

from transcribe.errors import ModelError

from .layout import AGAIN, TruncatedError, os_errors, truncated
from .sniff import HEAD_BYTES

if TYPE_CHECKING:
    import torch

R = TypeVar("R")
_MADV_POPULATE_READ = 22  # Linux 5.14, mman.h
FIRST_READ = 8 << 20  # a vocabulary of 150,000 tokens with its merges is 6 MB


class FileStorage:
    """One file behind one storage whose byte i is the file's byte i, so neighbours stay neighbours.

    Mapped: the storage is a read-only mapping. Its pages belong to the file, nothing is copied, and writing
    to it is a fault. Otherwise the storage is reserved memory, and a range is read into its place when first
    asked for: what is never asked for costs no memory.
    """

    def __init__(self, path: Path, *, mmap: bool) -> None:
        self.path = path
        self._read: set[int] = set()
        self._map: maps.mmap | None = None
        with path.open("rb") as file:
            self.size = file.seek(0, 2)
            file.seek(0)
            self.first = file.read(HEAD_BYTES)
            if mmap and self.size:
                with os_errors(path, "open it with --no-mmap"):
                    self._map = maps.mmap(file.fileno(), 0, access=maps.ACCESS_READ)

    def parse(self, read_head: Callable[[Path, bytes | maps.mmap, int], R], index: int) -> R:
        """Run a parser over the head of the file: the map, or a prefix that grows until it suffices."""
        head: bytes | maps.mmap = self._map if self._map is not None else self._prefix(FIRST_READ)
        while True:
            try:
                return read_head(self.path, head, index)
            except TruncatedError as error:
                if error.needed > self.size:
                    raise truncated(self.path, error.needed, self.size) from None
                longer = self._prefix(max(error.needed, 2 * len(head)))
                if len(longer) <= len(head):
                    raise truncated(self.path, error.needed, len(longer)) from None
                head = longer

    def view(self, offset: int, nbytes: int) -> torch.Tensor:
        """Bytes of the file, uint8 [nbytes]: a view of the one storage, which it keeps alive."""
        part = self._bytes[offset : offset + nbytes]
        if self._map is None and nbytes and offset not in self._read:
            with os_errors(self.path), self.path.open("rb", buffering=0) as file:
                file.seek(offset)
                space = part.numpy().data
                while space and (got := file.readinto(space)):
                    space = space[got:]
            if space:
                raise ModelError(f"{self.path}: has become shorter since it was opened; {AGAIN}")
            self._read.add(offset)
        return part

    def enter(self) -> None:
        """Have all pages of a mapping entered for this process, beside other work, where the system does that.

        When they are touched it enters 16 at a time, which takes several times as long in all.
        """
        if self._map is not None and sys.platform == "linux":
            Thread(target=_enter, args=(self._bytes,), daemon=True).start()

    def _prefix(self, count: int) -> bytes:
        with self.path.open("rb") as file:
            return file.read(count)

    @cached_property
    def _bytes(self) -> torch.Tensor:
        import torch

        if self._map is None:
            return torch.empty(self.size, dtype=torch.uint8)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that it cannot be written to is intended
            return torch.frombuffer(self._map, dtype=torch.uint8)


def _enter(mapped: torch.Tensor) -> None:
    address, size = ctypes.c_void_p(mapped.data_ptr()), ctypes.c_size_t(mapped.nbytes)
    ctypes.CDLL(None).madvise(address, size, _MADV_POPULATE_READ)
