"""A model's weights on disk, opened: names, shapes and metadata at once, tensors as views when asked for."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from gguf import GGMLQuantizationType

from transcribe.errors import ModelError

from . import audiocpp, files, gguf, safetensors, sniff
from .layout import AGAIN, TensorInfo, check_extents, os_errors
from .storage import FileStorage

if TYPE_CHECKING:
    import torch

    from .packed import PackedTensor

T = GGMLQuantizationType
PLAIN = {T.F64: "float64", T.F32: "float32", T.F16: "float16", T.BF16: "bfloat16",
         T.I64: "int64", T.I32: "int32", T.I16: "int16", T.I8: "int8"}
PACKED = (T.Q4_0, T.Q4_1, T.Q5_0, T.Q5_1, T.Q8_0, T.Q2_K, T.Q3_K, T.Q4_K, T.Q5_K, T.Q6_K)
SHOWN = 3  # how many names an error lists


class Checkpoint:
    """What `open_checkpoint` returns. No tensor has been read or allocated.

    path: what was opened. format: "gguf" or "safetensors". metadata: GGUF metadata as Python values, or the
    safetensors __metadata__. tensors: by logical name. files: the storage of each weights file.
    """

    def __init__(self, path: Path, format: Literal["gguf", "safetensors"], metadata: Mapping[str, Any],
                 tensors: Sequence[TensorInfo], storages: Sequence[FileStorage]) -> None:
        self.path = path
        self.format = format
        self.metadata = metadata
        self.tensors: Mapping[str, TensorInfo] = {tensor.name: tensor for tensor in tensors}
        self.files = storages

    def tensor(self, name: str) -> torch.Tensor | PackedTensor:
        """A view of the file's storage: a plain tensor for float and integer types, else a PackedTensor.

        Only a tensor whose place in the file is not aligned for its type is copied. Raises ModelError if
        there is no such tensor or its type is not one we read.
        """
        import torch

        from .packed import PackedTensor

        if name not in self.tensors:
            raise ModelError(f"{self.path}: has no tensor {name!r}; is it complete, and of the right family?")
        info = self.tensors[name]
        raw = self.files[info.file].view(info.offset, info.nbytes)
        if info.type in PLAIN:
            dtype: torch.dtype = getattr(torch, PLAIN[info.type])
            if info.nbytes == 0:
                return torch.empty(info.shape, dtype=dtype)
            return _aligned(raw, dtype.itemsize).view(dtype).view(info.shape)
        if info.type in PACKED:
            rows = math.prod(info.shape[:-1])
            # The scales in a block are float16, and blocks are of even size.
            data = _aligned(raw, 2).view(rows, info.nbytes // max(rows, 1))
            return PackedTensor(info.type, info.shape, data)
        raise ModelError(f"{self.path}: {_unreadable(info)}")

    def require(self, expected: Mapping[str, tuple[int, ...]]) -> None:
        """Check that every tensor of `expected` is present, with its shape and a type we read.

        Raises one ModelError that counts what is wrong and names the first few.
        """
        missing = [name for name in expected if name not in self.tensors]
        present = [(self.tensors[name], tuple(shape)) for name, shape in expected.items()
                   if name in self.tensors]
        misshapen = [f"{info.name} is {list(info.shape)}, needs {list(shape)}"
                     for info, shape in present if info.shape != shape]
        unreadable = [f"{info.name} is {info.type_name}" for info, _ in present if not _is_readable(info)]
        faults = [_count(missing, "missing"), _count(misshapen, "of the wrong shape"),
                  _count(unreadable, "of a type that is not read")]
        if any(faults):
            raise ModelError(f"{self.path}: of {len(expected)} tensors needed, "
                             f"{', '.join(filter(None, faults))}; is it complete, and of the right family?")

    def side_file(self, name: str) -> bytes | None:
        """A file of the model, such as config.json: embedded, else beside the weights, else None."""
        if isinstance(self.metadata, gguf.Metadata):
            embedded = audiocpp.embedded_file(self.path, self.metadata, name)
            if embedded is not None:
                return embedded
        beside = self.files[0].path.with_name(name)
        with os_errors(beside):
            return beside.read_bytes() if beside.is_file() else None

    @cached_property
    def config(self) -> dict[str, Any]:
        """config.json, {} if there is none. Raises ModelError if it is not a JSON object."""
        text = self.side_file("config.json")
        if text is None:
            return {}
        try:
            config = json.loads(text)
        except (ValueError, RecursionError):
            config = None
        if not isinstance(config, dict):
            raise ModelError(f"{self.path}: its config.json is not a JSON object; {AGAIN}")
        return config

    @cached_property
    def architecture(self) -> str:
        """GGUF's general.architecture, audio.cpp's embedded family, or config.json's model_type; else ""."""
        if isinstance(self.metadata, gguf.Metadata):
            name = self.metadata.get("general.architecture", "")
            if name == audiocpp.ARCHITECTURE:
                name = audiocpp.family(self.path, self.metadata) or self.config.get("model_type", "")
        else:
            name = self.config.get("model_type", "")
        return name if isinstance(name, str) else ""


