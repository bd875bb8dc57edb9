"""Qwen3-ASR's pocket model through the product: speech whose text is known, of any length, and no download."""

import jiwer
import numpy as np
import pocket
import pocket_layouts
import pytest
import soundfile
import torch
from pocket import SEED, error_rate, sentences

import transcribe
from transcribe.convert import convert
from transcribe.errors import UsageError
from transcribe.options import Request

MODEL = pocket.DATA / "pocket-qwen3-asr"


@pytest.fixture(scope="module")
def model():
    return transcribe.load_model(MODEL, device="cpu", dtype="float32")


def text_of(model, sentence, **request):
    return model.transcribe(sentence.samples, rate=pocket.RATE, **request).text


def test_unseen_sentences_of_any_length(vocabulary, model):
    assert error_rate(model, sentences(vocabulary, 30)) <= 0.01


@pytest.mark.slow
def test_many_unseen_sentences(vocabulary, model):
    assert error_rate(model, sentences(vocabulary, 200, seed=2 * SEED)) <= 0.01


LAYOUTS = [pocket_layouts.write_authors, pocket_layouts.write_transcribe_cpp, pocket_layouts.write_audio_cpp]


@pytest.mark.parametrize("write", LAYOUTS, ids=lambda write: write.__name__)
def test_every_layout_writes_the_same(vocabulary, model, write, tmp_path):
    other = transcribe.load_model(write(MODEL, tmp_path), device="cpu", dtype="float32")
    for sentence in sentences(vocabulary, 4, seed=SEED + 500):
        assert text_of(other, sentence) == text_of(model, sentence)


def test_in_q8_0_it_writes_the_same(vocabulary, model, tmp_path):
    packed = transcribe.load_model(convert(MODEL, tmp_path / "model.gguf", "q8_0").path, device="cpu", dtype="float32")
    for sentence in sentences(vocabulary, 12, seed=SEED + 600):
        assert text_of(packed, sentence) == text_of(model, sentence)


def test_five_minutes_are_cut_and_merged_and_nothing_is_lost(vocabulary, model):
    sentence = vocabulary.sentence(SEED + 1000, 300.0)
    transcript = model.transcribe(sentence.samples, rate=pocket.RATE)
    assert transcript.covered_seconds == transcript.decoded_seconds == pytest.approx(300.0)
    assert jiwer.wer(sentence.text, transcript.text) <= 0.01
    assert len(transcript.segments) >= 300 / model.model.window.max_seconds
    centres = [(start + stop) / 2 / pocket.RATE for start, stop in sentence.spans]
    holders = [[s.id for s in transcript.segments if s.start <= centre < s.end] for centre in centres]
    assert all(len(holder) == 1 for holder in holders)
    assert not transcript.truncated


def test_windows_decoded_together_write_what_they_write_alone(vocabulary, model):
    sentence = vocabulary.sentence(SEED + 1500, 100.0)
    several = transcribe.load_model(MODEL, device="cpu", dtype="float32", batch_size=4)
    together = several.transcribe(sentence.samples, rate=pocket.RATE)
    alone = model.transcribe(sentence.samples, rate=pocket.RATE)
    assert together.stats["together"] == 4
    assert (together.text, together.segments) == (alone.text, alone.segments)


def test_many_recordings_together_write_what_each_writes_alone(vocabulary, model, tmp_path):
    paths = []
    for sentence in sentences(vocabulary, 14, longest=20.0, seed=SEED + 1600):
        paths.append(tmp_path / f"{len(paths)}.wav")
        soundfile.write(paths[-1], sentence.samples, pocket.RATE)
    several = transcribe.load_model(MODEL, device="cpu", dtype="float32", batch_size=None)
    together = dict(several.transcribe_all(paths))
    assert max(transcript.stats["together"] for transcript in together.values()) > 8
    for number, path in enumerate(paths):
        alone = model.transcribe(path)
        assert (together[number].text, together[number].segments) == (alone.text, alone.segments)


def test_one_load_writes_what_fresh_loads_write(vocabulary, model):
    spoken = [vocabulary.sentence(SEED + 2000, seconds) for seconds in (9.3, 2.1, 17.6)]
    together = [text_of(model, sentence) for sentence in spoken]
    fresh = [transcribe.load_model(MODEL, device="cpu", dtype="float32") for _ in spoken]
    assert together == [text_of(other, sentence) for other, sentence in zip(fresh, spoken, strict=True)]


def test_silence_has_no_text(model):
    transcript = model.transcribe(np.zeros(5 * pocket.RATE, np.float32), rate=pocket.RATE)
    assert (transcript.text, transcript.no_speech) == ("", True)


@pytest.mark.parametrize("decibels", [-200, -70, -40])
def test_noise_has_no_text_even_where_the_model_is_asked(model, decibels):
    noise = pocket.noise(np.random.default_rng(0), 7 * pocket.RATE, decibels)
    decoded = model.model.transcribe(torch.from_numpy(noise), Request())
    assert (decoded.text, decoded.language) == ("", None)


def test_the_language_is_detected_or_forced(vocabulary, model):
    sentence = vocabulary.sentence(SEED + 3000, 6.0)
    detected = model.transcribe(sentence.samples, rate=pocket.RATE)
    assert (detected.text, detected.language) == (sentence.text, "en")
    assert text_of(model, sentence, language="English") == sentence.text


def test_a_language_it_does_not_have_is_refused_with_those_it_has(vocabulary, model):
    sentence = vocabulary.sentence(SEED + 3000, 2.0)
    with pytest.raises(UsageError, match=r"'klingon'.*English"):
        text_of(model, sentence, language="klingon")


def test_a_prompt_is_not_repeated(vocabulary, model):
    sentence = vocabulary.sentence(SEED + 3001, 6.0)
    assert text_of(model, sentence, prompt="zebra giraffe lion twelve") == sentence.text


def test_very_short_audio_is_padded(vocabulary, model):
    assert model.model.transcribe(torch.zeros(100), Request()).text == ""
    sentence = vocabulary.sentence(SEED + 4000, 0.2)
    assert len(sentence.words) == 1
    assert text_of(model, sentence) == sentence.text
