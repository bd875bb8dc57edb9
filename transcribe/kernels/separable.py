"""Separable convolutions over time as a step for the C kernels (csrc/separable.h): float32, any number of rows.

Each channel's convolution and the product across channels are done tile by tile, so nothing between them is held whole.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from . import native
from .steps import SEPARABLE, Step

WIDE, NARROW, TILES = 48, 24, 8
"""Rows of a tile: the fewer if there would not be so many of them."""


class Form(NamedTuple):
    """Rows of `inputs` channels, every `stride`-th of them convolved, made rows of `outputs`."""

    inputs: int
    outputs: int
    kernel: int = 1
    stride: int = 1
    dilation: int = 1
    rectified: bool = False

    def steps(self, rows: int) -> int:
        """Rows of the result."""
        return (rows - 1) // self.stride + 1

    def tile(self, rows: int) -> int:
        """A multiple of 12 rows, and not less than stands on either side of x: then only neighbours read them."""
        least = -(-(self.dilation * (self.kernel - 1) // 2) // 12) * 12
        return max(WIDE if self.steps(rows) > TILES * WIDE else NARROW, least)

    def share(self, rows: int) -> int:
        """Values of scratch to a thread: two tiles, and of 16 channels the rows that one depends on."""
        tile = self.tile(rows)
        window = (tile - 1) * self.stride + self.dilation * (self.kernel - 1) + 1
        return 2 * -(-self.inputs // 16) * 16 * tile + 16 * window


def padded_weights(weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """`weight` [outputs, inputs] and `bias` [outputs] as the kernels read them: views, [inputs, outputs] and [outputs].

    Zeros lie behind the outputs. Rows are an odd number of cache lines apart, so that the same few outputs of many rows
    do not contend for the same few places in the cache.
    """
    outputs, inputs = weight.shape
    width = -(-outputs // 32) * 32
    rows, ends = weight.new_zeros(inputs, width + 16), bias.new_zeros(width)
    rows[:, :outputs], ends[:outputs] = weight.t(), bias
    return rows[:, :outputs], ends[:outputs]


def padded_kernel(depthwise: Tensor) -> Tensor:
    """`depthwise` [inputs, kernel] as the kernels read it: a view [kernel, inputs], zeros behind the inputs."""
    inputs, kernel = depthwise.shape
    rows = depthwise.new_zeros(kernel, -(-inputs // 16) * 16)
    rows[:, :inputs] = depthwise.t()
    return rows[:, :inputs]


def serves(weight: Tensor) -> bool:
    """Whether the kernels do it with this weight."""
    return weight.is_cpu and weight.dtype == torch.float32 and native.library() is not None


def scratch_bytes(form: Form, rows: int) -> int:
    """Bytes of scratch for all threads to have a part in [rows, inputs]."""
    threads = min(torch.get_num_threads(), -(-form.steps(rows) // form.tile(rows)))
    return 4 * threads * form.share(rows)


def separable(
    form: Form, x: Tensor, depthwise: Tensor | None, weight: Tensor, bias: Tensor, out: Tensor, scratch: Tensor
) -> list[Step]:
    """x [rows, inputs] convolved and projected into `out` [form.steps(rows), outputs], which may lie where x does.

    Without `depthwise` rows are only projected. Everything is contiguous but what is padded as above. As many threads
    have a part in it as there is scratch for.
    """
    tile, share = form.tile(len(x)), form.share(len(x))
    inputs, outputs, kernel, stride, dilation, rectified = form
    return [
        Step(SEPARABLE, -(-form.steps(len(x)) // tile), (
            x, depthwise, weight, bias, out, scratch, len(x), inputs, outputs, weight.stride(0), kernel, stride,
            dilation, int(rectified), tile, share, scratch.nbytes // (4 * share),
        ))
    ]  # fmt: skip
