"""What products with packed weights reach of the machine's limits, and how exact they are.

    python scripts/kernel_speed.py [--threads N] [--formats Q8_0 Q4_K ...] [--shape OUTPUTS INPUTS] [--json FILE]

The limits, measured in the same run: memory is read by torch's sum over 1 GiB of int64 (numpy's sum, and the maximum in
place of the sum, were no faster; from a cache the same sum does 130 GB/s); matrix speed is `torch.mm` of two squares.

Each format is random blocks with scales near 0.01, in as many copies as 1 GiB holds, which are gone through in turn: a
product finds its weight outside the caches. Memory serves others too: products with one row take turns with a sum over
the bytes of another copy, and the share is of that. Medians are printed.

With few rows of activations the kernels expand the weight as they multiply; with many it is expanded by tiles and
multiplied by torch. Both are measured from 8 rows up, whatever `packed_linear` would choose; printed is up to how
many rows the kernels are faster. Errors are the norm of the difference to a float64 product of the dequantised
weight with the same activations, relative to the norm of that product.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import accumulate, cycle
from math import log
from pathlib import Path
from typing import Any

import transcribe  # noqa: F401  its settings for threads come before torch

import torch  # isort: skip
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from speed import busy
from torch import Tensor

from transcribe import kernels
from transcribe.kernels import linear
from transcribe.weights import PackedTensor

T = GGMLQuantizationType
PLAIN = {T.F16: torch.float16, T.BF16: torch.bfloat16}
HALVES = {
    T.Q8_0: [0], T.Q4_0: [0], T.Q4_1: [0, 2], T.Q5_0: [0], T.Q5_1: [0, 2], T.Q4_K: [0, 2], T.Q5_K: [0, 2],
    T.Q6_K: [208], T.F16: [], T.BF16: [], T.Q2_K: [80, 82], T.Q3_K: [108],
}  # fmt: skip
"""The formats, and where their blocks have float16 numbers."""

OUTSIDE_CACHES = 1 << 30  # bytes
FEW = (1, 2, 4, 8, 16)
MANY = (8, 12, *range(16, 33), 64, 128, 256)
PRINTED = (17, 24, 32, 64, 128, 256)
DTYPES = (torch.bfloat16, torch.float32)


def random_weight(kind: T, outputs: int, inputs: int) -> Tensor:
    """The bytes of a weight, uint8 [outputs, bytes of a row]."""
    generator = torch.Generator().manual_seed(int(kind))
    if kind in PLAIN:
        return torch.randn(outputs, inputs, generator=generator).mul_(0.02).to(PLAIN[kind]).view(torch.uint8)
    values, size = GGML_QUANT_SIZES[kind]
    if inputs % values:
        raise SystemExit(f"{kind.name}: the inputs of a weight are a multiple of {values}, not {inputs}")
    blocks = torch.randint(256, (outputs * inputs // values, size), dtype=torch.uint8, generator=generator)
    for at in HALVES[kind]:
        scales = torch.randn(len(blocks), 1, generator=generator).mul_(0.01).half()
        blocks[:, at : at + 2] = scales.view(torch.uint8)
    return blocks.view(outputs, -1)


def as_weight(raw: Tensor, kind: T) -> Any:
    """Bytes [outputs, bytes of a row] as what `packed_linear` takes, without a copy."""
    if kind in PLAIN:
        return raw.view(PLAIN[kind])
    values, size = GGML_QUANT_SIZES[kind]
    return PackedTensor(kind, (len(raw), raw.shape[1] // size * values), raw)


def copies(raw: Tensor, memory: Tensor) -> list[Tensor]:
    """`memory`, uint8 [n], filled with copies of `raw`, each from a multiple of 64 bytes."""
    size = raw.numel()
    starts = range(0, len(memory) - size + 1, size + -size % 64)
    parts = [memory[at : at + size].view(raw.shape) for at in starts]
    for part in parts:
        part.copy_(raw)
    return parts


def seconds(*calls: Callable[[], object], least: float = 0.1) -> list[float]:
    """Each call's median time. They take turns, five each and as many more as fit in `least` seconds a call."""
    took: list[list[float]] = [[] for _ in calls]
    for call in calls:
        call()
    while len(took[0]) < 5 or sum(map(sum, took)) < least * len(calls):
        for call, times in zip(calls, took, strict=True):
            began = time.perf_counter()
            call()
            times.append(time.perf_counter() - began)
    return [statistics.median(times) for times in took]


