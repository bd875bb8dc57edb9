"""Carry a checkpoint's tensors into a model's modules."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from transcribe.engine.modules import Embedding, FusedLinear, Linear, StridedConv, Weighted
from transcribe.errors import UsageError
from transcribe.weights import FuseReport, PackedTensor, fuse_rows

if TYPE_CHECKING:
    from transcribe.options import LoadOptions
    from transcribe.weights import Checkpoint

log = logging.getLogger("transcribe")


def load_weights(
    model: nn.Module, checkpoint: Checkpoint, rename: Callable[[str], str], options: LoadOptions, dtype: torch.dtype,
    device: torch.device,
) -> FuseReport:
    """Fill every `Weighted` module of `model` from the checkpoint, after checking that all of it is there.

    A module's path and weight name make the canonical name; `rename` turns it into the checkpoint's. Linear and
    embedding weights stay as the file has them, views of its mapping; norms, biases and convolutions are small and
    are brought to `dtype`. Raises `ModelError` for what is missing or has another shape.
    """
    modules = {path: module for path, module in model.named_modules() if isinstance(module, Weighted)}
    wanted = {rename(name): shape for path, module in modules.items() for name, shape in _names(path, module)}
    checkpoint.require(wanted)
    report = FuseReport()

    def fetch(name: str) -> Tensor | PackedTensor:
        return checkpoint.tensor(rename(name))

    for path, module in modules.items():
        if isinstance(module, FusedLinear):
            parent = path.rpartition(".")[0]
            parts = [fetch(f"{parent}.{part}.weight") for part in module.parts]
            fused = fuse_rows(*parts, block=parent, kind=module.kind, alias=options.alias, report=report)
            module.weight = tuple(w.to(device) for w in fused) if isinstance(fused, tuple) else fused.to(device)
            if module.has_bias:
                biases = [_dense(fetch(f"{parent}.{part}.bias"), dtype) for part in module.parts]
                module.bias = torch.cat(biases).to(device)
            continue
        for name in module.shapes():
            tensor = fetch(f"{path}.{name}")
            packed = name == "weight" and isinstance(module, (Linear, Embedding))
            setattr(module, name, tensor.to(device) if packed else _dense(tensor, dtype).to(device))
        if isinstance(module, StridedConv):
            assert module.weight is not None
            module.weight = module.weight.transpose(1, 2).flatten(1)  # time-major, as its forward wants it
    for line in report.lines():
        log.info(line)
    return report


def _names(path: str, module: Weighted) -> list[tuple[str, tuple[int, ...]]]:
    if not isinstance(module, FusedLinear):
        return [(f"{path}.{name}", shape) for name, shape in module.shapes().items()]
    parent = path.rpartition(".")[0]
    return [
        (f"{parent}.{part}.{name}", (rows, *shape[1:]))
        for part, rows in module.parts.items()
        for name, shape in module.shapes().items()
    ]


def _dense(tensor: Tensor | PackedTensor, dtype: torch.dtype) -> Tensor:
    return tensor.dequantize(dtype) if isinstance(tensor, PackedTensor) else tensor.to(dtype)


def pick_device(name: str) -> torch.device:
    """The device asked for, or the best there is. Raises `UsageError` if it is not there."""
    available = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if name == "auto":
        return torch.device(next(d for d in ("cuda", "mps", "cpu") if available[d]))
    if not available.get(name, False):
        there = ", ".join(device for device, usable in available.items() if usable)
        raise UsageError(f"--device {name}: not available here; there is {there}")
    return torch.device(name)
