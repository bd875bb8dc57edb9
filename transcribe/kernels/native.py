"""Products with packed weights and their expansion by the C kernels.

Each function returns False for what the kernels do not do, and the caller then does it by torch operations. Threads are
torch's own: `torch.get_num_threads()` of the pool that its OpenMP library keeps.
"""

from __future__ import annotations

import ctypes
import struct
import sys
from functools import cache
from pathlib import Path

import torch
from gguf import GGMLQuantizationType
from torch import Tensor

from .library import chosen

T = GGMLQuantizationType

FORMATS = {
    kind.value: number
    for number, kind in enumerate(
        (T.F32, T.F16, T.BF16, T.Q4_0, T.Q4_1, T.Q5_0, T.Q5_1, T.Q8_0, T.Q2_K, T.Q3_K, T.Q4_K, T.Q5_K, T.Q6_K)
    )
}
"""The kernels' number of a format: its place in csrc/list.h."""

PLAIN = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
BRAIN = {torch.float32: 0, torch.bfloat16: 1}
"""The dtypes of activations, and whether they are bfloat16."""

_PRODUCT = struct.Struct("5P6q2i")
"""struct product in csrc/kernels.c."""


def library() -> ctypes.CDLL | None:
    """The kernels, or None where torch operations serve."""
    found = chosen().library
    if found is not None:
        _join_threads(found)
    return found


@cache
def _join_threads(kernels: ctypes.CDLL) -> None:
    kernels.transcribe_set_team(_team())


def _team() -> int | None:
    """The address of the function that runs work on torch's threads, looked up in the OpenMP library torch links to.

    A second copy of that library would keep a second pool of threads, that competes with torch's for the processor.
    None if torch has another kind of threads: the kernels then run on the caller's alone.
    """
    suffix = {"darwin": "dylib", "win32": "dll"}.get(sys.platform, "so")
    try:
        linked = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / f"libtorch_cpu.{suffix}"))
        return ctypes.cast(linked.GOMP_parallel, ctypes.c_void_p).value
    except (OSError, AttributeError):
        return None


def can_multiply(data: Tensor, kind: GGMLQuantizationType | None, dtype: torch.dtype) -> bool:
    """Whether `multiply` does this weight with activations of this dtype."""
    known = data.dtype in PLAIN if kind is None else kind.value in FORMATS
    return known and dtype in BRAIN and data.is_cpu and library() is not None


def prepared_bytes(
    data: Tensor, kind: GGMLQuantizationType | None, dtype: torch.dtype, rows: int, inputs: int
) -> int:
    """Bytes of scratch that `multiply` needs for this weight and activations [rows, inputs] of this dtype."""
    kernels = library()
    assert kernels is not None
    return kernels.transcribe_prepared_bytes(format_of(data, kind), BRAIN[dtype], rows, inputs)


def multiply(
    x: Tensor, data: Tensor, kind: GGMLQuantizationType | None, bias: Tensor | None, out: Tensor, scratch: Tensor | None
) -> None:
    """x [rows, inputs] times W [outputs, inputs] transposed, plus bias, into `out` [rows, outputs] of x's dtype.

    Sums are float32, in an order that does not depend on the number of rows. For bfloat16 activations, processors that
    multiply it round W's values to it, as torch does, except where they multiply its packed integers (csrc/lanes.h);
    others multiply in float32. W: `data` itself if `kind` is None, else `data` holds its rows packed in that format.
    `scratch`: uint8, at least `prepared_bytes`.
    """
    kernels = library()
    assert kernels is not None
    rows, inputs = x.shape
    brain = BRAIN[x.dtype]
    if x.stride(1) != 1 and not x.is_contiguous():
        x = x.contiguous()
    if data.stride(1) != 1 and not data.is_contiguous():
        data = data.contiguous()
    if bias is not None and bias.dtype != torch.float32:
        bias = bias.float()
    if brain and scratch is None:
        scratch = torch.empty(prepared_bytes(data, kind, x.dtype, rows, inputs), dtype=torch.uint8)
    kernels.transcribe_multiply(
        _PRODUCT.pack(
            data.data_ptr(), x.data_ptr(), 0 if bias is None else bias.data_ptr(), out.data_ptr(),
            0 if scratch is None else scratch.data_ptr(),
            data.stride(0) * data.itemsize, out.shape[1], inputs, rows, x.stride(0), out.stride(0),
            format_of(data, kind), brain,
        ),
        torch.get_num_threads(),
    )  # fmt: skip


def expand(raw: Tensor, kind: GGMLQuantizationType, out: Tensor) -> bool:
    """Packed rows, uint8 [rows, row_bytes], as values in `out` [rows, inputs]. False if the kernels cannot."""
    kernels = library()
    if kernels is None or not raw.is_cpu or out.dtype not in BRAIN or out.stride(1) != 1 or raw.stride(1) != 1:
        return False
    kernels.transcribe_expand(
        raw.data_ptr(), out.data_ptr(), raw.stride(0), raw.shape[0], out.shape[1], out.stride(0),
        FORMATS[kind.value], BRAIN[out.dtype], torch.get_num_threads(),
    )  # fmt: skip
    return True


def format_of(data: Tensor, kind: GGMLQuantizationType | None) -> int:
    """The kernels' number of a weight's format."""
    return PLAIN[data.dtype] if kind is None else FORMATS[kind.value]
