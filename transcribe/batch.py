"""Items of work -> transcripts in files or on stdout.

One bad file never stops the rest, an output is whole or absent, and the exit code says what happened.
"""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections import Counter
from collections.abc import Generator, Iterable, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Protocol

from . import writers
from .atomic import write_together
from .console import Console, Interrupts, explain, printable
from .errors import TranscribeError
from .manifest import Manifest, keep_manifest
from .progress import Meter
from .worklist import STDIN, Item, Plan

if TYPE_CHECKING:
    from .options import Request
    from .pipeline import Progresses, Result
    from .transcript import Transcript

OK, FAILED, NOTHING_TO_DO = 0, 1, 4


class Engine(Protocol):
    """What transcribes: a `Transcriber`, or several elsewhere."""

    def transcribe_all(
        self, sources: Iterable[str | Path | BinaryIO], request: Request, progress: Progresses | None = None
    ) -> Generator[Result]:
        """As `Transcriber.transcribe_all`."""
        ...


def run(
    plan: Plan,
    engine: Engine | None,
    request: Request,
    console: Console,
    stats_file: str | os.PathLike[str] | None = None,
    debug: bool = False,
) -> int:
    """Transcribe every item of `plan` and return the exit code.

    `engine` may be None where `plan.needs_model` is false. Files are written as their recordings end; lines on stdout
    keep the order of `plan`. Failures are lines on stderr, with a traceback where `debug`. `stats_file` gets one JSON
    line a transcript. An interrupt ends the run after the summary, with 130, or 143 for SIGTERM. Raises `OutputError`,
    `UsageError` if the manifest cannot be opened, or `OSError` for `stats_file`.
    """
    with keep_manifest(plan, console.error) as manifest:
        return _Run(plan, engine, request, console, debug, stats_file, manifest).all()


