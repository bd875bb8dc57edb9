"""A plan bound to a block and to the arena: what need not be looked up again is not.

Steps that the C kernels do are gathered into groups, each one call; the others are calls from Python. Addresses in the
arena and of weights are written down once; those of the block's inputs, and of results that leave, at each run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..kernels import steps as native
from .arena import Arena
from .plan import Plan, Ref, Step


class Call(NamedTuple):
    """One step from Python: `call(*args)` into register `dst`, `holes` filled from registers first."""

    dst: int
    call: Callable[..., Any]
    args: list[Any]
    holes: list[tuple[int, int]]
    """(position in args, register)"""
    frees: tuple[int, ...]
    released: list[tuple[int, int]]
    """(offset, bytes) in the arena"""


class Group(NamedTuple):
    """Steps that the kernels do in one call, and the registers they fill with new memory or share."""

    program: native.Program
    fresh: list[tuple[int, tuple[int, ...], torch.dtype]]
    taken: list[tuple[int, int]]
    """(register, the one whose memory it takes over)"""
    frees: tuple[int, ...]

    def run(self, registers: list[Any]) -> None:
        for register, shape, dtype in self.fresh:
            registers[register] = torch.empty(shape, dtype=dtype)
        for register, donor in self.taken:
            registers[register] = registers[donor]
        self.program.run(registers)
        for register in self.frees:
            registers[register] = None


class Bound(NamedTuple):
    """What runs."""

    instructions: list[Call | Group]
    ready: dict[int, Tensor]
    """Results, by register, that are views of the arena: made once."""


class Binder:
    """Binds one plan to one block. `inputs` are those of its first run: only their form and addresses are looked at.

    With `together`, steps that the kernels do are grouped: of few rows, or in a block that says it is `together`.
    """

    def __init__(
        self, plan: Plan, block: nn.Module, inputs: Sequence[Any], arena: Arena | None, device: torch.device,
        together: bool,
    ) -> None:  # fmt: skip
        self.plan, self.arena, self.device = plan, arena, device
        few = any(isinstance(value, Tensor) and native.few(value) for value in inputs)
        self.together = together and (few or getattr(block, "together", False))
        self.known: dict[int, Any] = {register: block.get_submodule(path) for register, path in plan.modules}
        self.samples: dict[int, Any] = dict(zip(plan.inputs, inputs, strict=True))
        self.late = list(self.samples.items())  # what has another address in each run
        self.opaque: set[int] = set()  # registers of results that lie where their operation has put them
        self.instructions: list[Call | Group] = []
        self.waiting: dict[int, Call] = {}  # views that nothing in Python has needed yet
        self.group: list[native.Step] = []
        self.fresh: list[tuple[int, tuple[int, ...], torch.dtype]] = []
        self.taken: list[tuple[int, int]] = []
        self.frees: list[int] = []

    def bind(self) -> Bound:
        for step in self.plan.steps:
            if step.spec is None:
                self._view(step)
            elif not (self.together and self._native(step)):
                self._python(step)
        self._flush()
        for register, _ in self.plan.outputs:
            self._demand(register)
        return Bound(self.instructions, {r: self.known[r] for r, _ in self.plan.outputs if r in self.known})

    def _sample(self, argument: Any) -> Any:
        if type(argument) is not Ref:
            return argument
        return self.known.get(argument.register, self.samples.get(argument.register))

    def _view(self, step: Step) -> None:
        """A view of something in the arena is made once; of anything else, when something in Python needs it."""
        call = self._call(step, partial(step.operation, **step.kwargs))
        if not call.holes:
            self.known[step.dst] = call.call(*call.args)
        elif self.together:
            self.samples[step.dst] = call.call(*map(self._sample, step.args))
            if any(register in self.opaque for _, register in call.holes):
                self.opaque.add(step.dst)
            self.waiting[step.dst] = call
        else:
            self.instructions.append(call)

    def _call(self, step: Step, call: Callable[..., Any]) -> Call:
        args = [self.known.get(a.register) if type(a) is Ref else a for a in step.args]
        holes = [(i, a.register) for i, a in enumerate(step.args) if type(a) is Ref and a.register not in self.known]
        released = [(s.offset, s.nbytes) for s in step.releases]
        return Call(step.dst, call, args, holes, step.frees, released)

    def _demand(self, register: int) -> None:
        """Emit a view that has waited, after those it looks into."""
        call = self.waiting.pop(register, None)
        if call is not None:
            for _, base in call.holes:
                self._demand(base)
            self.instructions.append(call)

    def _python(self, step: Step) -> None:
        """A call from Python; where its result lies is only known when it has run, unless that is in the arena."""
        assert step.spec is not None
        self._flush()
        for argument in step.args:
            if type(argument) is Ref:
                self._demand(argument.register)
        operation = step.operation if step.module is None else self.known[step.module]
        kwargs = dict(step.kwargs)
        if (scratch := self._scratch(step)) is not None:
            kwargs["scratch"] = scratch
        run = self._placed(step, operation.run) if operation.places else operation.run
        self.instructions.append(self._call(step, partial(run, **kwargs)))
        if self.together and step.dst not in self.known:
            self.samples[step.dst] = torch.empty(step.spec[0], dtype=step.spec[1])
            self.opaque.add(step.dst)

    def _placed(self, step: Step, run: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """`run` with the place of its result: in the arena, an operand's that it takes over, or new memory."""
        assert step.spec is not None
        shape, dtype = step.spec
        place = self._in_arena(step)
        if place is not None:
            self.known[step.dst] = place
            return partial(run, out=place)
        if step.into is not None:
            operand = step.args.index(Ref(step.into))
            return lambda *args, **kwargs: run(*args, out=args[operand], **kwargs)
        device = self.device
        return lambda *args, **kwargs: run(*args, out=torch.empty(shape, dtype=dtype, device=device), **kwargs)

    def _in_arena(self, step: Step) -> Tensor | None:
        if self.arena is None or step.storage is None or not step.storage.arena:
            return None
        assert step.spec is not None
        return self.arena.tensor(step.storage.offset, *step.spec)

    def _scratch(self, step: Step) -> Tensor | None:
        if self.arena is None or step.scratch is None:
            return None
        return self.arena.tensor(step.scratch.offset, (step.scratch.nbytes,), torch.uint8)

    def _native(self, step: Step) -> bool:
        """Add a step to the group; False if the kernels do not do it, or its operands' addresses are not known."""
        assert step.spec is not None
        operation = step.operation if step.module is None else self.known[step.module]
        if any(type(a) is Ref and a.register in self.opaque for a in step.args):
            return False
        args = [self._sample(argument) for argument in step.args]
        place = self._in_arena(step)
        if place is not None:
            out = place
        elif step.into is not None:
            out = self._sample(Ref(step.into))
        else:
            out = torch.empty(step.spec[0], dtype=step.spec[1])
        found = operation.steps(*args, out=out, scratch=self._scratch(step), **step.kwargs)
        if found is None:
            return False
        self.group += found
        self.frees += step.frees
        if place is not None:
            self.known[step.dst] = place
            return True
        self.samples[step.dst] = out
        if step.into is not None:
            self.taken.append((step.dst, step.into))
        else:
            self.fresh.append((step.dst, *step.spec))
            self.late.append((step.dst, out))
        return True

    def _flush(self) -> None:
        """The group so far as one instruction."""
        if self.group:
            program = native.Program(self.group, self._late)
            self.instructions.append(Group(program, self.fresh, self.taken, tuple(self.frees)))
        self.group, self.fresh, self.taken, self.frees = [], [], [], []

    def _late(self, operand: Any) -> tuple[int, int] | None:
        """The register whose value an operand is or looks into, and how many bytes in."""
        for register, value in self.late:
            if operand is value:
                return register, 0
            if isinstance(operand, Tensor) and isinstance(value, Tensor):
                offset = operand.data_ptr() - value.data_ptr()
                if 0 <= offset < _span(value):
                    return register, offset
        return None


def _span(tensor: Tensor) -> int:
    """Bytes from a tensor's first value to the end of its last."""
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (reach + 1) * tensor.itemsize if tensor.numel() else 0
