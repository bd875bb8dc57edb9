"""Runs blocks on plans, and answers how much memory they take before they run.

A family writes `x = engine(layer, x, rotation)` where it would write `x = layer(x, rotation)`. The block is traced
once, planned once for each shape, and replayed with the layer's own weights: results go to their places in the arena,
whose addresses do not move between runs of a plan, and everything that leaves is memory of the caller's own.

Switches: `recycle=False` keeps every intermediate until the next `begin()` (the "before" of every memory table), and
TRANSCRIBE_POISON=1 fills every released place with NaN, so that a read after release cannot go unnoticed.
"""

from __future__ import annotations

import os
import weakref
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.fx
from torch import Tensor, nn

from .arena import Arena
from .capture import signature, trace
from .plan import Plan, Ref, Step, make_plan

PLANS = 256  # plans kept: several lengths of every kind of block; each is some tens of kilobytes


class Account:
    """What a dry run would hold: `live` bytes now, and `peak_bytes` over all."""

    def __init__(self) -> None:
        self.live = self.heap_peak = self.arena = 0

    @property
    def peak_bytes(self) -> int:
        return self.heap_peak + self.arena

    def track(self, tensor: Tensor) -> Tensor:
        """Count a tensor for as long as it lives."""
        self._add(tensor.nbytes)
        weakref.finalize(tensor, self._add, -tensor.nbytes)
        return tensor

    def _add(self, nbytes: int) -> None:
        self.live += nbytes
        self.heap_peak = max(self.heap_peak, self.live)

    def run(self, plan: Plan, recycle: bool) -> None:
        """Count one run of a plan."""
        self.heap_peak = max(self.heap_peak, self.live + plan.heap_bytes)
        if recycle:
            self.arena = max(self.arena, plan.arena_bytes)
        else:
            self._add(plan.kept_bytes)


