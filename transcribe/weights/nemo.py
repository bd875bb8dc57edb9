"""Reading a NeMo archive: a tar of the configuration, the weights as `torch.save` has them, and the tokenizer's files.

The weights are a zip with one stored entry for each tensor's bytes and a pickle that says which is which. The pickle
is read by an interpreter that knows nothing but dictionaries of tensors, so whatever else a file holds cannot run; and
since it only tells where bytes lie, the tensors are views of the mapped archive like those of any other format. An
archive that is compressed as a whole (NeMo before 1.0 wrote those) is unpacked into memory instead.
"""

from __future__ import annotations

import io
import pickle
import re
import struct
import tarfile
import warnings
import zipfile
import zlib
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NamedTuple

from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from transcribe.errors import ModelError

from .layout import AGAIN, TensorInfo
from .storage import FileStorage

if TYPE_CHECKING:
    import torch

CONFIG, WEIGHTS = "model_config.yaml", "model_weights.ckpt"
SMALL = 64 << 20  # bytes: whatever is read whole and is larger than this is no configuration, pickle or tokenizer

T = GGMLQuantizationType
STORAGES = {
    "DoubleStorage": T.F64, "FloatStorage": T.F32, "HalfStorage": T.F16, "BFloat16Storage": T.BF16,
    "LongStorage": T.I64, "IntStorage": T.I32, "ShortStorage": T.I16, "CharStorage": T.I8,
}  # fmt: skip


@dataclass(frozen=True)
class Archive:
    """What an archive holds: its configuration, its tensors, where their bytes are, and its small files by name."""

    config: dict[str, Any]
    tensors: list[TensorInfo]
    storage: FileStorage
    files: Mapping[str, bytes]


class Stored(NamedTuple):
    """A tensor as the pickle tells it: in which entry of the zip, and how it lies there."""

    type: GGMLQuantizationType | None
    type_name: str
    entry: str
    offset: int
    shape: tuple[int, ...]
    contiguous: bool


def looks_like(head: bytes) -> bool:
    """Whether a file that starts with these bytes may be a tar, compressed or not."""
    return head[257:262] == b"ustar" or head[:2] == b"\x1f\x8b"


def open_archive(path: Path, storage: FileStorage) -> Archive | None:
    """Everything but the tensors' bytes; None for a tar that is no NeMo model, or no tar.

    Raises `ModelError` for a damaged archive, and for weights that are more than a dictionary of tensors.
    """
    try:
        with tarfile.open(path) as tar:
            return _read(path, tar, storage)
    except (tarfile.TarError, EOFError, zlib.error, zipfile.BadZipFile, struct.error) as error:
        if isinstance(error, tarfile.ReadError) and storage.first[:2] == b"\x1f\x8b":
            return None  # gzip of something else
        raise ModelError(f"{path}: a damaged NeMo archive ({error}); {AGAIN}") from None


def _read(path: Path, tar: tarfile.TarFile, storage: FileStorage) -> Archive | None:
    members = {member.name.removeprefix("./"): member for member in tar if member.isfile()}
    if CONFIG not in members:
        return None
    if WEIGHTS not in members:
        raise ModelError(f"{path}: a NeMo archive without {WEIGHTS}; {AGAIN}")
    files = {name: _content(tar, member) for name, member in members.items()
             if name != WEIGHTS and member.size <= SMALL}  # fmt: skip
    config = _config(path, files[CONFIG])
    member = members[WEIGHTS]
    if storage.first[:2] == b"\x1f\x8b":
        storage = _Unpacked(path, _content(tar, member))
        return Archive(config, _tensors(path, io.BytesIO(storage.data), 0), storage, files)
    file = tar.extractfile(member)
    assert file is not None
    return Archive(config, _tensors(path, file, member.offset_data), storage, files)


