"""NeMo's front end as a block of the engine, with the filters and the window that its checkpoints carry."""

from __future__ import annotations

import torch
from torch import Tensor

from transcribe.audio.normalized import BLOCK, Framing, normalized_log_mel
from transcribe.engine.modules import Weighted
from transcribe.engine.operations import Spec
from transcribe.threads import one_thread


class NormalizedMel(Weighted):
    """float32 [samples] -> [samples // hop, bands], computed in float32."""

    def __init__(self, bands: int, length: int, framing: Framing, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.bands, self.length, self.framing, self.dtype = bands, length, framing, dtype
        self.filters: Tensor | None = None
        self.window: Tensor | None = None

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {"fb": (1, self.bands, self.framing.points // 2 + 1), "window": (self.length,)}

    def fill(self, tensors: dict[str, Tensor], dtype: torch.dtype) -> None:
        self.filters, self.window = tensors["fb"][0], tensors["window"]

    def infer(self, x: Tensor) -> Spec:
        return (self.framing.frames(len(x)), self.bands), self.dtype

    def workspace_bytes(self, x: Tensor) -> int:
        """Of one block the waveform, the windowed frames and the spectra, complex and as power."""
        kept = 0 if self.dtype == torch.float32 else 4 * self.framing.frames(len(x)) * self.bands
        return kept + 4 * BLOCK * (self.framing.hop + self.framing.points + 3 * (self.framing.points // 2 + 1))

    def run(self, x: Tensor, out: Tensor | None = None, scratch: Tensor | None = None) -> Tensor:
        assert self.filters is not None
        assert self.window is not None
        with one_thread():
            if self.dtype == torch.float32:
                return normalized_log_mel(x, self.filters, self.window, self.framing, out)
            features = normalized_log_mel(x, self.filters, self.window, self.framing)
        return features.to(self.dtype) if out is None else out.copy_(features)
