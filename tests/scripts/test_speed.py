"""Timing against another engine: what is run and when, what is read from its output, and what is no result."""

import json
import sys

import pocket
import pytest
import soundfile
import speed

from transcribe.engine import decoding

OUTPUT = """\
audio: clip.wav
text:  hello there
  mel                 20.00 ms
  enc_compute        900.00 ms
  prefill_compute    500.00 ms  (tokens=158)
  prefill_logits       4.00 ms  (readback)
  step_loop         6000.00 ms  (255 steps, 23.53 ms/step)
  step_loop         1000.00 ms  (25 steps, 40.00 ms/step)
"""
OURS = {
    "text": "hello", "truncated": False,
    "stats": {"audio_seconds": 2.0, "model_seconds": 0.5, "windows": 1, "tokens": 9.0, "encode_s": 0.1,
              "decode_s": 0.4},
}  # fmt: skip


def patterns(*texts):
    return [speed.figure(text) for text in texts]


def test_a_part_is_the_sum_of_its_matches():
    parts = speed.their_parts(
        OUTPUT,
        patterns(
            r"encode=^ *(?:mel|enc_compute) +([\d.]+) ms",
            r"prefill=prefill_\w+ +([\d.]+) ms +\((?:tokens=(\d+))?",
            r"decode=step_loop +([\d.]+) ms +\((\d+) steps",
        ),
    )
    assert parts == {"encode": (920, 2), "prefill": (504, 158), "decode": (7000, 280)}
    found = speed.figures(12.0, 10.0, parts)
    assert found == pytest.approx({"wall": 12, "encode": 92, "prefill": 158 / 0.504, "decode": 25})


def test_without_a_second_group_each_match_is_a_token():
    assert speed.their_parts("30 ms/token\n50 ms/token", patterns(r"decode=(\d+) ms/token"))["decode"] == (80, 2)


def test_a_part_that_is_not_in_the_output_is_an_error():
    with pytest.raises(speed.RunError, match="decode"):
        speed.their_parts(OUTPUT, patterns(r"decode=no such line ([\d.]+)"))


@pytest.mark.parametrize(
    ("stats", "truncated", "steps"),
    [
        ({"tokens": 256, "windows": 1, "prefill_s": 1.0, "prefill_tokens": 158}, True, 255),
        ({"tokens": 40, "windows": 2, "prefill_s": 1.0, "prefill_tokens": 300}, False, 40),
        ({"tokens": 24, "windows": 1}, False, 25),
    ],
)
def test_the_steps_of_our_decoder(stats, truncated, steps):
    parts = speed.our_parts({"model_seconds": 3.0, "decode_s": 2.0, **stats}, truncated)
    assert parts["decode"] == (2000, steps)
    assert parts["model"].milliseconds == 3000


@pytest.fixture
def engines(tmp_path, monkeypatch):
    """Two commands that note when they are called. Ours writes `OURS`; theirs is made by its last lines."""
    log = tmp_path / "log"
    note = f"import sys; print({{!r}}, sys.argv[1], file=open({str(log)!r}, 'a'))\n"
    ours = tmp_path / "ours.py"
    ours.write_text(note.format("ours") + f"print({json.dumps(json.dumps(OURS))})\n")
    monkeypatch.setattr(speed, "PLAIN", [str(ours)])

    def command(*lines):
        theirs = tmp_path / "theirs.py"
        theirs.write_text(note.format("theirs") + "\n".join(lines))
        return ["--against", f"'{sys.executable}' '{theirs}' {{audio}}"]

    command.log = log
    return command


def test_runs_take_turns(engines, tmp_path):
    against = engines(f"print({OUTPUT!r})")
    text = ["--against-text", r"^text: *(\S.*)", "--against-figure", r"encode=enc_compute +([\d.]+) ms"]
    runs = speed.compare(speed.arguments([*against, *text, "--runs", "2", "a b.wav", "c.wav"]))
    turns = [f"{engine} {clip}" for clip in ("a b.wav", "c.wav") for engine in ("ours", "theirs")] * 2
    assert engines.log.read_text().splitlines() == turns
    assert [f"{run.engine} {run.clip}" for run in runs] == turns
    assert {run.text for run in runs if run.engine == "theirs"} == {"hello there"}
    assert runs[0].figures == pytest.approx(
        {"wall": runs[0].figures["wall"], "model": 0.5, "factor": 0.25, "encode": 50, "decode": 40}
    )
    assert runs[1].figures["encode"] == 450
    assert "| a b.wav | encoder, ms a second of audio | 50.00 (50.00) | 450.0 (450.0) | 0.111 (0.111) |" in (
        speed.table(runs)
    )


