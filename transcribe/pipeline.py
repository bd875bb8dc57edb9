"""One recording through one model: windows in, a transcript out, every second accounted for."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

import psutil
import torch

from .audio import RATE, AudioStream, open_array, open_audio
from .audio.activity import open_detector
from .errors import TranscribeError, UsageError
from .joining import Joiner
from .lockstep import Job, Lockstep
from .options import LoadOptions, Request
from .text.languages import UNSPACED, language_code, language_name
from .transcript import Segment, Transcript
from .windows import Window, windows

if TYPE_CHECKING:
    from transcribe.models.family import Decoded, Model

Progress = Callable[[float, "float | None"], None]

SHORTEST_WINDOW = 5.0  # seconds: with less context than this a model guesses, so a memory limit stops here


class Transcriber:
    """A loaded model, ready for recordings. `model` is the family's; `name` is what its file is called.

    `batch_size`: how many windows are decoded together; None for as many as memory allows, up to eight.
    """

    def __init__(
        self, model: Model, name: str = "", memory_limit: int | None = None, batch_size: int | None = 1
    ) -> None:
        self.model, self.name, self.memory_limit, self.batch_size = model, name, memory_limit, batch_size
        if (batch_size or 1) > 1 and not model.capabilities.lockstep:
            name = _model_name(model)
            raise UsageError(f"{name} has no decoder whose steps windows could share: use a batch size of 1")
        self.window_seconds = _fitting_window(model, memory_limit, batch_size or 1)

    @cached_property
    def together(self) -> int:
        """How many windows are decoded together."""
        if self.batch_size is not None:
            return self.batch_size
        if not self.model.capabilities.lockstep:
            return 1
        limit = self.memory_limit or psutil.virtual_memory().available // 4
        fits = [n for n in (2, 4, 8) if self.model.peak_bytes(self.window_seconds, n) <= limit]
        return max(fits, default=1)

    @classmethod
    def load(cls, path_or_name: str | None = None, options: LoadOptions | None = None) -> Transcriber:
        """Load a model from a path or a name; None means the default model.

        Raises `ModelError` when there is no such model or it is not one we can run, `UsageError` when the
        memory limit is too small for it.
        """
        from transcribe.models import load as load_model

        from . import hub
        from .weights import open_checkpoint

        options = options or LoadOptions()
        if options.threads:
            torch.set_num_threads(options.threads)
        path = hub.resolve(path_or_name)
        model = load_model(open_checkpoint(path, mmap=options.mmap), options)
        return cls(model, path.name, options.memory_limit, options.batch_size)

    def check(self, request: Request) -> Request:
        """The request with its language as a code. Raises `UsageError` for what this model cannot do."""
        can, model = self.model.capabilities, _model_name(self.model)
        language = _language(request.language, self.model, model)
        if request.task not in can.tasks:
            raise UsageError(f"{model} cannot {request.task}; it can {' or '.join(can.tasks)}")
        if request.timestamps not in can.timestamps:
            has = ", ".join(can.timestamps)
            raise UsageError(f"{model} has no {request.timestamps} timestamps; it has {has}")
        if request.prompt and not can.prompt:
            raise UsageError(f"{model} takes no prompt")
        if request.beam_size < 1:
            raise UsageError(f"beam size {request.beam_size}: at least 1")
        if request.beam_size > 1 and not can.beam:
            raise UsageError(f"{model} decodes greedily: a beam size of {request.beam_size} is not possible")
        if not 0 <= request.temperature < float("inf"):
            raise UsageError(f"temperature {request.temperature}: at least 0")
        if request.temperature > 0 and not can.temperature:
            raise UsageError(f"{model} does not sample: the temperature must be 0")
        if not 0 < request.top_p <= 1:
            raise UsageError(f"top-p {request.top_p}: above 0, at most 1")
        if request.temperature == 0 and (request.top_p < 1 or request.seed is not None):
            raise UsageError("top-p and seed are for sampling: set a temperature above 0")
        if request.max_tokens is not None and request.max_tokens < 1:
            raise UsageError(f"{request.max_tokens} tokens at most: at least 1")
        return replace(request, language=language)

    def transcribe(
        self,
        audio: str | Path | BinaryIO | Any,
        rate: int | None = None,
        progress: Progress | None = None,
        **fields: Any,
    ) -> Transcript:
        """Transcribe a path, an open binary file, or a float array [n] or [channels, n] with its rate.

        `fields` are those of `transcribe.options.Request`. `progress` is called after each window with the
        seconds done and the seconds the recording declares, if it does. Raises `UsageError` for a request
        this model cannot honour, `AudioError` for a recording that cannot be read, `TranscribeError` if the
        model fails.
        """
        request = self.check(Request(**fields))
        if isinstance(audio, (str, Path)) or hasattr(audio, "read"):
            stream = open_audio(audio)
        elif rate is None:
            raise UsageError("an array of samples needs its rate: transcribe(samples, rate=16000)")
        else:
            stream = open_array(audio, rate)
        with stream:
            return _Recording(self, stream, request, progress).run()


class Heard(NamedTuple):
    """What a window gave. Its place and that of the speech in it, in samples of the recording; `begin` is where times
    that the model gives count from."""

    start: int
    stop: int
    speech: tuple[int, int]
    begin: int
    decoded: Decoded


@dataclass
class _Recording:
    """What one run gathers."""

    owner: Transcriber
    stream: AudioStream
    request: Request
    progress: Progress | None = None
    warnings: list[str] = field(default_factory=list)
    answers: list[Heard] = field(default_factory=list)
    """In the order in which windows ended."""
    again: deque[Job] = field(default_factory=deque)
    """Halves of windows that failed for their length."""
    segments: list[Segment] = field(default_factory=list)
    language: str | None = None
    truncated: bool = False
    heard: int = 0  # windows given to the model
    longest: float = 0.0  # of them, in seconds
    covered: int = 0  # samples
    reached: int = 0
    stats: Counter[str] = field(default_factory=Counter)

    def run(self) -> Transcript:
        began = time.perf_counter()
        detector = open_detector(self.warnings)
        context = self.owner.model.window.context_seconds
        longest = self.owner.window_seconds - 2 * context
        self.windows = windows(self.stream.blocks(), detector, longest, context)
        lockstep = Lockstep(self.owner.model, self._next, lambda: self.owner.together)
        for job in lockstep.run():
            self._ended(job)
        decoded = self.stream.decoded_seconds
        source = self._gather(decoded)
        self.truncated |= self.stream.damaged
        if self.covered != round(decoded * RATE):
            self.truncated = True
            self.warnings.append(f"only {self.covered / RATE:.1f} of {decoded:.1f} s were transcribed")
        text = self._space.join(segment.text for segment in self.segments)
        if self.heard and not text:
            self.warnings.append("there seems to be speech, but the model wrote nothing")
        if self.request.timestamps != "word":
            self.segments = [replace(segment, words=[]) for segment in self.segments]
        model, stamped = self.owner.model, self.request.timestamps != "none"
        return Transcript(
            text=text,
            language=self.language,
            duration=decoded,
            segments=self.segments if stamped else [],
            model=self.owner.name,
            family=model.family,
            decoded_seconds=decoded,
            covered_seconds=self.covered / RATE,
            truncated=self.truncated,
            no_speech=not self.heard,
            timestamps_from=source if stamped else "none",
            warnings=[*self.stream.warnings, *self.warnings],
            stats=self._stats(decoded, time.perf_counter() - began, lockstep),
        )

    def _next(self) -> Job | None:
        """The next window with speech in it."""
        if self.again:
            return self.again.popleft()
        for window in self.windows:
            self.covered += len(window.samples)
            # A window's arrays hold until the next one is asked for, which may be before it has ended.
            if (job := self._job(window.copy() if self.owner.together > 1 else window)) is not None:
                return job
            self._report(window)
        return None

    def _job(self, window: Window, whole: bool = True) -> Job | None:
        """None for a window without speech."""
        heard = window.heard(max(1, round(self.owner.model.window.grid_seconds * RATE)))
        if heard is None:
            return None
        waveform = torch.from_numpy(heard[1])
        short = round(self.owner.model.window.min_seconds * RATE) - len(waveform)
        if short > 0:
            waveform = torch.nn.functional.pad(waveform, (0, short))
        self.heard += 1
        self.longest = max(self.longest, len(waveform) / RATE)
        return Job(window, heard[0], waveform, self.request, whole)

    def _ended(self, job: Job) -> None:
        """Keep what a window gave; a whole one that failed for its length is cut in two and tried once more."""
        if job.failed is not None:
            raise job.failed
        decoded, window = job.decoded, job.window
        if decoded is not None:
            self.stats.update(decoded.stats)
        again = decoded is None or decoded.looped or (decoded.truncated and self.request.max_tokens is None)
        halves = window.halves() if job.whole and again else None
        if decoded is None:
            if not halves:
                raise TranscribeError(f"{self.stream.name}: out of memory at {_place(window)}; set a memory limit")
            self._warn_once("out of memory: windows are cut in two")
        if halves:
            self.again.extend(part for half in halves if (part := self._job(half, whole=False)) is not None)
        elif decoded:
            first, last = window.voiced() or (0, len(window.samples))
            speech = window.start + first, window.start + last
            self.answers.append(Heard(window.start, window.stop, speech, job.begin, decoded))
            if decoded.looped:
                self.warnings.append(f"{_place(window)}: the model repeats itself: the text breaks off there")
            elif decoded.truncated:
                self.warnings.append(f"{_place(window)}: the token budget ran out: the text breaks off there")
            self.truncated |= decoded.looped or decoded.truncated
        self._report(window)

    def _report(self, window: Window) -> None:
        self.reached = max(self.reached, window.stop)
        if self.progress:
            self.progress(self.reached / RATE, self.stream.declared_seconds)

    @property
    def _space(self) -> str:
        return "" if self.language in UNSPACED else " "

    def _gather(self, seconds: float) -> str:
        """Windows in the order of the recording, in whatever order they ended. Where the times of segments are from."""
        self.answers.sort(key=lambda heard: heard.start)
        languages = (heard.decoded.language for heard in self.answers if heard.decoded.language)
        self.language = self.request.language or next(languages, None)
        if any(heard.decoded.pieces is not None for heard in self.answers):
            joiner = Joiner(self.owner.model.window.context_seconds)
            for heard in self.answers:
                pieces = heard.decoded.pieces or []
                joiner.add(pieces, heard.begin / RATE, heard.start / RATE, heard.stop / RATE)
            self.segments = joiner.segments(seconds, spaced=bool(self._space))
            return "ctc"
        for heard in self.answers:
            if text := heard.decoded.text.strip():
                start, stop = (edge / RATE for edge in heard.speech)
                self.segments.append(Segment(len(self.segments), start, stop, text))
        return "window"

    def _warn_once(self, warning: str) -> None:
        if warning not in self.warnings:
            self.warnings.append(warning)

    def _stats(self, seconds: float, wall: float, lockstep: Lockstep) -> dict[str, Any]:
        """Times in seconds; `real_time_factor` is time over length; the peak is predicted, not measured."""
        return {
            "audio_seconds": seconds,
            "wall_seconds": wall,
            "model_seconds": lockstep.model_seconds,
            "real_time_factor": wall / seconds if seconds else 0.0,
            "windows": self.heard,
            "longest_window": self.longest,
            "together": lockstep.most,
            "peak_bytes": self.owner.model.peak_bytes(self.longest, lockstep.most) if lockstep.most else 0,
            "tokens": 0,
            **self.stats,
        }


def _place(window: Window) -> str:
    return f"{window.start / RATE:.1f}-{window.stop / RATE:.1f} s"


def _model_name(model: Model) -> str:
    """What errors call it: the variant, led by the family where it does not begin with that."""
    family, variant = model.family, model.variant
    return variant if variant.replace("-", "_").startswith(family) else f"{family} {variant}"


def _language(wanted: str | None, model: Model, name: str) -> str | None:
    """The code for a request's language; None where the model is to choose."""
    can = model.capabilities
    known = ", ".join(f"{code} ({language_name(code)})" for code in can.languages[:8])
    known += ", ..." if len(can.languages) > 8 else ""
    if wanted is None or wanted.strip().casefold() in ("", "auto"):
        if can.detects_language:
            return None
        if len(can.languages) == 1:
            return can.languages[0]
        raise UsageError(f"{name} does not detect the language: name it; it knows {known}")
    code = language_code(wanted)
    exact = wanted.strip()
    if exact in can.languages:
        return exact
    if code is None or code not in can.languages:
        raise UsageError(f"{name} does not know the language {wanted!r}; it knows {known}")
    return code


def _fitting_window(model: Model, memory_limit: int | None, together: int) -> float:
    """The longest window, in seconds, whose predicted peak fits; to a tenth of a second."""
    longest = model.window.max_seconds
    if memory_limit is None or model.peak_bytes(longest, together) <= memory_limit:
        return longest
    shortest = min(max(SHORTEST_WINDOW, model.window.min_seconds), longest)
    least = model.peak_bytes(shortest, together)
    if least > memory_limit:
        raise UsageError(
            f"a memory limit of {memory_limit / 2**20:.0f} MiB is too small: {_model_name(model)} "
            f"needs {least / 2**20:.0f} MiB for {_windows(together)}{shortest:.0f} s of audio at a time"
        )
    fits, fails = shortest, longest
    while fails - fits > 0.1:
        middle = (fits + fails) / 2
        fits, fails = (middle, fails) if model.peak_bytes(middle, together) <= memory_limit else (fits, middle)
    return fits


def _windows(together: int) -> str:
    return f"{together} windows of " if together > 1 else ""
