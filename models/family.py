"""What a family tells the pipeline about itself, and what it gives back.

A family module has `matches(checkpoint)`, `load(checkpoint, options)` and a model class with the attributes and
methods of `Model`. Everything else about a family stays inside its module.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch

    from transcribe.options import Request


@dataclass(frozen=True)
class Capabilities:
    """What requests this model can honour. `languages` holds codes; detection means it may choose by itself."""

    languages: tuple[str, ...]
    detects_language: bool = False
    tasks: tuple[str, ...] = ("transcribe",)
    timestamps: tuple[str, ...] = ("none", "segment")
    prompt: bool = False
    beam: bool = False
    temperature: bool = False


@dataclass(frozen=True)
class Window:
    """The audio a model takes at once, in seconds. Shorter audio than `min_seconds` is padded with silence."""

    max_seconds: float
    min_seconds: float


@dataclass
class Decoded:
    """One window's result. `truncated` when the token budget ran out, `looped` when the loop guard stopped it.

    `prefill_seconds`... belong in `stats`: encode_s, prefill_s, decode_s (seconds) and tokens (count).
    """

    text: str
    tokens: list[int]
    truncated: bool = False
    looped: bool = False
    language: str | None = None
    stats: dict[str, float] = field(default_factory=dict)


class Model(Protocol):
    """A loaded model, ready for windows of audio."""

    family: str
    variant: str
    capabilities: Capabilities
    window: Window
    notes: list[str]  # one line each for --verbose: how weights were fused, dtype, device

    def transcribe(self, samples: torch.Tensor, request: Request) -> Decoded:
        """`samples`: float32 [n], 16 kHz mono, at most `window.max_seconds`. Raises TranscribeError."""
        ...

    def peak_bytes(self, seconds: float) -> int:
        """Bytes of activations and caches at the peak of one window of this length, known without running."""
        ...
