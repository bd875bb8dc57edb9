"""Any checkpoint a family loads -> one GGUF file in transcribe.cpp's or audio.cpp's dialect, in the type asked for."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import gguf
import numpy as np

from transcribe.errors import ModelError, TranscribeError, UsageError
from transcribe.weights import open_checkpoint
from transcribe.weights.write import Entry, write_gguf
from transcribe.worklist import check_writable

from .presets import PRESETS, Preset, preset

if TYPE_CHECKING:
    from transcribe.models.export import Export
    from transcribe.weights import Checkpoint

__all__ = ["PRESETS", "Converted", "check_destination", "convert"]

T = gguf.GGMLQuantizationType
PIECE = 1 << 20  # values expanded at once
COPIED = 1 << 24  # bytes copied at once


@dataclass(frozen=True)
class Converted:
    """What was written: bytes of tensors, and how many tensors of each type, the most frequent first."""

    path: Path
    nbytes: int
    types: dict[str, int]


def convert(source: Path, destination: Path, type: str, overwrite: bool = False) -> Converted:
    """Write the model at `source` to the file `destination`; `type` is one of `PRESETS`.

    The file appears under its name when it is whole. Tensors are read, expanded and packed some megabytes at a
    time; those that have their type already are copied byte for byte. Raises `UsageError` for an unknown type or a
    destination that must not or cannot be written, `ModelError` for a source that no family loads or that lacks
    something, `TranscribeError` when writing fails.
    """
    wanted = preset(type)
    check_destination(destination, overwrite)
    checkpoint = open_checkpoint(source)
    if destination.exists() and any(destination.samefile(file.path) for file in checkpoint.files):
        raise UsageError(f"{destination}: this is the model to be converted; give the result another name")

    from transcribe.models.export import export  # needs torch: after what can be refused without

    exported = export(checkpoint)
    entries = list(_entries(checkpoint, exported, wanted))
    size = sum(entry.nbytes for entry in entries)
    if size > shutil.disk_usage(destination.parent).free:
        raise TranscribeError(f"{destination}: {size / 1e6:.0f} MB are needed, the disk has less free")
    try:
        write_gguf(destination, exported.keys | {"general.file_type": int(wanted.file_type)}, entries)
    except OSError as error:
        raise TranscribeError(f"{destination}: cannot be written ({error.strerror or error})") from error
    return Converted(destination, size, dict(Counter(entry.type.name for entry in entries).most_common()))


def check_destination(destination: Path, overwrite: bool) -> None:
    """Raises `UsageError` for a file that must not or cannot be written; makes its folder."""
    if destination.suffix.lower() != ".gguf":
        raise UsageError(f"{destination}: a GGUF file is written; give a name that ends in .gguf")
    if destination.is_dir():
        raise UsageError(f"{destination}: a folder has this name; give the name of a file")
    if destination.exists() and not overwrite:
        raise UsageError(f"{destination}: exists already; --overwrite replaces it")
    check_writable(destination.parent)


def _entries(checkpoint: Checkpoint, exported: Export, wanted: Preset) -> Iterator[Entry]:
    for name, stored in exported.tensors.items():
        if isinstance(stored, np.ndarray):
            yield Entry(name, stored.shape, T.F32, partial(_whole, stored))
        else:
            info = checkpoint.tensors[stored]
            shape = info.shape
            by_form = exported.dialect == "audio.cpp"
            type = wanted.type_by_form(name, shape, info.type) if by_form else wanted.type_of(name, shape)
            yield Entry(name, shape, type, partial(_pieces, checkpoint, stored, type))


def _whole(values: np.ndarray) -> Iterator[np.ndarray]:
    yield np.ascontiguousarray(values, np.float32)


def _pieces(checkpoint: Checkpoint, name: str, type: T) -> Iterator[np.ndarray]:
    """The bytes of a tensor in another type, or its own."""
    info = checkpoint.tensors[name]
    if info.type == type:
        raw = checkpoint.files[info.file].view(info.offset, info.nbytes).numpy()
        yield from (raw[start : start + COPIED] for start in range(0, len(raw), COPIED))
        return
    for values in _values(checkpoint, name):
        if not np.isfinite(values).all():
            raise ModelError(f"{checkpoint.path}: tensor {name!r} holds infinity or no number; is it damaged?")
        if type == T.F16 and np.abs(values).max(initial=0) > np.finfo(np.float16).max:
            raise ModelError(f"{checkpoint.path}: tensor {name!r} is too large for float16; use --type bf16 or f32")
        yield _packed(values, type)


def _packed(values: np.ndarray, type: T) -> np.ndarray:
    if type in (T.Q4_K, T.Q5_K, T.Q6_K):
        from . import kquants

        return kquants.quantize(values, type)
    return gguf.quants.quantize(values, type)


def _values(checkpoint: Checkpoint, name: str) -> Iterator[np.ndarray]:
    """The values of a tensor, float32 [rows, columns], some rows at a time."""
    from transcribe.weights import PackedTensor

    tensor = checkpoint.tensor(name)
    columns = tensor.shape[-1] if tensor.shape else 1
    rows = 1
    for n in tensor.shape[:-1]:
        rows *= n
    step = max(1, PIECE // max(columns, 1))
    for start in range(0, rows, step):
        part = slice(start, start + step)
        if isinstance(tensor, PackedTensor):
            yield tensor.dequantize(rows=part).numpy()
        else:
            yield tensor.reshape(rows, columns)[part].float().numpy()
