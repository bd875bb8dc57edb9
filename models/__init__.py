"""The families: one module each. A new family is one file and one line here."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from transcribe.errors import ModelError

if TYPE_CHECKING:
    from transcribe.options import LoadOptions
    from transcribe.weights import Checkpoint

    from .family import Model

# architecture as a checkpoint names it -> module
FAMILIES = {
    "EncDecCTCModelBPE": "citrinet",
    "citrinet_asr": "citrinet",
    "moonshine": "moonshine",
    "qwen3_asr": "qwen3_asr",
}
SUPPORTED = tuple(sorted(set(FAMILIES.values())))


def family_of(checkpoint: Checkpoint) -> str:
    """The family a checkpoint belongs to, found without torch. Raises `ModelError` for one we do not know."""
    family = FAMILIES.get(checkpoint.architecture)
    if family is None:
        found = f"architecture {checkpoint.architecture!r}" if checkpoint.architecture else "no architecture named"
        raise ModelError(f"{checkpoint.path}: {found}; supported families: {', '.join(SUPPORTED)}")
    return family


def load(checkpoint: Checkpoint, options: LoadOptions) -> Model:
    """Build the model a checkpoint holds. Raises `ModelError` for a family we do not know."""
    return import_module(f"{__name__}.{family_of(checkpoint)}").load(checkpoint, options)
