"""Carry a checkpoint's tensors into a model's modules."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from transcribe.engine.modules import Embedding, FusedLinear, Linear, Weighted
from transcribe.errors import ModelError, UsageError
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
    checkpoint.require({rename(name): shape for name, shape in canonical_shapes(model).items()})
    for file in checkpoint.files:
        file.enter()
    report = FuseReport()

    def fetch(name: str) -> Tensor | PackedTensor:
        return checkpoint.tensor(rename(name))

    for path, module in modules.items():
        if isinstance(module, FusedLinear):
            parent = path.rpartition(".")[0]
            parts = [fetch(f"{parent}.{part}.weight") for part in module.parts]
            fused = fuse_rows(*parts, block=parent, kind=module.kind, alias=options.alias, copy=module.copies,
                              report=report)
            module.weight = tuple(w.to(device) for w in fused) if isinstance(fused, tuple) else fused.to(device)
            if module.has_bias:
                biases = [dense(fetch(f"{parent}.{part}.bias"), dtype) for part in module.parts]
                module.bias = torch.cat(biases).to(device)
            continue
        for name in module.shapes():
            tensor = fetch(f"{path}.{name}")
            packed = name == "weight" and isinstance(module, (Linear, Embedding))
            setattr(module, name, tensor.to(device) if packed else dense(tensor, dtype).to(device))
        module.prepare()
    for line in report.lines():
        log.info(line)
    return report


def canonical_shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """The canonical names and shapes of all the tensors a model needs, in the order of its modules."""
    modules = ((path, module) for path, module in model.named_modules() if isinstance(module, Weighted))
    return {name: shape for path, module in modules for name, shape in _shapes(path, module)}


def _shapes(path: str, module: Weighted) -> list[tuple[str, tuple[int, ...]]]:
    if not isinstance(module, FusedLinear):
        return [(f"{path}.{name}", shape) for name, shape in module.shapes().items()]
    parent = path.rpartition(".")[0]
    return [
        (f"{parent}.{part}.{name}", (rows, *shape[1:]))
        for name, shape in module.shapes().items()
        for part, rows in module.parts.items()
    ]


def dense(tensor: Tensor | PackedTensor, dtype: torch.dtype) -> Tensor:
    return tensor.dequantize(dtype) if isinstance(tensor, PackedTensor) else tensor.to(dtype)


def renamed(name: str, rules: Iterable[tuple[str, str | Callable[[re.Match[str]], str]]]) -> str:
    """A canonical name after every rule, (pattern, replacement), in turn."""
    for pattern, replacement in rules:
        name = re.sub(pattern, replacement, name)
    return name


def pick_device(name: str) -> torch.device:
    """The device asked for, or the best there is. Raises `UsageError` if it is not there."""
    available = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if name == "auto":
        return torch.device(next(d for d in ("cuda", "mps", "cpu") if available[d]))
    if not available.get(name, False):
        there = ", ".join(device for device, usable in available.items() if usable)
        raise UsageError(f"--device {name}: not available here; there is {there}")
    return torch.device(name)


def native_bfloat16(device: torch.device) -> bool:
    """Whether the device multiplies bfloat16 faster than float32."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    supported = getattr(torch.cpu, "_is_avx512_bf16_supported", None)
    return device.type == "cpu" and supported is not None and supported()


def pick_dtype(name: str, device: torch.device, auto: torch.dtype = torch.float32) -> torch.dtype:
    """What to compute in: `auto` unless asked otherwise. Raises `UsageError` for what only costs time."""
    if name == "float16" and device.type == "cpu":
        raise UsageError("--dtype float16: slower on a processor than float32; use float32 or bfloat16")
    return auto if name == "auto" else getattr(torch, name)


class Required:
    """Configuration values that must be there: `values[prefix + key]`, called `shown + key` in errors."""

    def __init__(self, checkpoint: Checkpoint, values: Mapping[str, Any], prefix: str, shown: str = "") -> None:
        self.path, self.values, self.prefix, self.shown = checkpoint.path, values, prefix, shown or prefix

    def __getitem__(self, key: str) -> Any:
        if self.prefix + key not in self.values:
            raise ModelError(f"{self.path}: {self.shown}{key} is missing from the model's configuration")
        return self.values[self.prefix + key]

    def expect(self, key: str, value: Any) -> None:
        """Raises `ModelError` for any other value."""
        if self[key] != value:
            raise ModelError(f"{self.path}: {self.shown}{key} is {self[key]!r}; only {value!r} is supported")