class Scheduler:
    """Runs `nn.Module` blocks with recycled activations. One at a time; not for use by two threads at once."""

    def __init__(self, device: torch.device | str = "cpu", recycle: bool = True, poison: bool | None = None) -> None:
        self.device = torch.device(device)
        self.recycle = recycle
        self.poison = os.environ.get("TRANSCRIBE_POISON", "") not in ("", "0") if poison is None else poison
        self.arena = Arena(self.device)
        self._graphs: dict[tuple[Any, ...], torch.fx.Graph] = {}
        self._signatures: weakref.WeakKeyDictionary[nn.Module, tuple[Any, ...]] = weakref.WeakKeyDictionary()
        self._plans: OrderedDict[tuple[Any, ...], Plan] = OrderedDict()
        self._bound: dict[int, list[Any]] = {}  # registers of a plan with the arena's tensors in place
        self._modules: weakref.WeakKeyDictionary[nn.Module, dict[str, nn.Module]] = weakref.WeakKeyDictionary()
        self._kept: list[Any] = []
        self._account: Account | None = None

    def begin(self) -> None:
        """Start a new piece of work: intermediates kept by `recycle=False` are let go."""
        self._kept.clear()

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Memory of the caller's own that outlives plans: caches. Counted in a dry run."""
        with torch.inference_mode(False):
            tensor = torch.empty(shape, dtype=dtype, device=self.device)
        return tensor if self._account is None else self._account.track(tensor)

    @contextmanager
    def dry(self) -> Iterator[Account]:
        """Inside, blocks are planned and counted but not run: results have the right form and no content."""
        self._account = Account()
        try:
            yield self._account
        finally:
            self._account = None

    def plan(self, block: nn.Module, *inputs: Any) -> Plan:
        """The plan of a block for inputs of these forms, from the cache if it is there."""
        kind = self._signatures.get(block)
        if kind is None:
            kind = self._signatures[block] = signature(block)
        key = (kind, *(_form(value) for value in inputs))
        plan = self._plans.get(key)
        if plan is None:
            if kind not in self._graphs:
                self._graphs[kind] = trace(block)
            plan = self._plans[key] = make_plan(self._graphs[kind], block, inputs, self.recycle)
            if len(self._plans) > PLANS:
                _, oldest = self._plans.popitem(last=False)
                self._bound.pop(id(oldest), None)
        self._plans.move_to_end(key)
        return plan

    def __call__(self, block: nn.Module, *inputs: Any) -> Any:
        """Run a block: tensors and caches in, tensors of the caller's own out, in the block's structure."""
        plan = self.plan(block, *inputs)
        if self._account is not None:
            self._account.run(plan, self.recycle)
            results = [self._account.track(torch.empty(shape, dtype=dtype)) for shape, dtype in plan.specs]
            return results[0] if plan.single else tuple(results)
        registers = self._registers(plan)
        for register, value in zip(plan.inputs, inputs, strict=True):
            registers[register] = value
        modules = self._modules.setdefault(block, {})
        for register, path in plan.modules:
            if path not in modules:
                modules[path] = block.get_submodule(path)
            registers[register] = modules[path]
        for step in plan.steps:
            self._run(step, registers)
        results = [registers[r].clone(memory_format=torch.contiguous_format) if copied else registers[r]
                   for r, copied in plan.outputs]
        return results[0] if plan.single else tuple(results)

    def _registers(self, plan: Plan) -> list[Any]:
        """Registers with everything that lies in the arena, and views of it, already in place."""
        if not self.recycle:
            return [None] * plan.registers
        if self.arena.buffer.numel() < plan.arena_bytes:
            self._bound.clear()
            self.arena.reserve(plan.arena_bytes)
        bound = self._bound.get(id(plan))
        if bound is None:
            bound = self._bound[id(plan)] = [None] * plan.registers
            for step in plan.steps:
                if step.is_view:
                    if all(bound[r] is not None for r in _refs(step)):
                        bound[step.dst] = step.operation(*_fetch(step.args, bound), **step.kwargs)
                elif step.storage is not None and step.storage.arena and step.spec is not None:
                    bound[step.dst] = self.arena.tensor(step.storage.offset, *step.spec)
        if self.poison:
            self.arena.buffer.fill_(0xFF)
        return bound.copy()

    def _run(self, step: Step, registers: list[Any]) -> None:
        if step.spec is None:
            if registers[step.dst] is None:
                registers[step.dst] = step.operation(*_fetch(step.args, registers), **step.kwargs)
        else:
            operation = step.operation if step.module is None else registers[step.module]
            registers[step.dst] = operation.run(
                *_fetch(step.args, registers), out=self._place(step, operation, registers),
                scratch=self._scratch(step), **step.kwargs,
            )
        if not self.recycle:
            self._kept.append(registers[step.dst])
            return
        for register in step.frees:
            registers[register] = None
        if self.poison:
            for storage in step.releases:
                self.arena.poison(storage.offset, storage.nbytes)

    def _place(self, step: Step, operation: Any, registers: list[Any]) -> Tensor | None:
        """Where a step's result goes: its slice of the arena, the operand it takes over, or memory of its own."""
        if not operation.places or step.spec is None:
            return None
        if registers[step.dst] is not None:
            return registers[step.dst]
        if step.into is not None:
            return registers[step.into].view(step.spec[0])
        return torch.empty(step.spec[0], dtype=step.spec[1], device=self.device)

    def _scratch(self, step: Step) -> Tensor | None:
        if step.scratch is None:
            return None
        if not self.recycle:
            return torch.empty(step.scratch.nbytes, dtype=torch.uint8, device=self.device)
        return self.arena.buffer[step.scratch.offset : step.scratch.offset + step.scratch.nbytes]


def _form(value: Any) -> Any:
    return (value.shape, value.stride(), value.dtype) if isinstance(value, Tensor) else type(value)


def _fetch(args: tuple[Any, ...], registers: list[Any]) -> list[Any]:
    return [registers[a.register] if type(a) is Ref else a for a in args]


def _refs(step: Step) -> list[int]:
    return [a.register for a in step.args if type(a) is Ref]
