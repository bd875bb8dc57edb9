"""audio.cpp's dialect of GGUF: original tensor names and shapes, and the model's small files, as metadata."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from transcribe.errors import ModelError

from .gguf import Metadata
from .layout import AGAIN, TensorInfo, count_bytes, own_name

ARCHITECTURE = "audiocpp"


def logical_tensors(path: Path, metadata: Metadata, tensors: Sequence[TensorInfo]) -> list[TensorInfo]:
    """The tensors under the logical names and shapes that `audiocpp.tensor_*` list in the table's order.

    The physical ones may be cut short or padded. Raises ModelError if the two do not fit.
    """
    names, ranks, dims = (_array(path, metadata, f"tensor_{what}") for what in ("names", "ranks", "shapes"))
    if not len(names) == len(ranks) == len(tensors) or any(r < 0 for r in ranks) or sum(ranks) != len(dims):
        raise ModelError(f"{path}: audiocpp.tensor_names, _ranks and _shapes have {len(names)}, {len(ranks)} "
                         f"and {len(dims)} items for {len(tensors)} tensors; {AGAIN}")
    result, at = [], 0
    for tensor, name, rank in zip(tensors, names, ranks, strict=True):
        shape = tuple(dims[at : at + rank])
        at += rank
        if any(n < 0 for n in shape) or math.prod(shape) != math.prod(tensor.shape):
            raise ModelError(f"{path}: tensor {name!r} of shape {list(shape)} is stored as "
                             f"{list(tensor.shape)}; {AGAIN}")
        if tensor.type is not None:
            count_bytes(path, name, shape, tensor.type)
        result.append(replace(tensor, name=name, shape=shape))
    return result


def family(path: Path, metadata: Metadata) -> str:
    """The family the embedded model specification names, "" if there is none."""
    name = metadata.get("audiocpp.model_spec.family")
    if not name:
        try:
            name = json.loads(metadata.get("audiocpp.model_spec.json", "{}"))["family"]
        except (ValueError, TypeError, KeyError, RecursionError):
            name = ""
    return name if isinstance(name, str) else ""


def embedded_file(path: Path, metadata: Metadata, name: str) -> bytes | None:
    """The bytes of an embedded file, from one array by offsets or from the older array of texts, or None."""
    if "audiocpp.embedded_files.names" not in metadata:
        return None
    names = _array(path, metadata, "embedded_files.names")
    found = own_name(names, name)
    if found is None:
        return None
    index = names.index(found)
    if "audiocpp.embedded_files.contents" in metadata:
        contents = _array(path, metadata, "embedded_files.contents")
        if len(contents) == len(names):
            return contents[index].encode("utf-8", "surrogateescape")
    else:
        offsets = _array(path, metadata, "embedded_files.offsets")
        try:
            data = metadata.blob("audiocpp.embedded_files.data")
        except KeyError:
            data = memoryview(b"")
        if len(offsets) == len(names) + 1 and 0 <= offsets[index] <= offsets[index + 1] <= len(data):
            return bytes(data[offsets[index] : offsets[index + 1]])
    raise ModelError(f"{path}: the embedded file {name!r} is damaged; {AGAIN}")


def _array(path: Path, metadata: Metadata, key: str) -> list[Any]:
    value = metadata.get(f"{ARCHITECTURE}.{key}")
    wanted = str if key.endswith(("names", "contents")) else int
    if not isinstance(value, list) or not all(type(item) is wanted for item in value):
        raise ModelError(f"{path}: {ARCHITECTURE}.{key} is missing or of the wrong type; "
                         "convert the model again")
    return value
