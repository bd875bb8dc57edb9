"""The C kernels as a shared library: found, loaded and told which instruction set to use. Imports no torch.

The library is optional. Where it was not built, or TRANSCRIBE_KERNELS=torch says so, PyTorch computes everything.
"""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass
from functools import cache
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

from transcribe.errors import UsageError

SWITCH = "TRANSCRIBE_KERNELS"
PATHS = {
    "amx": "AMX", "avx512bf16": "AVX-512 with BF16", "avx512": "AVX-512", "avx2": "AVX2", "neon": "NEON",
    "portable": "portable C", "torch": "torch",
}  # fmt: skip
"""The values of the switch, and how each path is called in print."""


@cache
def _open() -> ctypes.CDLL | None:
    for suffix in EXTENSION_SUFFIXES:
        file = Path(__file__).with_name(f"_kernels{suffix}")
        if file.exists():
            break
    else:
        return None
    try:
        library = ctypes.CDLL(str(file))
    except OSError:  # built for another machine
        return None
    address, number, flag = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
    record = ctypes.c_char_p
    library.transcribe_choose.argtypes = [record]
    library.transcribe_choose.restype = ctypes.c_char_p
    library.transcribe_set_team.argtypes = [address]
    library.transcribe_set_team.restype = None
    library.transcribe_prepared_bytes.argtypes = [flag, flag, number, number]
    library.transcribe_prepared_bytes.restype = number
    library.transcribe_multiply.argtypes = [record, flag]
    library.transcribe_multiply.restype = None
    library.transcribe_expand.argtypes = [address] * 2 + [number] * 4 + [flag] * 3
    library.transcribe_expand.restype = None
    library.transcribe_run.argtypes = [address, number, flag]
    library.transcribe_run.restype = None
    return library


@dataclass
class Chosen:
    """What serves now: the library set to one path of `PATHS`, or no library and "torch"."""

    library: ctypes.CDLL | None
    path: str


def choose(wanted: str) -> Chosen:
    """The path of `PATHS` that is wanted, or for "" the best there is.

    Raises `UsageError` for one that does not exist, or that this processor or installation does not have.
    """
    if wanted and wanted not in PATHS:
        raise UsageError(f"{SWITCH}={wanted} is not a path; use one of {', '.join(PATHS)}")
    library = None if wanted == "torch" else _open()
    if library is None:
        if wanted in ("", "torch"):
            return Chosen(None, "torch")
        raise UsageError(f"{SWITCH}={wanted}: the kernels were not built; reinstall with a C compiler, or unset it")
    name = library.transcribe_choose(wanted.encode())
    if name is None:
        raise UsageError(f"{SWITCH}={wanted}: this processor does not have it; unset it")
    return Chosen(library, name.decode())


@cache
def chosen() -> Chosen:
    """What serves: by TRANSCRIBE_KERNELS when first asked, and then what `use` says."""
    return choose(os.environ.get(SWITCH, ""))


def use(path: str) -> None:
    """Let another path serve from now on, in the whole process. Raises `UsageError` as `choose` does."""
    now, then = chosen(), choose(path)
    now.library, now.path = then.library, then.path
