"""The shared loader: GGUF, safetensors and NeMo files as named tensors that stay packed and mapped.

Opening a checkpoint, and so refusing a wrong one, does not import torch; the names below that need it load
it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .checkpoint import Checkpoint
from .layout import TensorInfo
from .opening import open_checkpoint

if TYPE_CHECKING:
    from .fuse import FuseReport, fuse_rows
    from .packed import PackedTensor

__all__ = ["Checkpoint", "FuseReport", "PackedTensor", "TensorInfo", "fuse_rows", "open_checkpoint"]

_LAZY = {"FuseReport": "fuse", "fuse_rows": "fuse", "PackedTensor": "packed"}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_LAZY[name]}", __name__), name)
