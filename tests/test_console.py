import io
import sys

import pytest

from transcribe.console import Console, explain, prepare_streams, printable
from transcribe.errors import AudioError


class Terminal(io.StringIO):
    def isatty(self):
        return True


def on_a_terminal(monkeypatch) -> Terminal:
    """Called in the test itself: pytest sets the streams anew after the fixtures."""
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "200")
    return terminal


def test_a_bar_is_drawn_on_a_terminal_and_stdout_stays_stdout(monkeypatch, capsys):
    terminal = on_a_terminal(monkeypatch)
    console = Console()
    stdout = sys.stdout
    with console.progress() as show:
        show("[bold]a.wav", 5.0, 10.0)
        console.output("text\n")
        console.error("a line")
        assert sys.stdout is stdout
    assert capsys.readouterr().out == "text\n"
    assert "[bold]a.wav" in terminal.getvalue()
    assert "50%" in terminal.getvalue()
    assert "\ntranscribe: a line\n" in terminal.getvalue().replace("\x1b[2K", "\n")


@pytest.mark.parametrize("why", ["quiet", "dumb", "pipe"])
def test_otherwise_nothing_is_drawn(monkeypatch, why):
    on_a_terminal(monkeypatch)
    if why == "dumb":
        monkeypatch.setenv("TERM", "dumb")
    if why == "pipe":
        monkeypatch.setattr(sys, "stderr", io.StringIO())
    console = Console(quiet=why == "quiet")
    with console.busy("loading"), console.progress() as show:
        assert show is None
    assert sys.stderr.getvalue() == ""


def test_no_color_is_honoured(monkeypatch):
    terminal = on_a_terminal(monkeypatch)
    monkeypatch.setenv("NO_COLOR", "1")
    with Console().progress() as show:
        show("a.wav", 5.0, 10.0)
    assert "50%" in terminal.getvalue()
    assert "\x1b[3" not in terminal.getvalue()


def test_quiet_leaves_errors(capsys):
    console = Console(quiet=True)
    console.inform("for your information")
    console.error("a.wav: broken\nin two")
    assert capsys.readouterr().err == "transcribe: a.wav: broken\\nin two\n"


def test_printable_keeps_letters_of_every_script_and_escapes_the_rest():
    kept = "æ 日本\N{IDEOGRAPHIC SPACE}\N{NO-BREAK SPACE}👩\N{ZERO WIDTH JOINER}🔬 \\"
    assert printable(kept) == kept
    assert printable("a\x1b[31m\u2028\udcff") == r"a\x1b[31m\u2028\xff"


def test_streams_take_any_text(monkeypatch):
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii"))
    monkeypatch.setattr(sys, "stderr", None)
    prepare_streams()
    Console().output("Høns \udcff")
    Console().error("dropped")
    assert raw.getvalue() == "Høns \\udcff".encode()


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (AudioError("a.wav: empty file"), "a.wav: empty file"),
        (PermissionError(13, "Permission denied", "b.wav"), "b.wav: Permission denied"),
        (OSError(28, "No space left on device"), "a.wav: No space left on device"),
        (MemoryError(), "a.wav: internal error: MemoryError:  (run with --debug)"),
    ],
)
def test_errors_are_one_line_that_names_the_file(error, line):
    assert explain(error, "a.wav: ") == line
