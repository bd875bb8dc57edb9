"""Voice activity: the network's numbers, and its state across calls."""

from __future__ import annotations

import warnings
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch

from transcribe.audio import activity
from transcribe.audio.activity import FRAME, EnergyDetector, SileroDetector, mean_square, open_detector

FRAMES = 60


@pytest.fixture
def sound() -> np.ndarray:
    """A buzz that comes and goes in noise: nothing like silence for any layer."""
    rng, n = np.random.default_rng(0), FRAMES * FRAME
    buzz = np.sign(np.sin(2 * np.pi * 120 * np.arange(n) / 16000)) * np.sin(np.arange(n) / 3000) ** 2
    return (0.2 * buzz + 0.05 * rng.standard_normal(n)).astype(np.float32)


def test_the_same_numbers_as_the_package_with_the_same_weights(sound):
    folder = Path(find_spec("silero_vad").submodule_search_locations[0]) / "data"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.jit is deprecated, and this is the reference all the same
        reference = torch.jit.load(str(folder / "silero_vad.jit"), map_location="cpu")
    names = {
        "stft_conv.weight": "stft.forward_basis_buffer",
        "final_conv.weight": "decoder.decoder.2.weight",
        "final_conv.bias": "decoder.decoder.2.bias",
    }
    for kind in ("weight", "bias"):
        names |= {f"conv{i + 1}.{kind}": f"encoder.{i}.reparam_conv.{kind}" for i in range(4)}
        names |= {f"lstm_cell.{kind}_{end}": f"decoder.rnn.{kind}_{end}" for end in ("ih", "hh")}
    state = reference.state_dict()
    detector = SileroDetector({ours: state[f"_model.{theirs}"] for ours, theirs in names.items()})
    with torch.inference_mode():
        frames = torch.from_numpy(sound).split(FRAME)
        expected = [reference(frame[None], 16000).item() for frame in frames]
    assert max(expected) - min(expected) > 0.01
    np.testing.assert_allclose(detector(sound), expected, atol=1e-5)


def test_state_runs_on_from_call_to_call(sound):
    whole = open_detector([])(sound)
    detector = open_detector([])
    parts = [detector(part) for part in np.split(sound, [7 * FRAME, 8 * FRAME, 40 * FRAME])]
    np.testing.assert_allclose(np.concatenate(parts), whole, atol=1e-5)


def test_a_recording_made_far_too_quiet_is_heard_all_the_same(sound):
    numbers = [open_detector([])(np.float32(gain) * sound) for gain in (0.01, 0.001)]
    np.testing.assert_allclose(numbers[0], numbers[1], atol=1e-3)


def test_silence_and_noise_are_not_speech():
    rng = np.random.default_rng(0)
    for amplitude in (0, 0.001, 0.1):
        sound = amplitude * rng.standard_normal(FRAMES * FRAME).astype(np.float32)
        assert open_detector([])(sound).max() < 0.35


def test_torch_keeps_its_thread_count(sound):
    before = torch.get_num_threads()
    open_detector([])(sound)
    assert torch.get_num_threads() == before


def test_without_the_package_loudness_decides_and_it_is_said(sound, monkeypatch):
    monkeypatch.setattr(activity, "find_spec", lambda name: None)
    said: list[str] = []
    detector = open_detector(said)
    assert said == ["silero-vad is not installed: loudness alone decides what is speech"]
    assert isinstance(detector, EnergyDetector)
    assert detector(np.zeros(FRAME * 9, np.float32)).max() == 0
    assert detector(sound).min() == 1


def test_loudness_in_steady_noise_finds_what_stands_out():
    rng = np.random.default_rng(0)
    sound = 0.02 * rng.standard_normal(FRAMES * FRAME).astype(np.float32)
    sound[20 * FRAME : 30 * FRAME] *= 4
    speech = EnergyDetector()(sound)
    assert speech[20:30].all()
    assert not speech[:20].any()
    assert not speech[30:].any()


def test_mean_square():
    np.testing.assert_allclose(mean_square(np.full(FRAME * 2, 0.5, np.float32)), [0.25, 0.25])
