"""What a model file is: its family, tensors and types, how they lie, what it lacks, what it needs to run."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .console import printable
from .errors import TranscribeError
from .options import LoadOptions

if TYPE_CHECKING:
    from .weights import Checkpoint, TensorInfo

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tekken.json", "vocab.json")
GGUF_TOKENIZER = ("tokenizer.ggml.tokens", "tokenizer.huggingface.json")

# Weights that multiply the same input, in the order they are joined: how to find the first, and all names.
JOINED = {
    "gate+up": (re.compile(r"(?<![a-z])gate(?![a-z])"), ("gate", "up")),
    "q/k/v": (re.compile(r"(?<![a-z])q(?![a-z])"), ("q", "k", "v")),
}


def describe(path: Path, seconds: float = 30.0) -> dict[str, Any]:
    """The report, as JSON holds it, on the model at `path`; `peak` is for `seconds` of audio.

    A file of a family we do not run, or one that lacks something, is described too: `problem` says what is
    wrong. Raises `ModelError` if it cannot be opened as a model at all.
    """
    from .models import FAMILIES
    from .weights import open_checkpoint

    checkpoint = open_checkpoint(path)
    report: dict[str, Any] = {
        "path": str(path),
        "format": checkpoint.format,
        "architecture": checkpoint.architecture,
        "family": FAMILIES.get(checkpoint.architecture),
        "variant": None,
        "tensors": len(checkpoint.tensors),
        "parameters": sum(math.prod(tensor.shape) for tensor in checkpoint.tensors.values()),
        "bytes": sum(tensor.nbytes for tensor in checkpoint.tensors.values()),
        "types": _types(checkpoint.tensors.values()),
        "adjacent": {kind: _adjacency(checkpoint.tensors, *how) for kind, how in JOINED.items()},
        "tokenizer": _tokenizer(checkpoint),
        "peak": None,
        "problem": None,
    }
    return report | _run_checks(checkpoint, seconds)


def _run_checks(checkpoint: Checkpoint, seconds: float) -> dict[str, Any]:
    """What only loading tells: that nothing is missing, the variant, and the peak of one window."""
    from .models import load

    try:
        model = load(checkpoint, LoadOptions(device="cpu"))
    except TranscribeError as error:
        return {"problem": str(error).removeprefix(f"{checkpoint.path}: ")}
    window = min(max(seconds, model.window.min_seconds), model.window.max_seconds)
    peak = {"seconds": seconds, "window_seconds": window, "bytes": model.peak_bytes(window)}
    return {"variant": model.variant, "peak": peak, "notes": model.notes}


def _types(tensors: Iterable[TensorInfo]) -> dict[str, dict[str, int]]:
    """Tensors, parameters and bytes by type, the largest first."""
    types: dict[str, dict[str, int]] = {}
    for tensor in tensors:
        sums = types.setdefault(tensor.type_name, {"tensors": 0, "parameters": 0, "bytes": 0})
        sums["tensors"] += 1
        sums["parameters"] += math.prod(tensor.shape)
        sums["bytes"] += tensor.nbytes
    return dict(sorted(types.items(), key=lambda item: -item[1]["bytes"]))


def _adjacency(tensors: Mapping[str, TensorInfo], first: re.Pattern[str], parts: tuple[str, ...]) -> dict[str, int]:
    """How many blocks have these matrices apart, and in how many of them they lie end to end, as one type."""
    blocks = adjacent = 0
    for name in tensors:
        # The last match is the matrix; a module further up may be called the same.
        matches = list(first.finditer(name))
        if not matches:
            continue
        before, after = name[: matches[-1].start()], name[matches[-1].end() :]
        group = [tensors.get(f"{before}{part}{after}") for part in parts]
        found = [tensor for tensor in group if tensor is not None and len(tensor.shape) == 2]
        if len(found) < len(parts):
            continue
        blocks += 1
        adjacent += all(
            (a.file, a.offset + a.nbytes, a.type_name) == (b.file, b.offset, b.type_name) for a, b in pairwise(found)
        )
    return {"blocks": blocks, "adjacent": adjacent}


def _tokenizer(checkpoint: Checkpoint) -> str | None:
    """Where the tokenizer is, if there is one."""
    for key in GGUF_TOKENIZER:
        if key in checkpoint.metadata:
            return key
    return next((name for name in TOKENIZER_FILES if checkpoint.side_file(name) is not None), None)


def as_text(report: Mapping[str, Any]) -> str:
    """The report for a person."""
    rows = [
        ("path", printable(report["path"])),
        ("format", report["format"]),
        ("architecture", report["architecture"] or "not named"),
        ("family", report["family"] or "none (unsupported)"),
        ("variant", report["variant"] or "not known"),
        ("tensors", f"{report['tensors']:,}"),
        ("parameters", f"{report['parameters']:,}"),
        ("weights", size(report["bytes"])),
    ]
    for name, sums in report["types"].items():
        share = f"{sums['tensors']:>5} tensors {sums['parameters']:>14,} parameters {size(sums['bytes']):>10}"
        rows.append((f"  {name}", share))
    for kind, count in report["adjacent"].items():
        rows.append((kind, _joined(count["blocks"], count["adjacent"])))
    rows.append(("tokenizer", report["tokenizer"] or "none found"))
    if report["peak"]:
        peak = report["peak"]
        window = f"{peak['seconds']:g} s of audio, in windows of {peak['window_seconds']:g} s"
        rows.append(("peak", f"{size(peak['bytes'])} above the weights, for {window}"))
    rows.append(("problem", report["problem"] or "none"))
    return "".join(f"{name:<14}{value}\n" for name, value in rows)


def _joined(blocks: int, adjacent: int) -> str:
    if not blocks:
        return "none apart"
    return f"{adjacent} of {blocks} blocks end to end: joined without a copy"


def size(count: int) -> str:
    """Bytes as a person reads them."""
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= scale:
            return f"{count / scale:.1f} {unit}"
    return f"{count} B"
