"""Windows tile the recording, and a transcript owns up to what it left out."""

from __future__ import annotations

import io
import wave

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transcribe.models.family import Capabilities, Decoded, Ongoing, Window

from transcribe import recording
from transcribe.audio.activity import FRAME, mean_square
from transcribe.errors import TranscribeError, UsageError
from transcribe.options import Request
from transcribe.pipeline import Transcriber
from transcribe.windows import SPEECH, gaps, quietest, windows

RATE = 16000


def loud(samples: np.ndarray) -> np.ndarray:
    """A detector that takes whatever is not silent for speech."""
    return (mean_square(samples) > 1e-4).astype(np.float32)


class FakeModel:
    """A model that writes down the length of what it hears; `replies` may answer or raise first."""

    family, variant = "fake", "small"
    capabilities = Capabilities(languages=("en",))
    window = Window(max_seconds=10.0, min_seconds=0.5)
    notes: tuple[str, ...] = ()

    def __init__(self, *replies: Decoded | Exception) -> None:
        self.replies = list(replies)
        self.heard: list[torch.Tensor] = []

    def begin(self, samples: torch.Tensor, request: Request) -> Ongoing:
        assert samples.dtype == torch.float32
        assert len(samples) <= self.window.max_seconds * RATE
        self.heard.append(samples.clone())
        reply = self.replies.pop(0) if self.replies else Decoded(f"{len(samples) / RATE:.1f}", [1, 2])
        if isinstance(reply, Exception):
            raise reply
        reply.stats = {"tokens": 2.0, "decode_s": 0.5}
        window = Ongoing()
        window.decoded = reply
        return window

    def peak_bytes(self, seconds: float, together: int = 1) -> int:
        return int(seconds * 1e6) * together


@pytest.fixture(autouse=True)
def _plain_detector(monkeypatch):
    monkeypatch.setattr(recording, "open_detector", lambda warnings: loud)


def talk(*seconds: float) -> np.ndarray:
    """Noise and silence in turn, each for so many seconds, noise first."""
    rng = np.random.default_rng(0)
    return np.concatenate(
        [rng.uniform(-0.5, 0.5, round(s * RATE)) * (i % 2 == 0) for i, s in enumerate(seconds)]
    ).astype(np.float32)


lengths = st.lists(st.integers(0, 4 * RATE), max_size=12)


