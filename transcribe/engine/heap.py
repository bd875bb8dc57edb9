"""What glibc is asked so that freed memory does not pile up; other C libraries need or take no asking."""

from __future__ import annotations

import ctypes
import sys
from functools import cache

_M_ARENA_MAX = -8  # malloc.h


@cache
def _glibc() -> ctypes.CDLL | None:
    library = ctypes.CDLL(None) if sys.platform == "linux" else None
    return library if hasattr(library, "malloc_trim") and hasattr(library, "mallopt") else None


def share() -> None:
    """Let threads started from now on allocate from one heap: what one has freed then serves the others."""
    library = _glibc()
    if library is not None:
        library.mallopt(_M_ARENA_MAX, 1)


def trim() -> None:
    """Return free memory to the system, a millisecond's work."""
    library = _glibc()
    if library is not None:
        library.malloc_trim(0)
