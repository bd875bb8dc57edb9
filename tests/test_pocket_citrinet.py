"""Citrinet's pocket model through the product: speech whose text and times are known, of any length."""

import json

import jiwer
import numpy as np
import pocket
import pytest
import torch
from pocket import SEED, error_rate, sentences

import transcribe
from transcribe import writers
from transcribe.convert import convert
from transcribe.errors import UsageError
from transcribe.options import Request
from transcribe.windows import windows

MODEL = pocket.DATA / "pocket-citrinet" / "pocket.nemo"
FRAME = 0.08  # seconds


@pytest.fixture(scope="module")
def model():
    return transcribe.load_model(MODEL, device="cpu", dtype="float32")


@pytest.fixture(scope="module")
def long(vocabulary):
    return vocabulary.sentence(SEED + 1000, 300.0)


def transcript_of(model, sentence, **request):
    return model.transcribe(sentence.samples, rate=pocket.RATE, **request)


def test_unseen_sentences_of_any_length(vocabulary, model):
    assert error_rate(model, sentences(vocabulary, 30, longest=40)) <= 0.01


@pytest.mark.slow
def test_many_unseen_sentences(vocabulary, model):
    assert error_rate(model, sentences(vocabulary, 200, longest=40, seed=2 * SEED)) <= 0.01


def test_five_minutes_in_windows_are_what_was_said(model, long):
    transcript = transcript_of(model, long)
    assert transcript.covered_seconds == transcript.decoded_seconds == pytest.approx(300.0)
    assert jiwer.wer(long.text, transcript.text) <= 0.01
    assert len(transcript.segments) >= 300 / model.model.window.max_seconds
    assert not transcript.truncated


def test_words_are_where_they_were_said(model, long):
    transcript = transcript_of(model, long, timestamps="word")
    assert transcript.timestamps_from == "ctc"
    words = [word for segment in transcript.segments for word in segment.words]
    assert [word.word for word in words] == transcript.text.split()
    edges = [edge for word in words for edge in (word.start, word.end)]
    assert edges == sorted(edges)
    assert edges[0] >= 0
    assert edges[-1] <= transcript.duration
    assert all(0 < word.probability <= 1 for word in words)
    if transcript.text == long.text:
        for word, (start, stop) in zip(words, long.spans, strict=True):
            middle = (word.start + word.end) / 2 * pocket.RATE
            assert start - 0.16 * pocket.RATE < middle < stop + 0.16 * pocket.RATE


def test_words_begin_and_end_with_frames(vocabulary, model):
    sentence = vocabulary.sentence(SEED + 7, 12.0)
    encoded = model.model.encode(torch.from_numpy(sentence.samples))
    path = torch.cat([part.argmax(-1) for part in model.model.log_probs(encoded)])
    spoken = (path != model.model.config.classes - 1).nonzero()[:, 0].tolist()
    transcript = transcript_of(model, sentence, timestamps="word")
    words = [word for segment in transcript.segments for word in segment.words]
    assert words[0].start == pytest.approx(spoken[0] * FRAME, abs=FRAME)
    assert words[-1].end == pytest.approx((spoken[-1] + 1) * FRAME, abs=FRAME)


def test_subtitles_and_json_have_the_times(model, long):
    transcript = transcript_of(model, long, timestamps="word")
    record = json.loads(writers.json(transcript))
    assert record["timestamps_from"] == "ctc"
    assert {"word", "start", "end", "probability"} == set(record["segments"][0]["words"][0])
    assert writers.srt(transcript).count("-->") == writers.vtt(transcript).count("-->") == len(transcript.segments)
    plain = transcript_of(model, long, timestamps="segment")
    assert [(s.start, s.end, s.text) for s in plain.segments] == [(s.start, s.end, s.text) for s in transcript.segments]
    assert not any(segment.words for segment in plain.segments)
    assert transcript_of(model, long, timestamps="none").segments == []


