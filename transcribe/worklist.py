"""Files and folders -> what there is to do: which recordings, which output files, what is already there.

Everything here is decided before a model is loaded, so that what cannot work fails now and not after hours.
"""

from __future__ import annotations

import os
import stat
import tempfile
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from .errors import UsageError
from .manifest import is_manifest

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


Shard = tuple[int, int]  # (2, 4): the second of four parts


@dataclass
class Item:
    """One recording: where it is, where its outputs go (format -> path; empty for stdout).

    `real` is its path without links, which tells recordings apart; `folder` is its place below a folder that was
    given, and `problem` what already keeps it from being read.
    """

    source: str
    real: str
    folder: str = ""
    problem: str | None = None
    targets: dict[str, Path] = field(default_factory=dict)


@dataclass
class Plan:
    """The work: `items` to transcribe, `skipped` whose outputs are there, `notes` for the user.

    `found` counts the recordings of all shards, `folders` are where the outputs of all of them go.
    """

    items: list[Item]
    formats: tuple[str, ...]
    output_dir: Path | None = None
    shard: Shard | None = None
    skipped: list[Item] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    found: int = 0
    folders: set[Path] = field(default_factory=set)

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
    shard: Shard | None = None,
) -> Plan:
    """Find the recordings and name every output. Raises `UsageError` for what cannot work.

    With `shard` the plan holds that part of the sorted list; names are those they have without it.
    """
    notes: list[str] = []
    items = list(discover(inputs, recursive, notes))
    folder = Path(output_dir) if output_dir is not None else None
    result = Plan(items, formats, folder, shard, notes=notes, found=len(items))
    if folder is None:
        if shard is not None:
            raise UsageError("--shard is for runs that share an output folder: give --output-dir")
        if len(formats) > 1:
            raise UsageError("--output-format all writes several files: say where with --output-dir")
        if len(items) > 1 and formats[0] not in ("txt", "jsonl"):
            raise UsageError(
                f"--output-format {formats[0]} of several recordings cannot share standard output: "
                "give --output-dir, or use jsonl"
            )
        return result
    if items:
        name_outputs(items, folder, formats)
        check_writable(folder)
        result.folders = {target.parent for item in items for target in item.targets.values()}
        if shard is not None:
            part, parts = shard
            result.items = items[part - 1 :: parts]
            if not result.items:
                notes.append(f"shard {part}/{parts}: nothing to do, there are {len(items)} recordings in all")
        set_complete_aside(result, overwrite)
    return result


def discover(inputs: Iterable[str], recursive: bool, notes: list[str]) -> Iterator[Item]:
    """Every recording once, folders in sorted order; no file is opened.

    `notes` gets a line for a folder that holds none, and for one that was found before under another name.
    """
    seen: dict[str, str] = {}
    for given in inputs:
        empty = True
        for item in _in_folder(given, recursive) if given != STDIN and os.path.isdir(given) else [_file(given)]:
            empty = False
            if item.real not in seen:
                seen[item.real] = item.source
                yield item
            elif os.path.abspath(item.source) != os.path.abspath(seen[item.real]):
                notes.append(f"{item.source}: the same file as {seen[item.real]}")
        if empty:
            hint = "" if recursive else " (--recursive looks into its subfolders)"
            notes.append(f"{given}: no audio or video files in this folder{hint}")


def _file(path: str, folder: str = "") -> Item:
    if path == STDIN:
        return Item(path, path)
    if os.path.exists(path):
        return Item(path, os.path.realpath(path), folder)
    problem = "dangling link" if os.path.islink(path) else "no such file"
    return Item(path, os.path.abspath(path), folder, problem)


