"""What convolutional encoders of NeMo are built of: separable convolutions over time, gates on channels, residuals.

Activations are rows of one clip, [time, channels]. Batch normalisation is folded into the weights when they are
filled in, y = (x - mean) / sqrt(variance + eps) * gain + bias being linear.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor

from transcribe.engine.modules import Weighted
from transcribe.engine.operations import Operation, Spec

# Rows of a result made at once, always so many, zeros after the clip's end: torch's kernels for the CPU are made for a
# size, and kept. What they allocate for this size finds the place where it lay before; for twice as many rows it does
# not always, and then tens of megabytes pile up in the heap.
TILE = 96
GROUP = 4  # tiles are projected together, by all threads; convolved by one: they are too small to share out
NORM = ("weight", "bias", "running_mean", "running_var")


def _folded(weight: Tensor, tensors: dict[str, Tensor], eps: float) -> tuple[Tensor, Tensor]:
    """The weight [outputs, inputs] and the bias that do what `weight` and the normalisation after it do."""
    gain, bias, mean, variance = (tensors[f"norm.{name}"] for name in NORM)
    scale = gain.double() * torch.rsqrt(variance.double() + eps)
    return (weight.double() * scale[:, None]).float(), (bias.double() - mean.double() * scale).float()


def _norm_shapes(channels: int) -> dict[str, tuple[int, ...]]:
    return {f"norm.{name}": (channels,) for name in NORM}


@contextmanager
def one_thread(device: torch.device) -> Iterator[None]:
    """Without waiting for other threads, which on a busy machine takes longer than what they would do."""
    threads = torch.get_num_threads()
    if device.type != "cpu" or threads == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


class SeparableConv(Weighted):
    """A convolution of each channel, one across channels, a normalisation, and maybe a rectifier.

    [time, inputs] -> [(time - 1) // stride + 1, outputs]; as many zeros stand around the clip as keep its length. A
    tile of rows is convolved and projected before the next, so the result may take the place of x: what the next
    tile still needs of x has been set aside.
    """

    in_place = (0,)

    def __init__(
        self, inputs: int, outputs: int, kernel: int, stride: int, dilation: int, eps: float, relu: bool
    ) -> None:
        super().__init__()
        self.inputs, self.outputs, self.kernel = inputs, outputs, kernel
        self.stride, self.dilation, self.eps, self.relu = stride, dilation, eps, relu
        self.span = dilation * (kernel - 1) + 1  # rows of x that one row of the result depends on
        self.window = (TILE - 1) * stride + self.span  # and a whole tile
        self.shared = max(self.span - stride, 0)  # of them at the end are at the beginning of the next tile's
        self.shrinks = outputs <= inputs  # then a row of the result ends where x has been read
        self.depthwise: Tensor | None = None
        self.weight: Tensor | None = None
        self.bias: Tensor | None = None

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {
            "depthwise.weight": (self.inputs, 1, self.kernel),
            "pointwise.weight": (self.outputs, self.inputs, 1),
            **_norm_shapes(self.outputs),
        }

    def fill(self, tensors: dict[str, Tensor], dtype: torch.dtype) -> None:
        weight, bias = _folded(tensors["pointwise.weight"][:, :, 0], tensors, self.eps)
        self.weight, self.bias = weight.to(dtype), bias.to(dtype)
        depthwise = tensors["depthwise.weight"].to(dtype).unsqueeze(2)  # [channels, 1, 1, kernel]
        self.depthwise = depthwise.contiguous(memory_format=torch.channels_last)

    def infer(self, x: Tensor) -> Spec:
        return ((x.shape[0] - 1) // self.stride + 1, self.outputs), x.dtype

    def scratch_bytes(self, x: Tensor) -> int:
        """The window, which is the rows of x that a tile depends on, and a group of convolved tiles."""
        return (self.window + GROUP * TILE) * self.inputs * x.dtype.itemsize

    def workspace_bytes(self, x: Tensor) -> int:
        """The convolved tile, and what of a window is moved to the front of the next."""
        return (TILE + self.shared) * self.inputs * x.dtype.itemsize

    def run(self, x: Tensor, out: Tensor | None = None, scratch: Tensor | None = None) -> Tensor:
        assert self.weight is not None
        assert self.depthwise is not None
        (steps, _), dtype = self.infer(x)
        if out is None:
            out = torch.empty(steps, self.outputs, dtype=dtype, device=x.device)
        if scratch is None:
            scratch = torch.empty(self.scratch_bytes(x), dtype=torch.uint8, device=x.device)
        window, rows = scratch.view(dtype).view(-1, self.inputs).split([self.window, GROUP * TILE])
        for start in range(0, steps, GROUP * TILE):
            tile = out[start : start + GROUP * TILE]
            with one_thread(x.device):
                for first in range(0, len(tile), TILE):
                    self._convolve(x, start + first, window, rows[first : first + TILE])
            torch.addmm(self.bias, rows[: len(tile)], self.weight.t(), out=tile)
            if self.relu:
                tile.relu_()
        return out

    def _convolve(self, x: Tensor, start: int, window: Tensor, rows: Tensor) -> None:
        """The rows of the depthwise convolution from `start` on, of which the last call made those before."""
        kept = self.shared if start else 0
        if kept:
            window[:kept] = window[-kept:].clone()
        self._read(x, start * self.stride - self.span // 2 + kept, window[kept:])
        image = window.view(1, 1, self.window, self.inputs).permute(0, 3, 1, 2)  # channels last
        made = F.conv2d(
            image, self.depthwise, stride=(1, self.stride), dilation=(1, self.dilation), groups=self.inputs
        )
        rows.copy_(made.permute(0, 2, 3, 1).view(TILE, self.inputs))

    @staticmethod
    def _read(x: Tensor, first: int, window: Tensor) -> None:
        """Rows of x from `first` on, zeros where there are none."""
        low, high = max(first, 0), min(first + len(window), len(x))
        high = max(low, high)
        window[: low - first].zero_()
        window[low - first : high - first] = x[low:high]
        window[high - first :].zero_()


class Pointwise(Weighted):
    """A convolution across channels, of every `stride`-th row: [time, inputs] -> [(time - 1) // stride + 1, outputs].

    With `eps` a normalisation follows; without, the convolution has a bias of its own.
    """

    def __init__(self, inputs: int, outputs: int, stride: int = 1, eps: float | None = None) -> None:
        super().__init__()
        self.inputs, self.outputs, self.stride, self.eps = inputs, outputs, stride, eps
        self.weight: Tensor | None = None
        self.bias: Tensor | None = None

    def shapes(self) -> dict[str, tuple[int, ...]]:
        after = {"bias": (self.outputs,)} if self.eps is None else _norm_shapes(self.outputs)
        return {"weight": (self.outputs, self.inputs, 1), **after}

    def fill(self, tensors: dict[str, Tensor], dtype: torch.dtype) -> None:
        weight = tensors["weight"][:, :, 0]
        bias = tensors["bias"] if self.eps is None else None
        if self.eps is not None:
            weight, bias = _folded(weight, tensors, self.eps)
        assert bias is not None
        self.weight, self.bias = weight.to(dtype), bias.to(dtype)

    def infer(self, x: Tensor) -> Spec:
        return ((x.shape[0] - 1) // self.stride + 1, self.outputs), x.dtype

    def run(self, x: Tensor, out: Tensor | None = None, scratch: Tensor | None = None) -> Tensor:
        assert self.weight is not None
        return torch.addmm(self.bias, x[:: self.stride], self.weight.t(), out=out)


class ChannelGate(Weighted):
    """Squeeze-and-excitation (Hu et al. 2018) over the whole clip: [time, channels] -> a factor for each channel.

    The mean over time through two layers, in float32.
    """

    def __init__(self, channels: int, inner: int) -> None:
        super().__init__()
        self.channels, self.inner = channels, inner
        self.squeeze: Tensor | None = None
        self.excite: Tensor | None = None

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {"fc.0.weight": (self.inner, self.channels), "fc.2.weight": (self.channels, self.inner)}

    def fill(self, tensors: dict[str, Tensor], dtype: torch.dtype) -> None:
        self.squeeze, self.excite = tensors["fc.0.weight"], tensors["fc.2.weight"]

    def infer(self, x: Tensor) -> Spec:
        return (self.channels,), x.dtype

    def run(self, x: Tensor, out: Tensor | None = None, scratch: Tensor | None = None) -> Tensor:
        assert self.squeeze is not None
        assert self.excite is not None
        mean = x.mean(0, dtype=torch.float32)
        gate = torch.sigmoid(self.excite @ torch.relu(self.squeeze @ mean)).to(x.dtype)
        return gate if out is None else out.copy_(gate)


def _rejoin(x: Tensor, gate: Tensor | None, around: Tensor | None, *, out: Tensor | None = None) -> Tensor:
    """max(0, x * gate + around): x and `around` [time, channels], `gate` [channels]."""
    if gate is not None and around is not None:
        out = torch.addcmul(around, x, gate, out=out)
    elif gate is not None:
        out = torch.mul(x, gate, out=out)
    elif around is not None:
        out = torch.add(x, around, out=out)
    else:
        out = x.clone() if out is None else out.copy_(x)
    return out.relu_()


def _like_x(x: Tensor, gate: Tensor | None, around: Tensor | None) -> Spec:
    return tuple(x.shape), x.dtype


rejoin = Operation(_like_x, _rejoin, in_place=(0, 2))