def _content(tar: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    file = tar.extractfile(member)
    assert file is not None
    return file.read()


class _Unpacked(FileStorage):
    """Bytes that had to be unpacked, in place of a file's."""

    def __init__(self, path: Path, data: bytes) -> None:
        self.path, self.data, self.size, self.first = path, data, len(data), data[:512]

    def view(self, offset: int, nbytes: int) -> torch.Tensor:
        return self._bytes[offset : offset + nbytes]

    @cached_property
    def _bytes(self) -> torch.Tensor:
        import torch

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that it cannot be written to is intended
            return torch.frombuffer(self.data, dtype=torch.uint8)


def _config(path: Path, text: bytes) -> dict[str, Any]:
    import yaml

    try:
        config = yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    except (yaml.YAMLError, UnicodeError, ValueError, RecursionError):
        config = None
    if not isinstance(config, dict):
        raise ModelError(f"{path}: its {CONFIG} is not a YAML mapping; {AGAIN}")
    return _resolved(config, config)


def _resolved(value: Any, root: Mapping[str, Any], depth: int = 0) -> Any:
    """`value` with references like ${model_defaults.repeat} replaced by what they name; unknown ones stay."""
    if depth > 32:
        return value
    if isinstance(value, dict):
        return {key: _resolved(item, root, depth + 1) for key, item in value.items()}
    if isinstance(value, list):
        return [_resolved(item, root, depth + 1) for item in value]
    if isinstance(value, str) and (match := re.fullmatch(r"\$\{(?:model\.)?([\w.]+)\}", value)):
        found: Any = root
        for key in match[1].split("."):
            found = found.get(key) if isinstance(found, dict) else None
        return value if found is None else _resolved(found, root, depth + 1)
    return value


def _tensors(path: Path, file: IO[bytes], start: int) -> list[TensorInfo]:
    """The tensors of weights in `file`, which itself begins at byte `start` of the storage."""
    if not zipfile.is_zipfile(file):
        raise ModelError(f"{path}: its {WEIGHTS} is not a PyTorch archive (before 1.6 they were pickles); {AGAIN}")
    with zipfile.ZipFile(file) as archive:
        entries = {entry.filename: entry for entry in archive.infolist()}
        pickles = [name for name in entries if name.endswith("/data.pkl")]
        if len(pickles) != 1 or entries[pickles[0]].file_size > SMALL:
            raise ModelError(f"{path}: its {WEIGHTS} is not what torch.save writes; {AGAIN}")
        stored = _unpickled(path, archive.read(pickles[0]))
    folder = pickles[0].removesuffix("data.pkl") + "data/"
    found = []
    for name, tensor in stored.items():
        entry = entries.get(folder + tensor.entry)
        nbytes = prod(tensor.shape) * (GGML_QUANT_SIZES[tensor.type][1] if tensor.type is not None else 0)
        if entry is None or entry.compress_type != zipfile.ZIP_STORED or tensor.offset + nbytes > entry.file_size:
            raise ModelError(f"{path}: the bytes of tensor {name!r} are not all there; {AGAIN}")
        file.seek(entry.header_offset + 26)
        lengths = sum(struct.unpack("<HH", file.read(4)))  # of its name and of what pads it, after a head of 30 bytes
        offset = start + entry.header_offset + 30 + lengths + tensor.offset
        type = tensor.type if tensor.contiguous else None
        type_name = tensor.type_name if tensor.contiguous else f"strided {tensor.type_name}"
        found.append(TensorInfo(name, tensor.shape, type, type_name, nbytes, 0, offset))
    return found


def _unpickled(path: Path, data: bytes) -> dict[str, Stored]:
    """The tensors of a state dictionary by name, from its pickle."""
    try:
        state = _StateUnpickler(path, io.BytesIO(data)).load()
        tensors = {name: value for name, value in state.items() if isinstance(value, Stored)}
    except ModelError:
        raise
    except Exception as error:  # a pickle can be wrong in any way
        raise ModelError(f"{path}: its {WEIGHTS} is damaged ({error}); {AGAIN}") from None
    if not tensors or not all(isinstance(name, str) for name in tensors):
        raise ModelError(f"{path}: its {WEIGHTS} is not a dictionary of tensors; {AGAIN}")
    return tensors


class _StateUnpickler(pickle.Unpickler):
    """Reads what `torch.save` writes for a dictionary of tensors, and refuses everything else by name."""

    def __init__(self, path: Path, file: IO[bytes]) -> None:
        super().__init__(file)
        self.path = path

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return _rebuilder()
        if module == "torch" and name.endswith("Storage"):
            return name
        raise ModelError(f"{self.path}: its {WEIGHTS} holds a {module}.{name}; only plain tensors are read")

    def persistent_load(self, id: Any) -> tuple[str, str]:
        kind, storage, entry, *_ = id
        if kind != "storage" or not isinstance(storage, str) or not isinstance(entry, str):
            raise ValueError(f"it refers to a {kind}")
        return storage, entry


def _rebuilder() -> Callable[..., Stored]:
    def rebuild(storage: Any, offset: int, shape: tuple[int, ...], stride: tuple[int, ...], *_: Any) -> Stored:
        name, entry = storage
        numbers = (offset, *shape, *stride)
        if not all(type(n) is int and n >= 0 for n in numbers) or len(stride) != len(shape):
            raise ValueError("a tensor's shape is no shape")
        steps = [prod(shape[i + 1 :]) for i in range(len(shape))]
        contiguous = all(n <= 1 or step == s for n, step, s in zip(shape, stride, steps, strict=True))
        kind = STORAGES.get(name)
        size = GGML_QUANT_SIZES[kind][1] if kind is not None else 0
        return Stored(kind, name.removesuffix("Storage"), entry, offset * size, tuple(shape), contiguous)

    return rebuild