def _in_folder(top: str, recursive: bool) -> Iterator[Item]:
    """Files with a known extension, no dot-files; links to folders are not followed.

    What kind an entry is comes with the listing: only links cost calls of their own. A folder that cannot be read is
    an item with a problem.
    """
    real_top = os.path.realpath(top)
    waiting = [""]
    while waiting:
        below = waiting.pop()
        folder, real_folder = (os.path.join(path, below) if below else path for path in (top, real_top))
        subfolders = []
        try:
            with os.scandir(folder) as listing:
                entries = sorted(listing, key=lambda entry: entry.name)
        except OSError as error:
            yield Item(folder, real_folder, problem=f"cannot read this folder: {error.strerror}")
            continue
        for entry in entries:
            name = entry.name
            if name.startswith("."):
                continue
            if entry.is_dir(follow_symlinks=False):
                subfolders.append(os.path.join(below, name))
            elif os.path.splitext(name)[1][1:].lower() in EXTENSIONS:
                if entry.is_symlink():
                    if os.path.isfile(entry.path) or not os.path.exists(entry.path):
                        yield _file(entry.path, below)
                elif entry.is_file():  # no pipes or devices
                    yield Item(entry.path, os.path.join(real_folder, name), below)
        if recursive:
            waiting.extend(reversed(subfolders))


def name_outputs(items: list[Item], output_dir: Path, formats: tuple[str, ...]) -> None:
    """Give each item its targets: `<stem>.<format>`, below the folder it was found in.

    Names that would meet, on a disk that ignores case too, keep the source's extension; those that still meet
    (x/a.wav and y/a.wav) are mirrored below the folder all sources share, and those that meet even so (a.wav and
    A.wav) are numbered. Raises `UsageError` if an output is a source.
    """
    shared = _common_folder(items)

    def name_at(level: int, item: Item) -> str:
        path = "stdin" if item.source == STDIN else os.path.abspath(item.source)
        folder, name = os.path.split(path)
        if level in (0, 2):
            name = os.path.splitext(name)[0]
        if level < 2:
            return os.path.join(item.folder, name)
        mirrored = os.path.relpath(folder, shared) if shared and folder else ""
        return os.path.normpath(os.path.join(mirrored, name if level < 4 else f"{name}.{level - 2}"))

    level = [0] * len(items)
    names = [name_at(0, item) for item in items]
    while True:
        keys = [_same_name(name) for name in names]
        count = Counter(keys)
        if "jsonl" in formats:
            count.update(key for key in count if is_manifest(f"{key}.jsonl"))
        clashing = [index for index, key in enumerate(keys) if count[key] > 1]
        if not clashing:
            break
        for index in sorted(clashing, key=level.__getitem__):
            if level[index] < 3 or count[keys[index]] > 1:  # of those that have tried all, the last keeps its name
                count[keys[index]] -= 1
                level[index] += 1
                names[index] = name_at(level[index], items[index])

    sources = {item.real for item in items if os.path.splitext(item.real)[1][1:] in formats}  # no others are met
    for item, name in zip(items, names, strict=True):
        item.targets = {format_: output_dir / f"{name}.{format_}" for format_ in formats}
        for target in item.targets.values() if sources else ():
            if os.path.realpath(target) in sources:
                raise UsageError(f"{target}: this output is one of the recordings; give another --output-dir")


def _common_folder(items: list[Item]) -> str:
    folders = {os.path.dirname(os.path.abspath(item.source)) for item in items if item.source != STDIN}
    try:
        return os.path.commonpath(folders) if folders else ""
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


def set_complete_aside(plan: Plan, overwrite: bool) -> None:
    """Skip what is done: every requested output there and newer than its recording; nothing with `overwrite`.

    Raises `UsageError` where an output is a folder, or would be replaced that cannot be compared, because it came
    from stdin.
    """
    waiting = []
    for item in plan.items:
        existing = {target: found for target in item.targets.values() if (found := _stat(target))}
        for target, found in existing.items():
            if stat.S_ISDIR(found.st_mode):
                raise UsageError(f"{target}: a folder has the name of this output; give another --output-dir")
        if existing and item.problem is None and not overwrite:
            first = next(iter(existing))
            if item.source == STDIN:
                raise UsageError(f"{first}: exists already; --overwrite replaces it")
            recording = _stat(item.source)
            oldest = min(found.st_mtime_ns for found in existing.values())
            if recording and len(existing) == len(item.targets) and oldest > recording.st_mtime_ns:
                plan.skipped.append(item)
                continue
            plan.notes.append(f"{first}: not newer than {item.source} or not complete; written again")
        waiting.append(item)
    plan.items = waiting


def _stat(path: str | Path) -> os.stat_result | None:
    try:
        return os.stat(path)
    except OSError:
        return None
