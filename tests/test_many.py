"""Many recordings in one run: each gets what it gets alone, in whatever company, and none stops the others."""

from __future__ import annotations

import wave
from pathlib import Path

import numpy as np
import pytest
from transcribe.models.family import Capabilities, Decoded, Ongoing, Window

from transcribe import recording
from transcribe.audio import RATE
from transcribe.audio.activity import mean_square
from transcribe.errors import AudioError, TranscribeError
from transcribe.options import Request
from transcribe.pipeline import Transcriber
from transcribe.transcript import Transcript


class Slow:
    """A model that takes a step for each second of a window, and says its length; `company` is the most it had."""

    family, variant = "slow", "slow"
    capabilities = Capabilities(languages=("en",))
    window = Window(max_seconds=10.0, min_seconds=0.1)
    notes: tuple[str, ...] = ()

    def __init__(self, fails: float = -1.0) -> None:
        self.company, self.fails = 0, fails

    def begin(self, samples, request):
        window = Ongoing()
        window.left, window.seconds = len(samples) // RATE + 1, len(samples) / RATE
        return window

    def advance(self, ongoing):
        self.company = max(self.company, len(ongoing))
        if any(abs(window.seconds - self.fails) < 0.1 for window in ongoing):
            raise RuntimeError("shapes cannot be multiplied")
        for window in ongoing:
            window.left -= 1
            if not window.left:
                window.decoded = Decoded(f"{window.seconds:.1f}", [], language="en", stats={"tokens": 1.0})

    def peak_bytes(self, seconds: float, together: int = 1) -> int:
        return int(seconds * 1e6) * together


@pytest.fixture(autouse=True)
def _plain_detector(monkeypatch):
    """Whatever is not silent is speech."""
    monkeypatch.setattr(
        recording, "open_detector", lambda warnings: lambda samples: (mean_square(samples) > 1e-4).astype(np.float32)
    )


def wav(folder: Path, name: str, *seconds: float) -> str:
    """Noise and silence in turn, noise first."""
    rng = np.random.default_rng(0)
    turns = [rng.uniform(-0.5, 0.5, round(s * RATE)) * (i % 2 == 0) for i, s in enumerate(seconds)]
    with wave.open(str(folder / name), "wb") as file:
        file.setparams((1, 2, RATE, 0, "NONE", ""))
        file.writeframes((np.concatenate([*turns, []]) * 32767).astype("<i2").tobytes())
    return str(folder / name)


LENGTHS = [(3,), (1, 3, 2, 3, 8), (0.5,), (25,), (0, 4), (7, 2.5, 1), (2,), ()]


def texts(transcriber: Transcriber, paths: list[str], **request) -> dict[int, str]:
    outcomes = dict(transcriber.transcribe_all(paths, Request(**request)))
    assert sorted(outcomes) == list(range(len(paths)))
    return {number: getattr(outcome, "text", str(outcome)) for number, outcome in outcomes.items()}


@pytest.mark.parametrize("together", [1, 2, 5])
def test_each_is_answered_as_alone_whatever_its_company(tmp_path, together):
    paths = [wav(tmp_path, f"{number}.wav", *seconds) for number, seconds in enumerate(LENGTHS)]
    model = Slow()
    answers = dict(Transcriber(model, batch_size=together).transcribe_all(paths, Request()))
    assert model.company == together
    for number, path in enumerate(paths):
        alone, answer = Transcriber(Slow()).transcribe(path), answers[number]
        assert isinstance(answer, Transcript)
        assert (answer.text, answer.segments, answer.warnings) == (alone.text, alone.segments, alone.warnings)
        assert answer.decoded_seconds == answer.covered_seconds == alone.duration
        assert answer.stats["tokens"] == alone.stats["tokens"]
        assert answer.stats["together"] <= together


def test_results_come_as_recordings_end(tmp_path):
    paths = [wav(tmp_path, "long.wav", 9), *(wav(tmp_path, f"{n}.wav", 1) for n in range(3))]
    order = [number for number, _ in Transcriber(Slow(), batch_size=2).transcribe_all(paths, Request())]
    assert order == [1, 2, 3, 0]


def test_one_that_cannot_be_read_or_fails_stops_no_other(tmp_path):
    (tmp_path / "bad.wav").write_bytes(b"no sound")
    paths = [
        wav(tmp_path, "a.wav", 3), str(tmp_path / "bad.wav"), str(tmp_path / "gone.wav"), wav(tmp_path, "fails.wav", 6),
        wav(tmp_path, "b.wav", 2),
    ]  # fmt: skip
    outcomes = dict(Transcriber(Slow(fails=6), batch_size=3).transcribe_all(paths, Request()))
    assert [outcomes[0].text, outcomes[4].text] == ["3.0", "2.0"]
    assert isinstance(outcomes[1], AudioError)
    assert isinstance(outcomes[2], AudioError)
    assert str(outcomes[3]) == "shapes cannot be multiplied"


def test_a_recording_that_fails_is_read_no_further_and_the_next_one_is(tmp_path):
    paths = [wav(tmp_path, "a.wav", 6, 3, 9, 3, 9, 3), wav(tmp_path, "b.wav", 2)]
    assert texts(Transcriber(Slow(fails=7)), paths) == {0: "shapes cannot be multiplied", 1: "2.0"}


def test_silent_recordings_do_not_wait_for_one_with_speech(tmp_path):
    silent = wav(tmp_path, "silent.wav", 0, 0.1)
    given = []

    def sources():
        for number in range(1000):
            given.append(number)
            yield silent

    number, transcript = next(Transcriber(Slow()).transcribe_all(sources(), Request()))
    assert (number, transcript.no_speech) == (0, True)
    assert len(given) < 100


def test_progress_has_the_number_of_the_recording(tmp_path):
    paths = [wav(tmp_path, "a.wav", 12, 1, 4), wav(tmp_path, "b.wav", 2)]
    seen = []
    list(Transcriber(Slow(), batch_size=2).transcribe_all(paths, Request(), lambda *now: seen.append(now)))
    assert {number: now for number, *now in seen} == {0: [17.0, 17.0], 1: [2.0, 2.0]}


def test_ending_early_leaves_nothing_running(tmp_path):
    paths = [wav(tmp_path, f"{n}.wav", 1) for n in range(30)]
    results = Transcriber(Slow()).transcribe_all(paths, Request())
    assert next(results)[1].text == "1.0"
    results.close()
    with pytest.raises(StopIteration):
        next(results)


def test_a_request_the_model_cannot_honour_is_refused_before_anything_is_read():
    with pytest.raises(TranscribeError, match="takes no prompt"):
        next(Transcriber(Slow()).transcribe_all(["/nowhere"], Request(prompt="Ada")))
