"""The clips that NeMo's answers were recorded for (scripts/record_nemo.py)."""

import numpy as np
import numpy.typing as npt

LENGTHS = (33_137, 16_000, 20_801)  # samples at 16 kHz; none but one a whole number of frames


def clips() -> list[npt.NDArray[np.float32]]:
    """A voice-like sweep over noise, of each length."""
    return [_clip(length) for length in LENGTHS]


def _clip(length: int) -> npt.NDArray[np.float32]:
    random = np.random.default_rng(length)
    time = np.arange(length) / 16_000
    pitch = 2 * np.pi * (120 * time + 15 * np.sin(2 * np.pi * 1.3 * time))
    tones = sum(np.sin(k * pitch) * (0.5 + 0.5 * np.sin(2 * np.pi * k * 0.7 * time)) / k for k in range(1, 24))
    return (0.1 * tones + 0.01 * random.standard_normal(length)).astype(np.float32)
