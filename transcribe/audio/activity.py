"""Voice activity: how likely each 32 ms of a recording is speech, and how loud it is.

The detector is Silero VAD (https://github.com/snakers4/silero-vad), with the weights its package carries as
safetensors. The package itself is not imported: that changes torch's thread count for the whole process, and
its TorchScript model runs frame by frame, 21 s for 20 min of audio where blocks of frames take 2.5 s.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from ..threads import one_thread
from .stream import Samples

FRAME = 512  # samples: 32 ms at 16 kHz
CONTEXT = 64  # samples of the frame before, which the network sees too
# The network misses speech below about -50 dB, so a recording whose loudest frame so far is softer than this
# (root mean square) is amplified up to it, though not over 100 times: noise is not speech at any level.
LOUD, SOFTEST = 0.02, 0.0002
LSTM = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
LOUDER = 2.0  # the fallback calls speech what has this many times the power of the noise floor
QUIETEST = 5e-8  # and a floor is never below this mean square, -73 dB
RISE = 1.002  # a frame: in noise that grows louder the floor doubles in 11 s

Detector = Callable[[Samples], npt.NDArray[np.float32]]


def open_detector(warnings: list[str]) -> Detector:
    """A detector for one recording: it takes float32 [k * 512] at 16 kHz and gives k speech probabilities.

    Calls follow each other through the recording: the state runs on. Without the silero-vad package loudness
    decides, with one line in `warnings`.
    """
    spec = find_spec("silero_vad")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        weights = Path(folder) / "data" / "silero_vad_16k.safetensors"
        if weights.is_file():
            return SileroDetector(load_file(weights))
    warnings.append("silero-vad is not installed: loudness alone decides what is speech")
    return EnergyDetector()


def mean_square(samples: Samples) -> npt.NDArray[np.float32]:
    """The power of each frame: float32 [k * 512] -> float32 [k], 1 at full scale."""
    frames = samples.reshape(-1, FRAME)
    return np.einsum("ij,ij->i", frames, frames) / np.float32(FRAME)


class SileroDetector:
    """Silero VAD for 16 kHz: short-time Fourier magnitudes, four convolutions, an LSTM over the frames.

    The convolutions look at one frame only, so a block of frames is a batch; each is written as a matrix
    product, which for these small sizes takes half the time.
    """

    def __init__(self, weights: Mapping[str, torch.Tensor]) -> None:
        self.weights = weights
        self.loudest = SOFTEST
        self.context = torch.zeros(CONTEXT)
        self.state = (torch.zeros(1, 1, 128), torch.zeros(1, 1, 128))

    @torch.inference_mode()
    def __call__(self, samples: Samples) -> npt.NDArray[np.float32]:
        if not len(samples):
            return np.zeros(0, np.float32)
        self.loudest = max(self.loudest, float(mean_square(samples).max()) ** 0.5)
        samples = samples * np.float32(max(1.0, LOUD / self.loudest))
        with one_thread():
            return self._probabilities(torch.from_numpy(samples)).numpy()

    def _probabilities(self, samples: torch.Tensor) -> torch.Tensor:
        joined = torch.cat([self.context, samples])
        self.context = joined[-CONTEXT:].clone()
        frames = F.pad(joined.unfold(0, CONTEXT + FRAME, FRAME), (0, CONTEXT), mode="reflect")  # [k, 640]
        spectrum = frames.unfold(1, 256, 128) @ self.weights["stft_conv.weight"][:, 0].T  # [k, 4, 258]
        x = (spectrum[..., :129].square() + spectrum[..., 129:].square()).sqrt()
        for name, stride in (("conv1", 1), ("conv2", 2), ("conv3", 2), ("conv4", 1)):
            x = self._convolve(x, name, stride)  # [k, 4, 128] [k, 2, 64] [k, 1, 64] [k, 1, 128]
        lstm = [self.weights[f"lstm_cell.{part}"] for part in LSTM]
        x, *state = torch.lstm(x.transpose(0, 1), self.state, lstm, True, 1, 0.0, False, False, True)
        self.state = (state[0], state[1])
        score = x[0].relu() @ self.weights["final_conv.weight"][0, :, 0] + self.weights["final_conv.bias"]
        return score.sigmoid()

    def _convolve(self, x: torch.Tensor, name: str, stride: int) -> torch.Tensor:
        """Width 3, padded by one, then ReLU: [k, n, in] -> [k, n / stride, out]."""
        weight = self.weights[f"{name}.weight"]  # [out, in, 3]
        taps = F.pad(x, (0, 0, 1, 1)).unfold(1, 3, stride).flatten(2)  # [k, n / stride, in * 3]
        return F.linear(taps, weight.flatten(1), self.weights[f"{name}.bias"]).relu()


class EnergyDetector:
    """Loudness over a noise floor that falls at once and rises slowly."""

    def __init__(self) -> None:
        self.floor = np.inf

    def __call__(self, samples: Samples) -> npt.NDArray[np.float32]:
        power = mean_square(samples)
        loud = np.empty_like(power)
        for index, value in enumerate(power):
            self.floor = max(min(float(value), self.floor * RISE), QUIETEST)
            loud[index] = value >= self.floor * LOUDER
        return loud
