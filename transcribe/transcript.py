"""What a transcription is: plain data, the same for every family and every writer."""

from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class Word:
    """One word; times in seconds from the start of the recording."""

    word: str
    start: float
    end: float
    probability: float | None = None


@dataclass
class Segment:
    """A stretch of speech; times in seconds from the start of the recording."""

    id: int
    start: float
    end: float
    text: str
    words: list[Word] = field(default_factory=list)


@dataclass
class Transcript:
    """The result for one recording.

    `decoded_seconds` were read from the file, `covered_seconds` of them were given to the model or found silent;
    the two are equal unless `truncated`. `timestamps_from` says where segment times come from: "model", "ctc",
    "aligner", "window" (the bounds of the cut), or "none". `no_speech` means that nothing was said.
    """

    text: str
    language: str | None
    duration: float
    segments: list[Segment] = field(default_factory=list)
    model: str = ""
    family: str = ""
    decoded_seconds: float = 0.0
    covered_seconds: float = 0.0
    truncated: bool = False
    no_speech: bool = False
    timestamps_from: str = "none"
    warnings: list[str] = field(default_factory=list)
    stats: dict[str, Any] = field(default_factory=dict)
