"""Spectral front ends: from the waveform to what an encoder takes.

The log-mel spectrogram of Whisper (Radford et al. 2022): frames of 25 ms every 10 ms, 400 points, power, mel bands,
log10 floored at 1e-10 and at 8 below the clip's largest, then (x + 4) / 4.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

RATE = 16_000
FRAME = 400  # samples, 25 ms: also the points of the Fourier transform
HOP = 160  # samples, 10 ms
BLOCK = 100  # frames computed at once, so that spectra of 1 s only are held
RANGE = 8.0  # what is quieter than the loudest by more powers of ten than this is silence


def mel_filters(bands: int) -> Tensor:
    """Triangular filters on Slaney's mel scale, 0-8 kHz, each of area one: float32 [bands, 201]."""
    from torchaudio.functional import melscale_fbanks

    filters = melscale_fbanks(FRAME // 2 + 1, 0.0, RATE / 2, bands, RATE, norm="slaney", mel_scale="slaney")
    return filters.t().contiguous()


def log_mel_frames(samples: int) -> int:
    """How many frames `log_mel` makes: the last one, centred on the end, is dropped as Whisper does."""
    return samples // HOP


def log_mel(samples: Tensor, filters: Tensor, out: Tensor | None = None) -> Tensor:
    """Whisper's log-mel spectrogram: float32 [n] at 16 kHz -> float32 [n // 160, bands].

    n is at least 201. Frames are centred, the waveform is mirrored at its ends, the window is Hann's. The spectra
    are made block by block: beside the result only 1 s of them is held, and a padded copy of the waveform.
    """
    count = log_mel_frames(len(samples))
    if out is None:
        out = samples.new_empty(count, filters.shape[0])
    window = torch.hann_window(FRAME, device=samples.device)
    padded = F.pad(samples[None], (FRAME // 2, FRAME // 2), mode="reflect")[0]
    frames = padded.unfold(0, FRAME, HOP)
    for start in range(0, count, BLOCK):
        stop = min(start + BLOCK, count)
        power = torch.fft.rfft(frames[start:stop] * window).abs().square()
        torch.mm(power, filters.t(), out=out[start:stop])
    out.clamp_(min=1e-10).log10_()
    return out.clamp_(min=float(out.max()) - RANGE).add_(4.0).div_(4.0)
