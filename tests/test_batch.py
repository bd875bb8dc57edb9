import errno
import json
import os
from pathlib import Path

import pytest

from transcribe import batch, worklist
from transcribe.console import Console
from transcribe.errors import AudioError, UsageError
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


def recordings(folder: Path, *names: str) -> list[Path]:
    paths = [folder / name for name in names]
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"sound")
        os.utime(path, (1_000_000, 1_000_000))
    return paths


def written(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


# Finding


def test_a_folder_is_sorted_without_dot_files_subfolders_and_other_files(tmp_path):
    recordings(tmp_path, "b.wav", "a.MP3", ".hidden.wav", "._a.wav", "notes.txt", "sub/c.wav", ".git/d.wav")
    found = [Path(item.source).name for item in worklist.plan([str(tmp_path)]).items]
    assert found == ["a.MP3", "b.wav"]
    found = [Path(item.source).name for item in worklist.plan([str(tmp_path)], recursive=True).items]
    assert found == ["a.MP3", "b.wav", "c.wav"]


def test_an_explicit_path_is_tried_whatever_its_name(tmp_path):
    paths = recordings(tmp_path, "talk.dat", ".hidden", "noext")
    assert [item.source for item in worklist.plan(map(str, paths)).items] == list(map(str, paths))


def test_a_file_named_twice_is_done_once(tmp_path, capsys):
    (path,) = recordings(tmp_path, "a.wav")
    assert go([path, tmp_path, f"{tmp_path}/./a.wav"]) == 0
    assert capsys.readouterr().out == "words of a.wav\n"


def test_pipes_in_a_folder_are_left_alone_and_dangling_links_reported(tmp_path, capsys):
    recordings(tmp_path, "a.wav")
    os.mkfifo(tmp_path / "b.wav")
    (tmp_path / "c.wav").symlink_to("gone.wav")
    assert go([tmp_path]) == 1
    assert f"{tmp_path}/c.wav: dangling link" in capsys.readouterr().err


def test_an_empty_folder_is_noted_with_a_hint(tmp_path):
    plan = worklist.plan([str(tmp_path)])
    assert plan.items == []
    assert "--recursive" in plan.notes[0]


# Naming


def targets(inputs, out="out", **options):
    plan = worklist.plan([str(path) for path in inputs], ("txt",), out, **options)
    return [str(item.targets["txt"].relative_to(out)) for item in plan.items]


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_extension_is_kept_only_where_two_would_meet(here):
    recordings(here, "foo.wav", "foo.mp3", "bar.wav")
    assert targets(["foo.wav", "foo.mp3", "bar.wav"]) == ["foo.wav.txt", "foo.mp3.txt", "bar.txt"]


def test_same_names_in_two_folders_are_mirrored(here):
    recordings(here, "x/a.wav", "y/a.wav", "y/b.wav")
    assert targets(["x/a.wav", "y"]) == ["x/a.txt", "y/a.txt", "b.txt"]


def test_recursive_mirrors_subfolders(here):
    recordings(here, "in/a.wav", "in/s/a.wav", "in/s/t/b.wav")
    assert targets(["in"], recursive=True) == ["a.txt", "s/a.txt", "s/t/b.txt"]


def test_names_that_differ_by_case_only_do_not_meet_on_any_disk(here):
    recordings(here, "A.wav", "a.mp3")
    assert targets(["A.wav", "a.mp3"]) == ["A.wav.txt", "a.mp3.txt"]


def test_a_chain_of_meeting_names_ends_in_different_ones(here):
    names = ["foo.wav", "foo.mp3", "foo.wav.mp3", "z/foo.wav", "z/foo.mp3"]
    recordings(here, *names)
    assert len(set(targets(names))) == len(names)


def test_stdin_has_a_name(here):
    recordings(here, "stdin.wav")
    assert targets(["-", "stdin.wav"]) == ["stdin.txt", "stdin.wav.txt"]


def test_an_output_never_replaces_a_recording(here):
    recordings(here, "odd.txt")
    with pytest.raises(UsageError, match="one of the recordings"):
        targets(["odd.txt"], out=".")
    assert (here / "odd.txt").read_bytes() == b"sound"


# Before any work


def test_an_output_folder_that_is_a_file_or_below_one_is_refused(here):
    recordings(here, "a.wav", "file")
    for folder in ("file", "file/below"):
        with pytest.raises(UsageError, match=f"{folder}: cannot write into this output folder"):
            worklist.plan(["a.wav"], ("txt",), folder)


def test_a_read_only_output_folder_is_refused(here, monkeypatch):
    def refuse(dir):
        raise PermissionError(errno.EACCES, "Permission denied", str(dir))

    recordings(here, "a.wav")
    monkeypatch.setattr(worklist.tempfile, "TemporaryFile", refuse)
    with pytest.raises(UsageError, match="out: cannot write into this output folder: Permission denied"):
        worklist.plan(["a.wav"], ("txt",), "out")


@pytest.mark.parametrize(("inputs", "formats"), [(["a.wav"], ("txt", "srt")), (["a.wav", "b.wav"], ("srt",))])
def test_what_cannot_share_stdout_needs_an_output_folder(here, inputs, formats):
    recordings(here, *inputs)
    with pytest.raises(UsageError, match="--output-dir"):
        worklist.plan(inputs, formats)


# Skipping


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


def test_a_changed_recording_or_a_missing_format_is_done_again_and_said(here, capsys):
    recordings(here, "a.wav")
    go(["a.wav"], "out")
    fake = Fake()
    go(["a.wav"], "out", fake, formats=("txt", "srt"))
    os.utime("a.wav", (2**31, 2**31))
    go(["a.wav"], "out", fake)
    assert fake.asked == ["a.wav", "a.wav"]
    assert capsys.readouterr().err.count("out/a.txt: not newer than a.wav or not complete; written") == 2


def test_a_partial_result_is_reported_each_time(here, capsys):
    recordings(here, "a.wav")
    for _ in range(2):
        assert go(["a.wav"], "out", Fake({"a.wav": "partial"})) == 1
        assert "a.wav: partial: 1.0 of 2.0 s are transcribed" in capsys.readouterr().err
    assert (here / "out/a.txt").read_text() == "words of a.wav\n"


def test_stdin_does_not_replace_an_output_unasked(here):
    (here / "out").mkdir()
    (here / "out/stdin.txt").write_text("mine")
    with pytest.raises(UsageError, match="exists already"):
        worklist.plan(["-"], ("txt",), "out")
    assert worklist.plan(["-"], ("txt",), "out", overwrite=True).items


# Running


def test_one_bad_file_stops_nothing(here, capsys):
    recordings(here, "a.wav", "b.wav", "c.wav", "d.wav")
    faults = {"b.wav": AudioError("b.wav: no audio stream"), "c.wav": ZeroDivisionError("oops")}
    assert go(["a.wav", "b.wav", "missing.wav", "c.wav", "d.wav"], "out", Fake(faults)) == 1
    assert written(here / "out") == ["a.txt", "d.txt"]
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

    monkeypatch.setattr(batch.os, "fsync", full)
    assert go(["a.wav", "b.wav"], "out", overwrite=True) == 1
    assert written(here / "out") == ["a.txt"]
    assert (here / "out/a.txt").read_text() == before
    assert "transcribe: out/b.txt: cannot write: No space left on device\n" in capsys.readouterr().err


def test_an_interrupted_write_leaves_no_temporary(here, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(batch.os, "replace", interrupt)
    with pytest.raises(KeyboardInterrupt):
        batch.write_atomically(here / "a.txt", b"x")
    assert written(here) == []


def test_written_files_have_the_usual_permissions(here):
    batch.write_atomically(here / "a.txt", b"x")
    (here / "b.txt").write_bytes(b"x")
    assert (here / "a.txt").stat().st_mode == (here / "b.txt").stat().st_mode
