"""A folder of recordings from end to end: what is there afterwards, whatever happened on the way."""

import json
import os
import random
import resource
import signal
import time
from collections import Counter
from pathlib import Path

from recordings import written
from standin import run, start

FORMATS = ("txt", "srt", "vtt", "tsv", "json")
EVERYTHING = ("in", "--recursive", "-o", "out", "-f", "all")


def folder_of(top: Path, said: dict[str, str]) -> None:
    """Recordings by name below `top`/in, and what they say; all older than any output."""
    for name, text in said.items():
        path = top / "in" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        os.utime(path, (1_000_000, 1_000_000))


def many(count: int) -> dict[str, str]:
    return {f"{number % 4}/{number:02}.wav": f"words of {number}" for number in range(count)}


def manifest(top: Path, name: str = "manifest.jsonl") -> list[dict]:
    return [json.loads(line) for line in (top / "out" / name).read_text().splitlines()]


def outputs(top: Path) -> dict[str, bytes]:
    """What is in the output folder, hidden files too, but for the manifests."""
    return {name: (top / "out" / name).read_bytes() for name in written(top / "out") if "manifest" not in name}


def expected(said: dict[str, str]) -> dict[str, bytes]:
    return {f"{name.removesuffix('.wav')}.txt": f"{text}\n".encode() for name, text in said.items()}


def test_ten_kills_lose_nothing_and_double_nothing(tmp_path):
    said, delays = many(100), []
    for folder in (calm := tmp_path / "calm", top := tmp_path / "killed"):
        folder_of(folder, said)
    assert run(calm, *EVERYTHING)[0] == 0
    for _ in range(10):
        process = start(top, *EVERYTHING, STANDIN_SECONDS="0.005")
        any(b" -> " in line for line in iter(process.stderr.readline, b""))
        delays.append(random.uniform(0, 0.05))
        time.sleep(delays[-1])
        process.kill()
        process.communicate()
    killed_with = len(manifest(top))
    code, _, err = run(top, *EVERYTHING)
    assert code == 0, err
    assert outputs(top) == outputs(calm), delays
    assert len(outputs(top)) == 100 * len(FORMATS)
    records = manifest(top)
    assert Counter(record["path"] for record in records) == Counter(f"in/{name}" for name in said), delays
    assert {record["outcome"] for record in records} <= {"done", "skipped"}
    assert 10 <= killed_with < 100, "the runs were killed at work"


def test_bad_files_stop_nothing_and_each_has_its_reason(tmp_path):
    said = {f"{number}.wav": "noise" if number in (0, 4, 9) else f"words of {number}" for number in range(10)}
    folder_of(tmp_path, said)
    code, out, err = run(tmp_path, "in", "-o", "out")
    assert (code, out) == (1, "")
    reasons = [f"in/{number}.wav: no audio stream" for number in (0, 4, 9)]
    assert [line for line in err.splitlines() if "no audio" in line] == [f"transcribe: {reason}" for reason in reasons]
    assert "transcribe: 7 done, 3 failed; 7 s of audio" in err
    assert outputs(tmp_path) == expected({name: text for name, text in said.items() if text != "noise"})
    records = {record["path"]: record for record in manifest(tmp_path)}
    assert Counter(record["outcome"] for record in records.values()) == {"done": 7, "failed": 3}
    assert [record["error"]["message"] for record in records.values() if "error" in record] == reasons
    code, _, err = run(tmp_path, "in", "-o", "out")
    assert code == 1, "what failed is tried again"
    assert "transcribe: 3 failed, 7 skipped" in err


NAMES = (
    "a b.wav", "q'uo\"te.wav", "[x].wav", "{y}.wav", "-dash.wav", "--model.wav", "new\nline.wav", "tab\t.wav", "*?.wav",
    "Høns på æg.wav", "にっぽん.wav", "e\u0301.wav", "\x1b[31mred.wav", "%s $HOME.wav", os.fsdecode(b"\xff\xfe.wav"),
    os.fsdecode(b"\xe6g/\xf8.wav"), "same.wav", "nested/same.wav", "nested/deep er/same.wav",
)  # fmt: skip


