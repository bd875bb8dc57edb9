import errno
import os
import unicodedata

import pytest
from recordings import recordings

from transcribe import worklist
from transcribe.errors import UsageError


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def found(*inputs, **options):
    return [item.source for item in worklist.plan(map(str, inputs), **options).items]


def targets(inputs, out="out", formats=("txt",), **options):
    plan = worklist.plan(map(str, inputs), formats, out, **options)
    return [str(target.relative_to(out)) for item in plan.items for target in item.targets.values()]


# Finding


def test_a_folder_is_sorted_without_dot_files_subfolders_and_other_files(here):
    recordings(
        here, "b.wav", "a.MP3", ".hidden.wav", "._a.wav", "notes.txt", "sub/c.wav", "also.wav/d.wav", ".git/e.wav"
    )
    assert found(".") == ["./a.MP3", "./b.wav"]
    assert found(".", recursive=True) == ["./a.MP3", "./b.wav", "./also.wav/d.wav", "./sub/c.wav"]


def test_an_explicit_path_is_tried_whatever_its_name(tmp_path):
    paths = recordings(tmp_path, "talk.dat", ".hidden", "noext")
    assert found(*paths) == list(map(str, paths))


def test_a_file_named_twice_is_done_once_and_nothing_said(here):
    recordings(here, "a.wav")
    plan = worklist.plan(["a.wav", ".", f"{here}/./a.wav"])
    assert [item.source for item in plan.items] == ["a.wav"]
    assert plan.notes == []


def test_links_to_one_file_are_one_recording(here):
    recordings(here, "in/b.wav", "store/1.wav")
    (here / "in/a.wav").symlink_to("b.wav")
    (here / "in/c.wav").symlink_to("../store/1.wav")
    (here / "in/d.wav").symlink_to(here / "store/1.wav")
    plan = worklist.plan(["in"])
    assert [item.source for item in plan.items] == ["in/a.wav", "in/c.wav"]
    assert plan.notes == ["in/b.wav: the same file as in/a.wav", "in/d.wav: the same file as in/c.wav"]


def test_links_to_folders_are_followed_only_if_given(here):
    recordings(here, "store/1.wav", "in/a.wav")
    (here / "in/link").symlink_to(here / "store")
    (here / "in/link.wav").symlink_to(here / "store")
    (here / "in/round").symlink_to(here / "in")
    assert found("in", recursive=True) == ["in/a.wav"]
    assert found("in/link") == ["in/link/1.wav"]


def test_dangling_links_are_items_with_a_problem_and_pipes_are_left_alone(here):
    os.mkfifo("b.wav")
    for name in ("c.wav", "d.wav"):
        (here / name).symlink_to("gone.wav")
    (here / "e.wav").symlink_to("e.wav")
    (here / "f.wav").symlink_to("b.wav")
    items = worklist.plan(["."]).items
    assert [(item.source, item.problem) for item in items] == [
        (f"./{name}.wav", "dangling link") for name in "cde"
    ]  # fmt: skip


def test_a_folder_that_cannot_be_read_is_an_item_with_a_problem(here, monkeypatch):
    recordings(here, "a.wav", "closed/b.wav", "open/c.wav")
    scandir = os.scandir

    def refuse(path):
        if str(path).endswith("closed"):
            raise PermissionError(errno.EACCES, "Permission denied", path)
        return scandir(path)

    monkeypatch.setattr(worklist.os, "scandir", refuse)
    items = worklist.plan(["."], recursive=True).items
    assert [item.source for item in items] == ["./a.wav", "./closed", "./open/c.wav"]
    assert items[1].problem == "cannot read this folder: Permission denied"


def test_an_empty_folder_is_noted_with_a_hint(tmp_path):
    plan = worklist.plan([str(tmp_path)])
    assert plan.items == []
    assert "--recursive" in plan.notes[0]


def test_no_recording_is_opened_and_only_links_and_outputs_are_looked_up(here, monkeypatch):
    recordings(here, *(f"in/{number}.wav" for number in range(50)))
    looked_up, stat = [], os.stat
    monkeypatch.setattr("builtins.open", None)
    monkeypatch.setattr(worklist.os, "stat", lambda path, **options: looked_up.append(path) or stat(path, **options))
    plan = worklist.plan(["in"], ("txt",), "out")
    assert len(plan.items) == 50
    assert len([path for path in looked_up if str(path).endswith(".txt")]) == 50
    assert [path for path in looked_up if str(path).endswith(".wav")] == []


# Naming


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


def test_names_that_meet_whatever_is_tried_are_numbered(here):
    recordings(here, "a.wav", "A.wav", "A.WAV", "x/Å.wav", "x/A\u030a.wav", "x/b.wav")
    names = targets(["."], recursive=True)
    assert len({unicodedata.normalize("NFC", name).casefold() for name in names}) == len(names)
    assert {name for name in names if name.isascii()} == {"A.WAV.3.txt", "A.wav.2.txt", "a.wav.txt", "x/b.txt"}


def test_stdin_has_a_name(here):
    recordings(here, "stdin.wav")
    assert targets(["-", "stdin.wav"]) == ["stdin.txt", "stdin.wav.txt"]


