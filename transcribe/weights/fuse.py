"""Joining weights that multiply the same input (gate with up, q with k and v), by a view where they touch.

The output dimension is the first, and rows stand alone in every format, so joined weights are their bytes in
a row. Where the file already has them so, the joined weight is one slice of its storage and owns nothing.
"""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass, field

import torch

from transcribe.errors import ModelError

from .packed import PackedTensor

Weight = torch.Tensor | PackedTensor
NO_ALIAS = "TRANSCRIBE_NO_GATE_UP_ALIAS"


@dataclass
class FuseReport:
    """How the weights of a model were joined. Counters are by (kind, reason)."""

    aliased: Counter[str] = field(default_factory=Counter)
    copied: Counter[tuple[str, str]] = field(default_factory=Counter)
    separate: Counter[tuple[str, str]] = field(default_factory=Counter)
    bytes_copied: Counter[str] = field(default_factory=Counter)

    def lines(self) -> list[str]:
        """One line a kind, such as "gate+up: 28 aliased"."""
        kinds = dict.fromkeys([*self.aliased, *(k for k, _ in self.copied), *(k for k, _ in self.separate)])
        return [f"{kind}: {'; '.join(self._parts(kind))}" for kind in kinds]

    def _parts(self, kind: str) -> list[str]:
        parts = [f"{self.aliased[kind]} aliased"] if self.aliased[kind] else []
        for how, counts in (("packed by copying", self.copied), ("kept separate", self.separate)):
            parts += [f"{how} ({n} block{'s' * (n != 1)}; {why})"
                      for (of, why), n in counts.items() if of == kind]
        return parts


def fuse_rows(*tensors: Weight, block: str, kind: str, alias: bool = True, copy: bool = True,
              report: FuseReport | None = None) -> Weight | tuple[Weight, ...]:
    """Concatenate weights (or biases) along dimension 0.

    One view of their storage if they lie end to end in it, in the order given, else a copy in a storage of
    its own; `alias=False` or TRANSCRIBE_NO_GATE_UP_ALIAS=1 forces the copy. With `copy=False` they come back
    as a tuple instead, to be multiplied one by one; so do weights of different types, which cannot be one
    packed weight and are never expanded to become one. What was done is counted in `report` under `kind`.
    Raises ModelError naming `block` if row lengths differ.
    """
    report = FuseReport() if report is None else report
    rows = [tuple(t.shape[1:]) for t in tensors]
    if len(set(rows)) != 1:
        shapes = " and ".join(str(list(t.shape)) for t in tensors)
        raise ModelError(f"{block}: {kind} cannot be joined, {shapes} differ beyond the first dimension; "
                         "the file is damaged or of another model")
    if len({_type(t) for t in tensors}) > 1:
        report.separate[kind, "types differ"] += 1
        return tensors
    data = [t.data if isinstance(t, PackedTensor) else t for t in tensors]
    reason = _why_copy(data, alias)
    if reason and not copy:
        report.separate[kind, reason] += 1
        return tensors
    if reason:
        fused = torch.cat(data)
        report.copied[kind, reason] += 1
        report.bytes_copied[kind] += fused.nbytes
    else:
        count = sum(len(d) for d in data)
        fused = data[0].as_strided((count, *data[0].shape[1:]), data[0].stride())
        report.aliased[kind] += 1
    if fused.nbytes != sum(t.nbytes for t in tensors):
        raise ModelError(f"{block}: {kind} joined are {fused.nbytes} bytes, apart "
                         f"{[t.nbytes for t in tensors]}; the file is damaged")
    first = tensors[0]
    if isinstance(first, PackedTensor):
        return PackedTensor(first.type, (sum(t.shape[0] for t in tensors), *rows[0]), fused)
    return fused


def _type(tensor: Weight) -> object:
    return tensor.type if isinstance(tensor, PackedTensor) else tensor.dtype


def _why_copy(data: list[torch.Tensor], alias: bool) -> str:
    """Why these cannot be one slice; "" if they can."""
    if not alias:
        return "disabled by --no-alias"
    if os.environ.get(NO_ALIAS, "0")[:1] not in ("", "0"):
        return f"disabled by {NO_ALIAS}"
    if len({d.untyped_storage().data_ptr() for d in data}) > 1 or len({d.device for d in data}) > 1:
        return "separate storages"
    ends = [d.storage_offset() + d.numel() for d in data]
    touching = all(end == d.storage_offset() for end, d in zip(ends, data[1:], strict=False))
    return "" if touching and all(d.is_contiguous() for d in data) else "not adjacent"
