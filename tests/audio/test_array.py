"""Samples in memory."""

from __future__ import annotations

import io

import numpy as np
import pytest
import torch

from transcribe.audio import RATE, open_array, open_audio
from transcribe.errors import AudioError


def read(stream):
    return np.concatenate([*stream.blocks(), np.zeros(0, np.float32)])


@pytest.mark.parametrize("rate", [8000, 16000, 44100])
def test_an_array_gives_the_samples_its_file_gives(wav, sine, rate):
    wave = sine(3, rate)[0]
    with open_audio(io.BytesIO(wav(wave.astype("<f4").tobytes(), tag=3, bits=32, rate=rate))) as stream:
        expected = read(stream)
    assert len(expected) == pytest.approx(3 * RATE, abs=2)
    np.testing.assert_array_equal(read(open_array(wave, rate)), expected)
    np.testing.assert_array_equal(read(open_array(torch.from_numpy(wave), rate)), expected)


def test_channels_are_mixed(sine):
    stereo = np.stack([np.zeros(RATE, np.float32), sine(1, RATE)[0]])
    np.testing.assert_allclose(read(open_array(stereo, RATE)), stereo[1] / 2)


def test_the_length_is_known_and_counted():
    stream = open_array(np.zeros(24000), 8000)
    assert stream.declared_seconds == 3
    assert stream.decoded_seconds == 0
    read(stream)
    assert stream.decoded_seconds == 3


@pytest.mark.parametrize(
    ("samples", "rate", "what"),
    [
        (np.zeros(10, np.int16), 16000, "int16 samples"),
        (torch.zeros(10, dtype=torch.int16), 16000, "int16 samples"),
        (np.zeros((1, 2, 3)), 16000, "shape"),
        (np.zeros((16000, 2)), 16000, "shape"),
        (np.zeros(10), 0, "sample rate 0"),
        (np.zeros(10), 0.5, "sample rate 0.5"),
    ],
)
def test_what_cannot_be_audio_is_refused(samples, rate, what):
    with pytest.raises(AudioError, match=what):
        open_array(samples, rate)


def test_a_sample_that_is_not_a_number_is_an_error_where_it_stands():
    samples = np.zeros(5 * RATE)
    samples[3 * RATE + 5] = np.nan
    with pytest.raises(AudioError, match="near 3 s is not a finite number"):
        read(open_array(samples, RATE))