def silence(samples):
    return np.ones(-(-len(samples) // 512), np.float32)  # everything is speech: cuts fall where they must


def test_the_middle_of_a_window_is_what_a_single_pass_gives(model, long):
    """The gates' averages are over a window, not over the recording: log-probabilities differ a little."""
    own = model.model
    single = torch.cat(list(own.log_probs(own.encode(torch.from_numpy(long.samples[: 120 * pocket.RATE])))))
    differences, disagreeing, count = [], 0, 0
    for window in windows([long.samples[: 120 * pocket.RATE]], silence, 40.0, own.window.context_seconds):
        begin, samples = window.heard(1280)
        parts = torch.cat(list(own.log_probs(own.encode(torch.from_numpy(samples.copy())))))
        first, last = -(-window.start // 1280), window.stop // 1280
        mine, other = parts[first - begin // 1280 : last - begin // 1280], single[first:last]
        differences.append((mine.exp() - other[: len(mine)].exp()).abs().max())
        disagreeing += int((mine.argmax(-1) != other[: len(mine)].argmax(-1)).sum())
        count += len(mine)
    print(f"largest difference of a probability {max(differences):.3f}, {disagreeing} of {count} frames disagree")
    assert disagreeing <= 0.02 * count


def test_companions_change_no_bit(vocabulary, model):
    spoken = [vocabulary.sentence(SEED + 2000, seconds) for seconds in (9.3, 2.1, 17.6)]
    together = [transcript_of(model, sentence, timestamps="word").segments for sentence in spoken]
    fresh = [transcribe.load_model(MODEL, device="cpu", dtype="float32") for _ in spoken]
    alone = [transcript_of(other, s, timestamps="word").segments for other, s in zip(fresh, spoken, strict=True)]
    assert together == alone


def test_a_beam_writes_what_was_said_too(vocabulary, model):
    for sentence in sentences(vocabulary, 6, seed=SEED + 300, longest=20):
        greedy, beam = (transcript_of(model, sentence, timestamps="word", beam_size=size) for size in (1, 8))
        assert beam.text == greedy.text == sentence.text
        assert [w.start for s in beam.segments for w in s.words] == pytest.approx(
            [w.start for s in greedy.segments for w in s.words], abs=2 * FRAME)  # fmt: skip


@pytest.mark.parametrize("type", ["f16", "q8_0"])
def test_converted_it_writes_the_same(vocabulary, model, type, tmp_path):
    packed = transcribe.load_model(convert(MODEL, tmp_path / "model.gguf", type).path, device="cpu", dtype="float32")
    for sentence in sentences(vocabulary, 6, longest=40, seed=SEED + 600):
        assert transcript_of(packed, sentence).text == transcript_of(model, sentence).text


def test_bfloat16_writes_the_same(vocabulary, model):
    other = transcribe.load_model(MODEL, device="cpu", dtype="bfloat16")
    for sentence in sentences(vocabulary, 4, longest=40, seed=SEED + 700):
        assert transcript_of(other, sentence).text == transcript_of(model, sentence).text


@pytest.mark.parametrize("decibels", [-200, -70, -40])
def test_noise_has_no_text_even_where_the_model_is_asked(model, decibels):
    noise = pocket.noise(np.random.default_rng(0), 7 * pocket.RATE, decibels)
    assert model.model.transcribe(torch.from_numpy(noise), Request()).text == ""


def test_what_it_cannot_do_is_refused(vocabulary, model):
    sentence = vocabulary.sentence(SEED, 1.0)
    for request in ({"prompt": "cat"}, {"language": "de"}, {"temperature": 0.5}, {"task": "translate"}):
        with pytest.raises(UsageError):
            transcript_of(model, sentence, **request)


def test_a_memory_limit_makes_windows_shorter(vocabulary, model, long):
    own = model.model
    limit = own.peak_bytes(20.0)
    small = transcribe.load_model(MODEL, device="cpu", dtype="float32", memory_limit=limit)
    assert own.peak_bytes(small.window_seconds) <= limit
    transcript = transcript_of(small, long)
    assert transcript.stats["longest_window"] <= 20.0
    assert jiwer.wer(long.text, transcript.text) <= 0.02
    with pytest.raises(UsageError, match="too small"):
        transcribe.load_model(MODEL, device="cpu", dtype="float32", memory_limit=1000)
