"""Reading the head of a safetensors file: eight bytes of length, then JSON that says where tensors lie."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from mmap import mmap
from pathlib import Path
from typing import Any

from gguf import GGMLQuantizationType

from transcribe.errors import ModelError

from .layout import AGAIN, TensorInfo, TruncatedError, count_bytes

# The limit of the format's own library.
MAX_HEAD = 100_000_000

T = GGMLQuantizationType
TYPES = {
    "F64": T.F64, "F32": T.F32, "F16": T.F16, "BF16": T.BF16,
    "I64": T.I64, "I32": T.I32, "I16": T.I16, "I8": T.I8,
}


@dataclass(frozen=True)
class Head:
    metadata: Mapping[str, str]
    tensors: list[TensorInfo]


def looks_like(head: bytes) -> bool:
    """Whether a file that starts with these bytes (nine or more) may be safetensors."""
    return len(head) > 8 and 2 <= int.from_bytes(head[:8], "little") <= MAX_HEAD and head[8:9] == b"{"


def read_head(path: Path, data: bytes | mmap, file: int = 0) -> Head:
    """Parse the head of a safetensors file, of which `data` holds the beginning or the whole.

    Whether the tensors lie within the file is left to `check_extents`. Raises TruncatedError when `data` is
    too short, ModelError when it is not a sound safetensors file.
    """
    start = 8 + int.from_bytes(data[:8], "little")
    if start > len(data):
        raise TruncatedError(start)
    try:
        head = json.loads(data[8:start].decode("utf-8"), object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path}: the safetensors header is damaged ({error}); {AGAIN}") from None
    if not isinstance(head, dict):
        raise ModelError(f"{path}: the safetensors header is not a JSON object; {AGAIN}")
    metadata = head.pop("__metadata__", None) or {}
    if not isinstance(metadata, dict):
        raise ModelError(f"{path}: the safetensors __metadata__ is not a JSON object; {AGAIN}")
    return Head(metadata, [_tensor(path, name, entry, start, file) for name, entry in head.items()])


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) < len(pairs):
        raise ValueError("a name occurs twice")
    return result


def _tensor(path: Path, name: str, entry: Any, data_start: int, file: int) -> TensorInfo:
    try:
        dtype, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
        numbers = (*shape, begin, end - begin)
        sound = isinstance(dtype, str) and all(type(n) is int and n >= 0 for n in numbers)
    except (TypeError, KeyError, ValueError):
        sound = False
    if not sound:
        raise ModelError(f"{path}: the entry of tensor {name!r} is damaged; {AGAIN}")
    kind = TYPES.get(dtype)
    if kind is not None and (needed := count_bytes(path, name, shape, kind)) != end - begin:
        raise ModelError(f"{path}: tensor {name!r} of {dtype} {shape} takes {needed} bytes, but its place "
                         f"has {end - begin}; {AGAIN}")
    return TensorInfo(name, tuple(shape), kind, dtype, end - begin, file, data_start + begin)
