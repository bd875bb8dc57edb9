"""Reading the head of a GGUF file: its metadata and where its tensors lie.

The layout is that of ggml's docs/gguf.md, versions 2 and 3, little-endian: magic, version, tensor count,
metadata count, the metadata, the tensor table, padding to the alignment, tensor data. Every count and length
is checked against the bytes that are there before anything is made of it. Arrays stay where they are until
they are asked for.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import repeat
from mmap import mmap
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFValueType

from transcribe.errors import ModelError

from .layout import AGAIN, TensorInfo, TruncatedError, count_bytes

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_DIMS = 4
MAX_NAME = 65535
# ggml aligns to any power of two and the specification to any multiple of 8; beyond this it is damage.
MAX_ALIGNMENT = 1 << 24

V = GGUFValueType
SCALARS = {
    V.UINT8: struct.Struct("<B"), V.INT8: struct.Struct("<b"), V.UINT16: struct.Struct("<H"),
    V.INT16: struct.Struct("<h"), V.UINT32: struct.Struct("<I"), V.INT32: struct.Struct("<i"),
    V.UINT64: struct.Struct("<Q"), V.INT64: struct.Struct("<q"), V.FLOAT32: struct.Struct("<f"),
    V.FLOAT64: struct.Struct("<d"), V.BOOL: struct.Struct("<?"),
}
U32, U64 = SCALARS[V.UINT32], SCALARS[V.UINT64]


@dataclass(frozen=True)
class Array:
    """An array of `count` items of one type, its bytes at `start` of the head."""

    type: GGUFValueType
    count: int
    start: int


class Metadata(Mapping[str, Any]):
    """GGUF metadata as Python values: numbers, str, bool, and lists of them; an array of bytes as `bytes`.

    An array is decoded from the file each time it is asked for, so a vocabulary costs nothing to those who do
    not want it. Bytes of an array's string that are not UTF-8 become surrogates ("surrogateescape"), as
    tokens may be pieces of a character.
    """

    def __init__(self, head: bytes | mmap, values: dict[str, Any]) -> None:
        self._head, self._values = head, values

    def __getitem__(self, key: str) -> Any:
        value = self._values[key]
        if not isinstance(value, Array):
            return value
        if value.type == V.STRING:
            return list(self._strings(value))
        if value.type == V.UINT8:
            return bytes(self.blob(key))
        scalar = SCALARS[value.type]
        return np.frombuffer(self._head, scalar.format, value.count, value.start).tolist()

    def blob(self, key: str) -> memoryview:
        """The bytes of a uint8 array, in place. Raises KeyError if `key` is not such an array."""
        value = self._values[key]
        if not isinstance(value, Array) or value.type != V.UINT8:
            raise KeyError(key)
        return memoryview(self._head)[value.start : value.start + value.count]

    def _strings(self, array: Array) -> Iterator[str]:
        head, length, at = self._head, U64.unpack_from, array.start
        for _ in repeat(None, array.count):
            end = at + 8 + length(head, at)[0]
            yield head[at + 8 : end].decode("utf-8", "surrogateescape")
            at = end

    def __contains__(self, key: object) -> bool:  # Mapping's would decode an array
        return key in self._values

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)


@dataclass(frozen=True)
class Head:
    metadata: Metadata
    tensors: list[TensorInfo]


@dataclass
class _Cursor:
    """A position in the head that never passes its end: raises TruncatedError instead."""

    data: bytes | mmap
    at: int = field(default=0)

    def skip(self, count: int) -> int:
        """Step over `count` bytes and return where they start."""
        start, self.at = self.at, self.at + count
        if self.at > len(self.data):
            raise TruncatedError(self.at)
        return start

    def number(self, scalar: struct.Struct) -> Any:
        return scalar.unpack_from(self.data, self.skip(scalar.size))[0]

    def string(self) -> str:
        length = self.number(U64)
        start = self.skip(length)
        return self.data[start : start + length].decode("utf-8", "replace")

    def skip_strings(self, count: int) -> None:
        self.require(count, 8)
        data, length, at = self.data, U64.unpack_from, self.at
        try:
            for _ in repeat(None, count):
                at += 8 + length(data, at)[0]
        except (struct.error, OverflowError):
            raise TruncatedError(at + 8) from None
        self.at = at
        self.skip(0)

    def require(self, count: int, size: int) -> None:
        """`count` items of at least `size` bytes each are still to come."""
        if self.at + count * size > len(self.data):
            raise TruncatedError(self.at + count * size)


def read_head(path: Path, data: bytes | mmap, file: int = 0) -> Head:
    """Parse the head of a GGUF file, of which `data` holds the beginning or the whole.

    Returns tensors under their physical names, `file` noted as theirs; whether they lie within the file is
    left to `check_extents`. Raises TruncatedError when `data` is too short, ModelError when it is not a sound
    GGUF file.
    """
    cursor = _Cursor(data)
    cursor.skip(4)
    version = cursor.number(U32)
    if version not in VERSIONS:
        if int.from_bytes(version.to_bytes(4, "little"), "big") in VERSIONS:
            raise ModelError(f"{path}: a big-endian GGUF file; convert it with gguf-convert-endian")
        raise ModelError(f"{path}: GGUF version {version} is not read, only 2 and 3; convert the model again")
    tensor_count, value_count = cursor.number(U64), cursor.number(U64)
    # The least a value takes is a key length, a type and one byte; a tensor a name length, dimensions, type,
    # offset.
    cursor.require(value_count, 13)
    values: dict[str, Any] = {}
    for _ in range(value_count):
        key = _name(path, cursor, "metadata key")
        if key in values:
            raise ModelError(f"{path}: the metadata key {key!r} occurs twice; {AGAIN}")
        values[key] = _value(path, cursor, key)
    alignment = _alignment(path, values)
    cursor.require(tensor_count, 24)
    table = [_tensor(path, cursor, file) for _ in range(tensor_count)]
    data_start = -(-cursor.at // alignment) * alignment
    tensors = []
    for name, shape, kind, offset in table:
        if offset % alignment:
            raise ModelError(f"{path}: tensor {name!r} is not aligned to {alignment} bytes; {AGAIN}")
        nbytes = count_bytes(path, name, shape, kind)
        tensors.append(TensorInfo(name, shape, kind, kind.name, nbytes, file, data_start + offset))
    return Head(Metadata(data, values), tensors)


def _name(path: Path, cursor: _Cursor, what: str) -> str:
    start = cursor.at
    name = cursor.string()
    if cursor.at - start - 8 > MAX_NAME:
        raise ModelError(f"{path}: a {what} of {cursor.at - start - 8} bytes; {AGAIN}")
    return name


def _value(path: Path, cursor: _Cursor, key: str) -> Any:
    kind = _value_type(path, cursor, key)
    if kind == V.STRING:
        return cursor.string()
    if kind != V.ARRAY:
        return cursor.number(SCALARS[kind])
    item = _value_type(path, cursor, key)
    count = cursor.number(U64)
    if item == V.ARRAY:
        raise ModelError(f"{path}: metadata {key!r} is an array of arrays, which is not read; "
                         "convert the model again")
    array = Array(item, count, cursor.at)
    if item == V.STRING:
        cursor.skip_strings(count)
    else:
        cursor.skip(count * SCALARS[item].size)
    return array


def _value_type(path: Path, cursor: _Cursor, key: str) -> GGUFValueType:
    number = cursor.number(U32)
    try:
        return GGUFValueType(number)
    except ValueError:
        raise ModelError(f"{path}: metadata {key!r} has the unknown type {number}; {AGAIN}") from None


def _alignment(path: Path, values: dict[str, Any]) -> int:
    alignment = values.get("general.alignment", 32)
    sound = (isinstance(alignment, int) and 0 < alignment <= MAX_ALIGNMENT
             and (alignment % 8 == 0 or alignment & (alignment - 1) == 0))
    if not sound:
        shown = alignment if isinstance(alignment, int | float) else type(alignment).__name__
        raise ModelError(f"{path}: the alignment {shown} is not a power of two or a multiple of 8 "
                         f"up to {MAX_ALIGNMENT}; {AGAIN}")
    return alignment


def _tensor(path: Path, cursor: _Cursor, file: int) -> tuple[str, tuple[int, ...], GGMLQuantizationType, int]:
    name = _name(path, cursor, "tensor name")
    dims = cursor.number(U32)
    if dims > MAX_DIMS:
        raise ModelError(f"{path}: tensor {name!r} has {dims} dimensions, of at most {MAX_DIMS}; {AGAIN}")
    shape = tuple(cursor.number(U64) for _ in range(dims))[::-1]
    number = cursor.number(U32)
    try:
        kind = GGMLQuantizationType(number)
    except ValueError:
        raise ModelError(f"{path}: tensor {name!r} has the unknown type {number}; it needs a newer version, "
                         "or the file is damaged") from None
    return name, shape, kind, cursor.number(U64)
