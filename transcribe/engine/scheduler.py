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

from . import heap
from .arena import Arena
from .binding import Binder, Bound, Group
from .capture import signature, trace
from .plan import Plan, make_plan

PLANS = 32  # plans kept, some tens of kilobytes each with their programs: eight lengths of an encoder and a decoder


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
        heap.share()
        self.device = torch.device(device)
        self.recycle = recycle
        self.poison = os.environ.get("TRANSCRIBE_POISON", "") not in ("", "0") if poison is None else poison
        self.arena = Arena(self.device)
        self._graphs: dict[tuple[Any, ...], torch.fx.Graph] = {}
        self._signatures: weakref.WeakKeyDictionary[nn.Module, tuple[Any, ...]] = weakref.WeakKeyDictionary()
        self._plans: OrderedDict[tuple[Any, ...], Plan] = OrderedDict()
        self._programs: weakref.WeakKeyDictionary[nn.Module, dict[int, Bound]] = weakref.WeakKeyDictionary()
        self._kept: list[Any] = []
        self._account: Account | None = None

    def begin(self) -> None:
        """Start a new piece of work: what the last one has freed goes back to the system.

        Caches are freed in pieces of many sizes, which the C library would rather keep: several of them by and by.
        """
        self._kept.clear()
        self.trim()

    def trim(self) -> None:
        """Between the stages of a piece of work: what has been freed goes back to the system."""
        if self._account is None:
            heap.trim()

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Memory of the caller's own that outlives plans: caches. Counted in a dry run."""
        with torch.inference_mode(False):
            tensor = torch.empty(shape, dtype=dtype, device=self.device)
        return tensor if self._account is None else self._account.track(tensor)

    @property
    def is_dry(self) -> bool:
        """Whether blocks are counted, not run: copying what they give would only touch memory."""
        return self._account is not None

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
                for programs in self._programs.values():
                    programs.pop(id(oldest), None)
        self._plans.move_to_end(key)
        return plan

    def __call__(self, block: nn.Module, *inputs: Any) -> Any:
        """Run a block: tensors and caches in, tensors of the caller's own out, in the block's structure."""
        plan = self.plan(block, *inputs)
        if self._account is not None:
            self._account.run(plan, self.recycle)
            results = [self._account.track(torch.empty(shape, dtype=dtype)) for shape, dtype in plan.specs]
        else:
            registers = self._run(plan, self._program(plan, block, inputs), inputs)
            results = [
                registers[r].clone(memory_format=torch.contiguous_format) if copied else registers[r]
                for r, copied in plan.outputs
            ]
        return results[0] if plan.single else tuple(results)

    def _run(self, plan: Plan, program: Bound, inputs: tuple[Any, ...]) -> list[Any]:
        """Replay a program; its registers at the end."""
        registers: list[Any] = [None] * plan.registers
        for register, value in program.ready.items():
            registers[register] = value
        for register, value in zip(plan.inputs, inputs, strict=True):
            registers[register] = value
        if self.poison:
            self.arena.buffer.fill_(0xFF)
        for instruction in program.instructions:
            if isinstance(instruction, Group):
                instruction.run(registers)
                continue
            dst, call, args, holes, frees, released = instruction
            if holes:
                args = args.copy()
                for position, register in holes:
                    args[position] = registers[register]
            registers[dst] = call(*args)
            if not self.recycle:
                self._kept.append(registers[dst])
                continue
            for register in frees:
                registers[register] = None
            if self.poison:
                for offset, nbytes in released:
                    self.arena.poison(offset, nbytes)
        return registers

    def _program(self, plan: Plan, block: nn.Module, inputs: tuple[Any, ...]) -> Bound:
        """The program of a plan and a block, bound anew when the arena has moved."""
        if self.recycle and self.arena.buffer.numel() < plan.arena_bytes:
            self._programs.clear()  # they point into the old buffer
            self.arena.reserve(plan.arena_bytes)
            self.trim()  # the old one goes back to the system
        programs = self._programs.setdefault(block, {})
        if id(plan) not in programs:
            arena = self.arena if self.recycle else None
            together = self.recycle and not self.poison
            programs[id(plan)] = Binder(plan, block, inputs, arena, self.device, together).bind()
        return programs[id(plan)]


def _form(value: Any) -> Any:
    return (value.shape, value.stride(), value.dtype) if isinstance(value, Tensor) else type(value)
