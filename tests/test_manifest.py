import errno
import json
import os
import re
from pathlib import Path

import pytest
from recordings import recordings, written

from transcribe.errors import UsageError
from transcribe.manifest import Manifest, keep_manifest
from transcribe.transcript import Transcript
from transcribe.worklist import Item, plan


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "out").mkdir()
    return tmp_path


def item(source: str, *formats: str) -> Item:
    stem = os.path.splitext(source)[0]
    return Item(source, source, targets={format_: Path(f"out/{stem}.{format_}") for format_ in formats or ("txt",)})


def records(path="out/manifest.jsonl"):
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def keep(*entries, shard=None, tell=None):
    """Open, add and close."""
    with Manifest(Path("out"), shard, tell or pytest.fail) as manifest:
        for entry in entries:
            manifest.add(*entry)


def said(seconds=2.0, warnings=()):
    return Transcript("words", "en", seconds, model="tiny", warnings=list(warnings))


def test_a_record_says_how_a_recording_ended(here):
    failure = {"kind": "AudioError", "message": "b.wav: no audio stream"}
    with Manifest(Path("out"), None, pytest.fail) as manifest:
        manifest.add(item("sub/a.wav", "txt", "srt"), "done", said(1.23456))
        manifest.add(item("b.wav"), "failed", error=failure)
        manifest.add(item("c.wav"), "partial", said(warnings=["only 1.0 of 2.0 s"]))
        first, second, third = records()
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", first.pop("finished"))
    outputs = ["sub/a.txt", "sub/a.srt"]
    assert first == {"path": "sub/a.wav", "outcome": "done", "outputs": outputs, "seconds": 1.235, "model": "tiny"}
    assert (second["outcome"], second["outputs"], second["seconds"], second["model"]) == ("failed", [], None, None)
    assert second["error"] == failure
    assert (third["outcome"], third["warnings"]) == ("partial", ["only 1.0 of 2.0 s"])


def test_a_later_run_appends(here):
    keep((item("a.wav"), "partial", said()))
    keep((item("a.wav"), "done", said()))
    assert [record["outcome"] for record in records()] == ["partial", "done"]


def test_shards_have_manifests_of_their_own(here):
    keep((item("a.wav"), "done", said()), shard=(2, 4))
    assert written(here / "out") == ["manifest-2-of-4.jsonl"]


def test_any_name_of_a_file_reads_back(here):
    names = [os.fsdecode(b"\xff\xfe.wav"), "new\nline.wav", "Høns på æg.wav", "にっぽん.wav", "\u2028.wav"]
    keep(*((item(name), "done", said()) for name in names))
    lines = Path("out/manifest.jsonl").read_bytes().split(b"\n")
    assert [json.loads(line)["path"] for line in lines[:-1]] == names
    assert json.loads(lines[0])["outputs"] == [os.fsdecode(b"\xff\xfe.txt")]
    assert "Høns på æg.wav".encode() in lines[2]


@pytest.mark.parametrize("torn", [b'{"path": "b.w', b"\0\0\0"])
def test_a_torn_last_line_is_cut_off(here, torn):
    keep((item("a.wav"), "done", said()))
    with open("out/manifest.jsonl", "ab") as file:
        file.write(torn)
    keep((item("b.wav"), "done", said()))
    assert [record["path"] for record in records()] == ["a.wav", "b.wav"]


def test_skipped_ones_are_recorded_once_where_no_run_recorded_them(here):
    keep((item("a.wav"), "done", said()), shard=(1, 2))
    keep((item("b.wav"), "done", said()), (item("b.wav"), "failed"), shard=(2, 2))
    Path("out/manifest-9-of-9.jsonl").write_bytes(b'torn "\n[1]\n{"path": "c.wav"}\n\xff\n')
    for _ in range(2):
        with Manifest(Path("out"), None, pytest.fail) as manifest:
            manifest.add_skipped([item("a.wav"), item("b.wav"), item("c.wav", "txt", "srt")])
    assert [(record["path"], record["outcome"]) for record in records()] == [("b.wav", "skipped"), ("c.wav", "skipped")]
    assert records()[1]["outputs"] == ["c.txt", "c.srt"]


class Disk:
    """A file on a disk with `room` for so many bytes more."""

    def __init__(self, file, room):
        self.file, self.room = file, room

    def write(self, data):
        if not self.room:
            raise OSError(errno.ENOSPC, "No space left on device")
        count = self.file.write(data[: self.room])
        self.room -= count
        return count

    def __getattr__(self, name):
        return getattr(self.file, name)


@pytest.mark.parametrize("room", [0, 1, 100])
def test_records_wait_while_the_disk_is_full_and_it_is_said_once(here, room):
    told = []
    with Manifest(Path("out"), None, told.append) as manifest:
        manifest.add(item("a.wav"), "done", said())
        manifest._file = disk = Disk(manifest._file, room)
        manifest.add(item("b.wav"), "done", said())
        manifest.add(item("c.wav"), "done", said())
        assert [record["path"] for record in records()] == ["a.wav"]
        disk.room = 10_000
        manifest.add(item("d.wav"), "done", said())
        assert [record["path"] for record in records()] == ["a.wav", "b.wav", "c.wav", "d.wav"]
    full = "out/manifest.jsonl: cannot write: No space left on device; its records wait until it can be written"
    assert told == [full]


def test_what_could_not_be_recorded_by_the_end_is_said(here):
    told = []
    with Manifest(Path("out"), None, told.append) as manifest:
        manifest._file = Disk(manifest._file, 5)
        manifest.add(item("a.wav"), "done", said())
        manifest.add(item("b.wav"), "done", said())
    assert told[1:] == ["out/manifest.jsonl: 2 records could not be written"]
    assert records() == []


def test_a_manifest_that_cannot_be_opened_is_one_line(here):
    (here / "out/manifest.jsonl").mkdir()
    with pytest.raises(UsageError, match="cannot write the manifest: Is a directory"):
        keep()


def test_a_run_tidies_up_after_one_that_was_killed(here):
    """Killed between an output and its record, and while writing the next."""
    recordings(here, "in/a.wav", "in/sub/b.wav", "out/sub/.transcribe-0123456789abcdef.tmp")
    (here / "out/a.txt").write_text("said")
    with keep_manifest(plan(["in"], ("txt",), "out", recursive=True, shard=(1, 2)), pytest.fail):
        assert written(here / "out") == ["a.txt", "manifest-1-of-2.jsonl"]
    assert [record["path"] for record in records("out/manifest-1-of-2.jsonl")] == ["in/a.wav"]


def test_standard_output_has_no_manifest(here):
    recordings(here, "in/a.wav")
    with keep_manifest(plan(["in"]), pytest.fail) as manifest:
        assert manifest is None