def test_any_name_comes_out_as_it_went_in(tmp_path):
    said = {name: f"words of {number}" for number, name in enumerate(NAMES)}
    folder_of(tmp_path, {**said, "stem.wav": "from wav", "stem.mp3": "from mp3"})
    code, out, err = run(tmp_path, "in", "--recursive", "-o", "out", LC_ALL="C")
    assert (code, out) == (0, "")
    twins = {"stem.wav.txt": b"from wav\n", "stem.mp3.txt": b"from mp3\n"}
    assert outputs(tmp_path) == {**expected(said), **twins}
    records = {record["path"]: record["outputs"] for record in manifest(tmp_path)}
    assert records == {
        **{f"in/{name}": [f"{name.removesuffix('.wav')}.txt"] for name in said},
        "in/stem.wav": ["stem.wav.txt"],
        "in/stem.mp3": ["stem.mp3.txt"],
    }
    assert err.isprintable() or set(filter(lambda letter: not letter.isprintable(), err)) == {"\n"}
    assert len(err.splitlines()) == len(records) + 1, "a line each, and the summary"
    for shown in (r"in/new\nline.wav", r"in/\xff\xfe.wav", r"in/\x1b[31mred.wav", "in/[x].wav", "in/にっぽん.wav"):
        assert f" {shown} -> " in err


def test_any_name_may_be_given_by_itself(tmp_path):
    said = {name: f"words of {number}" for number, name in enumerate(NAMES) if "/" not in name}
    folder_of(tmp_path, said)
    code, _, err = run(tmp_path / "in", "-o", "../out", "--", *said)
    assert code == 0, err
    assert outputs(tmp_path) == expected(said)


def test_four_shards_at_once_do_everything_once(tmp_path):
    said = {**many(30), "manifest-1-of-4.wav": "words"}
    folder_of(tmp_path, said)
    shards = [start(tmp_path, "in", "--recursive", "-o", "out", "--shard", f"{part}/4") for part in (1, 2, 3, 4)]
    ends = [(shard.communicate()[1].decode(), shard.returncode) for shard in shards]
    assert [code for _, code in ends] == [0] * 4, ends
    assert outputs(tmp_path).items() >= expected(many(30)).items()
    parts = [manifest(tmp_path, f"manifest-{part}-of-4.jsonl") for part in (1, 2, 3, 4)]
    assert [len(part) for part in parts] == [8, 8, 8, 7]
    assert sorted(record["path"] for part in parts for record in part) == sorted(f"in/{name}" for name in said)
    code, _, err = run(tmp_path, "in", "--recursive", "-o", "out")
    assert (code, "transcribe: 31 skipped" in err) == (0, True)
    assert manifest(tmp_path) == [], "the shards' manifests count"


def test_what_does_not_fit_on_the_disk_fails_alone(tmp_path):
    """The kernel refuses files beyond a size, as it does where a disk is full."""
    said = {"a.wav": "words of a", "b.wav": "b" * 200_000, "c.wav": "words of c"}
    folder_of(tmp_path, said)
    limit = 150_000  # less than a format of b, more than all of a and c
    code, _, err = run(
        tmp_path, *EVERYTHING, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    )
    assert code == 1
    assert err.count("cannot write") == 1
    assert "transcribe: out/b.txt: cannot write: File too large\n" in err
    assert "transcribe: 2 done, 1 failed" in err
    assert sorted(outputs(tmp_path)) == sorted(f"{stem}.{format_}" for stem in "ac" for format_ in FORMATS)
    assert [record["outcome"] for record in manifest(tmp_path)] == ["done", "failed", "done"]
    assert run(tmp_path, *EVERYTHING)[0] == 0
    assert manifest(tmp_path)[-1]["outputs"] == [f"b.{format_}" for format_ in FORMATS]


def test_an_interrupt_begins_nothing_new_and_the_next_run_goes_on(tmp_path):
    said = {**many(8), "3/slow.wav": "slow words", "4/last.wav": "last words"}
    folder_of(tmp_path, said)
    process = start(tmp_path, *EVERYTHING)
    assert any(b"working" in line for line in iter(process.stderr.readline, b""))
    process.send_signal(signal.SIGINT)
    err = process.communicate(timeout=10)[1].decode()
    assert process.returncode == 130
    assert "transcribe: 8 done, 2 not done" in err
    assert len(outputs(tmp_path)) == 8 * len(FORMATS)
    assert len(manifest(tmp_path)) == 8
    (tmp_path / "in/3/slow.wav").rename(tmp_path / "in/3/sped up.wav")
    code, _, err = run(tmp_path, *EVERYTHING)
    assert code == 0
    assert "transcribe: 2 done, 8 skipped" in err
    assert len(outputs(tmp_path)) == 10 * len(FORMATS)
