"""The modules that own weights.

Weights are plain attributes, filled by the loader: a tensor, or a PackedTensor that stays packed as the file has it.
The scheduler treats each of these modules as one operation, so their weights never become constants of a graph.
Activations are rows: [rows, features], where rows are the positions of one sequence or one token of several.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..kernels import steps
from ..kernels.linear import TILE_BYTES, Weight, packed_linear, scratch_bytes
from ..kernels.steps import Step
from .operations import Spec


class Weighted(nn.Module):
    """A module that owns weights: one operation for the scheduler."""

    places = True
    in_place: tuple[int, ...] = ()
    shrinks = False

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The names and shapes of the tensors this module needs, in PyTorch's order."""
        raise NotImplementedError

    def prepare(self) -> None:
        """Bring the weights, just loaded, into the order in which `run` reads them."""

    def weight_form(self) -> tuple[Any, ...]:
        """Types of the weights: they decide scratch sizes, hence the plan."""
        forms: list[Any] = []
        for name in ("weight", "bias"):
            held = getattr(self, name, None)
            for part in held if isinstance(held, tuple) else (held,):
                forms.append(part.dtype if isinstance(part, Tensor) else getattr(part, "type", None))
        return tuple(forms)

    def infer(self, x: Tensor) -> Spec:
        return tuple(x.shape), x.dtype

    def scratch_bytes(self, x: Tensor) -> int:
        return 0

    def workspace_bytes(self, x: Tensor) -> int:
        return 0

    def run(self, x: Tensor, out: Tensor | None = None, scratch: Tensor | None = None) -> Tensor:
        raise NotImplementedError

    def steps(self, x: Tensor, out: Tensor, scratch: Tensor | None = None) -> list[Step] | None:
        return None

    def forward(self, x: Tensor) -> Tensor:
        return self.run(x)


def _with_bias(weight: tuple[int, ...], bias: bool) -> dict[str, tuple[int, ...]]:
    return {"weight": weight, "bias": weight[:1]} if bias else {"weight": weight}


class Linear(Weighted):
    """y = x Wᵀ + b over packed or plain weights: [rows, inputs] -> [rows, outputs]."""

    def __init__(self, inputs: int, outputs: int, bias: bool = True) -> None:
        super().__init__()
        self.inputs, self.outputs, self.has_bias = inputs, outputs, bias
        self.weight: Weight | tuple[Weight, ...] | None = None
        self.bias: Tensor | None = None

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return _with_bias((self.outputs, self.inputs), self.has_bias)

    @property
    def weights(self) -> tuple[Weight, ...]:
        """The weight, or the parts of a fused one that could not be one slice."""
        assert self.weight is not None
        return self.weight if isinstance(self.weight, tuple) else (self.weight,)

    def infer(self, x: Tensor) -> Spec:
        return (*x.shape[:-1], self.outputs), x.dtype

    def scratch_bytes(self, x: Tensor) -> int:
        return max(scratch_bytes(part, x.dtype, x.shape[0]) for part in self.weights)

    def steps(self, x: Tensor, out: Tensor, scratch: Tensor | None = None) -> list[Step] | None:
        return steps.linear(x, self.weights, self.bias, out, scratch)

    def run(self, x: Tensor, out: Tensor | None = None, scratch: Tensor | None = None) -> Tensor:
        if out is None:
            out = x.new_empty(*x.shape[:-1], self.outputs)
        if len(self.weights) == 1:
            return packed_linear(x, self.weights[0], self.bias, out, scratch)
        start = 0
        for part in self.weights:
            stop = start + part.shape[0]
            bias = None if self.bias is None else self.bias[start:stop]
            packed_linear(x, part, bias, out[..., start:stop], scratch)
            start = stop
        return out


class FusedLinear(Linear):
    """Several projections of one input as one: their weights lie end to end, in the file or after the loader's copy.

    `parts` maps each projection's name, beside this module in the checkpoint, to its number of outputs; `kind` is
    what the loader's summary calls them ("gate+up", "q/k/v"). Without `copies`, weights that are not one slice of the
    file stay apart and are multiplied one by one.
    """

    def __init__(
        self, inputs: int, parts: dict[str, int], kind: str, bias: bool = False, copies: bool = True
    ) -> None:
        super().__init__(inputs, sum(parts.values()), bias)
        self.parts, self.kind, self.copies = parts, kind, copies


