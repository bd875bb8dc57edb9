"""The packed formats of ggml, expanded by plain torch operations: the definition that the C kernels meet bit for bit.

A row of a packed weight is a whole number of blocks; a block holds 32 or 256 values as small integers with
their scales. Every format here is one formula, `value = scale * q + offset`, evaluated in float32 in that
order, so the result is bit for bit that of ggml's reference code. The formats differ only in where the bits
of `q` lie: each has one function that gathers them, after the block structures in ggml-common.h.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from torch import Tensor

from .native import expand

T = GGMLQuantizationType

# Values expanded at once: enough to drown the cost of a call, few enough that the passes find them in cache.
_CPU_CHUNK, _DEVICE_CHUNK = 1 << 20, 1 << 24


class Fields(NamedTuple):
    """One format's blocks taken apart: `value = scale * q + offset`.

    q: uint8 or int8, contiguous, [rows, blocks, values in a block].
    scale, offset: float32 [rows, blocks, groups]; a group is a run of values that share them.
    """

    q: Tensor
    scale: Tensor
    offset: Tensor | None = None


def dequantize(raw: Tensor, type: GGMLQuantizationType, dtype: torch.dtype = torch.float32,
               out: Tensor | None = None) -> Tensor:
    """Expand packed rows.

    raw: uint8 [rows, row_bytes], each row contiguous and starting at an even address.
    out: [rows, cols] to write into, on raw's device; its dtype then takes the place of `dtype`.
    Returns [rows, cols]: the float32 values, rounded to nearest even in any narrower dtype. The only other
    memory taken is for a chunk of rows, and the kernels take none. Raises ValueError for a type, shape or out
    that does not fit.
    """
    if type not in UNPACK:
        raise ValueError(f"{type.name} is not a packed type that can be expanded")
    values, size = GGML_QUANT_SIZES[type]
    rows, row_bytes = raw.shape
    blocks, rest = divmod(row_bytes, size)
    if raw.dtype != torch.uint8 or rest:
        raise ValueError(f"{type.name} rows are uint8 in blocks of {size} bytes, "
                         f"not {raw.dtype} of {row_bytes}")
    cols = blocks * values
    if out is None:
        out = torch.empty(rows, cols, dtype=dtype, device=raw.device)
    elif out.shape != (rows, cols):
        raise ValueError(f"out is {tuple(out.shape)}, not {(rows, cols)}")
    if expand(raw, type, out):
        return out
    step = max(1, (_CPU_CHUNK if raw.device.type == "cpu" else _DEVICE_CHUNK) // max(cols, 1))
    in_place = out.dtype == torch.float32 and out.is_contiguous()
    for first in range(0, rows if cols else 0, step):
        part, target = raw[first : first + step], out[first : first + step]
        exact = target if in_place else torch.empty(target.shape, dtype=torch.float32, device=raw.device)
        fields = UNPACK[type](part.view(-1, blocks, size))
        grouped = exact.view(*fields.scale.shape, -1)
        grouped.copy_(fields.q.view(grouped.shape)).mul_(fields.scale.unsqueeze(-1))
        if fields.offset is not None:
            grouped.add_(fields.offset.unsqueeze(-1))
        if not in_place:
            target.copy_(exact)
    return out


def _half(blocks: Tensor, at: int) -> Tensor:
    """The float16 at byte `at` of each block, as float32 [rows, blocks, 1]."""
    return blocks[..., at : at + 2].view(torch.float16).contiguous().float()


def _nibbles(blocks: Tensor, at: int, groups: int, size: int) -> Tensor:
    """`groups` runs of `size` bytes from byte `at`: the low halves of a run, then its high halves.

    uint8 [rows, blocks, groups * 2 * size], contiguous. Masking whole blocks and copying from them is faster
    than masking the short runs.
    """
    q = blocks.new_empty(*blocks.shape[:2], groups, 2, size)
    for half, bits in enumerate((blocks & 15, blocks >> 4)):
        q[:, :, :, half].copy_(bits[..., at : at + groups * size].unflatten(-1, (groups, size)))
    return q.flatten(2)


def _move(bits: Tensor, mask: int, source: int, target: int) -> Tensor:
    """The field `mask` at bit `source` of each byte, moved to bit `target`."""
    field = bits & (mask << source)
    return field << (target - source) if target >= source else field >> (source - target)


def _pairs(blocks: Tensor, at: int) -> Tensor:
    """64 bytes of 2-bit fields from byte `at`: two runs of 32 bytes, a run holding four planes of 32 values.

    uint8 [rows, blocks, 2, 4, 32], contiguous.
    """
    packed = blocks[..., at : at + 64].contiguous()
    q = blocks.new_empty(*blocks.shape[:2], 2, 4, 32)
    for plane in range(4):
        q[:, :, :, plane].copy_(_move(packed, 3, 2 * plane, 0).unflatten(-1, (2, 32)))
    return q


def _fifth_bits(blocks: Tensor, at: int) -> Tensor:
    """32 bits from byte `at`, bit j spread to bit 4 of byte j: uint8 [rows, blocks, 32].

    A byte is repeated into the eight bytes of an int64 and each copy keeps its own bit; adding 127 carries
    any kept bit to bit 7.
    """
    spread = blocks[..., at : at + 4].to(torch.int64) * 0x0101010101010101
    spread &= 0x8040201008040201 - (1 << 64)
    spread += 0x7F7F7F7F7F7F7F7F
    return ((spread >> 3) & 0x1010101010101010).view(torch.uint8)


def _scales_and_mins(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """The head of Q4_K and Q5_K: two float16, then eight 6-bit scales and eight 6-bit minima in 12 bytes.

    Bytes 0-3 and 4-7 hold the first four scales and minima in their low six bits; their top two bits complete
    the last four, whose low and high nibbles are bytes 8-11. float32 [rows, blocks, 8] each.
    """
    scale, minimum, rest = blocks[..., 4:16].unflatten(-1, (3, 4)).unbind(-2)
    scales = torch.cat((scale & 63, (rest & 15) | _move(scale, 3, 6, 4)), -1)
    minima = torch.cat((minimum & 63, (rest >> 4) | _move(minimum, 3, 6, 4)), -1)
    return _half(blocks, 0) * scales.float(), _half(blocks, 2) * minima.float()


def _q4_0(b: Tensor) -> Fields:
    return Fields(_nibbles(b, 2, 1, 16).view(torch.int8).sub_(8), _half(b, 0))


def _q4_1(b: Tensor) -> Fields:
    return Fields(_nibbles(b, 4, 1, 16), _half(b, 0), _half(b, 2))


def _q5_0(b: Tensor) -> Fields:
    q = _nibbles(b, 6, 1, 16).bitwise_or_(_fifth_bits(b, 2))
    return Fields(q.view(torch.int8).sub_(16), _half(b, 0))


def _q5_1(b: Tensor) -> Fields:
    return Fields(_nibbles(b, 8, 1, 16).bitwise_or_(_fifth_bits(b, 4)), _half(b, 0), _half(b, 2))


def _q8_0(b: Tensor) -> Fields:
    return Fields(b[..., 2:].view(torch.int8), _half(b, 0))


def _q2_k(b: Tensor) -> Fields:
    scale = _half(b, 80) * (b[..., :16] & 15).float()
    minimum = _half(b, 82) * (b[..., :16] >> 4).float()
    return Fields(_pairs(b, 16).flatten(2), scale, -minimum)


def _q3_k(b: Tensor) -> Fields:
    q = _pairs(b, 32).view(*b.shape[:2], 8, 32)
    top = b[..., :32].contiguous()
    for plane in range(8):
        q[:, :, plane].bitwise_or_(_move(top, 1, plane, 2))
    # Sixteen 6-bit scales: the low four bits are the nibbles of bytes 0-7, the top two the fields of bytes
    # 8-11.
    low, high = b[..., 96:104], b[..., 104:108]
    scale = torch.cat((low & 15, low >> 4), -1) | torch.cat([_move(high, 3, 2 * i, 4) for i in range(4)], -1)
    return Fields(q.view(torch.int8).sub_(4).flatten(2), _half(b, 108) * (scale.float() - 32))


def _q4_k(b: Tensor) -> Fields:
    scale, minimum = _scales_and_mins(b)
    return Fields(_nibbles(b, 16, 4, 32), scale, -minimum)


def _q5_k(b: Tensor) -> Fields:
    scale, minimum = _scales_and_mins(b)
    q = _nibbles(b, 48, 4, 32).view(*b.shape[:2], 8, 32)
    top = b[..., 16:48].contiguous()
    for plane in range(8):
        q[:, :, plane].bitwise_or_(_move(top, 1, plane, 4))
    return Fields(q.flatten(2), scale, -minimum)


def _q6_k(b: Tensor) -> Fields:
    q = _nibbles(b, 0, 2, 64).view(*b.shape[:2], 2, 4, 32)
    top = b[..., 128:192].contiguous()
    for plane in range(4):
        q[:, :, :, plane].bitwise_or_(_move(top, 3, 2 * plane, 4).unflatten(-1, (2, 32)))
    scale = b[..., 192:208].view(torch.int8).float()
    return Fields(q.view(torch.int8).sub_(32).flatten(2), _half(b, 208) * scale)


UNPACK: dict[GGMLQuantizationType, Callable[[Tensor], Fields]] = {
    T.Q4_0: _q4_0, T.Q4_1: _q4_1, T.Q5_0: _q5_0, T.Q5_1: _q5_1, T.Q8_0: _q8_0,
    T.Q2_K: _q2_k, T.Q3_K: _q3_k, T.Q4_K: _q4_k, T.Q5_K: _q5_k, T.Q6_K: _q6_k,
}
