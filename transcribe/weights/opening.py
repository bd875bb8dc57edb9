"""From a path to a `Checkpoint`: which format, which dialect, one file or a set."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from transcribe.errors import ModelError

from . import audiocpp, files, gguf, nemo, safetensors, sniff
from .checkpoint import Checkpoint
from .layout import AGAIN, TensorInfo, check_extents, listed, os_errors
from .storage import FileStorage


def open_checkpoint(path: str | Path, *, mmap: bool = True) -> Checkpoint:
    """Open GGUF or safetensors weights, or a NeMo archive.

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
    if nemo.looks_like(storage.first) and (archive := nemo.open_archive(first, storage)):
        return Checkpoint(path, "nemo", {}, archive.tensors, [archive.storage], archive)
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
        raise ModelError(f"{index}: {listed(lost, 'not in the shards it names')}; {AGAIN}")
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
