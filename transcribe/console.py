"""What the user sees: transcripts on stdout, everything else on stderr, and what Ctrl-C does.

stdout carries the transcript and nothing else. A progress bar is drawn only on a terminal, and never while a
line is being printed. Printing does not raise for a name or a text, whatever the encoding of the terminal.
"""

from __future__ import annotations

import io
import os
import signal
import sys
import threading
import unicodedata
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from .errors import TranscribeError

Show = Callable[[str, float, "float | None"], None]


class OutputError(TranscribeError):
    """Standard output cannot be written: a full disk."""


class ReaderGoneError(OutputError):
    """Nobody reads standard output any more: no error of ours, so nothing is said."""

    exit_code = 141  # what a shell reports for a program that SIGPIPE ended


class Console:
    """Prints lines; `quiet` leaves errors only."""

    def __init__(self, quiet: bool = False) -> None:
        self.quiet = quiet
        self.bar = not quiet and sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
        self._drawn: Any = None

    def output(self, text: str) -> None:
        """Transcript text to stdout, at once. Raises `OutputError`."""
        if sys.stdout is None:
            raise OutputError("cannot write to standard output: it is closed")
        try:
            with self._cleared():
                sys.stdout.write(text)
                sys.stdout.flush()
        except BrokenPipeError as error:
            raise ReaderGoneError from error
        except OSError as error:
            raise OutputError(f"cannot write to standard output: {error.strerror or error}") from error

    def inform(self, message: str) -> None:
        """A line for a person, unless quiet."""
        if not self.quiet:
            self.error(message)

    def error(self, message: str) -> None:
        """A line that says what went wrong."""
        with self._cleared():
            print(f"transcribe: {printable(message)}", file=sys.stderr, flush=True)

    @contextmanager
    def busy(self, message: str) -> Iterator[None]:
        """A sign of life on a terminal while something takes its time."""
        if not self.bar:
            yield
            return
        from rich.console import Console as RichConsole
        from rich.text import Text

        with RichConsole(stderr=True).status(Text(printable(message))):
            yield

    @contextmanager
    def progress(self) -> Iterator[Show | None]:
        """A bar on a terminal; call what it yields with (a description, what is done, of how much or None)."""
        if not self.bar:
            yield None
            return
        from rich.console import Console as RichConsole
        from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as RichProgress

        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TaskProgressColumn(),
            TimeRemainingColumn(),
        )
        # Redirecting stdout would send transcripts to stderr.
        with RichProgress(
            *columns,
            console=RichConsole(stderr=True),
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
        ) as bar:
            task = bar.add_task("", total=None)

            def show(description: str, done: float, total: float | None) -> None:
                bar.update(task, description=printable(description), completed=done, total=total)

            self._drawn = bar
            try:
                yield show
            finally:
                self._drawn = None

    @contextmanager
    def _cleared(self) -> Iterator[None]:
        """No bar in the way."""
        if self._drawn is None:
            yield
            return
        self._drawn.stop()
        try:
            yield
        finally:
            self._drawn.start()


class Interrupts:
    """While entered, a first SIGINT or SIGTERM raises `KeyboardInterrupt`, a second one ends the process.

    `signal` is the number of the one that came, or 0.
    """

    def __init__(self) -> None:
        self.signal = 0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._came) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _came(self, number: int, frame: FrameType | None) -> None:
        if self.signal:
            os._exit(128 + number)
        self.signal = number
        raise KeyboardInterrupt


def explain(error: BaseException, about: str = "") -> str:
    """The line that says what went wrong; `about` opens it where the error does not name a file itself."""
    if isinstance(error, TranscribeError):
        return str(error)
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else f"{about}{error.strerror}"
    return f"{about}internal error: {type(error).__name__}: {error} (run with --debug)"


def printable(text: str) -> str:
    """`text` on one line for a terminal: line breaks, control characters and stray bytes as escapes."""
    return "".join(map(_escape, text))


def _escape(character: str) -> str:
    if unicodedata.category(character) not in ("Cc", "Cs", "Zl", "Zp"):
        return character
    byte = ord(character) - 0xDC00
    if 0x80 <= byte <= 0xFF:  # a byte of a file name that is no UTF-8, as Python carries it
        return f"\\x{byte:02x}"
    return character.encode("unicode_escape").decode("ascii")


def prepare_streams() -> None:
    """Make stdout and stderr take any text: UTF-8 in pipes and files, escapes for what a terminal lacks."""
    if sys.stderr is None:  # closed by the caller
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            encoding = stream.encoding if stream.isatty() else "utf-8"
            stream.reconfigure(encoding=encoding, errors="backslashreplace")


def discard_stdout() -> None:
    """Point stdout at nothing, so that what is still buffered cannot fail again at exit."""
    if sys.stdout is not None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
