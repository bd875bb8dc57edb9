"""Small weight files, written by the formats' own libraries, and GGUF heads made by hand where those would refuse."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType

Stored = tuple[np.ndarray, "GGMLQuantizationType | None"]


def packed(kind: GGMLQuantizationType, *shape: int, seed: int = 0) -> Stored:
    """Random blocks of a packed type for a weight of this logical shape."""
    block, size = GGML_QUANT_SIZES[kind]
    rng = np.random.default_rng(seed)
    return rng.integers(0, 256, (*shape[:-1], shape[-1] // block * size), np.uint8), kind


def write_gguf(path: Path, tensors: Mapping[str, Stored | np.ndarray], metadata: Mapping[str, Any] | None = None,
               arch: str = "test", **writer_options: Any) -> Path:
    """`metadata` values are Python values, or (value, type) or (value, ARRAY, item type)."""
    writer = gguf.GGUFWriter(path, arch, **writer_options)
    for key, value in (metadata or {}).items():
        if isinstance(value, tuple):
            writer.add_key_value(key, *value)
        else:
            writer.add_key_value(key, value, GGUFValueType.get_type(value))
    for name, stored in tensors.items():
        data, kind = stored if isinstance(stored, tuple) else (stored, None)
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def value(key: str, kind: int, payload: bytes) -> bytes:
    """One metadata entry."""
    return text(key) + struct.pack("<I", kind) + payload


def entry(name: str, dims: tuple[int, ...], kind: int = 0, offset: int = 0) -> bytes:
    """One entry of the tensor table; `dims` in GGUF's order."""
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


def raw_gguf(values: list[bytes] | None = None, entries: list[bytes] | None = None, *, version: bytes = b"\3\0\0\0",
             counts: tuple[int, int] | None = None, align: int = 32, data: bytes = bytes(4096)) -> bytes:
    """A GGUF file of these parts, sound or not."""
    values, entries = values or [], entries or []
    tensor_count, value_count = counts or (len(entries), len(values))
    head = b"GGUF" + version + struct.pack("<QQ", tensor_count, value_count) + b"".join(values + entries)
    return head + bytes(-len(head) % align) + data
