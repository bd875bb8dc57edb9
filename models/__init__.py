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
    "moonshine": "moonshine",
}
SUPPORTED = tuple(sorted(set(FAMILIES.values())))


def load(checkpoint: Checkpoint, options: LoadOptions) -> Model:
    """Build the family a checkpoint belongs to. Raises `ModelError` for one we do not know."""
    module = FAMILIES.get(checkpoint.architecture)
    if module is None:
        found = f"architecture {checkpoint.architecture!r}" if checkpoint.architecture else "no architecture named"
        raise ModelError(f"{checkpoint.path}: {found}; supported families: {', '.join(SUPPORTED)}")
    return import_module(f"{__name__}.{module}").load(checkpoint, options)
