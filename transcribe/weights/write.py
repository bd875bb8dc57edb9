"""Writing a GGUF file, a piece of a tensor at a time, so that it appears under its name only when it is whole."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType, GGUFWriter

# Long values come last, so that whoever reads the beginning of a file has all the short ones.
LONG = (
    "tokenizer.ggml.tokens",
    "tokenizer.ggml.scores",
    "tokenizer.ggml.token_type",
    "tokenizer.ggml.merges",
    "tokenizer.chat_template",
)


@dataclass(frozen=True)
class Entry:
    """A tensor to write.

    shape: PyTorch order. type: how its bytes are to be read.
    pieces: gives its bytes when called, in order and in pieces of any length.
    """

    name: str
    shape: tuple[int, ...]
    type: GGMLQuantizationType
    pieces: Callable[[], Iterable[np.ndarray]]

    @property
    def nbytes(self) -> int:
        block, size = GGML_QUANT_SIZES[self.type]
        return prod(self.shape) // block * size


def write_gguf(destination: Path, keys: Mapping[str, Any], entries: Sequence[Entry]) -> None:
    """Write metadata and tensors to `destination`, replacing what is there only once all is written.

    `keys` has `general.architecture` and Python values: an int becomes uint32 (int32 in arrays), a float float32; a
    NumPy array keeps its type.
    Memory: one piece. Raises OSError; whatever is raised, nothing of the new file stays behind.
    """
    with _replacing(destination) as temporary:
        alignment = _write_head(temporary, keys, entries)
        with open(temporary, "r+b") as file:
            file.seek(0, os.SEEK_END)
            for entry in entries:
                file.write(bytes(-file.tell() % alignment))
                end = file.tell() + entry.nbytes
                for piece in entry.pieces():
                    file.write(piece.data)
                if file.tell() != end:
                    raise ValueError(f"tensor {entry.name!r}: {file.tell() - end:+} bytes of {entry.nbytes}")
            file.write(bytes(-file.tell() % alignment))


def _write_head(path: Path, keys: Mapping[str, Any], entries: Sequence[Entry]) -> int:
    """Everything before the tensors' bytes; returns what those are aligned to."""
    writer = GGUFWriter(path, keys["general.architecture"])
    for key in (*(key for key in keys if key not in LONG), *(key for key in LONG if key in keys)):
        if key != "general.architecture":
            _add(writer, key, keys[key])
    for entry in entries:
        writer.add_tensor_info(entry.name, entry.shape, np.dtype(np.float32), entry.nbytes, raw_dtype=entry.type)
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
    finally:
        writer.close()
    return writer.data_alignment


def _add(writer: GGUFWriter, key: str, value: Any) -> None:
    v = GGUFValueType
    if isinstance(value, np.ndarray):
        writer.add_key_value(key, value.tolist(), v.ARRAY, v[value.dtype.name.upper()])
    elif isinstance(value, list | bytes):
        if value:
            items = [_utf8(item) if isinstance(item, str) else item for item in value]
            writer.add_array(key, value if isinstance(value, bytes) else items)
    elif isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        kinds = (v.UINT32, 0, 1 << 32), (v.UINT64, 0, 1 << 64), (v.INT64, -1 << 63, 0)
        writer.add_key_value(key, value, next(kind for kind, low, high in kinds if low <= value < high))
    elif isinstance(value, float):
        writer.add_float32(key, value)
    else:
        writer.add_key_value(key, _utf8(value), v.STRING)


def _utf8(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")  # as the reader decodes what is a piece of a character


@contextmanager
def _replacing(destination: Path) -> Iterator[Path]:
    handle, name = tempfile.mkstemp(prefix=f".{destination.name}.", suffix=".part", dir=destination.parent)
    os.close(handle)
    try:
        yield Path(name)
        os.chmod(name, 0o644)  # mkstemp's files are for their owner alone
        os.replace(name, destination)
    except BaseException:
        os.unlink(name)
        raise