@contextmanager
def kernels_up_to(rows: int) -> Iterator[None]:
    """Let `packed_linear` use the kernels up to so many rows of activations."""
    before = linear.FEW_ROWS
    linear.FEW_ROWS = rows
    try:
        yield
    finally:
        linear.FEW_ROWS = before


def product_time(
    weights: Iterator[Any], rows: int, dtype: torch.dtype, by_kernels: bool, *beside: Callable[[], object]
) -> list[float]:
    """Seconds for a product of so many rows with the next of `weights`, and for the calls it takes turns with."""
    weight = next(weights)
    outputs, inputs = weight.shape
    x, out = torch.randn(rows, inputs).to(dtype), torch.empty(rows, outputs, dtype=dtype)
    with kernels_up_to(rows if by_kernels else 0):
        scratch = torch.empty(linear.scratch_bytes(weight, dtype, rows), dtype=torch.uint8)
        return seconds(lambda: linear.packed_linear(x, next(weights), None, out, scratch), *beside)


def read(data: Tensor) -> object:
    """Every byte of `data` but the last few."""
    return data.view(-1)[: data.numel() // 8 * 8].view(torch.int64).sum()


def limits(memory: Tensor, threads: int, side: int = 2048) -> dict[str, float]:
    """GB/s of memory and GFLOP/s of torch's matrix product."""
    found: dict[str, float] = {}
    for count in sorted({1, threads}):
        torch.set_num_threads(count)
        found[f"memory, GB/s, threads: {count}"] = len(memory) / seconds(partial(read, memory))[0] / 1e9
        for dtype in DTYPES:
            a, b = torch.randn(2, side, side).to(dtype)
            took = seconds(partial(torch.mm, a, b.t()))
            found[f"{_name(dtype)} product, GFLOP/s, threads: {count}"] = 2 * side**3 / took[0] / 1e9
    return found


def error(weight: Any, dtype: torch.dtype, by_kernels: bool, rows: int = 16) -> float:
    """The norm of a product's error, relative to the product in float64."""
    outputs, inputs = weight.shape
    x = torch.randn(rows, inputs, generator=torch.Generator().manual_seed(1)).to(dtype)
    values = weight if isinstance(weight, Tensor) else weight.dequantize()
    exact = x.double() @ values.double().t()
    with kernels_up_to(rows if by_kernels else 0):
        found = linear.packed_linear(x, weight, None, torch.empty(rows, outputs, dtype=dtype))
    return float((found.double() - exact).norm() / exact.norm())


def crossover(first: dict[int, float], second: dict[int, float]) -> int:
    """The rows up to which `first` should serve, so that on the whole least is lost; 0 if it never should.

    Times by rows. Of all limits, the one with the least sum of logarithms of times, which one noisy time does not move.
    """
    both = sorted(first.keys() & second.keys())
    gains = list(accumulate((log(second[rows] / first[rows]) for rows in both), initial=0.0))
    return [0, *both][gains.index(max(gains))]


def measure(kind: T, shape: tuple[int, int], memory: Tensor) -> dict[str, Any]:
    """All figures of a format. Times are seconds by rows of activations."""
    raw = random_weight(kind, *shape)
    parts = copies(raw, memory)
    weights = cycle([as_weight(part, kind) for part in parts])
    others = cycle(parts[len(parts) // 2 :] + parts[: len(parts) // 2])
    found: dict[str, Any] = {"format": kind.name, "bytes": raw.numel(), "reading": {}, "kernels": {}, "expanded": {}}
    for dtype in DTYPES:
        one, reading = product_time(weights, 1, dtype, True, lambda: read(next(others)))
        few = {rows: product_time(weights, rows, dtype, True)[0] for rows in sorted({*FEW[1:], *MANY})}
        many = {rows: product_time(weights, rows, dtype, False)[0] for rows in MANY}
        for path, times in (("reading", reading), ("kernels", {1: one, **few}), ("expanded", many)):
            found[path][_name(dtype)] = times
    found["errors"] = {
        f"{_name(dtype)}, {'kernels' if by_kernels else 'expanded'}": error(as_weight(raw, kind), dtype, by_kernels)
        for dtype in DTYPES
        for by_kernels in (True, False)
    }
    return found


def report(found: list[dict[str, Any]], shape: tuple[int, int]) -> str:
    flop = 2 * shape[0] * shape[1] / 1e9
    bandwidth, speed, large, exact = [], [], [], []
    for row in found:
        for dtype, few in row["kernels"].items():
            name, many = [row["format"], dtype], row["expanded"][dtype]
            rates = [row["bytes"] / took / 1e9 for took in (row["reading"][dtype], *map(few.get, FEW))]
            bandwidth.append([*name, f"{100 * rates[1] / rates[0]:.0f} %", *(f"{rate:.1f}" for rate in rates)])
            speed.append([*name, *(f"{flop * rows / few[rows]:.0f}" for rows in FEW + PRINTED)])
            speeds = [f"{flop * rows / many[rows]:.0f}" for rows in PRINTED]
            large.append([*name, str(crossover(few, many)), *speeds])
        exact.append([row["format"], *(f"{value:.1e}" for value in row["errors"].values())])
    parts = [
        "Kernels, GB/s of packed weight, by rows of activations",
        markdown(["format", "dtype", "share at 1 row", "memory", *map(str, FEW)], bandwidth),
        "Kernels, GFLOP/s, by rows of activations",
        markdown(["format", "dtype", *map(str, FEW + PRINTED)], speed),
        "Expanded and multiplied by torch, GFLOP/s, by rows of activations",
        markdown(["format", "dtype", "kernels are faster up to", *map(str, PRINTED)], large),
        "Relative error against float64",
        markdown(["format", *found[0]["errors"]], exact),
    ]
    return "\n\n".join(parts)


def markdown(heads: list[str], rows: list[list[str]]) -> str:
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (heads, ["---"] * len(heads), *rows))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=min(2, os.cpu_count() or 1))
    parser.add_argument("--formats", nargs="+", choices=[kind.name for kind in HALVES], metavar="FORMAT")
    parser.add_argument("--shape", nargs=2, type=int, default=(6144, 1024), metavar=("OUTPUTS", "INPUTS"),
                        help="of the weight (default: gate and up of a decoder of 0.6B)")  # fmt: skip
    parser.add_argument("--json", type=Path, help="every time by rows of activations, in seconds")
    args = parser.parse_args()
    shape = tuple(args.shape)
    kinds = [kind for kind in HALVES if not args.formats or kind.name in args.formats]
    memory = torch.ones(OUTSIDE_CACHES, dtype=torch.uint8)
    before, began = busy(), time.perf_counter()
    machine = limits(memory, args.threads)  # leaves so many threads in use
    print(f"{kernels.path()} kernels, {args.threads} threads, weights [{shape[0]}, {shape[1]}]\n")
    print(markdown(["limit", ""], [[name, f"{value:.1f}"] for name, value in machine.items()]), flush=True)
    found = [measure(kind, shape, memory) for kind in kinds]
    others = (busy() - before) / (time.perf_counter() - began)
    print("\n" + report(found, shape))
    print(f"\nProcessors busy with other work: {max(0.0, others):.2f}.")
    if args.json:
        args.json.write_text(json.dumps({"kernels": kernels.path(), "threads": args.threads, "shape": shape,
                                         "limits": machine, "formats": found}, indent=1) + "\n")  # fmt: skip


if __name__ == "__main__":
    main()
