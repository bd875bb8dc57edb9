"""Recordings through one model: windows in, transcripts out."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import replace
from functools import cached_property, partial
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import psutil
import torch

from .audio import AudioStream, open_array, open_audio
from .audio.ahead import ahead
from .errors import UsageError
from .lockstep import Lockstep
from .options import LoadOptions, Request
from .recording import Part, Progress, Recording
from .text.languages import language_code, language_name
from .transcript import Transcript

if TYPE_CHECKING:
    from transcribe.models.family import Model

    from .audio.stream import Samples

Progresses = Callable[[int, float, "float | None"], None]
Result = tuple[int, "Transcript | Exception"]

SHORTEST_WINDOW = 5.0  # seconds: with less context than this a model guesses, so a memory limit stops here
READ_AHEAD = 64  # blocks of about half a second


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
        fits = [n for n in (2, 4, 8, 16) if self.model.peak_bytes(self.window_seconds, n) <= limit]
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
            opened: Callable[[], AudioStream] = partial(open_audio, audio)
        elif rate is None:
            raise UsageError("an array of samples needs its rate: transcribe(samples, rate=16000)")
        else:
            opened = partial(open_array, audio, rate)
        run = _Run(self, request, lambda _, *reached: progress(*reached) if progress else None)
        for _, outcome in run.results(_read([opened])):
            if isinstance(outcome, Transcript):
                return outcome
            raise outcome
        raise AssertionError("a recording that gives nothing")

    def transcribe_all(
        self,
        sources: Iterable[str | Path | BinaryIO],
        request: Request | None = None,
        progress: Progresses | None = None,
    ) -> Generator[Result]:
        """Transcribe many recordings, windows of several decoded together: the same texts as one by one, sooner.

        Gives the number of each recording, from 0, with its transcript or what went wrong, as they end. The next
        ones are decoded from their files meanwhile. `progress` is called after each window with the recording's number
        and what `transcribe` gives. Raises `UsageError` for a request this model cannot honour.
        """
        run = _Run(self, self.check(request or Request()), progress)
        events = ahead(_read(partial(open_audio, source) for source in sources), READ_AHEAD)
        try:
            yield from run.results(events)
        finally:
            events.close()


Event = tuple[int, "AudioStream | Samples | Exception"]


def _read(recordings: Iterable[Callable[[], AudioStream]]) -> Iterator[Event]:
    """Every recording, opened and decoded: its number with its stream, then each of its blocks, or what went wrong."""
    for number, open_ in enumerate(recordings):
        try:
            with open_() as stream:
                yield number, stream
                for block in stream.blocks():
                    yield number, block
        except Exception as error:
            yield number, error


class _Run:
    """Recordings on their way through one model."""

    def __init__(self, owner: Transcriber, request: Request, progress: Progresses | None) -> None:
        self.owner, self.request, self.progress = owner, request, progress
        self.again: deque[Part] = deque()
        """Halves of windows that failed for their length."""
        self.open: dict[int, Recording] = {}
        """Recordings with windows to be read or under way."""
        self.largest = 0.0, 0
        """The longest window of those that are over, in seconds, and the most that were under way together,"""
        self.peak_bytes = 0
        """and what such windows take at their peak."""

    def results(self, events: Iterator[Event]) -> Iterator[Result]:
        """The number of each recording and what came of it, as they end."""
        parts = self._parts(events)
        lockstep = Lockstep(self.owner.model, lambda: self._next(parts), lambda: self.owner.together)
        while True:
            for ended in lockstep.run():
                for part in ended:
                    self.again.extend(part.recording.ended(part))
                yield from self._over()
            over = list(self._over())
            if not over:
                return
            yield from over

    def _next(self, parts: Iterator[Part | None]) -> Part | None:
        return self.again.popleft() if self.again else next(parts, None)

    def _parts(self, events: Iterator[Event]) -> Iterator[Part | None]:
        """The windows of all recordings, in order; None where one is over with none of its windows under way."""
        for number, of_one in groupby(events, lambda event: event[0]):
            yield from self._parts_of(number, of_one)
            if self.open[number].over:
                yield None

    def _parts_of(self, number: int, events: Iterator[Event]) -> Iterator[Part]:
        progress = partial(self.progress, number) if self.progress else None
        recording = self.open[number] = Recording(self.owner.model, self.request, progress)
        try:
            _, stream = next(events)
            if isinstance(stream, Exception):
                raise stream
            if isinstance(stream, AudioStream):
                keep = self.owner.together > 1
                yield from recording.parts(stream, self._blocks(events), self.owner.window_seconds, keep)
        except Exception as error:
            recording.failed = error
        recording.read = True

    def _blocks(self, events: Iterator[Event]) -> Iterator[Samples]:
        for _, block in events:
            if isinstance(block, Exception):
                raise block
            if not isinstance(block, AudioStream):
                yield block

    def _over(self) -> Iterator[Result]:
        """Recordings of which everything has been read and answered."""
        for number in [number for number, recording in self.open.items() if recording.over]:
            yield number, self._outcome(self.open.pop(number))

    def _outcome(self, recording: Recording) -> Transcript | Exception:
        try:
            transcript = recording.transcript(self.owner.name)
        except Exception as error:
            return error
        stats = transcript.stats
        stats["peak_bytes"] = self._peak(stats["longest_window"], stats["together"])
        return transcript

    def _peak(self, longest: float, together: int) -> int:
        """Predicted for the run so far; worked out only where it grows, and by lengths in quarters of a second."""
        longest = min(math.ceil(longest * 4) / 4, self.owner.window_seconds)
        largest = max(longest, self.largest[0]), max(together, self.largest[1])
        if largest != self.largest and largest[1]:
            self.peak_bytes = self.owner.model.peak_bytes(*largest)
        self.largest = largest
        return self.peak_bytes


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
