"""NeMo's spectral front end: a log-mel spectrogram in which every band has mean 0 and deviation 1 over the clip.

Pre-emphasis, frames of 25 ms every 10 ms centred in a longer Fourier transform, power, mel bands, the natural
logarithm of the band plus 2^-24, then each band normalised over the clip (NeMo's `FilterbankFeatures`, "per_feature").
The waveform is silent beyond its ends. No dither: that is for training.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

BLOCK = 25  # frames computed at once: what torch allocates for so many fits where it lay before
TINY = 1e-5  # added to the deviation


@dataclass(frozen=True)
class Framing:
    """How a waveform is cut: samples from frame to frame, points of the transform, and what precedes both."""

    hop: int = 160
    points: int = 512
    preemphasis: float = 0.97
    guard: float = 2.0**-24

    def frames(self, samples: int) -> int:
        """How many frames a clip has. One that is centred on its very end is not among them."""
        return samples // self.hop


def normalized_log_mel(
    samples: Tensor, filters: Tensor, window: Tensor, framing: Framing, out: Tensor | None = None
) -> Tensor:
    """float32 [n] -> float32 [n // hop, bands], n at least two hops.

    `filters` [bands, points / 2 + 1]; `window` has at most as many values as the transform has points, and stands in
    the middle of them. Beside the result, the waveform and the spectra of one block are held.
    """
    count, half = framing.frames(len(samples)), framing.points // 2
    if out is None:
        out = samples.new_empty(count, filters.shape[0])
    before = (framing.points - len(window)) // 2
    window = torch.nn.functional.pad(window, (before, framing.points - len(window) - before))
    rows = min(BLOCK, count)
    waveform = samples.new_empty((rows - 1) * framing.hop + framing.points)
    frames = samples.new_empty(rows, framing.points)
    power = frames.new_empty(rows, half + 1)
    for start in range(0, count, BLOCK):
        stop = min(start + BLOCK, count)
        rows = stop - start
        _emphasise(samples, start * framing.hop - half, waveform, framing)
        torch.mul(waveform.unfold(0, framing.points, framing.hop)[:rows], window, out=frames[:rows])
        real, imaginary = torch.view_as_real(torch.fft.rfft(frames[:rows])).unbind(-1)
        torch.mul(real, real, out=power[:rows]).addcmul_(imaginary, imaginary)
        del real, imaginary  # so that the next ones may lie where these did
        torch.mm(power[:rows], filters.t(), out=out[start:stop])
    out.add_(framing.guard).log_()
    deviation, mean = torch.std_mean(out, 0)
    return out.sub_(mean).div_(deviation.nan_to_num_(0.0).add_(TINY))


def _emphasise(samples: Tensor, start: int, result: Tensor, framing: Framing) -> None:
    """x[t] - preemphasis * x[t - 1] for t from `start` on, zero where there is no t, whatever is before it."""
    stop = start + len(result)
    first, last = max(start, 0), min(stop, len(samples))
    inside = result[first - start : last - start].copy_(samples[first:last])
    result[: first - start].zero_()
    result[last - start :].zero_()
    if first > 0:
        inside.sub_(samples[first - 1 : last - 1], alpha=framing.preemphasis)
    else:
        inside[1:].sub_(samples[: last - 1], alpha=framing.preemphasis)