def test_no_output_takes_the_name_of_a_manifest(here):
    recordings(here, "manifest.wav", "Manifest-1-of-2.wav", "sub/manifest.wav", "manifest-of.wav")
    names = targets(["."], formats=("jsonl",), recursive=True)
    assert names == ["Manifest-1-of-2.wav.jsonl", "manifest-of.jsonl", "manifest.wav.jsonl", "sub/manifest.jsonl"]
    assert targets(["manifest.wav"]) == ["manifest.txt"]
    recordings(here, "manifest")
    assert targets(["manifest"], formats=("jsonl",)) == ["manifest.2.jsonl"]


def test_an_output_never_replaces_a_recording(here):
    recordings(here, "odd.txt", "store/c.txt")
    (here / "link.wav").symlink_to("store/c.txt")
    (here / "out").symlink_to("store")
    (here / "c.wav").symlink_to("odd.txt")
    for inputs, out in ((["odd.txt"], "."), (["link.wav", "c.wav"], "out")):
        with pytest.raises(UsageError, match="one of the recordings"):
            targets(inputs, out=out)
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


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_folder_in_the_place_of_an_output_is_refused(here, overwrite):
    recordings(here, "a.wav", "out/a.txt/keep")
    with pytest.raises(UsageError, match="a folder has the name of this output"):
        worklist.plan(["a.wav"], ("txt",), "out", overwrite=overwrite)


@pytest.mark.parametrize(("inputs", "formats"), [(["a.wav"], ("txt", "srt")), (["a.wav", "b.wav"], ("srt",))])
def test_what_cannot_share_stdout_needs_an_output_folder(here, inputs, formats):
    recordings(here, *inputs)
    with pytest.raises(UsageError, match="--output-dir"):
        worklist.plan(inputs, formats)


# Skipping


def plan_of_two(formats=("txt",), **options):
    """a.wav, which has the text it had, and b.wav."""
    plan = worklist.plan(["a.wav", "b.wav"], formats, "out", **options)
    return [item.source for item in plan.items], [item.source for item in plan.skipped], plan.notes


@pytest.fixture
def a_done(here):
    recordings(here, "a.wav", "b.wav")
    (here / "out").mkdir()
    (here / "out/a.txt").write_text("said")
    return here


def test_what_is_done_is_skipped_unless_overwritten(a_done):
    assert plan_of_two() == (["b.wav"], ["a.wav"], [])
    assert plan_of_two(overwrite=True) == (["a.wav", "b.wav"], [], [])


def test_a_missing_format_is_done_again_and_said(a_done):
    again = "out/a.txt: not newer than a.wav or not complete; written again"
    assert plan_of_two(("txt", "srt")) == (["a.wav", "b.wav"], [], [again])


@pytest.mark.parametrize("date", [1_000_000, 2**31])
def test_an_output_that_is_not_newer_than_its_recording_is_not_done(a_done, date):
    os.utime("out/a.txt", (1_000_000, 1_000_000))
    os.utime("a.wav", (date, date))
    again = "out/a.txt: not newer than a.wav or not complete; written again"
    assert plan_of_two() == (["a.wav", "b.wav"], [], [again])


def test_what_is_gone_is_not_done(a_done):
    os.unlink("a.wav")
    assert plan_of_two() == (["a.wav", "b.wav"], [], [])


def test_stdin_does_not_replace_an_output_unasked(here):
    (here / "out").mkdir()
    (here / "out/stdin.txt").write_text("mine")
    with pytest.raises(UsageError, match="exists already"):
        worklist.plan(["-"], ("txt",), "out")
    assert worklist.plan(["-"], ("txt",), "out", overwrite=True).items


# Sharding


def test_shards_are_the_whole_list_with_the_names_it_has_without_them(here):
    recordings(here, "in/a.wav", "in/a.mp3", "in/b.wav", "in/c.wav", "in/d/a.wav")
    (here / "in/b.mp3").symlink_to("b.wav")
    whole = targets(["in"], recursive=True)
    assert len(whole) == 5
    shards = [targets(["in"], recursive=True, shard=(part, 3)) for part in (1, 2, 3)]
    assert shards == [whole[0::3], whole[1::3], whole[2::3]]


def test_what_one_shard_has_done_does_not_move_the_others(here):
    recordings(here, "in/a.wav", "in/b.wav", "in/c.wav", "in/d.wav")
    before = targets(["in"], shard=(2, 2))
    (here / "out/a.txt").write_text("done")
    (here / "out/b.txt").write_text("done")
    assert before == ["b.txt", "d.txt"]
    assert targets(["in"], shard=(2, 2)) == ["d.txt"]


def test_a_shard_without_a_part_has_nothing_to_do(here):
    recordings(here, "a.wav", "b.wav")
    plan = worklist.plan(["."], ("txt",), "out", shard=(3, 3))
    assert (plan.items, plan.skipped, plan.found) == ([], [], 2)
    assert plan.notes == ["shard 3/3: nothing to do, there are 2 recordings in all"]


def test_shards_need_an_output_folder(here):
    recordings(here, "a.wav")
    with pytest.raises(UsageError, match="--output-dir"):
        worklist.plan(["a.wav"], shard=(1, 2))
