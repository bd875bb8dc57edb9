"""Files and folders -> what there is to do: which recordings, which output files, what is already there.

Everything here is decided before a model is loaded, so that what cannot work fails now and not after hours.
"""

from __future__ import annotations

import os
import tempfile
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from .errors import UsageError

STDIN = "-"

# Looked for inside folders only; a file named on the command line is tried whatever its extension.
# fmt: off
EXTENSIONS = frozenset((
    "3g2", "3gp", "aac", "ac3", "aif", "aifc", "aiff", "amr", "ape", "asf", "au", "avi", "awb", "caf",
    "dts", "eac3", "flac", "flv", "gsm", "m2ts", "m4a", "m4b", "m4r", "m4v", "mka", "mkv", "mov", "mp2",
    "mp3", "mp4", "mpeg", "mpg", "mts", "mxf", "oga", "ogg", "ogv", "opus", "qt", "ra", "rm", "spx",
    "tta", "ts", "vob", "voc", "w64", "wav", "weba", "webm", "wma", "wmv", "wv",
))
# fmt: on


@dataclass
class Item:
    """One recording: where it is, where its outputs go (format -> path; empty for stdout).

    `folder` is its place below a folder that was given, and `problem` what already keeps it from being read.
    """

    source: str
    folder: str = ""
    problem: str | None = None
    targets: dict[str, Path] = field(default_factory=dict)


@dataclass
class Plan:
    """The work: `items` to transcribe, `skipped` whose outputs are there, `notes` for the user."""

    items: list[Item]
    formats: tuple[str, ...]
    output_dir: Path | None = None
    skipped: list[Item] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def several(self) -> bool:
        return len(self.items) + len(self.skipped) > 1

    @property
    def to_stdout(self) -> bool:
        return self.output_dir is None

    @property
    def needs_model(self) -> bool:
        return any(item.problem is None for item in self.items)


def plan(
    inputs: Iterable[str],
    formats: tuple[str, ...] = ("txt",),
    output_dir: str | os.PathLike[str] | None = None,
    recursive: bool = False,
    overwrite: bool = False,
) -> Plan:
    """Find the recordings and name every output. Raises `UsageError` for what cannot work."""
    notes: list[str] = []
    items = list(discover(inputs, recursive, notes))
    result = Plan(items, formats, Path(output_dir) if output_dir is not None else None, notes=notes)
    if result.output_dir is None:
        if len(formats) > 1:
            raise UsageError("--output-format all writes several files: say where with --output-dir")
        if len(items) > 1 and formats[0] not in ("txt", "jsonl"):
            raise UsageError(
                f"--output-format {formats[0]} of several recordings cannot share standard output: "
                "give --output-dir, or use jsonl"
            )
        return result
    if items:
        name_outputs(items, result.output_dir, formats)
        check_writable(result.output_dir)
        if not overwrite:
            skip_complete(result)
    return result


def discover(inputs: Iterable[str], recursive: bool, notes: list[str]) -> Iterator[Item]:
    """Every recording once, folders in sorted order; `notes` gets a line for a folder that holds none."""
    seen = set()
    for given in inputs:
        found = _in_folder(given, recursive) if given != STDIN and os.path.isdir(given) else [_file(given)]
        empty = True
        for item in found:
            empty = False
            identity = item.source if item.source == STDIN else os.path.abspath(item.source)
            if identity not in seen:
                seen.add(identity)
                yield item
        if empty:
            hint = "" if recursive else " (--recursive looks into its subfolders)"
            notes.append(f"{given}: no audio or video files in this folder{hint}")


def _file(path: str, folder: str = "") -> Item:
    if path == STDIN or os.path.exists(path):
        return Item(path, folder)
    return Item(path, folder, problem="dangling link" if os.path.islink(path) else "no such file")