def test_a_failing_command_is_no_result(engines, tmp_path, monkeypatch, capsys):
    against = engines("print('text')", "print('reading', file=sys.stderr)", "sys.exit('out of luck')")
    figures = tmp_path / "figures.json"
    monkeypatch.setattr(sys, "argv", ["speed.py", *against, "--runs", "3", "--json", str(figures), "a.wav"])
    with pytest.raises(SystemExit, match=r"a\.wav, theirs: exit status 1: out of luck"):
        speed.main()
    assert capsys.readouterr().out == ""
    assert not figures.exists()
    assert len(engines.log.read_text().splitlines()) == 2


def test_an_expected_status_is_no_failure(engines):
    against = engines("print('text')", "sys.exit(7)")
    runs = speed.compare(speed.arguments([*against, "--against-status", "7", "--runs", "1", "a.wav"]))
    assert runs[1].text == "text"


@pytest.mark.parametrize("lines", [[], ["print('loading')"]])
def test_no_transcript_is_no_result(engines, lines):
    args = speed.arguments([*engines(*lines), "--against-text", r"^text: *(\S.*)", "a.wav"])
    with pytest.raises(speed.RunError, match="theirs: no transcript"):
        speed.compare(args)


def test_a_missing_program_is_named(engines):
    engines()
    with pytest.raises(speed.RunError, match="theirs: no-such-engine"):
        speed.compare(speed.arguments(["--against", "no-such-engine {audio}", "a.wav"]))


@pytest.mark.parametrize(
    "words",
    [
        ["--against", "engine clip.wav"],
        ["--against", "engine {audio}", "--against-figure", "speed=([0-9]+)"],
        ["--against", "engine {audio}", "--against-figure", "encode=[0-9]+"],
        ["--against", "engine {audio}", "--against-figure", "prefill=([0-9]+)"],
        ["--against-status", "1"],
        ["--runs", "0"],
    ],
)
def test_what_cannot_be_meant_is_refused(words, capsys):
    with pytest.raises(SystemExit) as error:
        speed.arguments([*words, "a.wav"])
    assert error.value.code == 2


def test_the_table_has_medians_the_best_and_what_one_engine_alone_reports():
    def run(engine, **figures):
        return speed.Run("a.wav", engine, "text", 0.25, figures)

    runs = [run("ours", wall=wall, prefill=300 * wall, decode=5.0) for wall in (1.0, 2.0, 6.0)]
    lines = speed.table([*runs, run("theirs", wall=4.0, prefill=200.0)]).splitlines()
    assert "| a.wav | wall time, s | 2.000 (1.000) | 4.000 (4.000) | 0.500 (0.250) |" in lines
    assert "| a.wav | prefill, tokens a second | 600.0 (1800.0) | 200.0 (200.0) | 3.000 (9.000) |" in lines
    assert "| a.wav | decoder, ms a token | 5.000 (5.000) |  |  |" in lines
    assert "0.25" in lines[-1]


def test_a_budget_of_tokens_is_used_up(monkeypatch):
    repeated = [1] * 300
    assert decoding.loop_period(repeated)
    monkeypatch.setattr(decoding, "LOOP_TOKENS", sys.maxsize)  # as the command of TO_THE_END does
    assert not decoding.loop_period(repeated)


def test_our_own_command_reports_its_parts(tmp_path):
    clip = tmp_path / "clip.wav"
    sentence = pocket.read_vocabulary().sentence(7, 4.0)
    soundfile.write(clip, sentence.samples, pocket.RATE)
    model = pocket.DATA / "pocket-qwen3-asr"
    options = ["--threads", "1", "--dtype", "float32", "--max-tokens", "8"]
    args = speed.arguments([str(clip), "--model", str(model), *options])
    run, seconds = speed.our_run(clip, args)
    assert seconds == pytest.approx(sentence.seconds, abs=0.01)
    assert run.figures.keys() == speed.FIGURES.keys()
    assert 0 < run.figures["encode"] * seconds / 1000 < run.figures["model"] < run.figures["wall"]
