"""The demonstration model: spoken digits in voices that it was not trained on."""

import numpy as np
import pocket
import pytest
from pocket import SEED, Sentence, error_rate, noise, read_vocabulary

import transcribe

DATA = pocket.DATA / "digits"


@pytest.fixture(scope="module")
def model():
    return transcribe.load_model(DATA / "digits.nemo", device="cpu", dtype="float32")


@pytest.fixture(scope="module")
def digits():
    return read_vocabulary(DATA)


def in_noise(sentence: Sentence, below: float) -> Sentence:
    """With white noise so many decibels under the speech."""
    speech = np.concatenate([sentence.samples[start:stop] for start, stop in sentence.spans])
    level = 10 * np.log10(np.mean(speech**2)) - below
    added = noise(np.random.default_rng(len(sentence.samples)), len(sentence.samples), level)
    return Sentence(sentence.samples + added, sentence.words, sentence.spans)


@pytest.mark.parametrize("below", [40, 20, 10])
def test_digits_of_voices_that_were_kept_apart(model, digits, below):
    seconds = (2, 5, 10, 20)
    spoken = [digits.sentence(SEED + i, s, renderings=[v]) for v in digits.clips for i, s in enumerate(seconds)]
    assert error_rate(model, [in_noise(sentence, below) for sentence in spoken]) <= 0.10
