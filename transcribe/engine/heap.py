"""What glibc is asked so that freed memory does not pile up; other C libraries need or take no asking."""

from __future__ import annotations

import ctypes
import sys
from functools import cache

_M_ARENA_MAX, _M_MMAP_THRESHOLD = -8, -3  # malloc.h
OWN_PAGES = 1 << 18  # bytes


@cache
def _glibc() -> ctypes.CDLL | None:
    library = ctypes.CDLL(None) if sys.platform == "linux" else None
    return library if hasattr(library, "malloc_trim") and hasattr(library, "mallopt") else None


def share() -> None:
    """Let threads started from now on allocate from one heap: what one has freed then serves the others."""
    library = _glibc()
    if library is not None:
        library.mallopt(_M_ARENA_MAX, 1)


def own_pages() -> None:
    """Give every block from `OWN_PAGES` on pages of its own, which go back when it is freed.

    glibc would come to keep ever larger ones among the small ones, where holes cannot always be used again. New pages
    cost time: for a family that has few blocks outside its plan.
    """
    library = _glibc()
    if library is not None:
        library.mallopt(_M_MMAP_THRESHOLD, OWN_PAGES)


def trim() -> None:
    """Return free memory to the system, a millisecond's work."""
    library = _glibc()
    if library is not None:
        library.malloc_trim(0)
