"""Where the time of a decoded token goes.

    python scripts/token_time.py clip.wav --model M [--batch N] [--threads N] [--steps N] [--json FILE]

The clip is encoded once for each sequence; then the same step is run again and again, with one kind of work after the
other left out of the kernels' programs, the largest first: what the step becomes faster by is what that kind takes.
Bytes of weights are those that one step reads; beside them stands the speed at which torch's sum reads memory, in turns
with the steps.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import transcribe

import torch  # isort: skip
from speed import busy

from transcribe.audio import RATE, open_audio
from transcribe.engine.binding import Group
from transcribe.kernels import steps
from transcribe.options import Request

PARTS = {
    "products": (steps.MULTIPLY,),
    "attention": (steps.ATTEND,),
    "norms": (steps.RMS_NORM, steps.LAYER_NORM),
    "rotary embedding": (steps.ROTARY_HALVES, steps.ROTARY_PAIRS),
    "element by element": (steps.ADD, steps.TIMES, steps.SILU),
    "packing activations": (steps.PREPARE,),
}


def programs(model: Any) -> list[steps.Program]:
    """Those of the steps that have run."""
    bound = [b for plans in model.engine._programs.values() for b in plans.values()]
    return [i.program for b in bound for i in b.instructions if isinstance(i, Group)]


def silence(found: list[steps.Program], operations: tuple[int, ...]) -> int:
    """Leave these operations out; the bytes of weights that they would have read."""
    read = 0
    for program in found:
        for at in range(0, program.count * steps.WORDS, steps.WORDS):
            if program.words[at] in operations:
                if program.words[at] == steps.MULTIPLY:
                    read += program.words[at + steps.HEADER + 5] * program.words[at + steps.HEADER + 6]
                program.words[at : at + 2] = [steps.ADD, 0]
    return read


def measure(model: Any, samples: torch.Tensor, batch: int, count: int) -> dict[str, Any]:
    """Milliseconds of a step and of each part."""
    windows = [model.begin(samples, Request(max_tokens=10_000)) for _ in range(batch)]
    tokens = [5] * batch
    model.engine._programs.clear()  # from here on, the step's only
    memory = torch.ones(1 << 27, dtype=torch.int64)

    def step() -> None:
        model.step(tokens, windows)

    def read() -> None:
        memory.sum()

    with torch.inference_mode():
        _, reading = in_turns(count, step, read)  # not for the step: the sum leaves nothing of it in the caches
        (whole,) = in_turns(count, step)
        found, left, parts, weights = programs(model), whole, {}, 0
        for name, operations in PARTS.items():
            weights += silence(found, operations)
            (now,) = in_turns(count, step)
            parts[name], left = left - now, now
        for program in found:
            program._run = lambda *args: None
        (python,) = in_turns(count, step)
    parts |= {"calls and threads": left - python, "Python": python}
    return {
        "batch": batch,
        "positions": windows[0].cache[0].length,
        "step_ms": whole,
        "parts_ms": parts,
        "weight_bytes": weights,
        "read_gb_s": memory.nbytes / reading / 1e6,
    }


def in_turns(count: int, *calls: Callable[[], None]) -> list[float]:
    """Median milliseconds of each."""
    took: list[list[float]] = [[] for _ in calls]
    for _ in range(count):
        for call, times in zip(calls, took, strict=True):
            began = time.perf_counter()
            call()
            times.append(1e3 * (time.perf_counter() - began))
    return [statistics.median(times) for times in took]


def table(found: dict[str, Any]) -> str:
    gigabytes = found["weight_bytes"] / 1e9
    reached = gigabytes / found["parts_ms"]["products"] * 1e3
    lines = ["| part | ms | share |", "|---|---|---|"]
    lines += [f"| {part} | {ms:.2f} | {ms / found['step_ms']:.0%} |" for part, ms in found["parts_ms"].items()]
    lines += [f"| **a step of {found['batch']}** | **{found['step_ms']:.2f}** | |", ""]
    lines += [
        f"Weights: {gigabytes:.3f} GB at {reached:.1f} GB/s, {reached / found['read_gb_s']:.0%} of what a sum reads "
        f"({found['read_gb_s']:.1f} GB/s); {found['positions']} positions in the cache at the end."
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("clip", type=Path)
    parser.add_argument("--model", "-m")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--steps", type=int, default=15, help="for each figure")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    model = transcribe.load_model(args.model, threads=args.threads, device="cpu")
    with open_audio(args.clip) as stream:
        samples = torch.cat([torch.from_numpy(block.copy()) for block in stream.blocks()])
    before, began = busy(), time.perf_counter()
    found = measure(model.model, samples[: int(model.window_seconds * RATE)], args.batch, args.steps)
    others = (busy() - before) / (time.perf_counter() - began)
    print(f"{table(found)}\n\nProcessors busy with other work: {others:.2f}")
    if args.json:
        args.json.write_text(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
