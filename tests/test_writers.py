import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from transcribe import writers
from transcribe.errors import UsageError
from transcribe.transcript import Segment, Transcript, Word


def transcript(*segments: tuple[float, float, str], duration: float = 10.0, **fields) -> Transcript:
    parts = [Segment(number, start, end, text) for number, (start, end, text) in enumerate(segments)]
    return Transcript(" ".join(part.text for part in parts), "en", duration, parts, **fields)


TWO = transcript((0.0, 1.5, " Hello there."), (2.0, 3.25, "Bye."))


def test_txt_is_one_line_a_segment():
    assert writers.txt(TWO) == "Hello there.\nBye.\n"


def test_txt_without_segments_is_the_text():
    assert writers.txt(Transcript("All of it.", "en", 3.0)) == "All of it.\n"


def test_nothing_said_is_an_empty_txt_and_valid_empty_subtitles():
    silent = Transcript("", None, 5.0, no_speech=True)
    assert writers.txt(silent) == ""
    assert writers.srt(silent) == ""
    assert writers.vtt(silent) == "WEBVTT\n"
    assert writers.tsv(silent) == "start\tend\ttext\n"


def test_srt_counts_from_one_with_hours_and_commas():
    assert writers.srt(TWO) == (
        "1\n00:00:00,000 --> 00:00:01,500\nHello there.\n\n2\n00:00:02,000 --> 00:00:03,250\nBye.\n"
    )


def test_vtt_leaves_out_zero_hours():
    late = transcript((0.0, 1.0, "a"), (3661.001, 3662.0, "b"), duration=4000.0)
    assert writers.vtt(late) == "WEBVTT\n\n00:00.000 --> 00:01.000\na\n\n01:01:01.001 --> 01:01:02.000\nb\n"


def test_tsv_is_in_milliseconds():
    assert writers.tsv(TWO) == "start\tend\ttext\n0\t1500\tHello there.\n2000\t3250\tBye.\n"


def test_text_cannot_break_out_of_a_cue_or_a_row():
    nasty = transcript((0.0, 1.0, "a --> b\n\n2\tx <i> & y"))
    assert writers.srt(nasty).splitlines()[2:] == ["a -> b 2\tx <i> & y"]
    assert writers.vtt(nasty).splitlines()[3:] == ["a --&gt; b 2\tx &lt;i&gt; &amp; y"]
    assert writers.tsv(nasty).splitlines()[1:] == ["0\t1000\ta --> b 2 x <i> & y"]


def test_empty_segments_make_no_cue():
    assert writers.srt(transcript((0.0, 1.0, " "), (1.0, 2.0, "x"))).startswith("1\n00:00:01,000")


def test_times_round_to_milliseconds_before_they_carry():
    assert "00:00:59,999 --> 00:01:00,000" in writers.srt(transcript((59.9994, 59.9996, "x"), duration=60.0))


def test_json_has_the_keys_of_whisper_and_ours():
    source = transcript(
        (0.0, 1.0, "Høns"), model="m", family="f", decoded_seconds=10.0, covered_seconds=10.0,
        timestamps_from="window", warnings=["w"], stats={"tokens": 3},
    )  # fmt: skip
    text = writers.json(source)
    assert "Høns" in text
    assert json.loads(text) == {
        "text": "Høns", "language": "en", "duration": 10.0,
        "segments": [{"id": 0, "start": 0.0, "end": 1.0, "text": "Høns"}],
        "model": "m", "family": "f", "decoded_seconds": 10.0, "covered_seconds": 10.0, "truncated": False,
        "no_speech": False, "timestamps_from": "window", "warnings": ["w"], "stats": {"tokens": 3},
    }  # fmt: skip


def test_json_has_words_where_there_are_words():
    source = transcript((0.0, 1.0, "a b"))
    source.segments[0].words = [Word("a", 0.0, 0.4, 0.9), Word("b", 0.4, 1.0)]
    assert json.loads(writers.json(source))["segments"][0]["words"] == [
        {"word": "a", "start": 0.0, "end": 0.4, "probability": 0.9},
        {"word": "b", "start": 0.4, "end": 1.0, "probability": None},
    ]


def test_jsonl_is_one_line_and_never_nan():
    line = writers.jsonl(Transcript("a\nb", "en", 1.0, stats={"speed": float("inf"), "x": [float("nan")]}))
    assert line.count("\n") == 1
    assert json.loads(line)["stats"] == {"speed": None, "x": [None]}


def test_all_is_what_whisper_writes():
    assert writers.formats("all") == ("txt", "srt", "vtt", "tsv", "json")


@pytest.mark.parametrize("choice", ["srt", "vtt", "tsv", "all"])
def test_formats_made_of_times_need_timestamps(choice):
    with pytest.raises(UsageError, match="needs times"):
        writers.formats(choice, "none")


@pytest.mark.parametrize("choice", ["txt", "json", "jsonl"])
def test_other_formats_do_not(choice):
    assert writers.formats(choice, "none") == (choice,)


def test_an_unknown_format_is_refused():
    with pytest.raises(UsageError, match="'ass'"):
        writers.formats("ass")


seconds = st.floats(allow_nan=True, allow_infinity=True) | st.floats(-5, 50)


@given(st.lists(st.tuples(seconds, seconds), max_size=8), st.floats(0, 30))
def test_whatever_the_model_says_cues_are_ordered_and_inside_the_recording(spans, duration):
    said = transcript(*((start, end, "x") for start, end in spans), duration=duration)
    rows = [tuple(map(int, line.split("\t")[:2])) for line in writers.tsv(said).splitlines()[1:]]
    assert len(rows) == len(spans)
    flat = [time for row in rows for time in row]
    assert flat == sorted(flat)
    assert all(0 <= time <= duration * 1000 + 1e-6 for time in flat)
    for segment, row in zip(json.loads(writers.json(said))["segments"], rows, strict=True):
        assert (segment["start"], segment["end"]) == (row[0] / 1000, row[1] / 1000)
