"""What a family tells the pipeline about itself, and what it gives back.

A family module has `matches(checkpoint)`, `load(checkpoint, options)` and a model class with the attributes and
methods of `Model`. Everything else about a family stays inside its module.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from transcribe.errors import TranscribeError

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
    lockstep: bool = True
    """Several windows share the steps of a decoder."""


@dataclass(frozen=True)
class Window:
    """The audio a model takes at once, in seconds. Shorter audio than `min_seconds` is padded with silence.

    Of `max_seconds`, `context_seconds` at either end are what surrounds the part that counts, so windows overlap; the
    model's answer has `pieces` then, to be joined by their times. Where the model's frames are `grid_seconds` apart,
    audio begins at a multiple of that, so that overlapping windows have the same frames.
    """

    max_seconds: float
    min_seconds: float
    context_seconds: float = 0.0
    grid_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Piece:
    """A token as text, with a leading space if it begins a word; seconds from the start of what the model was given."""

    text: str
    start: float
    end: float
    probability: float


class Pieces(Iterable[Piece]):
    """Pieces kept as numbers side by side: an hour has tens of thousands, which as objects take six times as much."""

    def __init__(self, pieces: Iterable[Piece]) -> None:
        self._texts: list[str] = []
        self._numbers = array("d")
        for piece in pieces:
            self._texts.append(piece.text)
            self._numbers.extend((piece.start, piece.end, piece.probability))

    def __iter__(self) -> Iterator[Piece]:
        numbers = iter(self._numbers)
        for text in self._texts:
            yield Piece(text, next(numbers), next(numbers), next(numbers))


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
    pieces: Iterable[Piece] | None = None
    """The same text with times, from models that have them."""


@dataclass
class Ongoing:
    """A window that a model has begun: `decoded` or `failed` is set when it is over. A family adds what it keeps."""

    decoded: Decoded | None = field(default=None, init=False)
    failed: TranscribeError | None = field(default=None, init=False)

    @property
    def over(self) -> bool:
        return self.decoded is not None or self.failed is not None


class Model(Protocol):
    """A loaded model, ready for windows of audio. Windows begin one by one and are decoded in lockstep."""

    family: str
    variant: str
    capabilities: Capabilities
    window: Window
    notes: list[str]  # one line each for --verbose: how weights were fused, dtype, device

    def begin(self, samples: torch.Tensor, request: Request) -> Any:
        """Encode `samples`, float32 [n], 16 kHz mono, at most `window.max_seconds`: an `Ongoing` of the family's."""
        ...

    def advance(self, ongoing: Sequence[Any]) -> None:
        """One more token of each, none of which is over. What each is answered does not depend on the others."""
        ...

    def peak_bytes(self, seconds: float, together: int = 1) -> int:
        """Bytes of activations and caches at the peak of so many windows of this length, known without running."""
        ...
