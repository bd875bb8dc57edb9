"""Samples that are already in memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from transcribe.errors import AudioError

from .stream import AudioStream, Samples

STRIDE_SECONDS = 1  # converted at a time, so that nothing as long as the array is allocated


def open_array(samples: Any, rate: int) -> AudioStream:
    """A stream over a NumPy or torch array of floats, [n] or [channels, n], full scale at 1, `rate` in hertz.

    Raises `AudioError` for another shape, for integers (their full scale is a guess) and for a rate below 1;
    a sample that is not finite is an error when the stream reaches it.
    """
    if hasattr(samples, "detach"):  # torch, which need not be imported to know it
        samples = samples.detach().cpu()
        samples = (samples.float() if samples.is_floating_point() else samples).numpy()
    array = np.asarray(samples)
    if not np.issubdtype(array.dtype, np.floating):
        raise AudioError(f"audio array: {array.dtype} samples; give floats between -1 and 1")
    if array.ndim == 1:
        array = array[None]
    if array.ndim != 2 or array.shape[0] > max(array.shape[1], 8):
        raise AudioError(f"audio array: shape {list(array.shape)}; give [samples] or [channels, samples]")
    if isinstance(rate, bool) or rate != int(rate) or rate < 1:
        raise AudioError(f"audio array: sample rate {rate!r}; give samples a second, a whole number")
    return ArrayStream(array, int(rate))


class ArrayStream(AudioStream):
    """A float array [channels, n]."""

    def __init__(self, array: np.ndarray, rate: int) -> None:
        super().__init__("audio array", array.shape[1] / rate)
        self.array, self.rate = array, rate

    def pieces(self) -> Iterator[tuple[Samples, int]]:
        stride = STRIDE_SECONDS * self.rate
        for start in range(0, self.array.shape[1], stride):
            mono = self.array[:, start : start + stride].mean(0, dtype=np.float32)
            if not np.isfinite(mono).all():
                second = start / self.rate
                raise AudioError(f"{self.name}: a sample near {second:.0f} s is not a finite number")
            yield mono, self.rate
