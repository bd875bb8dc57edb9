"""One recording: its windows with speech go out as jobs, and what they gave comes together as a transcript.

Every second is accounted for: what was decoded, what was covered, what the model broke off.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from .audio import RATE, AudioStream
from .audio.activity import open_detector
from .errors import TranscribeError
from .joining import Joiner
from .lockstep import Job
from .text.languages import UNSPACED
from .transcript import Segment, Transcript
from .windows import Window, windows

if TYPE_CHECKING:
    from transcribe.models.family import Decoded, Model

    from .audio.stream import Samples
    from .options import Request

Progress = Callable[[float, "float | None"], None]


class Heard(NamedTuple):
    """What a window gave. Its place and that of the speech in it, in samples of the recording; `begin` is where times
    that the model gives count from."""

    start: int
    stop: int
    speech: tuple[int, int]
    begin: int
    decoded: Decoded


@dataclass
class Part(Job):
    """A window of a recording. `whole`: not a half of one that failed for its length."""

    recording: Recording
    window: Window
    begin: int
    """The sample of the recording that `samples` begin at."""
    whole: bool


class Recording:
    """A recording under way. `progress` is called with the seconds done and the seconds declared, if any are.

    `failed` is what went wrong; `over` is true when no window is left to read or to wait for.
    """

    def __init__(self, model: Model, request: Request, progress: Progress | None = None) -> None:
        self.model, self.request, self.progress = model, request, progress
        self.stream: AudioStream
        self.failed: Exception | None = None
        self.read = False
        self._under_way = 0
        self._began = time.perf_counter()
        self._warnings: list[str] = []
        self._answers: list[Heard] = []  # in the order in which windows ended
        self._truncated = False
        self._heard = 0  # windows given to the model
        self._longest = 0.0  # of them, in seconds
        self._covered = self._reached = 0  # samples
        self._model_seconds = 0.0
        self._most = 0
        self._stats: Counter[str] = Counter()

    @property
    def over(self) -> bool:
        return self.read and not self._under_way

    def parts(self, stream: AudioStream, blocks: Iterable[Samples], seconds: float, keep: bool) -> Iterator[Part]:
        """Its windows with speech in order, of at most `seconds` with their context.

        Without `keep` a part's samples hold until the next part is asked for.
        """
        self.stream = stream
        context = self.model.window.context_seconds
        for window in windows(blocks, open_detector(self._warnings), seconds - 2 * context, context):
            self._covered += len(window.samples)
            if (part := self._part(window.copy() if keep else window)) is not None:
                yield part
            else:
                self._report(window)
            if self.failed:
                return

    def _part(self, window: Window, whole: bool = True) -> Part | None:
        """None for a window without speech."""
        heard = window.heard(max(1, round(self.model.window.grid_seconds * RATE)))
        if heard is None:
            return None
        waveform = torch.from_numpy(heard[1])
        short = round(self.model.window.min_seconds * RATE) - len(waveform)
        if short > 0:
            waveform = torch.nn.functional.pad(waveform, (0, short))
        self._heard += 1
        self._under_way += 1
        self._longest = max(self._longest, len(waveform) / RATE)
        return Part(waveform, self.request, self, window, heard[0], whole)

    def ended(self, part: Part) -> list[Part]:
        """Keep what a window gave; the halves of a whole one that failed for its length, to be tried once more."""
        self._under_way -= 1
        self._model_seconds += part.seconds
        self._most = max(self._most, part.company)
        decoded, window = part.decoded, part.window
        halves: list[Part] = []
        if decoded is not None:
            self._stats.update(decoded.stats)
        if part.failed is not None:
            self.failed = self.failed or part.failed
        elif decoded is None or decoded.looped or (decoded.truncated and self.request.max_tokens is None):
            cut = window.halves() if part.whole else None
            halves = [half for piece in cut or () if (half := self._part(piece, whole=False)) is not None]
        if decoded is None and part.failed is None:
            if halves:
                self._warn_once("out of memory: windows are cut in two")
            else:
                self.failed = TranscribeError(
                    f"{self.stream.name}: out of memory at {_place(window)}; set a memory limit"
                )
        if decoded is not None and not halves:
            self._keep(part, decoded)
        self._report(window)
        return halves

    def _keep(self, part: Part, decoded: Decoded) -> None:
        window = part.window
        first, last = window.voiced() or (0, len(window.samples))
        speech = window.start + first, window.start + last
        self._answers.append(Heard(window.start, window.stop, speech, part.begin, decoded))
        if decoded.looped:
            self._warnings.append(f"{_place(window)}: the model repeats itself: the text breaks off there")
        elif decoded.truncated:
            self._warnings.append(f"{_place(window)}: the token budget ran out: the text breaks off there")
        self._truncated |= decoded.looped or decoded.truncated

    def _report(self, window: Window) -> None:
        self._reached = max(self._reached, window.stop)
        if self.progress:
            self.progress(self._reached / RATE, self.stream.declared_seconds)

    def transcript(self, model_name: str) -> Transcript:
        """What all windows gave. Raises what went wrong."""
        if self.failed is not None:
            raise self.failed
        seconds = self.stream.decoded_seconds
        # Windows in the order of the recording, in whatever order they ended.
        self._answers.sort(key=lambda heard: heard.start)
        languages = (heard.decoded.language for heard in self._answers if heard.decoded.language)
        language = self.request.language or next(languages, None)
        space = "" if language in UNSPACED else " "
        segments, source = self._segments(seconds, bool(space))
        truncated = self._truncated or self.stream.damaged
        if self._covered != round(seconds * RATE):
            truncated = True
            self._warnings.append(f"only {self._covered / RATE:.1f} of {seconds:.1f} s were transcribed")
        text = space.join(segment.text for segment in segments)
        if self._heard and not text:
            self._warnings.append("there seems to be speech, but the model wrote nothing")
        if self.request.timestamps != "word":
            segments = [replace(segment, words=[]) for segment in segments]
        stamped = self.request.timestamps != "none"
        return Transcript(
            text=text,
            language=language,
            duration=seconds,
            segments=segments if stamped else [],
            model=model_name,
            family=self.model.family,
            decoded_seconds=seconds,
            covered_seconds=self._covered / RATE,
            truncated=truncated,
            no_speech=not self._heard,
            timestamps_from=source if stamped else "none",
            warnings=[*self.stream.warnings, *self._warnings],
            stats=self._figures(seconds),
        )

    def _segments(self, seconds: float, spaced: bool) -> tuple[list[Segment], str]:
        """The segments, and where their times are from."""
        if any(heard.decoded.pieces is not None for heard in self._answers):
            joiner = Joiner(self.model.window.context_seconds)
            for heard in self._answers:
                pieces = heard.decoded.pieces or []
                joiner.add(pieces, heard.begin / RATE, heard.start / RATE, heard.stop / RATE)
            return joiner.segments(seconds, spaced), "ctc"
        segments: list[Segment] = []
        for heard in self._answers:
            if text := heard.decoded.text.strip():
                start, stop = (edge / RATE for edge in heard.speech)
                segments.append(Segment(len(segments), start, stop, text))
        return segments, "window"

    def _warn_once(self, warning: str) -> None:
        if warning not in self._warnings:
            self._warnings.append(warning)

    def _figures(self, seconds: float) -> dict[str, Any]:
        """Times in seconds; `wall_seconds` is shared with recordings decoded meanwhile, `model_seconds` is not.

        `real_time_factor` is wall time over length.
        """
        wall = time.perf_counter() - self._began
        return {
            "audio_seconds": seconds,
            "wall_seconds": wall,
            "model_seconds": self._model_seconds,
            "real_time_factor": wall / seconds if seconds else 0.0,
            "windows": self._heard,
            "longest_window": self._longest,
            "together": self._most,
            "tokens": 0,
            **self._stats,
        }


def _place(window: Window) -> str:
    return f"{window.start / RATE:.1f}-{window.stop / RATE:.1f} s"