@dataclass
class _Run:
    plan: Plan
    engine: Engine | None
    request: Request
    console: Console
    debug: bool
    stats_file: str | os.PathLike[str] | None
    manifest: Manifest | None
    outcomes: Counter[str] = field(default_factory=Counter)
    stats: list[str] = field(default_factory=list)
    audio_seconds: float = 0.0

    def all(self) -> int:
        began = time.monotonic()
        for note in self.plan.notes:
            self.console.inform(note)
        if len(self.plan.skipped) == 1:
            (item,) = self.plan.skipped
            self.console.inform(f"{item.source}: skipped, {_outputs(item)} is newer (--overwrite redoes it)")
        elif self.plan.skipped:
            self.console.inform(f"{len(self.plan.skipped)} skipped, their outputs are newer (--overwrite redoes them)")
        with Interrupts() as interrupts:
            with suppress(KeyboardInterrupt):
                self._transcribe(interrupts)
            if self.plan.several or interrupts.signal:
                self._summarise(time.monotonic() - began)
            if self.stats_file is not None:
                write_together({Path(self.stats_file): writers.encode("".join(self.stats))})
        if interrupts.signal:
            return 128 + interrupts.signal
        return FAILED if self.outcomes["failed"] or self.outcomes["partial"] else OK

    def _transcribe(self, interrupts: Interrupts) -> None:
        items = self.plan.items
        with self.console.progress() as show, closing(self._results(Meter(items, show))) as results:
            for number, outcome in _in_order(results) if self.plan.to_stdout else results:
                self.outcomes[self._ended(items[number], outcome)] += 1
                if interrupts.signal:  # something below held it back
                    return

    def _results(self, meter: Meter) -> Generator[Result]:
        """The number of each item and what came of it: first those that cannot be read, then as they end."""
        readable = []
        for number, item in enumerate(self.plan.items):
            if item.problem is None:
                readable.append(number)
            else:
                meter.ended(number)
                yield number, TranscribeError(f"{item.source}: {item.problem}")
        if not readable or self.engine is None:
            return
        sources = (_source(self.plan.items[number]) for number in readable)

        def progress(at: int, seconds: float, declared: float | None) -> None:
            meter.reached(readable[at], seconds, declared)

        with closing(self.engine.transcribe_all(sources, self.request, progress)) as results:
            for at, outcome in results:
                meter.ended(readable[at])
                yield readable[at], outcome

    def _ended(self, item: Item, outcome: Transcript | Exception) -> str:
        """Put what came of an item where it belongs; returns its outcome in a word."""
        if isinstance(outcome, Exception):
            self._report(outcome, item)
            return "failed"
        transcript = outcome
        try:
            _write(item, transcript)
        except Exception as error:
            self._report(error, item)
            return "failed"
        ending = "partial" if transcript.truncated else "done"
        if self.manifest:
            self.manifest.add(item, ending, transcript)
        self._announce(item, transcript)
        self.audio_seconds += transcript.duration
        if self.stats_file is not None:
            self.stats.append(writers.json_line({"path": item.source, **transcript.stats}))
        for warning in transcript.warnings:
            self.console.inform(f"{item.source}: {warning}")
        if transcript.truncated:
            covered = f"{transcript.covered_seconds:.1f} of {transcript.duration:.1f} s"
            self.console.error(f"{item.source}: partial: {covered} are transcribed")
        return ending

    def _announce(self, item: Item, transcript: Transcript) -> None:
        """The transcript on stdout, or a line that says where it went."""
        if self.plan.to_stdout:
            self.console.output(self._for_stdout(item, transcript))
            return
        length = f"{transcript.duration:.1f} s of audio"
        place = f"{self.outcomes.total() + 1}/{len(self.plan.items)} "
        if not self.plan.several:
            place, length = "", f"{length} in {transcript.stats.get('wall_seconds', 0.0):.1f} s"
        self.console.inform(f"{place}{item.source} -> {_outputs(item)} ({length})")

    def _report(self, error: Exception, item: Item) -> None:
        if self.debug:
            traceback.print_exception(error)
        message = explain(error, f"{item.source}: ")
        self.console.error(message)
        failure = {"kind": type(error).__name__, "message": message}
        if self.manifest:
            self.manifest.add(item, "failed", error=failure)
        if self.plan.to_stdout and self.plan.formats == ("jsonl",):
            self.console.output(writers.json_line({"path": item.source, "error": failure}))

    def _for_stdout(self, item: Item, transcript: Transcript) -> str:
        if self.plan.several and self.plan.formats == ("txt",):
            return f"{printable(item.source)}\t{writers.one_line(transcript.text)}\n"
        return _render(item, transcript, self.plan.formats[0])

    def _summarise(self, took: float) -> None:
        counts = {**self.outcomes, "skipped": len(self.plan.skipped)}
        counts["not done"] = len(self.plan.items) - self.outcomes.total()
        order = ("done", "partial", "failed", "skipped", "not done")
        words = ", ".join(f"{counts[outcome]} {outcome}" for outcome in order if counts.get(outcome))
        self.console.inform(f"{words}; {self.audio_seconds:.0f} s of audio in {took:.1f} s")


def _in_order(results: Iterable[Result]) -> Iterator[Result]:
    """Results by their numbers from 0: what ends early waits for those before it."""
    waiting: dict[int, Transcript | Exception] = {}
    at = 0
    for number, outcome in results:
        waiting[number] = outcome
        while at in waiting:
            yield at, waiting.pop(at)
            at += 1


def _write(item: Item, transcript: Transcript) -> None:
    """All its outputs at once; those of a partial result are taken for unfinished by the next run."""
    outputs = {target: writers.encode(_render(item, transcript, format_)) for format_, target in item.targets.items()}
    source = item.source if item.source != STDIN else None
    write_together(outputs, source, complete=not transcript.truncated)


def _source(item: Item) -> str | BinaryIO:
    return sys.stdin.buffer if item.source == STDIN else item.source


def _outputs(item: Item) -> str:
    """The item's outputs, in short: out/a.txt, or out/a.{txt,srt}."""
    *_, last = item.targets.values()
    formats = list(item.targets)
    return str(last) if len(formats) == 1 else f"{last.with_suffix('')}.{{{','.join(formats)}}}"


def _render(item: Item, transcript: Transcript, format_: str) -> str:
    if format_ == "jsonl":
        return writers.json_line({"path": item.source, **writers.as_dict(transcript)})
    return writers.WRITERS[format_](transcript)
