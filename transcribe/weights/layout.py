"""Where a tensor lies in its file, and the checks that every format shares."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from transcribe.errors import ModelError

AGAIN = "download it again"
SHOWN = 3  # how many names an error lists


class TruncatedError(Exception):
    """The bytes at hand end before byte `needed`."""

    def __init__(self, needed: int) -> None:
        super().__init__(needed)
        self.needed = needed


@dataclass(frozen=True)
class TensorInfo:
    """One tensor of a checkpoint; nothing of it has been read.

    shape: PyTorch order, the last dimension varies fastest.
    type: None for a type we cannot read; `type_name` says which.
    file, offset: the index of its file in `Checkpoint.files`, and its first byte there.
    """

    name: str
    shape: tuple[int, ...]
    type: GGMLQuantizationType | None
    type_name: str
    nbytes: int
    file: int
    offset: int


def count_bytes(path: Path, name: str, shape: Sequence[int], type: GGMLQuantizationType) -> int:
    """Bytes of a tensor. Raises ModelError if its rows are not whole blocks or its size is impossible."""
    block, size = GGML_QUANT_SIZES[type]
    count = math.prod(shape)
    if math.prod(n or 1 for n in shape) >= 1 << 62:
        raise ModelError(f"{path}: tensor {name!r} has the impossible shape {list(shape)}; {AGAIN}")
    if block > 1 and (not shape or shape[-1] % block):
        raise ModelError(f"{path}: tensor {name!r} of shape {list(shape)} is {type.name}, which has rows of "
                         f"whole blocks of {block}; {AGAIN}")
    return count // block * size


def check_extents(path: Path, tensors: Sequence[TensorInfo], size: int) -> None:
    """Every tensor lies within the file's `size` bytes, under a name of its own, and over no other."""
    seen: set[str] = set()
    for tensor in tensors:
        if tensor.name in seen:
            raise ModelError(f"{path}: two tensors are named {tensor.name!r}; {AGAIN}")
        seen.add(tensor.name)
    needed = max((t.offset + t.nbytes for t in tensors), default=0)
    if needed > size:
        raise truncated(path, needed, size)
    ordered = sorted((t for t in tensors if t.nbytes), key=lambda t: t.offset)
    for left, right in pairwise(ordered):
        if left.offset + left.nbytes > right.offset:
            raise ModelError(f"{path}: tensors {left.name!r} and {right.name!r} overlap; {AGAIN}")


@contextmanager
def os_errors(path: Path, advice: str = "check its permissions and the disk") -> Iterator[None]:
    """Turn the operating system's refusals into a ModelError."""
    try:
        yield
    except OSError as error:
        what = error.strerror or error
        raise ModelError(f"{error.filename or path}: cannot be read ({what}); {advice}") from None


def truncated(path: Path, needed: int, size: int) -> ModelError:
    return ModelError(f"{path}: truncated: needs {needed} bytes, has {size}; {AGAIN}")


def own_name(names: Iterable[str], name: str) -> str | None:
    """The one of `names` that is `name`, or the only one that is called after a model, such as small_config.json."""
    found = [each for each in names if each == name] or [each for each in names if each.endswith(f"_{name}")]
    return found[0] if len(found) == 1 else None


def listed(names: Sequence[str], what: str) -> str:
    """How many names there are and the first of them, as "5 missing (a, b, c, ...)"; "" for none."""
    shown = ", ".join(names[:SHOWN]) + (", ..." if len(names) > SHOWN else "")
    return f"{len(names)} {what} ({shown})" if names else ""
