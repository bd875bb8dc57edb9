"""Each family as the converter that its GGUF files come from writes it: keys, tensor names and their order.

One module a family: transcribe.cpp's dialect, or audio.cpp's for what only that has.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal

from .. import family_of
from ..loading import canonical_shapes

if TYPE_CHECKING:
    import numpy as np
    from torch import nn

    from transcribe.weights import Checkpoint


@dataclass(frozen=True)
class Export:
    """A checkpoint in the dialect.

    keys: metadata as Python values, `general.architecture` among them; see `transcribe.weights.write`.
    tensors: by name in the file and in its order: the name in the checkpoint, or float32 values the checkpoint lacks.
    dialect: whose rules say which tensors are packed; see `transcribe.convert.presets`.
    """

    keys: dict[str, Any]
    tensors: dict[str, str | np.ndarray]
    dialect: Literal["transcribe.cpp", "audio.cpp"] = "transcribe.cpp"


def export(checkpoint: Checkpoint) -> Export:
    """Raises `ModelError` for a family we do not know, and for what is missing from the checkpoint."""
    return import_module(f"{__name__}.{family_of(checkpoint)}").export(checkpoint)


def named(
    network: nn.Module, checkpoint: Checkpoint, written: Callable[[str], str], stored: Callable[[str], str]
) -> dict[str, str]:
    """The tensors of a network by name in the dialect, after checking that the checkpoint has them.

    The order is that of the modules: what the engine joins without a copy (q, k and v; gate and up) lies end to end.
    """
    shapes = canonical_shapes(network)
    checkpoint.require({stored(name): shape for name, shape in shapes.items()})
    return {written(name): stored(name) for name in shapes}


def size_label(checkpoint: Checkpoint, tensors: Mapping[str, str]) -> str:
    """How many parameters these tensors hold, as names of models have it: 1.7B, 27M."""
    count = sum(math.prod(checkpoint.tensors[name].shape) for name in tensors.values())
    if count >= 10**9:
        return f"{count / 10**9:.1f}B"
    return f"{count / 10**6:.0f}M" if count >= 10**6 else f"{count / 10**3:.0f}K"


def kept_keys(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of a file that is in the dialect already, but for those about how that file is laid out."""
    return {key: metadata[key] for key in metadata if key != "general.alignment" and not key.startswith("split.")}
