"""Items of work -> transcripts in files or on stdout.

One bad file never stops the rest, an output is whole or absent, and the exit code says what happened.
"""

from __future__ import annotations

import os
import secrets
import sys
import time
import traceback
from collections import Counter
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import writers
from .console import Console, Interrupts, explain, printable
from .errors import TranscribeError
from .worklist import STDIN, Item, Plan

if TYPE_CHECKING:
    from .options import Request
    from .pipeline import Transcriber
    from .transcript import Transcript

OK, FAILED, NOTHING_TO_DO = 0, 1, 4


def run(
    plan: Plan,
    transcriber: Transcriber | None,
    request: Request,
    console: Console,
    stats_file: str | os.PathLike[str] | None = None,
    debug: bool = False,
) -> int:
    """Transcribe every item of `plan` and return the exit code.

    `transcriber` may be None where `plan.needs_model` is false. Failures are lines on stderr, with a
    traceback where `debug`. `stats_file` gets one JSON line a transcript. An interrupt ends the run after
    the summary, with 130, or 143 for SIGTERM. Raises `OutputError`, or `OSError` for `stats_file`.
    """
    return _Run(plan, transcriber, request, console, debug).all(stats_file)


@dataclass
class _Run:
    plan: Plan
    transcriber: Transcriber | None
    request: Request
    console: Console
    debug: bool
    outcomes: Counter[str] = field(default_factory=Counter)
    stats: list[dict[str, Any]] = field(default_factory=list)
    audio_seconds: float = 0.0

    def all(self, stats_file: str | os.PathLike[str] | None) -> int:
        began = time.monotonic()
        for note in self.plan.notes:
            self.console.inform(note)
        for item in self.plan.skipped:
            self.console.inform(f"{item.source}: skipped, {_outputs(item)} is newer (--overwrite redoes it)")
        with Interrupts() as interrupts:
            try:
                for number, item in enumerate(self.plan.items, 1):
                    self.outcomes[self._one(item, number)] += 1
                    if interrupts.signal:  # something below held it back
                        break
            except KeyboardInterrupt:
                pass
            if self.plan.several or interrupts.signal:
                self._summarise(time.monotonic() - began)
            if stats_file is not None:
                lines = "".join(writers.json_line(record) for record in self.stats)
                write_atomically(Path(stats_file), _encode(lines))
        if interrupts.signal:
            return 128 + interrupts.signal
        return FAILED if self.outcomes["failed"] or self.outcomes["partial"] else OK

    def _one(self, item: Item, number: int) -> str:
        """Transcribe one item and put it where it belongs; returns its outcome."""
        place = f"{number}/{len(self.plan.items)} {item.source}" if self.plan.several else item.source
        began = time.monotonic()
        try:
            transcript = self._transcribe(item, place)
            for format_, target in item.targets.items():
                # A partial result is dated as its recording, so that the next run does it again.
                dated = item.source if transcript.truncated and item.source != STDIN else None
                write_atomically(target, _encode(_render(item, transcript, format_)), dated)
        except Exception as error:
            self._report(error, item)
            return "failed"
        if self.plan.to_stdout:
            self.console.output(self._for_stdout(item, transcript))
        else:
            took = time.monotonic() - began
            length = f"{transcript.duration:.1f} s of audio in {took:.1f} s"
            self.console.inform(f"{place} -> {_outputs(item)} ({length})")
        self.audio_seconds += transcript.duration
        self.stats.append({"path": item.source, **transcript.stats})
        for warning in transcript.warnings:
            self.console.inform(f"{item.source}: {warning}")
        if not transcript.truncated:
            return "done"
        covered = f"{transcript.covered_seconds:.1f} of {transcript.duration:.1f} s"
        self.console.error(f"{item.source}: partial: {covered} are transcribed")
        return "partial"

    def _transcribe(self, item: Item, place: str) -> Transcript:
        if item.problem is not None or self.transcriber is None:
            raise TranscribeError(f"{item.source}: {item.problem}")
        audio = sys.stdin.buffer if item.source == STDIN else item.source
        with self.console.progress(place) as progress:
            return self.transcriber.transcribe(audio, progress=progress, **asdict(self.request))

    def _report(self, error: Exception, item: Item) -> None:
        if self.debug:
            traceback.print_exception(error)
        message = explain(error, f"{item.source}: ")
        self.console.error(message)
        if self.plan.to_stdout and self.plan.formats == ("jsonl",):
            record = {"path": item.source, "error": {"kind": type(error).__name__, "message": message}}
            self.console.output(writers.json_line(record))

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


def write_atomically(target: Path, data: bytes, dated_as: str | None = None) -> None:
    """Write `data` beside `target` and rename, so that `target` is whole or as it was. Raises `OSError`.

    With `dated_as` the file gets the modification time of that one.
    """
    temporary = target.parent / f".transcribe-{secrets.token_hex(8)}.tmp"
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with open(temporary, "xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())  # a full disk may say so only here
        if dated_as is not None:
            changed = os.stat(dated_as).st_mtime_ns
            os.utime(temporary, ns=(changed, changed))
        os.replace(temporary, target)
    except BaseException as error:
        with suppress(OSError):
            temporary.unlink()
        if isinstance(error, OSError):
            raise OSError(error.errno, f"cannot write: {error.strerror or error}", str(target)) from error
        raise


def _outputs(item: Item) -> str:
    """The item's outputs, in short: out/a.txt, or out/a.{txt,srt}."""
    *_, last = item.targets.values()
    formats = list(item.targets)
    return str(last) if len(formats) == 1 else f"{last.with_suffix('')}.{{{','.join(formats)}}}"


def _render(item: Item, transcript: Transcript, format_: str) -> str:
    if format_ == "jsonl":
        return writers.json_line({"path": item.source, **writers.as_dict(transcript)})
    return writers.WRITERS[format_](transcript)


def _encode(text: str) -> bytes:
    """UTF-8; a stray byte of a file name becomes a JSON escape (`\\udcff`) that reads back as that name."""
    return text.encode("utf-8", "backslashreplace")
