"""The manifest of an output folder: JSON Lines, one record a recording, appended when it ends.

A recording's last record is its state. Every shard has a manifest of its own, so that none is written by two machines.
"""

from __future__ import annotations

import errno
import json
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import writers
from .atomic import writing_into
from .errors import UsageError

if TYPE_CHECKING:
    from .transcript import Transcript
    from .worklist import Item, Plan, Shard

COMPLETE = ("done", "skipped")


def manifest_name(shard: Shard | None = None) -> str:
    return "manifest.jsonl" if shard is None else "manifest-{}-of-{}.jsonl".format(*shard)


def is_manifest(name: str) -> bool:
    """Whether a file of this name is a manifest, on disks that ignore case too."""
    return re.fullmatch(r"manifest(-\d+-of-\d+)?\.jsonl", name, re.IGNORECASE) is not None


class Manifest:
    """Appends to the manifest in `folder`. Raises `UsageError` if it cannot be opened.

    A disk that is full stops nothing: `tell` gets a line, once, and records wait for the next one that can be written.
    """

    def __init__(self, folder: Path, shard: Shard | None, tell: Callable[[str], None]) -> None:
        self.folder = folder
        self.path = folder / manifest_name(shard)
        self._tell = tell
        self._waiting: list[bytes] = []
        self._told = False
        try:
            self._file = open(self.path, "ab+", buffering=0)  # noqa: SIM115
            self._cut_torn_line()
        except OSError as error:
            raise UsageError(f"{self.path}: cannot write the manifest: {error.strerror or error}") from error

    def __enter__(self) -> Manifest:
        return self

    def __exit__(self, *_: object) -> None:
        if self._waiting and self._write():
            self._tell(f"{self.path}: {len(self._waiting)} records could not be written")
        self._file.close()

    def add(
        self,
        item: Item,
        outcome: str,
        transcript: Transcript | None = None,
        error: dict[str, str] | None = None,
    ) -> None:
        """Record how `item` ended: "done", "partial", "failed" (with `error`: kind and message) or "skipped".

        Seconds and model are null where there is no transcript.
        """
        there = () if outcome == "failed" else item.targets.values()
        record: dict[str, Any] = {
            "path": item.source,
            "outcome": outcome,
            "outputs": [target.relative_to(self.folder).as_posix() for target in there],
            "seconds": round(transcript.duration, 3) if transcript else None,
            "model": transcript.model if transcript else None,
        }
        if error:
            record["error"] = error
        if transcript and transcript.warnings:
            record["warnings"] = transcript.warnings
        record["finished"] = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        self._waiting.append(writers.encode(writers.json_line(record)))
        if (problem := self._write()) and not self._told:
            self._told = True
            self._tell(f"{self.path}: cannot write: {problem}; its records wait until it can be written")

    def add_skipped(self, items: Sequence[Item]) -> None:
        """Record those that no manifest here has as complete: a run may be killed between an output and its record."""
        known = _complete(self.folder) if items else set()
        for item in items:
            if item.source not in known:
                self.add(item, "skipped")

    def _write(self) -> str | None:
        """What waits, in one call: all of it or nothing. Returns what is wrong.

        An interrupt loses a record rather than write it twice; a later run makes up for it.
        """
        lines, self._waiting = self._waiting, []
        data = b"".join(lines)
        try:
            written = self._file.write(data)
            if written == len(data):
                return None
            self._file.truncate(self._file.tell() - written)
            problem = os.strerror(errno.ENOSPC)
        except OSError as error:
            problem = error.strerror or str(error)
        self._waiting = lines
        return problem

    def _cut_torn_line(self) -> None:
        """What a machine that died, or a disk that was full, left without its end."""
        with open(self.path, "rb") as lines:
            whole = sum(len(line) for line in lines if line.endswith(b"\n"))
        self._file.truncate(whole)


@contextmanager
def keep_manifest(plan: Plan, tell: Callable[[str], None]) -> Iterator[Manifest | None]:
    """The manifest of the plan's output folder, for the length of a run; None where all goes to stdout.

    First it tidies up after runs that were killed: their temporaries, and what they did without recording it.
    """
    if plan.output_dir is None:
        yield None
        return
    with writing_into(plan.output_dir, plan.folders), Manifest(plan.output_dir, plan.shard, tell) as manifest:
        manifest.add_skipped(plan.skipped)
        yield manifest


def _complete(folder: Path) -> set[str]:
    """The paths whose last record, in any manifest of `folder`, says that they are complete."""
    complete: set[str] = set()
    for name in filter(is_manifest, os.listdir(folder)):
        last = {}
        with suppress(OSError), open(folder / name, "rb") as lines:
            for line in lines:
                with suppress(ValueError, KeyError, TypeError):  # torn, or not ours
                    record = json.loads(line)
                    last[record["path"]] = record["outcome"]
        complete.update(path for path, outcome in last.items() if outcome in COMPLETE)
    return complete
