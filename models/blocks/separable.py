"""What convolutional encoders of NeMo are built of: separable convolutions over time, gates on channels, residuals.

Activations are rows of one clip, [time, channels]. Batch normalisation is folded into the weights when they are
filled in, y = (x - mean) / sqrt(variance + eps) * gain + bias being linear.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from transcribe.engine.modules import Weighted
from transcribe.engine.operations import Operation, Spec
from transcribe.kernels import separable, steps
from transcribe.kernels.separable import Form
from transcribe.kernels.steps import Step
from transcribe.threads import one_thread

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


class Pointwise(Weighted):
    """A convolution across channels, of every `stride`-th row: [time, inputs] -> [(time - 1) // stride + 1, outputs].

    With `eps` a normalisation follows; without, the convolution has a bias of its own.
    """

    def __init__(self, inputs: int, outputs: int, stride: int = 1, eps: float | None = None) -> None:
        super().__init__()
        self.form, self.eps = Form(inputs, outputs, stride=stride), eps
        self.depthwise: Tensor | None = None
        self.weight: Tensor | None = None
        self.bias: Tensor | None = None

    def shapes(self) -> dict[str, tuple[int, ...]]:
        outputs = self.form.outputs
        after = {"bias": (outputs,)} if self.eps is None else _norm_shapes(outputs)
        return {"weight": (outputs, self.form.inputs, 1), **after}

    def fill(self, tensors: dict[str, Tensor], dtype: torch.dtype) -> None:
        weight = tensors["weight"][:, :, 0]
        if self.eps is None:
            bias = tensors["bias"]
        else:
            weight, bias = _folded(weight, tensors, self.eps)
        self.weight, self.bias = separable.padded_weights(weight.to(dtype), bias.to(dtype))

    def infer(self, x: Tensor) -> Spec:
        return (self.form.steps(len(x)), self.form.outputs), x.dtype

    @property
    def native(self) -> bool:
        """Whether the C kernels do it."""
        return self.weight is not None and separable.serves(self.weight)

    def scratch_bytes(self, x: Tensor) -> int:
        return separable.scratch_bytes(self.form, len(x)) if self.native else self._scratch(x)

    def workspace_bytes(self, x: Tensor) -> int:
        return 0 if self.native else self._workspace(x)

    def steps(self, x: Tensor, out: Tensor, scratch: Tensor | None = None) -> list[Step] | None:
        if not self.native or scratch is None:
            return None
        assert self.weight is not None
        assert self.bias is not None
        return separable.separable(self.form, x, self.depthwise, self.weight, self.bias, out, scratch)

    def run(self, x: Tensor, out: Tensor | None = None, scratch: Tensor | None = None) -> Tensor:
        if out is None:
            out = x.new_empty(self.infer(x)[0])
        if scratch is None:
            scratch = torch.empty(self.scratch_bytes(x), dtype=torch.uint8, device=x.device)
        if not steps.run(self.steps(x, out, scratch)):
            self._by_torch(x, out, scratch)
        return out

    def _scratch(self, x: Tensor) -> int:
        return 0

    def _workspace(self, x: Tensor) -> int:
        return 0

    def _by_torch(self, x: Tensor, out: Tensor, scratch: Tensor) -> None:
        assert self.weight is not None
        assert self.bias is not None
        torch.addmm(self.bias, x[:: self.form.stride], self.weight, out=out)


class SeparableConv(Pointwise):
    """A convolution of each channel, one across channels, a normalisation, and maybe a rectifier.

    [time, inputs] -> [(time - 1) // stride + 1, outputs]; as many zeros stand around the clip as keep its length. A
    tile of rows is convolved and projected before the next, so the result may take the place of x: what the next
    tile still needs of x has been set aside.
    """

    in_place = (0,)

    def __init__(
        self, inputs: int, outputs: int, kernel: int, stride: int, dilation: int, eps: float, relu: bool
    ) -> None:
        super().__init__(inputs, outputs, stride, eps)
        self.form = Form(inputs, outputs, kernel, stride, dilation, rectified=relu)
        span = dilation * (kernel - 1) + 1  # rows of x that one row of the result depends on
        self.before = span // 2  # of them before its own
        self.window = (TILE - 1) * stride + span  # and a whole tile
        self.shared = max(span - stride, 0)  # of them at the end are at the beginning of the next tile's
        self.shrinks = outputs <= inputs  # then a row of the result ends where x has been read

    def shapes(self) -> dict[str, tuple[int, ...]]:
        inputs, outputs, kernel, *_ = self.form
        depthwise, pointwise = (inputs, 1, kernel), (outputs, inputs, 1)
        return {"depthwise.weight": depthwise, "pointwise.weight": pointwise, **_norm_shapes(outputs)}

    def fill(self, tensors: dict[str, Tensor], dtype: torch.dtype) -> None:
        super().fill({"weight": tensors["pointwise.weight"], **tensors}, dtype)
        self.depthwise = separable.padded_kernel(tensors["depthwise.weight"][:, 0].to(dtype))

    def _scratch(self, x: Tensor) -> int:
        """The window, which is the rows of x that a tile depends on, and a group of convolved tiles."""
        return (self.window + GROUP * TILE) * self.form.inputs * x.dtype.itemsize

    def _workspace(self, x: Tensor) -> int:
        """The convolved tile, what of a window is moved to the front of the next, and the kernel as torch wants it."""
        return (TILE + self.shared + self.form.kernel) * self.form.inputs * x.dtype.itemsize

    def _by_torch(self, x: Tensor, out: Tensor, scratch: Tensor) -> None:
        assert self.weight is not None
        assert self.bias is not None
        assert self.depthwise is not None
        inputs = self.form.inputs
        window, rows = scratch.view(x.dtype).view(-1, inputs).split([self.window, GROUP * TILE])
        kernel = self.depthwise.t().reshape(inputs, 1, 1, -1)
        for start in range(0, len(out), GROUP * TILE):
            tile = out[start : start + GROUP * TILE]
            with one_thread():
                for first in range(0, len(tile), TILE):
                    self._convolve(x, start + first, kernel, window, rows[first : first + TILE])
            torch.addmm(self.bias, rows[: len(tile)], self.weight, out=tile)
            if self.form.rectified:
                tile.relu_()

    def _convolve(self, x: Tensor, start: int, kernel: Tensor, window: Tensor, rows: Tensor) -> None:
        """The rows of the depthwise convolution from `start` on, of which the last call made those before."""
        inputs, stride, dilation = self.form.inputs, self.form.stride, self.form.dilation
        kept = self.shared if start else 0
        if kept:
            window[:kept] = window[-kept:].clone()
        self._read(x, start * stride - self.before + kept, window[kept:])
        image = window.view(1, 1, self.window, inputs).permute(0, 3, 1, 2)  # channels last
        made = F.conv2d(image, kernel, stride=(1, stride), dilation=(1, dilation), groups=inputs)
        rows.copy_(made.permute(0, 2, 3, 1).view(TILE, inputs))

    @staticmethod
    def _read(x: Tensor, first: int, window: Tensor) -> None:
        """Rows of x from `first` on, zeros where there are none."""
        low, high = max(first, 0), min(first + len(window), len(x))
        high = max(low, high)
        window[: low - first].zero_()
        window[low - first : high - first] = x[low:high]
        window[high - first :].zero_()


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
        with one_thread():
            mean = x.mean(0, dtype=torch.float32)
            gate = torch.sigmoid(self.excite @ torch.relu(self.squeeze @ mean)).to(x.dtype)
        return gate if out is None else out.copy_(gate)


def _rejoin(x: Tensor, gate: Tensor | None, around: Tensor | None, *, out: Tensor | None = None) -> Tensor:
    """max(0, x * gate + around): x and `around` [time, channels], `gate` [channels]."""
    with one_thread():
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