def _in_folder(top: str, recursive: bool) -> Iterator[Item]:
    """Files with a known extension, no dot-files; a folder that cannot be read is an item with a problem."""
    unreadable: list[OSError] = []
    for folder, subfolders, names in os.walk(top, onerror=unreadable.append):
        subfolders[:] = sorted(name for name in subfolders if recursive and not name.startswith("."))
        below = os.path.relpath(folder, top)
        for name in sorted(names):
            path = os.path.join(folder, name)
            if name.startswith(".") or os.path.splitext(name)[1][1:].lower() not in EXTENSIONS:
                continue
            if os.path.isfile(path) or os.path.islink(path):  # no pipes or devices
                yield _file(path, "" if below == os.curdir else below)
    for error in unreadable:
        yield Item(error.filename, problem=f"cannot read this folder: {error.strerror}")


def name_outputs(items: list[Item], output_dir: Path, formats: tuple[str, ...]) -> None:
    """Give each item its targets: `<stem>.<format>`, below the folder it was found in.

    Names that would meet keep the source's extension; those that still meet (x/a.wav and y/a.wav) are
    mirrored below the folder all sources share. Raises `UsageError` if two still meet, or an output is a
    source.
    """
    folders = [os.path.dirname(os.path.abspath(item.source)) for item in items]
    shared = _common_folder({folder for folder, item in zip(folders, items, strict=True) if item.source != STDIN})

    def candidates(item: Item, folder: str) -> list[str]:
        name = "stdin" if item.source == STDIN else os.path.basename(os.path.abspath(item.source))
        stem = os.path.splitext(name)[0]
        mirrored = os.path.relpath(folder, shared) if shared and item.source != STDIN else ""
        return [
            os.path.normpath(os.path.join(*parts))
            for parts in ((item.folder, stem), (item.folder, name), (mirrored, stem), (mirrored, name))
        ]

    choices = [candidates(item, folder) for item, folder in zip(items, folders, strict=True)]
    level = [0] * len(items)
    while True:
        names = [choice[at] for choice, at in zip(choices, level, strict=True)]
        count = Counter(map(_same_name, names))
        clashing = [index for index, name in enumerate(names) if count[_same_name(name)] > 1]
        if not clashing:
            break
        if all(level[index] == 3 for index in clashing):
            first, second = (items[index].source for index in clashing[:2])
            raise UsageError(f"{first} and {second} would be written to one output: transcribe them apart")
        for index in clashing:
            level[index] = min(level[index] + 1, 3)

    sources = {os.path.realpath(item.source) for item in items if item.source != STDIN}
    for item, name in zip(items, names, strict=True):
        item.targets = {format_: output_dir / f"{name}.{format_}" for format_ in formats}
        for target in item.targets.values():
            if os.path.realpath(target) in sources:
                raise UsageError(f"{target}: this output is one of the recordings; give another --output-dir")
            if target.is_dir():
                raise UsageError(f"{target}: a folder has the name of this output; give another --output-dir")


def _common_folder(parents: set[str]) -> str:
    try:
        return os.path.commonpath(parents) if parents else ""
    except ValueError:  # on several drives
        return ""


def _same_name(name: str) -> str:
    """What a file system that ignores case or Unicode form takes `name` for."""
    return unicodedata.normalize("NFC", name).casefold()


def check_writable(folder: Path) -> None:
    """Make `folder` and write to it once, so that this fails now and not after hours. Raises `UsageError`."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        reason = "it is a file" if folder.is_file() else error.strerror or str(error)
        raise UsageError(f"{folder}: cannot write into this output folder: {reason}") from error


def skip_complete(plan: Plan) -> None:
    """Set aside what is done: every requested output there and newer than its recording.

    Raises `UsageError` where an output would be replaced that cannot be compared, because it came from stdin.
    """
    waiting = []
    for item in plan.items:
        existing = [target for target in item.targets.values() if target.exists()]
        if item.source == STDIN and existing:
            raise UsageError(f"{existing[0]}: exists already; --overwrite replaces it")
        if item.problem is None and len(existing) == len(item.targets) and _newer(existing, item.source):
            plan.skipped.append(item)
            continue
        if existing and item.problem is None:
            plan.notes.append(f"{existing[0]}: not newer than {item.source} or not complete; written again")
        waiting.append(item)
    plan.items = waiting


def _newer(targets: list[Path], source: str) -> bool:
    return min(target.stat().st_mtime_ns for target in targets) > os.stat(source).st_mtime_ns
