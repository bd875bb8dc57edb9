"""Packing into ggml's K formats: blocks of 256 whose sub-blocks have scales that are quantised themselves.

The `gguf` package unpacks these but does not pack them. What is minimised, and over which candidates, is what ggml's
reference quantisers do without an importance matrix (ggml-quants.c, `quantize_row_q4_K_ref` and its like).
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from gguf import GGMLQuantizationType
from torch import Tensor

T = GGMLQuantizationType
BLOCK = 256
GROUP = 128  # blocks a thread packs at once: they stay in its cache, and torch starts no threads of its own for them
TINY = 1e-15  # a sub-block with nothing larger is all zeros
LARGEST_SCALE = 63  # of the six bits for a scale or a minimum


def quantize(values: np.ndarray, type: T) -> np.ndarray:
    """float32 [rows, columns] -> uint8 [rows, row_bytes]. `type` is Q4_K, Q5_K or Q6_K; columns a multiple of 256."""
    blocks = torch.from_numpy(np.ascontiguousarray(values)).view(-1, BLOCK)
    pack = {T.Q4_K: _q4_k, T.Q5_K: _q5_k, T.Q6_K: _q6_k}[type]
    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        return torch.cat(list(pool.map(pack, blocks.split(GROUP)))).view(len(values), -1).numpy()


def _q4_k(x: Tensor) -> Tensor:
    head, levels = _with_minimum(x.view(-1, 8, 32), 15, start=-1.0, steps=20)
    return torch.cat([head, _nibbles(levels)], 1)


def _q5_k(x: Tensor) -> Tensor:
    head, levels = _with_minimum(x.view(-1, 8, 32), 31, start=-0.5, steps=15)
    high = ((levels >> 4) << torch.arange(8, dtype=torch.uint8)[:, None]).sum(1, dtype=torch.uint8)
    return torch.cat([head, high, _nibbles(levels & 15)], 1)


def _nibbles(levels: Tensor) -> Tensor:
    """[blocks, 8, 32] -> [blocks, 128]: the low and the high half of a byte are 32 values apart."""
    return (levels[:, ::2] | levels[:, 1::2] << 4).flatten(1)


def _with_minimum(x: Tensor, top: int, start: float, steps: int) -> tuple[Tensor, Tensor]:
    """A scale and a minimum for each of eight sub-blocks: [blocks, 8, 32] -> head [blocks, 16], levels as `x`."""
    scale, minimum = (found.view(-1, 8) for found in _fit_with_minimum(_columns(x), top, start, steps))
    d, step = _six_bits(scale)
    dmin, offset = _six_bits(minimum)
    width = _rounded(d) * step
    levels = ((x + (_rounded(dmin) * offset)[..., None]) / width[..., None]).nan_to_num_(0.0).round_().clamp_(0, top)
    levels[width == 0] = 0
    step, offset = step.byte(), offset.byte()
    low = torch.cat([step[:, :4] | step[:, 4:] >> 4 << 6, offset[:, :4] | offset[:, 4:] >> 4 << 6], 1)
    head = torch.cat([_half(d), _half(dmin), low, step[:, 4:] & 15 | (offset[:, 4:] & 15) << 4], 1)
    return head, levels.byte()


def _columns(x: Tensor) -> Tensor:
    """[blocks, sub-blocks, values] -> [values, all sub-blocks]: sums down a column are many times faster."""
    return x.flatten(0, 1).t().contiguous()


def _fit_with_minimum(x: Tensor, top: int, start: float, steps: int) -> tuple[Tensor, Tensor]:
    """Scales and minima (as what is subtracted, not below 0) of columns, of least weighted squared error.

    Candidates divide the range above the best minimum so far into `top + start + 0.1 i` steps; each fixes the levels,
    and these a least-squares fit.
    """
    weight = x.square().mean(0).sqrt() + x.abs()
    low, high = x.amin(0).clamp(max=0), x.amax(0)
    weighted_x = weight * x
    sum_w, sum_x = weight.sum(0), weighted_x.sum(0)

    def levels_at(steps: float, minimum: Tensor) -> Tensor:
        rate = (steps / (high - minimum)).nan_to_num_(0.0, 0.0)
        return torch.addcmul(-minimum * rate, x, rate).round_().clamp_(0, top)

    def error(levels: Tensor, scale: Tensor, minimum: Tensor) -> Tensor:
        return torch.addcmul(minimum, levels, scale).sub_(x).square_().mul_(weight).sum(0)

    best_scale, best_minimum = (high - low) / top, low
    best = error(levels_at(top, low), best_scale, best_minimum)
    for i in range(steps + 1):
        levels = levels_at(start + 0.1 * i + top, best_minimum)
        weighted = weight * levels
        sum_l, sum_l2, sum_xl = weighted.sum(0), weighted.mul_(levels).sum(0), (weighted_x * levels).sum(0)
        determinant = sum_w * sum_l2 - sum_l * sum_l
        scale = (sum_w * sum_xl - sum_x * sum_l) / determinant
        minimum = (sum_l2 * sum_x - sum_l * sum_xl) / determinant
        above = minimum > 0
        scale, minimum = torch.where(above, sum_xl / sum_l2, scale), minimum.masked_fill(above, 0.0)
        found = error(levels, scale, minimum)
        better = (determinant > 0) & (found < best)
        best = torch.where(better, found, best)
        best_scale = torch.where(better, scale, best_scale)
        best_minimum = torch.where(better, minimum, best_minimum)
    return best_scale.masked_fill(high == low, 0.0), -best_minimum


def _six_bits(values: Tensor) -> tuple[Tensor, Tensor]:
    """[blocks, 8], none below 0 -> the unit of each block [blocks, 1], and values in units: 0 to 63."""
    largest = values.amax(-1, keepdim=True).clamp(min=0)
    units = (values * (LARGEST_SCALE / largest)).nan_to_num_(0.0, 0.0, 0.0).round_().clamp_(0, LARGEST_SCALE)
    return largest / LARGEST_SCALE, units


def _q6_k(x: Tensor) -> Tensor:
    x = x.view(-1, 16, 16)
    scale = _fit_symmetric(_columns(x), 32).view(-1, 16)
    largest = scale.gather(1, scale.abs().argmax(1, keepdim=True))
    d = (largest / -128).masked_fill(largest.abs() < TINY, 0.0)
    units = (scale * (-128 / largest)).nan_to_num_(0.0, 0.0, 0.0).round_().clamp_(-128, 127).masked_fill(d == 0, 0.0)
    width = _rounded(d) * units
    levels = (x / width[..., None]).nan_to_num_(0.0).round_().clamp_(-32, 31)
    levels[width == 0] = 0
    # Two halves of 128; in each, four quarters of 32 share bytes.
    quarters = (levels + 32).byte().view(-1, 2, 4, 32)
    low = quarters[:, :, :2] & 15 | (quarters[:, :, 2:] & 15) << 4
    high = (quarters >> 4 << (2 * torch.arange(4, dtype=torch.uint8))[:, None]).sum(2, dtype=torch.uint8)
    return torch.cat([low.flatten(1), high.flatten(1), units.to(torch.int8).view(torch.uint8), _half(d)], 1)


def _fit_symmetric(x: Tensor, top: int) -> Tensor:
    """Scales of columns, of least squared error weighted by the square of the value.

    Candidates put the value of largest magnitude at level `-top - 0.1 i`; each fixes the levels, these the scale.
    """
    extreme = x.gather(0, x.abs().argmax(0, keepdim=True))[0]
    weighted_x = x.square().mul_(x)
    weight = x.square()
    best = best_scale = torch.zeros_like(extreme)
    for i in (0, *range(-9, 0), *range(1, 10)):
        levels = (x * (-(top + 0.1 * i) / extreme).nan_to_num_(0.0, 0.0, 0.0)).round_().clamp_(-top, top - 1)
        sum_xl, sum_l2 = (weighted_x * levels).sum(0), levels.square_().mul_(weight).sum(0)
        scale = sum_xl / sum_l2
        better = (sum_l2 > 0) & (scale * sum_xl > best)
        best = torch.where(better, scale * sum_xl, best)
        best_scale = torch.where(better, scale, best_scale)
    return best_scale.masked_fill(extreme.abs() < TINY, 0.0)


def _rounded(d: Tensor) -> Tensor:
    return d.half().float()


def _half(d: Tensor) -> Tensor:
    """[blocks, 1] as the two bytes of a float16."""
    return d.half().view(torch.uint8)
