import pytest
import torch

from transcribe.audio.features import log_mel, log_mel_frames, mel_filters


def whisper(samples: torch.Tensor, filters: torch.Tensor) -> torch.Tensor:
    """The same by torch.stft over everything at once."""
    spectrum = torch.stft(samples, 400, 160, window=torch.hann_window(400), return_complex=True)[:, :-1]
    mel = (filters @ spectrum.abs() ** 2).clamp(min=1e-10).log10()
    return ((mel.maximum(mel.max() - 8) + 4) / 4).t()


@pytest.mark.parametrize("count", [201, 400, 16_000, 16_159, 16_160, 50_001])
def test_the_blocks_join_into_the_spectrogram_of_the_whole(count):
    samples = torch.randn(count, generator=torch.Generator().manual_seed(count)) * 0.1
    samples[: count // 4] = 0
    features = log_mel(samples, mel_filters(80))
    assert features.shape == (log_mel_frames(count), 80)
    assert torch.allclose(features, whisper(samples, mel_filters(80)), atol=1e-4)


def test_a_tone_is_in_the_band_around_its_frequency():
    tone = torch.sin(2 * torch.pi * 1000 * torch.arange(16_000) / 16_000)
    filters = mel_filters(128)
    band = int(log_mel(tone, filters)[50].argmax())
    assert band == int(filters[:, 25].argmax())  # bin 25 of 400 points at 16 kHz


def test_silence_is_flat():
    assert torch.equal(log_mel(torch.zeros(3200), mel_filters(8)), torch.full((20, 8), -1.5))
