"""Files that are whole or absent, whenever the process dies; what dead ones left behind is removed."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

PREFIX, SUFFIX = ".transcribe-", ".tmp"
DAY = 86400.0


def write_together(outputs: Mapping[Path, bytes], source: str | None = None, complete: bool = True) -> None:
    """Write every file beside its place, then rename them all. Raises `OSError`, naming the file.

    With `source` they are dated as that one until all are in place, and for good unless `complete`: a later run
    takes outputs that are not newer than their recording for unfinished.
    """
    temporaries = {target: target.parent / f"{PREFIX}{secrets.token_hex(8)}{SUFFIX}" for target in outputs}
    target = None
    try:
        dated = _modified(source) if source is not None else None
        for target, temporary in temporaries.items():
            target.parent.mkdir(parents=True, exist_ok=True)
            with open(temporary, "xb") as file:
                file.write(outputs[target])
                file.flush()
                os.fsync(file.fileno())  # a full disk may say so only here
            if dated is not None:
                os.utime(temporary, ns=(dated, dated))
        for target, temporary in temporaries.items():
            os.replace(temporary, target)
        if complete and dated is not None:
            for target in outputs:
                os.utime(target)
    except BaseException as error:
        for temporary in temporaries.values():
            with suppress(OSError):
                temporary.unlink()
        if isinstance(error, OSError):
            raise OSError(error.errno, f"cannot write: {error.strerror or error}", str(target)) from error
        raise


def _modified(path: str) -> int | None:
    """None where it is gone: what was heard is kept."""
    try:
        return os.stat(path).st_mtime_ns
    except OSError:
        return None


@contextmanager
def writing_into(folder: Path, folders: Iterable[Path]) -> Iterator[None]:
    """While entered, other runs see that `folder` is written into; temporaries of dead ones are removed first.

    `folders` are `folder` and those below it to look in. A temporary is dead if no other run is under way, or if it is
    more than a day old. The sign is a shared lock, which ends with the process however that ends; where there are no
    locks, age alone tells.
    """
    handle = None
    if fcntl is not None:
        with suppress(OSError):  # a folder may be for writing only
            handle = os.open(folder, os.O_RDONLY)
    try:
        _remove_dead(folders, alone=_lock(handle, shared=False))
        _lock(handle, shared=True)
        yield
    finally:
        if handle is not None:
            os.close(handle)


def _lock(handle: int | None, shared: bool) -> bool:
    """False if another run has it, or there are no locks here."""
    if handle is None:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_SH if shared else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _remove_dead(folders: Iterable[Path], alone: bool) -> None:
    for folder in folders:
        with suppress(OSError), os.scandir(folder) as entries:
            for entry in entries:
                if entry.name.startswith(PREFIX) and entry.name.endswith(SUFFIX):
                    with suppress(OSError):
                        if alone or entry.stat().st_mtime < time.time() - DAY:
                            os.unlink(entry.path)
