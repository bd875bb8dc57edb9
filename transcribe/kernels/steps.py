"""A few rows' operations as steps for the C kernels: what lies between the products of a decoder's layers, and they.

Each function here describes one operation on tensors as `Step`s, or returns None where the kernels do not do it (too
many rows, another device or dtype, a form they do not know); the caller then computes by torch operations. A `Program`
is a list of steps ready to run: all of them in one call, on one team of threads (csrc/steps.h). A row is computed in
the same order of operations whatever else is in the program, so steps together or one by one, or rows together or
alone, give the same bits.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from . import native
from .linear import FEW_ROWS, Weight, data_and_format

(PREPARE, MULTIPLY, ADD, TIMES, SILU, RMS_NORM, LAYER_NORM, ROTARY_HALVES, ROTARY_PAIRS, ATTEND,
 SEPARABLE) = range(11)  # fmt: skip
WORDS, HEADER = 23, 4  # of a step in csrc/steps.h, and of them before its operands
WIDEST_HEAD, MOST_HEADS = 256, 16  # of attention, as in csrc/operands.h


class Lanes(Protocol):
    """Keys and values of sequences."""

    dtype: torch.dtype

    def table(self) -> int:
        """The address of int64 [sequences, 5]: keys, values, length, and strides of rows and groups, in values.

        The length counts a row that is about to be written.
        """
        ...


class Step(NamedTuple):
    """One operation. Operands: numbers, tensors (by address), `Lanes` (by `table()` when it runs), None."""

    operation: int
    units: int
    operands: tuple[Any, ...]


Finder = Callable[[Any], "tuple[int, int] | None"]


class Program:
    """Steps ready to run.

    `late(operand)` is (register, offset in bytes) for an operand that is another one in every run: it is then looked up
    in the registers that `run` is given.
    """

    def __init__(self, steps: Iterable[Step], late: Finder = lambda operand: None) -> None:
        steps = list(steps)
        self.count = len(steps)
        self.words = (ctypes.c_int64 * (self.count * WORDS))()
        self.tensors: list[tuple[int, int, int]] = []
        """(word, register, offset)"""
        self.lanes: list[tuple[int, int]] = []
        self.kept: list[Tensor] = []
        for i, step in enumerate(steps):
            start = i * WORDS
            self.words[start : start + 2] = [step.operation, step.units]
            for word, operand in enumerate(step.operands, start + HEADER):
                self._place(word, operand, late(operand))
        kernels = native.library()
        assert kernels is not None
        self._run = kernels.transcribe_run

    def _place(self, word: int, operand: Any, late: tuple[int, int] | None) -> None:
        if operand is None:
            return
        if isinstance(operand, float):
            self.words[word] = struct.unpack("q", struct.pack("d", operand))[0]
        elif isinstance(operand, int):
            self.words[word] = operand
        elif isinstance(operand, Tensor):
            if late is not None:
                self.tensors.append((word, *late))
            else:
                self.words[word] = operand.data_ptr()
                self.kept.append(operand)
        elif late is not None:
            self.lanes.append((word, late[0]))
        else:
            self.words[word] = operand.table()

    def run(self, registers: list[Any] | None = None) -> None:
        if registers is not None:
            for word, register, offset in self.tensors:
                self.words[word] = registers[register].data_ptr() + offset
            for word, register in self.lanes:
                self.words[word] = registers[register].table()
        self._run(self.words, self.count, torch.get_num_threads())


def run(steps: list[Step] | None) -> bool:
    """Run steps by themselves; False if there are none, for what the kernels do not do."""
    if steps is None:
        return False
    Program(steps).run()
    return True


def known(*tensors: Tensor) -> bool:
    """Whether the kernels may take these: of one dtype they know, values of a row side by side."""
    dtype = tensors[0].dtype
    return (
        dtype in native.BRAIN
        and all(t.is_cpu and t.dtype == dtype and t.stride(-1) == 1 for t in tensors)
        and native.library() is not None
    )


def few(*tensors: Tensor) -> bool:
    """The same of a few rows: what torch does as well, or better, for many."""
    return tensors[0].shape[0] <= FEW_ROWS and known(*tensors)


def linear(
    x: Tensor, weights: tuple[Weight, ...], bias: Tensor | None, out: Tensor, scratch: Tensor | None
) -> list[Step] | None:
    """x [rows, inputs] times the transpose of each weight, side by side in out [rows, outputs]; bias [outputs]."""
    if x.dim() != 2 or not few(x, out):
        return None
    forms = [data_and_format(weight) for weight in weights]
    if not all(native.can_multiply(w, kind, x.dtype) and w.stride(1) == 1 for w, kind in forms):
        return None
    (rows, inputs), brain = x.shape, native.BRAIN[x.dtype]
    prepared = max(native.prepared_bytes(w, kind, x.dtype, rows, inputs) for w, kind in forms)
    if prepared and scratch is None:
        scratch = torch.empty(prepared, dtype=torch.uint8)
    bias = bias if bias is None else bias.float()
    found: list[Step] = []
    start, before = 0, None
    for source, kind in forms:
        outputs, form = source.shape[0], native.format_of(source, kind)
        part = None if bias is None else bias[start : start + outputs]
        product = (
            source, x, part, out[:, start : start + outputs], scratch if prepared else None,
            source.stride(0) * source.itemsize, outputs, inputs, rows, x.stride(0), out.stride(0), form | brain << 32,
        )  # fmt: skip
        if prepared and form != before:
            found.append(Step(PREPARE, 1, product))
        found.append(Step(MULTIPLY, outputs, product))
        start, before = start + outputs, form
    return found


def _pairs(operation: int, a: Tensor, b: Tensor, out: Tensor) -> list[Step] | None:
    if not isinstance(a, Tensor) or not isinstance(b, Tensor) or a.shape != b.shape or not few(a, b, out):
        return None
    if not all(t[0].is_contiguous() for t in (a, b, out)):
        return None
    operands = (a, b, out, a[0].numel(), a.stride(0), b.stride(0), out.stride(0), native.BRAIN[a.dtype])
    return [Step(operation, a.shape[0], operands)]


def add(a: Tensor, b: Tensor, out: Tensor) -> list[Step] | None:
    """a + b of one shape [rows, ...]."""
    return _pairs(ADD, a, b, out)


def times(a: Tensor, b: Tensor, out: Tensor) -> list[Step] | None:
    """a * b of one shape [rows, ...]."""
    return _pairs(TIMES, a, b, out)


def silu(x: Tensor, out: Tensor) -> list[Step] | None:
    """x / (1 + exp(-x)), [rows, ...]."""
    return _pairs(SILU, x, x, out)


def norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, centred: bool, out: Tensor) -> list[Step] | None:
    """Each stretch of x [rows, width] or [rows, heads, width] normalised, about its mean if `centred`."""
    given = (x, weight, out) if bias is None else (x, weight, bias, out)
    takes = few if centred else known  # torch has a kernel for the one
    if x.dim() not in (2, 3) or not out.is_contiguous() or not takes(*given):
        return None
    parts, between = (1, 0) if x.dim() == 2 else (x.shape[1], x.stride(1))
    operands = (x, weight, bias, out, parts, x.shape[-1], x.stride(0), between, native.BRAIN[x.dtype], eps)
    return [Step(LAYER_NORM if centred else RMS_NORM, x.shape[0], operands)]


def rotary(x: Tensor, rotation: Tensor, pairs: bool, out: Tensor) -> list[Step] | None:
    """x [rows, ..., width] turned: by halves, rotation [rows, 2, width / 2], or by complex [rows, pairs] of `pairs`."""
    if not out.is_contiguous() or not known(x, out) or not rotation.is_contiguous() or not rotation.is_cpu:
        return None
    heads = x[0].numel() // x.shape[-1]
    if x.dim() > 2 and not x[0].is_contiguous():
        return None
    if rotation.dtype != (torch.complex64 if pairs else x.dtype) or x.shape[-1] % 2:
        return None
    turned = 2 * rotation.shape[-1]
    operands = (
        x, rotation, out, heads, x.shape[-1], x.stride(0), x.shape[-1], turned, native.BRAIN[x.dtype]
    )  # fmt: skip
    return [Step(ROTARY_PAIRS if pairs else ROTARY_HALVES, x.shape[0], operands)]


def attend(
    q: Tensor, k: Tensor | None, v: Tensor | None, lanes: Lanes, groups: int, out: Tensor
) -> list[Step] | None:
    """Each query of q [rows, heads, width] to the keys and values of its own lane.

    k and v [rows, groups, width], where given, are first written to the lane's last row.
    """
    fresh = () if k is None or v is None else (k, v)
    if not few(q, *fresh, out) or not out.is_contiguous() or not all(t[0].is_contiguous() for t in (q, *fresh)):
        return None
    rows, heads, width = q.shape
    if width > WIDEST_HEAD or heads // groups > MOST_HEADS or lanes.dtype != q.dtype:
        return None
    strides = [t.stride(0) for t in fresh] or [0, 0]
    operands = (
        q, k, v, out, lanes, heads, groups, width, q.stride(0), *strides, int(bool(fresh)), native.BRAIN[q.dtype],
        width**-0.5,
    )  # fmt: skip
    return [Step(ATTEND, rows * groups, operands)]