@settings(max_examples=60, deadline=None)
@given(lengths, st.floats(0.5, 5), st.integers(1, 9000))
def test_windows_tile_the_recording(pieces, limit, block):
    rng = np.random.default_rng(0)
    turns = [rng.uniform(-0.5, 0.5, n) * (i % 2) for i, n in enumerate(pieces)]
    recording = np.concatenate([*turns, []]).astype(np.float32)
    blocks = [recording[at : at + block] for at in range(0, len(recording), block)]
    copies, at, spoken = [], 0, np.zeros(len(recording), bool)
    for window in windows(blocks, loud, limit):
        assert window.start == at
        assert 0 < len(window.samples) <= limit * RATE
        assert len(window.speech) == len(window.power) == -(-len(window.samples) // FRAME)
        copies.append(window.samples.copy())
        if voiced := window.voiced():
            spoken[at + voiced[0] : at + voiced[1]] = True
        at = window.stop
    np.testing.assert_array_equal(np.concatenate([*copies, np.zeros(0, np.float32)]), recording)
    # Only runs of speech too short to be a word may stay unheard.
    for start, stop in _runs(np.abs(recording) > 0, 10 * FRAME):
        assert spoken[start:stop].mean() > 0.5


@settings(deadline=None, max_examples=40)
@given(st.lists(st.integers(1, 60_000), max_size=8), st.integers(1, 20), st.sampled_from([0.1, 0.5, 2.0]))
def test_windows_have_what_is_around_them(pieces, limit, context):
    rng = np.random.default_rng(0)
    turns = [rng.uniform(-0.5, 0.5, n) * (i % 2) for i, n in enumerate(pieces)]
    recording = np.concatenate([*turns, []]).astype(np.float32)
    reach, at = int(context * RATE) // FRAME * FRAME, 0
    for window in windows([recording], loud, limit, context):
        assert (window.start, window.lead) == (at, min(at, reach))
        assert 0 < len(window.samples) <= limit * RATE
        np.testing.assert_array_equal(window.around, recording[at - window.lead : window.stop + reach])
        if heard := window.heard(1280):
            first, samples = heard
            assert first % 1280 == 0
            np.testing.assert_array_equal(samples, recording[first : first + len(samples)])
        for half in window.halves() or ():
            assert half.lead == min(half.start, reach)
            np.testing.assert_array_equal(half.around, recording[half.start - half.lead : half.stop + reach])
        at = window.stop
    assert at == len(recording)


def _runs(mask: np.ndarray, shortest: int) -> list[tuple[int, int]]:
    edges = np.flatnonzero(np.diff(np.concatenate([[0], mask.astype(np.int8), [0]])))
    return [(a, b) for a, b in edges.reshape(-1, 2).tolist() if b - a >= shortest]


def test_a_window_is_cut_in_the_longest_gap_of_its_last_third():
    recording = talk(3.8, 1.0, 3.2, 0.2, 0.9, 0.5, 0.3, 0.2, 5)  # gaps at 3.8, 8.0, 9.1 and 9.9 s
    first = next(iter(windows([recording], loud, 10.0)))
    assert 9.1 < len(first.samples) / RATE < 9.6


def test_where_nobody_pauses_it_is_cut_where_it_is_quietest():
    recording = talk(20)
    recording[int(8.2 * RATE) : int(8.3 * RATE)] *= 0.3
    first = next(iter(windows([recording], loud, 10.0)))
    assert 8.2 < len(first.samples) / RATE < 8.3


def test_a_long_pause_ends_a_window_and_a_short_one_does_not():
    bounds = [w.voiced() for w in windows([talk(2, 3, 2, 1, 2)], loud, 30.0)]
    assert [round((b - a) / RATE, 1) for a, b in bounds] == [2.3, 5.3]


def test_gaps_and_the_quietest_boundary():
    speech = np.array([0, 0, 1, 1, 0, 1, 0, 0, 0, 1], np.float32)
    assert gaps(speech) == [(0, 2), (4, 5), (6, 9)]
    assert gaps(np.ones(3, np.float32) * SPEECH) == []
    assert quietest(speech, np.ones(10, np.float32), 3, 10) == 7
    power = np.array([9, 9, 1, 1, 9, 0, 9], np.float32)
    assert quietest(np.ones(7, np.float32), power, 1, 7) == 3


def test_every_second_is_covered_and_every_utterance_heard():
    recording = talk(4, 1, 7, 25, 3, 0.4, 22, 5)
    model = FakeModel()
    result = Transcriber(model, "fake.gguf").transcribe(recording, RATE)
    assert result.decoded_seconds == result.covered_seconds == pytest.approx(len(recording) / RATE)
    assert not result.truncated
    assert result.text == " ".join(segment.text for segment in result.segments)
    assert sum(len(samples) for samples in model.heard) / RATE == pytest.approx(4 + 7 + 3 + 22 + 3.4, abs=1.5)
    ends = [0.0, *(time for segment in result.segments for time in (segment.start, segment.end))]
    assert ends == sorted(ends)
    assert ends[-1] <= result.duration
    assert (result.timestamps_from, result.model, result.family) == ("window", "fake.gguf", "fake")
    assert result.stats["tokens"] == 2 * len(model.heard)
    longest = max(len(samples) for samples in model.heard) / RATE
    assert model.peak_bytes(longest) <= result.stats["peak_bytes"] <= model.peak_bytes(longest + 0.25)


@pytest.mark.parametrize("seconds", [0, 0.05, 3, 65])
def test_silence_in_nothing_out(seconds):
    model = FakeModel()
    model.capabilities = Capabilities(languages=("en",), prompt=True)
    result = Transcriber(model).transcribe(
        np.zeros(round(seconds * RATE), np.float32), RATE, language="English", prompt="Dear Sir"
    )
    assert (result.text, result.segments, result.no_speech, result.truncated) == ("", [], True, False)
    assert result.covered_seconds == result.duration == seconds
    assert model.heard == []


def test_a_short_clip_is_padded_to_what_the_model_needs():
    model = FakeModel()
    result = Transcriber(model).transcribe(talk(0.12), RATE)
    assert [len(samples) for samples in model.heard] == [RATE // 2]
    assert result.segments[0].end == pytest.approx(0.12)


def test_no_timestamps_means_no_segments():
    result = Transcriber(FakeModel()).transcribe(talk(1), RATE, timestamps="none")
    assert (result.text, result.segments, result.timestamps_from) == ("1.0", [], "none")


def test_a_loop_is_tried_once_more_in_two_parts():
    model = FakeModel(Decoded("ha ha ha", [1], looped=True))
    result = Transcriber(model).transcribe(talk(3, 0.5, 3), RATE)
    assert [round(len(samples) / RATE, 1) for samples in model.heard] == [6.5, 3.2, 3.3]
    assert result.text == "3.2 3.3"
    assert (result.truncated, result.warnings) == (False, [])


def test_a_loop_that_stays_is_marked():
    loops = [Decoded("ha", [1], looped=True) for _ in range(3)]
    result = Transcriber(FakeModel(*loops)).transcribe(talk(3, 0.5, 3), RATE)
    assert result.text == "ha ha"
    assert result.truncated
    assert [w.partition(":")[0] for w in result.warnings] == ["0.0-3.2 s", "3.2-6.5 s"]
    assert "repeats itself" in result.warnings[0]


def test_a_budget_that_runs_out_is_marked_and_one_the_caller_set_is_not_raised():
    model = FakeModel(*[Decoded("and", [1], truncated=True) for _ in range(3)])
    result = Transcriber(model).transcribe(talk(3, 0.5, 3), RATE)
    assert (len(model.heard), result.truncated) == (3, True)
    assert "token budget ran out" in result.warnings[0]
    model = FakeModel(Decoded("and", [1], truncated=True))
    result = Transcriber(model).transcribe(talk(3, 0.5, 3), RATE, max_tokens=1)
    assert (len(model.heard), result.text, result.truncated) == (1, "and", True)


@pytest.mark.parametrize(
    "error",
    [MemoryError(), torch.OutOfMemoryError("CUDA"), RuntimeError("DefaultCPUAllocator: can't allocate memory")],
)
def test_out_of_memory_halves_the_window_once(error):
    model = FakeModel(error)
    result = Transcriber(model).transcribe(talk(3, 0.5, 3), RATE)
    assert result.text == "3.2 3.3"
    assert result.warnings == ["out of memory: windows are cut in two"]
    assert not result.truncated
    with pytest.raises(TranscribeError, match=r"out of memory at 0\.0-3\.2 s"):
        Transcriber(FakeModel(error, error)).transcribe(talk(3, 0.5, 3), RATE)


def test_other_failures_fail_the_recording():
    for error in (RuntimeError("shapes cannot be multiplied"), TranscribeError("logits are not finite")):
        with pytest.raises(type(error), match=str(error)):
            Transcriber(FakeModel(error)).transcribe(talk(1), RATE)


def test_speech_without_text_is_said():
    result = Transcriber(FakeModel(Decoded(" ", []))).transcribe(talk(1), RATE)
    assert (result.text, result.no_speech) == ("", False)
    assert result.warnings == ["there seems to be speech, but the model wrote nothing"]


def test_a_file_and_its_samples_give_the_same_transcript():
    recording = (talk(4, 1, 9) * 32767).astype("<i2")
    file = io.BytesIO()
    with wave.open(file, "wb") as out:
        out.setparams((1, 2, RATE, 0, "NONE", ""))
        out.writeframes(recording.tobytes())
    file.seek(0)
    from_file, from_array = FakeModel(), FakeModel()
    one = Transcriber(from_file).transcribe(file)
    other = Transcriber(from_array).transcribe(recording / np.float32(32768), RATE)
    assert one.segments == other.segments
    for a, b in zip(from_file.heard, from_array.heard, strict=True):
        assert torch.equal(a, b)


def test_a_damaged_file_is_transcribed_as_far_as_it_goes():
    file = io.BytesIO()
    with wave.open(file, "wb") as out:
        out.setparams((1, 2, RATE, 0, "NONE", ""))
        out.writeframes((talk(8) * 32767).astype("<i2").tobytes())
    result = Transcriber(FakeModel()).transcribe(io.BytesIO(file.getvalue()[: 44 + 3 * 2 * RATE]))
    assert (result.duration, result.text, result.truncated) == (3.0, "3.0", True)
    assert "decoded 3.0 of 8.0 s" in result.warnings[0]


def test_progress_reaches_the_end():
    seen: list[tuple[float, float | None]] = []
    Transcriber(FakeModel()).transcribe(talk(12, 1, 12), RATE, progress=lambda *now: seen.append(now))
    assert seen == sorted(seen)
    assert seen[-1] == (25.0, 25.0)


def test_languages_without_spaces_are_joined_without():
    model = FakeModel(Decoded("你好", [1], language="zh"), Decoded("世界", [1], language="zh"))
    model.capabilities = Capabilities(languages=("en", "zh"), detects_language=True)
    result = Transcriber(model).transcribe(talk(1, 3, 1), RATE)
    assert (result.text, result.language) == ("你好世界", "zh")


def test_the_window_fits_the_memory_limit():
    model = FakeModel()
    assert Transcriber(model, memory_limit=10**8).window_seconds == 10
    assert Transcriber(model, memory_limit=7 * 10**6).window_seconds == pytest.approx(7, abs=0.1)
    assert model.peak_bytes(Transcriber(model, memory_limit=7 * 10**6).window_seconds) <= 7 * 10**6
    with pytest.raises(UsageError, match=r"limit of 1 MiB is too small: fake small needs 5 MiB for 5 s"):
        Transcriber(model, memory_limit=10**6)


def test_as_many_windows_are_decoded_together_as_the_limit_allows():
    model = FakeModel()
    assert Transcriber(model).together == 1
    assert Transcriber(model, batch_size=3).together == 3
    assert Transcriber(model, memory_limit=45 * 10**6, batch_size=None).together == 4
    assert Transcriber(model, memory_limit=10**9, batch_size=None).together == 16
    assert Transcriber(model, memory_limit=35 * 10**6, batch_size=4).window_seconds == pytest.approx(8.7, abs=0.1)
    with pytest.raises(UsageError, match=r"fake small needs 19 MiB for 4 windows of 5 s"):
        Transcriber(model, memory_limit=10**7, batch_size=4)


def test_a_family_without_steps_to_share_refuses_a_batch():
    model = FakeModel()
    model.capabilities = Capabilities(languages=("en",), lockstep=False)
    assert Transcriber(model, batch_size=None).together == 1
    with pytest.raises(UsageError, match="fake small has no decoder"):
        Transcriber(model, batch_size=2)


def test_windows_that_end_out_of_order_are_put_in_order():
    class Late(FakeModel):
        """The longer a window, the more steps it takes."""

        def begin(self, samples, request):
            window = Ongoing()
            window.left = len(samples) // RATE + 1
            window.text = f"{len(samples) / RATE:.1f}"
            return window

        def advance(self, ongoing):
            for window in ongoing:
                window.left -= 1
                if not window.left:
                    window.decoded = Decoded(window.text, [], language="en", truncated=window.text < "3")

    recording = talk(4, 3, 2, 3, 3, 3, 1)
    alone, together = (Transcriber(Late(), batch_size=n).transcribe(recording, RATE) for n in (1, 3))
    assert [together.text, together.segments, together.warnings] == [alone.text, alone.segments, alone.warnings]
    assert [segment.id for segment in together.segments] == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("asked", "what"),
    [
        ({"language": "da"}, r"fake small does not know the language 'da'; it knows en \(English\)"),
        ({"language": "Klingon"}, "does not know the language 'Klingon'"),
        ({"task": "translate"}, "cannot translate; it can transcribe"),
        ({"timestamps": "word"}, "no word timestamps; it has none, segment"),
        ({"prompt": "Names: Ada"}, "takes no prompt"),
        ({"beam_size": 5}, "greedily"),
        ({"beam_size": 0}, "at least 1"),
        ({"temperature": 0.5}, "does not sample"),
        ({"temperature": float("nan")}, "at least 0"),
        ({"top_p": 0.0}, "above 0, at most 1"),
        ({"top_p": 0.9}, "set a temperature"),
        ({"seed": 1}, "set a temperature"),
        ({"max_tokens": 0}, "at least 1"),
    ],
)
def test_what_the_model_cannot_do_is_refused(asked, what):
    with pytest.raises(UsageError, match=what):
        Transcriber(FakeModel()).check(Request(**asked))


def test_errors_name_the_family_once():
    model = FakeModel()
    model.family, model.variant = "fake_asr", "fake-asr-0.6b"
    with pytest.raises(UsageError, match=r"^fake-asr-0\.6b takes no prompt"):
        Transcriber(model).check(Request(prompt="Ada"))


def test_a_language_may_be_named_in_several_ways():
    transcriber = Transcriber(FakeModel())
    for name in ("en", "EN", "English", "en-GB", "en_US", None, "auto"):
        assert transcriber.check(Request(language=name)).language == "en"
    transcriber.model.capabilities = Capabilities(languages=("en", "da", "zh"), detects_language=True)
    assert transcriber.check(Request(language="auto")).language is None
    assert transcriber.check(Request(language="Mandarin")).language == "zh"
    transcriber.model.capabilities = Capabilities(languages=("en", "da"))
    with pytest.raises(UsageError, match=r"name it; it knows en \(English\), da \(Danish\)"):
        transcriber.check(Request())


def test_an_array_needs_its_rate():
    with pytest.raises(UsageError, match="needs its rate"):
        Transcriber(FakeModel()).transcribe(talk(1))