def open_checkpoint(path: str | Path, *, mmap: bool = True) -> Checkpoint:
    """Open GGUF or safetensors weights.

    `path` is a single file, any part of a split GGUF set, any shard or the index of a safetensors set, or a
    directory that holds one of these. With `mmap` the files are mapped read-only, else tensors are read into
    memory when first asked for. What is wrong with the files is found here, before anything is allocated:
    raises ModelError.
    """
    path = Path(path)
    with os_errors(path):
        return _open(path, mmap)


def _open(path: Path, mmap: bool) -> Checkpoint:
    first = files.find_weights(path)
    index = files.safetensors_index(first)
    if index is not None:
        return _open_shards(path, index, mmap)
    storage = FileStorage(first, mmap=mmap)
    if storage.first.startswith(gguf.MAGIC):
        return _open_gguf(path, storage, mmap)
    if safetensors.looks_like(storage.first):
        head = storage.parse(safetensors.read_head, 0)
        check_extents(first, head.tensors, storage.size)
        return Checkpoint(path, "safetensors", head.metadata, head.tensors, [storage])
    raise ModelError(f"{first}: not a model but {sniff.describe(storage.first)}")


def _open_shards(path: Path, index: Path, mmap: bool) -> Checkpoint:
    shards, where = files.read_index(index)
    storages = [FileStorage(shard, mmap=mmap) for shard in shards]
    heads: list[safetensors.Head] = []
    tensors: dict[str, TensorInfo] = {}
    for number, storage in enumerate(storages):
        if not safetensors.looks_like(storage.first):
            raise ModelError(f"{storage.path}: not a safetensors shard but {sniff.describe(storage.first)}")
        head = storage.parse(safetensors.read_head, number)
        check_extents(storage.path, head.tensors, storage.size)
        heads.append(head)
        # A name may be in two shards; the index says which of them counts.
        here = storage.path.name
        tensors.update({t.name: t for t in head.tensors if where.get(t.name, here) == here})
    lost = [repr(name) for name in where if name not in tensors]
    if lost:
        raise ModelError(f"{index}: {_count(lost, 'not in the shards it names')}; {AGAIN}")
    return Checkpoint(path, "safetensors", heads[0].metadata, list(tensors.values()), storages)


def _open_gguf(path: Path, storage: FileStorage, mmap: bool) -> Checkpoint:
    head = storage.parse(gguf.read_head, 0)
    check_extents(storage.path, head.tensors, storage.size)
    count = head.metadata.get("split.count", 0)
    if isinstance(count, int) and count > 1:
        return _open_gguf_set(path, files.gguf_set(storage.path, count), mmap)
    tensors = head.tensors
    if head.metadata.get("general.architecture") == audiocpp.ARCHITECTURE:
        tensors = audiocpp.logical_tensors(storage.path, head.metadata, tensors)
        check_extents(storage.path, tensors, storage.size)
    return Checkpoint(path, "gguf", head.metadata, tensors, [storage])


def _open_gguf_set(path: Path, parts: Sequence[Path], mmap: bool) -> Checkpoint:
    storages = [FileStorage(part, mmap=mmap) for part in parts]
    heads: list[gguf.Head] = []
    tensors: dict[str, TensorInfo] = {}
    for number, storage in enumerate(storages):
        if not storage.first.startswith(gguf.MAGIC):
            raise ModelError(f"{storage.path}: not a GGUF part but {sniff.describe(storage.first)}")
        head = storage.parse(gguf.read_head, number)
        check_extents(storage.path, head.tensors, storage.size)
        if (head.metadata.get("split.no"), head.metadata.get("split.count")) != (number, len(parts)):
            raise ModelError(f"{storage.path}: not part {number + 1} of {len(parts)} by its own metadata; "
                             "give the parts under their original names")
        for tensor in head.tensors:
            if tensors.setdefault(tensor.name, tensor) is not tensor:
                raise ModelError(f"{storage.path}: tensor {tensor.name!r} is in another part too; {AGAIN}")
        heads.append(head)
    total = heads[0].metadata.get("split.tensors.count", len(tensors))
    if isinstance(total, int) and total != len(tensors):
        raise ModelError(f"{parts[0]}: its set should have {total} tensors, has {len(tensors)}; {AGAIN}")
    return Checkpoint(path, "gguf", heads[0].metadata, list(tensors.values()), storages)


def _aligned(raw: torch.Tensor, size: int) -> torch.Tensor:
    return raw if raw.storage_offset() % size == 0 else raw.clone()


def _is_readable(info: TensorInfo) -> bool:
    return info.type in PLAIN or info.type in PACKED


def _unreadable(info: TensorInfo) -> str:
    names = " ".join(kind.name for kind in (*PLAIN, *PACKED))
    return f"tensor {info.name!r} is {info.type_name}, which is not read; convert the model to one of {names}"


def _count(names: Sequence[str], what: str) -> str:
    shown = ", ".join(names[:SHOWN]) + (", ..." if len(names) > SHOWN else "")
    return f"{len(names)} {what} ({shown})" if names else ""
