import errno
import json
import os

import pytest
from recordings import recordings, written

from transcribe import batch, worklist
from transcribe.console import Console
from transcribe.errors import AudioError
from transcribe.options import Request
from transcribe.transcript import Segment, Transcript


class Fake:
    """Says the name of the file; `faults` maps a file name to what happens instead."""

    def __init__(self, faults=None):
        self.faults = faults or {}
        self.asked = []

    def transcribe_all(self, sources, request, progress=None):
        for number, source in enumerate(sources):
            name = os.path.basename(source) if isinstance(source, str) else "stdin"
            self.asked.append(name)
            try:
                yield number, self.transcript(name, self.faults.get(name))
            except Exception as error:
                yield number, error

    def transcript(self, name, fault):
        if isinstance(fault, Exception):
            raise fault
        text = f"words of {name}"
        result = Transcript(text, "en", 2.0, [Segment(0, 0.0, 2.0, text)], stats={"tokens": 3})
        if fault == "partial":
            result.truncated, result.covered_seconds = True, 1.0
        return result


def go(inputs, output_dir=None, fake=None, formats=("txt",), **options):
    """Plan and run; returns the exit code."""
    settings = {name: options.pop(name) for name in ("stats_file", "debug") if name in options}
    plan = worklist.plan([str(path) for path in inputs], formats, output_dir, **options)
    return batch.run(plan, fake or Fake(), Request(), Console(), **settings)


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


# Again


def test_done_work_is_skipped_and_overwrite_does_it_again(here, capsys):
    recordings(here, "a.wav", "b.wav")
    assert go(["a.wav"], "out") == 0
    fake = Fake()
    assert go(["a.wav", "b.wav"], "out", fake) == 0
    assert fake.asked == ["b.wav"]
    err = capsys.readouterr().err
    assert "a.wav: skipped, out/a.txt is newer (--overwrite redoes it)" in err
    assert "1 done, 1 skipped" in err
    assert go(["a.wav"], "out", fake, overwrite=True) == 0
    assert fake.asked == ["b.wav", "a.wav"]


def test_a_partial_result_is_reported_each_time(here, capsys):
    recordings(here, "a.wav")
    for _ in range(2):
        assert go(["a.wav"], "out", Fake({"a.wav": "partial"})) == 1
        assert "a.wav: partial: 1.0 of 2.0 s are transcribed" in capsys.readouterr().err
    assert (here / "out/a.txt").read_text() == "words of a.wav\n"


# Running


def test_one_bad_file_stops_nothing(here, capsys):
    recordings(here, "a.wav", "b.wav", "c.wav", "d.wav")
    faults = {"b.wav": AudioError("b.wav: no audio stream"), "c.wav": ZeroDivisionError("oops")}
    assert go(["a.wav", "b.wav", "missing.wav", "c.wav", "d.wav"], "out", Fake(faults)) == 1
    assert written(here / "out") == ["a.txt", "d.txt", "manifest.jsonl"]
    out, err = capsys.readouterr()
    assert out == ""
    assert "transcribe: b.wav: no audio stream\n" in err
    assert "transcribe: missing.wav: no such file\n" in err
    assert "transcribe: c.wav: internal error: ZeroDivisionError: oops (run with --debug)\n" in err
    assert "transcribe: 2 done, 3 failed; 4 s of audio" in err
    assert "Traceback" not in err


def test_debug_shows_the_traceback(here, capsys):
    recordings(here, "a.wav")
    go(["a.wav"], fake=Fake({"a.wav": ZeroDivisionError("oops")}), debug=True)
    assert "Traceback" in capsys.readouterr().err


def test_several_recordings_on_stdout_are_path_tab_text(here, capsys):
    recordings(here, "a.wav", "new\nline\t.wav")
    assert go(["a.wav", "new\nline\t.wav"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "a.wav\twords of a.wav"
    assert lines[1].split("\t")[0] == r"new\nline\t.wav"


class Backwards(Fake):
    """The last ends first."""

    def transcribe_all(self, sources, request, progress=None):
        yield from reversed(list(super().transcribe_all(sources, request, progress)))


def test_lines_on_stdout_keep_their_order_and_files_are_written_as_they_end(here, capsys):
    names = ["a.wav", "b.wav", "c.wav"]
    recordings(here, *names)
    assert go([*names[:1], "missing.wav", *names[1:]], fake=Backwards()) == 1
    assert [line.split("\t")[0] for line in capsys.readouterr().out.splitlines()] == names
    go(names, "out", Backwards())
    arrows = [line for line in capsys.readouterr().err.splitlines() if "->" in line]
    assert [line.split()[1:3] for line in arrows] == [["1/3", "c.wav"], ["2/3", "b.wav"], ["3/3", "a.wav"]]


def test_jsonl_on_stdout_has_a_line_a_file_failures_too(here, capsys):
    recordings(here, "a.wav", "b.wav")
    fake = Fake({"b.wav": AudioError("b.wav: empty")})
    assert go(["a.wav", "b.wav"], fake=fake, formats=("jsonl",)) == 1
    first, second = map(json.loads, capsys.readouterr().out.splitlines())
    assert (first["path"], first["text"]) == ("a.wav", "words of a.wav")
    assert second == {"path": "b.wav", "error": {"kind": "AudioError", "message": "b.wav: empty"}}


def test_stats_are_a_json_line_a_transcript(here):
    recordings(here, "a.wav", "b.wav")
    fake = Fake({"b.wav": AudioError("b.wav: empty")})
    go(["a.wav", "b.wav"], "out", fake, stats_file=here / "stats.jsonl")
    assert (here / "stats.jsonl").read_text() == '{"path": "a.wav", "tokens": 3}\n'


NAMES = ["a b.wav", "[x].wav", "-dash.wav", "new\nline.wav", "Høns på æg.wav", "にっぽん.wav", "q'uo\"te.wav"]


def test_strange_names_come_out_as_they_went_in(here, capsys):
    names = [*NAMES, os.fsdecode(b"\xff\xfe.wav")]
    recordings(here, *names)
    assert go(names, "out", formats=("txt", "json", "jsonl")) == 0
    assert {path.removesuffix(".txt") for path in written(here / "out") if path.endswith(".txt")} == {
        name.removesuffix(".wav") for name in names
    }
    stray = (here / "out" / os.fsdecode(b"\xff\xfe.jsonl")).read_bytes()
    assert json.loads(stray)["path"] == names[-1]
    err = capsys.readouterr().err
    assert "[x].wav" in err
    assert r"\xff\xfe.wav" in err
    assert r"new\nline.wav" in err


def test_what_went_where_is_a_line_a_file(here, capsys):
    recordings(here, "a.wav")
    go(["a.wav"], "out")
    go(["a.wav"], "out", formats=("txt", "srt"))
    err = capsys.readouterr().err
    assert "transcribe: a.wav -> out/a.txt (2.0 s of audio in 0.0 s)\n" in err
    assert "transcribe: a.wav -> out/a.{txt,srt} (2.0 s" in err


# Writing


def test_a_failed_write_leaves_what_was_there_and_no_temporary(here, monkeypatch, capsys):
    recordings(here, "a.wav", "b.wav")
    go(["a.wav"], "out")
    before = (here / "out/a.txt").read_text()

    def full(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    assert go(["a.wav", "b.wav"], "out", overwrite=True) == 1
    assert written(here / "out") == ["a.txt", "manifest.jsonl"]
    assert (here / "out/a.txt").read_text() == before
    assert "transcribe: out/b.txt: cannot write: No space left on device\n" in capsys.readouterr().err
