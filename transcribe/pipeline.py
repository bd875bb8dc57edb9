"""One recording through one model: windows in, a transcript out, every second accounted for."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import torch

from .audio import RATE, AudioStream, open_array, open_audio
from .audio.activity import open_detector
from .errors import TranscribeError, UsageError
from .joining import Joiner
from .options import LoadOptions, Request
from .text.languages import UNSPACED, language_code, language_name
from .transcript import Segment, Transcript
from .windows import Window, windows

if TYPE_CHECKING:
    from transcribe.models.family import Decoded, Model

    from .audio.stream import Samples

Progress = Callable[[float, "float | None"], None]

SHORTEST_WINDOW = 5.0  # seconds: with less context than this a model guesses, so a memory limit stops here


class Transcriber:
    """A loaded model, ready for recordings. `model` is the family's; `name` is what its file is called."""

    def __init__(self, model: Model, name: str = "", memory_limit: int | None = None) -> None:
        self.model, self.name = model, name
        self.window_seconds = _fitting_window(model, memory_limit)

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
        return cls(model, path.name, options.memory_limit)

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
            return _Recording(self, stream, request).run(progress)


@dataclass
class _Recording:
    """What one run gathers."""

    owner: Transcriber
    stream: AudioStream
    request: Request
    warnings: list[str] = field(default_factory=list)
    segments: list[Segment] = field(default_factory=list)
    truncated: bool = False
    heard: int = 0  # windows given to the model
    longest: float = 0.0  # of them, in seconds
    model_seconds: float = 0.0
    stats: Counter[str] = field(default_factory=Counter)
    joiner: Joiner | None = None  # of a model whose windows overlap, or that has times

    def run(self, progress: Progress | None) -> Transcript:
        began = time.perf_counter()
        covered = 0
        self.language = self.request.language
        detector = open_detector(self.warnings)
        context = self.owner.model.window.context_seconds
        longest = self.owner.window_seconds - 2 * context
        for window in windows(self.stream.blocks(), detector, longest, context):
            self._listen(window)
            covered += len(window.samples)
            if progress:
                progress(window.stop / RATE, self.stream.declared_seconds)
        decoded = self.stream.decoded_seconds
        self.truncated |= self.stream.damaged
        if covered != round(decoded * RATE):
            self.truncated = True
            self.warnings.append(f"only {covered / RATE:.1f} of {decoded:.1f} s were transcribed")
        spaced = self.language not in UNSPACED
        if self.joiner:
            self.segments = self.joiner.segments(decoded, spaced)
        text = (" " if spaced else "").join(segment.text for segment in self.segments)
        if self.heard and not text:
            self.warnings.append("there seems to be speech, but the model wrote nothing")
        if self.request.timestamps != "word":
            self.segments = [replace(segment, words=[]) for segment in self.segments]
        model, stamped = self.owner.model, self.request.timestamps != "none"
        source = "ctc" if self.joiner else "window"
        return Transcript(
            text=text,
            language=self.language,
            duration=decoded,
            segments=self.segments if stamped else [],
            model=self.owner.name,
            family=model.family,
            decoded_seconds=decoded,
            covered_seconds=covered / RATE,
            truncated=self.truncated,
            no_speech=not self.heard,
            timestamps_from=source if stamped else "none",
            warnings=[*self.stream.warnings, *self.warnings],
            stats=self._stats(decoded, time.perf_counter() - began),
        )

    def _listen(self, window: Window, whole: bool = True) -> None:
        """Transcribe a window; a whole one that fails for its length is cut in two and tried once more."""
        heard = window.heard(max(1, round(self.owner.model.window.grid_seconds * RATE)))
        if heard is None:
            return
        begin, samples = heard
        decoded = self._decode(samples)
        again = decoded is None or decoded.looped or (decoded.truncated and self.request.max_tokens is None)
        halves = window.halves() if whole and again else None
        place = f"{window.start / RATE:.1f}-{window.stop / RATE:.1f} s"
        if decoded is None:
            if not halves:
                raise TranscribeError(f"{self.stream.name}: out of memory at {place}; set a memory limit")
            self._warn_once("out of memory: windows are cut in two")
        if halves:
            for half in halves:
                self._listen(half, whole=False)
        elif decoded:
            self._keep(window, begin, decoded, place)

    def _decode(self, samples: Samples) -> Decoded | None:
        """The model's answer; None if memory ran out."""
        model = self.owner.model
        short = round(model.window.min_seconds * RATE) - len(samples)
        waveform = torch.from_numpy(samples)
        if short > 0:
            waveform = torch.nn.functional.pad(waveform, (0, short))
        self.heard += 1
        self.longest = max(self.longest, len(waveform) / RATE)
        began = time.perf_counter()
        try:
            decoded = model.transcribe(waveform, self.request)
        except (MemoryError, RuntimeError) as error:
            if not _is_out_of_memory(error):
                raise
            return None
        finally:
            self.model_seconds += time.perf_counter() - began
        self.stats.update(decoded.stats)
        return decoded

    def _keep(self, window: Window, begin: int, decoded: Decoded, place: str) -> None:
        """What a window says; `begin` is the sample of the recording that the model's times count from."""
        self.language = self.language or decoded.language
        if decoded.looped:
            self.warnings.append(f"{place}: the model repeats itself: the text breaks off there")
        elif decoded.truncated:
            self.warnings.append(f"{place}: the token budget ran out: the text breaks off there")
        self.truncated |= decoded.looped or decoded.truncated
        if decoded.pieces is not None:
            self.joiner = self.joiner or Joiner(self.owner.model.window.context_seconds)
            self.joiner.add(decoded.pieces, begin / RATE, window.start / RATE, window.stop / RATE)
        elif (text := decoded.text.strip()) and (voiced := window.voiced()):
            start, stop = ((window.start + edge) / RATE for edge in voiced)
            self.segments.append(Segment(len(self.segments), start, stop, text))

    def _warn_once(self, warning: str) -> None:
        if warning not in self.warnings:
            self.warnings.append(warning)

    def _stats(self, seconds: float, wall: float) -> dict[str, Any]:
        """Times in seconds; `real_time_factor` is time over length; the peak is predicted, not measured."""
        return {
            "audio_seconds": seconds,
            "wall_seconds": wall,
            "model_seconds": self.model_seconds,
            "real_time_factor": wall / seconds if seconds else 0.0,
            "windows": self.heard,
            "longest_window": self.longest,
            "peak_bytes": self.owner.model.peak_bytes(self.longest) if self.longest else 0,
            "tokens": 0,
            **self.stats,
        }


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


def _fitting_window(model: Model, memory_limit: int | None) -> float:
    """The longest window, in seconds, whose predicted peak fits; to a tenth of a second."""
    longest = model.window.max_seconds
    if memory_limit is None or model.peak_bytes(longest) <= memory_limit:
        return longest
    shortest = min(max(SHORTEST_WINDOW, model.window.min_seconds) + 2 * model.window.context_seconds, longest)
    least = model.peak_bytes(shortest)
    if least > memory_limit:
        raise UsageError(
            f"a memory limit of {memory_limit / 2**20:.0f} MiB is too small: {_model_name(model)} "
            f"needs {least / 2**20:.0f} MiB for {shortest:.0f} s of audio at a time"
        )
    fits, fails = shortest, longest
    while fails - fits > 0.1:
        middle = (fits + fails) / 2
        fits, fails = (middle, fails) if model.peak_bytes(middle) <= memory_limit else (fits, middle)
    return fits


def _is_out_of_memory(error: MemoryError | RuntimeError) -> bool:
    """Torch has a class for this on CUDA; on the CPU and on MPS only the text tells."""
    text = str(error)
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or any(
        sign in text for sign in ("can't allocate memory", "not enough memory", "out of memory")
    )