class Embedding(Weighted):
    """Rows of a packed or plain table: int64 [rows] -> [rows, width] in the compute dtype."""

    def __init__(self, count: int, width: int, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.count, self.width, self.dtype = count, width, dtype
        self.weight: Weight | None = None

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {"weight": (self.count, self.width)}

    def infer(self, x: Tensor) -> Spec:
        return (*x.shape, self.width), self.dtype

    def run(self, x: Tensor, out: Tensor | None = None, scratch: Tensor | None = None) -> Tensor:
        if out is None:
            out = torch.empty(*x.shape, self.width, dtype=self.dtype, device=x.device)
        if isinstance(self.weight, Tensor):
            return out.copy_(self.weight.index_select(0, x))
        assert self.weight is not None
        return self.weight.select_rows(x).dequantize(self.dtype, slice(None), out)


class LayerNorm(Weighted):
    """Layer normalisation over the last dimension, Ba et al. 2016."""

    places = False  # torch has no kernel that writes in place; its result is freed at its last use

    def __init__(self, width: int, eps: float = 1e-5, bias: bool = True) -> None:
        super().__init__()
        self.width, self.eps, self.has_bias = width, eps, bias
        self.weight: Tensor | None = None
        self.bias: Tensor | None = None

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return _with_bias((self.width,), self.has_bias)

    def workspace_bytes(self, x: Tensor) -> int:
        return 2 * 4 * x.shape[0]  # mean and reciprocal deviation of each row

    def steps(self, x: Tensor, out: Tensor, scratch: Tensor | None = None) -> list[Step] | None:
        assert self.weight is not None
        return steps.norm(x, self.weight, self.bias, self.eps, True, out)

    def run(self, x: Tensor, out: Tensor | None = None, scratch: Tensor | None = None) -> Tensor:
        if steps.few(x):
            place = torch.empty_like(x, memory_format=torch.contiguous_format)
            if steps.run(self.steps(x, place)):
                return place
        return F.layer_norm(x, (self.width,), self.weight, self.bias, self.eps)


class RMSNorm(Weighted):
    """x / rms(x) times a gain, over the last dimension (Zhang and Sennrich 2019). The mean square is float32's."""

    in_place = (0,)

    def __init__(self, width: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.width, self.eps = width, eps
        self.weight: Tensor | None = None

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {"weight": (self.width,)}

    def workspace_bytes(self, x: Tensor) -> int:
        return 4 * x.numel() // self.width

    def steps(self, x: Tensor, out: Tensor, scratch: Tensor | None = None) -> list[Step] | None:
        assert self.weight is not None
        return steps.norm(x, self.weight, None, self.eps, False, out)

    def run(self, x: Tensor, out: Tensor | None = None, scratch: Tensor | None = None) -> Tensor:
        assert self.weight is not None
        if out is None:
            out = torch.empty_like(x, memory_format=torch.contiguous_format)
        if steps.run(self.steps(x, out)):
            return out
        scale = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
        scale.square_().div_(self.width).add_(self.eps).rsqrt_()
        return torch.mul(x, scale, out=out).mul_(self.weight)


class GroupNorm(Weighted):
    """Normalisation over all positions and channels at once (one group, Wu and He 2018): [time, channels]."""

    in_place = (0,)

    def __init__(self, channels: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.channels, self.eps = channels, eps
        self.weight: Tensor | None = None
        self.bias: Tensor | None = None

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {"weight": (self.channels,), "bias": (self.channels,)}

    def run(self, x: Tensor, out: Tensor | None = None, scratch: Tensor | None = None) -> Tensor:
        assert self.weight is not None
        assert self.bias is not None
        variance, mean = torch.var_mean(x, correction=0)
        scale = self.weight * torch.rsqrt(variance + self.eps)
        return torch.addcmul(self.bias - mean * scale, x, scale, out=out)


class StridedConv(Weighted):
    """A convolution without padding over time, [time, inputs] -> [(time - kernel) // stride + 1, outputs].

    Frames of `stride` steps are rows of one matrix, so the kernel is ceil(kernel / stride) matrix products over rows
    that do not overlap: nothing is unfolded.
    """

    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int, bias: bool = True) -> None:
        super().__init__()
        self.inputs, self.outputs, self.kernel, self.stride, self.has_bias = inputs, outputs, kernel, stride, bias
        self.weight: Tensor | None = None
        self.bias: Tensor | None = None

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return _with_bias((self.outputs, self.inputs, self.kernel), self.has_bias)

    def prepare(self) -> None:
        assert self.weight is not None
        self.weight = self.weight.transpose(1, 2).flatten(1)  # [outputs, kernel * inputs]

    def infer(self, x: Tensor) -> Spec:
        return ((x.shape[0] - self.kernel) // self.stride + 1, self.outputs), x.dtype

    def run(self, x: Tensor, out: Tensor | None = None, scratch: Tensor | None = None) -> Tensor:
        assert self.weight is not None
        (steps, _), dtype = self.infer(x)
        if out is None:
            out = torch.empty(steps, self.outputs, dtype=dtype, device=x.device)
        frame = self.stride * self.inputs
        for start in range(0, self.kernel * self.inputs, frame):
            taps = self.weight[:, start : start + frame].t()
            rows = x.as_strided((steps, taps.shape[0]), (frame, 1), x.storage_offset() + start)
            if start > 0:
                out.addmm_(rows, taps)
            elif self.bias is not None:
                torch.addmm(self.bias, rows, taps, out=out)
            else:
                torch.mm(rows, taps, out=out)
        return out


class Conv2d(Weighted):
    """A 3x3 convolution with stride 2 and padding 1, channels last.

    [height, width, inputs] -> [(height + 1) // 2, (width + 1) // 2, outputs]: a product with the patches under the
    kernel, unfolded a few lines at a time. torch's own convolution rearranges image and weights at every call: in
    bfloat16 it was measured to take more than twice as long, in float32 a tenth longer.
    """

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.inputs, self.outputs = inputs, outputs
        self.weight: Tensor | None = None
        self.bias: Tensor | None = None

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return _with_bias((self.outputs, self.inputs, 3, 3), True)

    def prepare(self) -> None:
        assert self.weight is not None
        self.weight = self.weight.permute(0, 2, 3, 1).flatten(1)  # [outputs, 3 * 3 * inputs], as patches are

    def infer(self, x: Tensor) -> Spec:
        return ((x.shape[0] + 1) // 2, (x.shape[1] + 1) // 2, self.outputs), x.dtype

    def _tile(self, x: Tensor) -> tuple[int, int]:
        """Lines of the result to a tile of patches, all about the same, and the bytes of each line."""
        lines, columns, _ = self.infer(x)[0]
        nbytes = columns * 9 * self.inputs * x.dtype.itemsize
        return -(-lines // -(-lines * nbytes // TILE_BYTES)), nbytes

    def scratch_bytes(self, x: Tensor) -> int:
        """A tile of patches, and what their product needs."""
        assert self.weight is not None
        lines, nbytes = self._tile(x)
        return lines * nbytes + scratch_bytes(self.weight, x.dtype, lines * self.infer(x)[0][1])

    def workspace_bytes(self, x: Tensor) -> int:
        """The padded lines that a tile is unfolded from."""
        return (2 * self._tile(x)[0] + 1) * (x.shape[1] + 2) * self.inputs * x.dtype.itemsize

    def run(self, x: Tensor, out: Tensor | None = None, scratch: Tensor | None = None) -> Tensor:
        assert self.weight is not None
        assert self.bias is not None
        (lines, columns, _), dtype = shape, _ = self.infer(x)
        if out is None:
            out = torch.empty(shape, dtype=dtype, device=x.device)
        if scratch is None:
            scratch = torch.empty(self.scratch_bytes(x), dtype=torch.uint8, device=x.device)
        most, nbytes = self._tile(x)
        patches = scratch[: most * nbytes].view(dtype).view(most, columns, 3, 3, self.inputs)
        line = (x.shape[1] + 2) * self.inputs
        for start in range(0, lines, most):
            count = min(most, lines - start)
            first, stop = 2 * start - 1, 2 * (start + count)  # of the image's lines
            above, below = max(0, -first), max(0, stop - len(x))
            padded = F.pad(x[max(0, first) : stop], (0, 0, 1, 1, above, below))
            under = padded.as_strided(patches[:count].shape, (2 * line, 2 * self.inputs, line, self.inputs, 1))
            rows = patches[:count].copy_(under).view(count * columns, -1)
            place = out[start : start + count].view(len(rows), -1)
            packed_linear(rows, self.weight, self.bias, place, scratch[most * nbytes :])
        return out
