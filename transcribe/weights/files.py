"""From what the user names to the files of one model: a directory, a single file, or any part of a set."""

from __future__ import annotations

import json
import re
from pathlib import Path

from transcribe.errors import ModelError

from .layout import AGAIN

INDEX = ".safetensors.index.json"
# gguf-split and Hugging Face both number from 1.
PART = re.compile(r"(?P<stem>.+)-(?P<part>\d{5})-of-(?P<count>\d{5})(?P<suffix>\.gguf|\.safetensors)")


def find_weights(path: Path) -> Path:
    """The file to open for `path`: itself, or the one in a directory. Raises ModelError if there is none."""
    if not path.exists():
        raise ModelError(f"{path}: no such file or directory; check the path")
    if not path.is_dir():
        if not path.is_file():
            raise ModelError(f"{path}: not a regular file; give a GGUF, safetensors or .nemo file")
        return path
    for name in ("model.safetensors", "model" + INDEX):
        if (path / name).is_file():
            return path / name
    found = sorted(p for p in path.iterdir() if p.suffix == ".gguf" and p.is_file())
    models = {(match["stem"], match["count"]) if (match := PART.fullmatch(p.name)) else p.name for p in found}
    if len(models) == 1:
        return found[0]
    if models:
        names = ", ".join(p.name for p in found[:3]) + (", ..." if len(found) > 3 else "")
        raise ModelError(f"{path}: holds several GGUF files ({names}); give one of them")
    for suffix in (".safetensors", ".nemo"):
        others = [p for p in path.iterdir() if p.suffix == suffix and p.is_file()]
        if len(others) == 1:
            return others[0]
    pickles = sorted(p.name for p in path.iterdir() if p.suffix in (".bin", ".pt", ".pth", ".ckpt"))
    other = f"; {pickles[0]} would have to be converted to safetensors or GGUF first" if pickles else ""
    raise ModelError(f"{path}: a directory without weights: expected model.safetensors, model{INDEX} or one "
                     f".gguf or .nemo file{other or '; give the directory that has them'}")


def gguf_set(path: Path, count: int) -> list[Path]:
    """All parts of the split GGUF set that `path` is one of, in order."""
    match = PART.fullmatch(path.name)
    if not match or match["suffix"] != ".gguf" or int(match["count"]) != count:
        raise ModelError(f"{path}: one part of a model split in {count}, or several joined, but not named "
                         f"NAME-00001-of-{count:05}.gguf; keep the parts apart, under their original names")
    names = [f"{match['stem']}-{number:05}-of-{count:05}.gguf" for number in range(1, count + 1)]
    return _all_there([path.with_name(name) for name in names])


def safetensors_index(path: Path) -> Path | None:
    """The index of the set that `path` is, or is a shard of; None for a file that stands alone."""
    if path.name.endswith(INDEX):
        return path
    match = PART.fullmatch(path.name)
    if not match or match["suffix"] != ".safetensors" or int(match["count"]) < 2:
        return None
    index = path.with_name(match["stem"] + INDEX)
    if not index.is_file():
        raise ModelError(f"{path}: one shard of {int(match['count'])}; its index {index.name} is missing: "
                         "put it beside the shards")
    return index


def read_index(index: Path) -> tuple[list[Path], dict[str, str]]:
    """The shards of a set in order, and the shard's name for each tensor."""
    try:
        where = json.loads(index.read_bytes())["weight_map"]
        plain = isinstance(where, dict) and all(isinstance(name, str) and Path(name).name == name
                                                for name in where.values())
    except (ValueError, KeyError, TypeError, RecursionError):
        plain = False
    if not plain or not where:
        raise ModelError(f"{index}: not an index of safetensors shards (no sound weight_map); {AGAIN}")
    return _all_there([index.with_name(name) for name in sorted(set(where.values()))]), where


def _all_there(parts: list[Path]) -> list[Path]:
    missing = [part.name for part in parts if not part.is_file()]
    if missing:
        others = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise ModelError(f"{parts[0].with_name(missing[0])}: missing{others}, of a set of {len(parts)} "
                         "files; put all of them in one directory")
    return parts
