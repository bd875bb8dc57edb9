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

from . import audiocpp, gguf, nemo
from .layout import AGAIN, TensorInfo, listed, os_errors, own_name
from .storage import FileStorage

if TYPE_CHECKING:
    import torch

    from .packed import PackedTensor

T = GGMLQuantizationType
PLAIN = {T.F64: "float64", T.F32: "float32", T.F16: "float16", T.BF16: "bfloat16",
         T.I64: "int64", T.I32: "int32", T.I16: "int16", T.I8: "int8"}
PACKED = (T.Q4_0, T.Q4_1, T.Q5_0, T.Q5_1, T.Q8_0, T.Q2_K, T.Q3_K, T.Q4_K, T.Q5_K, T.Q6_K)


class Checkpoint:
    """What `open_checkpoint` returns. No tensor has been read or allocated.

    path: what was opened. format: "gguf", "safetensors" or "nemo". metadata: GGUF metadata as Python values, or the
    safetensors __metadata__. tensors: by logical name. files: the storage of each weights file. archive: of a
    NeMo model, its configuration and small files.
    """

    def __init__(self, path: Path, format: Literal["gguf", "safetensors", "nemo"], metadata: Mapping[str, Any],
                 tensors: Sequence[TensorInfo], storages: Sequence[FileStorage],
                 archive: nemo.Archive | None = None) -> None:
        self.path = path
        self.format = format
        self.metadata = metadata
        self.tensors: Mapping[str, TensorInfo] = {tensor.name: tensor for tensor in tensors}
        self.files = storages
        self.archive = archive

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
        faults = [listed(missing, "missing"), listed(misshapen, "of the wrong shape"),
                  listed(unreadable, "of a type that is not read")]
        if any(faults):
            raise ModelError(f"{self.path}: of {len(expected)} tensors needed, "
                             f"{', '.join(filter(None, faults))}; is it complete, and of the right family?")

    def side_file(self, name: str) -> bytes | None:
        """A file of the model, such as config.json: embedded, else beside the weights, else None.

        It may be called after the model: NAME_config.json.
        """
        if self.archive is not None:
            found = own_name(self.archive.files, name)
            return None if found is None else self.archive.files[found]
        if isinstance(self.metadata, gguf.Metadata):
            embedded = audiocpp.embedded_file(self.path, self.metadata, name)
            if embedded is not None:
                return embedded
        weights = self.files[0].path
        for beside in (weights.with_name(name), weights.with_name(f"{weights.stem}_{name}")):
            with os_errors(beside):
                if beside.is_file():
                    return beside.read_bytes()
        return None

    @cached_property
    def config(self) -> dict[str, Any]:
        """config.json, or a NeMo model's own; {} if there is none. Raises ModelError if it is not a JSON object."""
        if self.archive is not None:
            return self.archive.config
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
        """GGUF's general.architecture, audio.cpp's family, config.json's model_type, or NeMo's class; else ""."""
        if isinstance(self.metadata, gguf.Metadata):
            name = self.metadata.get("general.architecture", "")
            if name == audiocpp.ARCHITECTURE:
                name = audiocpp.family(self.path, self.metadata) or self.config.get("model_type", "")
        else:
            name = self.config.get("model_type") or str(self.config.get("target", "")).rpartition(".")[2]
        return name if isinstance(name, str) else ""


def _aligned(raw: torch.Tensor, size: int) -> torch.Tensor:
    return raw if raw.storage_offset() % size == 0 else raw.clone()


def _is_readable(info: TensorInfo) -> bool:
    return info.type in PLAIN or info.type in PACKED


def _unreadable(info: TensorInfo) -> str:
    names = " ".join(kind.name for kind in (*PLAIN, *PACKED))
    return f"tensor {info.name!r} is {info.type_name}, which is not read; convert the model to one of {names}"
