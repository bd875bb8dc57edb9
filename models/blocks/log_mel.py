"""The log-mel spectrogram as a block of the engine, so that a dry run counts it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from transcribe.audio.features import BLOCK, FRAME, log_mel, log_mel_frames, mel_filters
from transcribe.engine.modules import Weighted
from transcribe.engine.operations import Spec

if TYPE_CHECKING:
    from transcribe.weights import Checkpoint

STORED = "frontend.mel_filterbank"  # where transcribe.cpp's converters keep the filters


class LogMel(Weighted):
    """Whisper's front end: float32 [samples] -> float32 [samples // 160, bands]."""

    def __init__(self, bands: int) -> None:
        super().__init__()
        self.bands = bands
        self.weight: Tensor | None = None

    @classmethod
    def of(cls, checkpoint: Checkpoint, bands: int, device: torch.device) -> LogMel:
        """With the filters a checkpoint carries, else with our own."""
        front_end = cls(bands)
        if STORED in checkpoint.tensors:
            checkpoint.require({STORED: (bands, FRAME // 2 + 1)})
            filters = checkpoint.tensor(STORED)
            front_end.weight = (filters if isinstance(filters, Tensor) else filters.dequantize()).float().to(device)
        else:
            front_end.weight = mel_filters(bands).to(device)
        return front_end

    def infer(self, x: Tensor) -> Spec:
        return (log_mel_frames(len(x)), self.bands), torch.float32

    def workspace_bytes(self, x: Tensor) -> int:
        """The padded waveform, and of one block the windowed frames and the spectra, complex and twice real."""
        return 4 * (len(x) + FRAME + min(BLOCK, log_mel_frames(len(x))) * 3 * FRAME)

    def run(self, x: Tensor, out: Tensor | None = None, scratch: Tensor | None = None) -> Tensor:
        assert self.weight is not None
        return log_mel(x, self.weight, out)
