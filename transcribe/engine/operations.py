"""What the scheduler can compute.

Two kinds of operation stand in a captured graph. A *view* makes no storage (`VIEWS`). Everything else is an
`Operation`: it says what shape its result has, so that a plan needs no run, and it computes the result into a place
it is given, so that the plan decides where results live. `lookup` finds the Operation of a graph node; the few torch
functions that families use are in `TORCH`, our own are defined in functional.py, and modules that own weights
(modules.py) are operations themselves.
"""

from __future__ import annotations

import builtins
import operator
from collections.abc import Callable
from itertools import zip_longest
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from ..kernels import steps
from ..kernels.steps import Step

Spec = tuple[tuple[int, ...], torch.dtype]


class Computes(Protocol):
    """What the planner asks of an operation or of a module that owns weights."""

    places: bool
    """Can write its result into a tensor it is given. If not, the result is allocated and freed at its last use."""
    in_place: tuple[int, ...]
    """Positions of operands whose storage the result may take when they die here."""
    shrinks: bool
    """Such an operand may be larger than the result."""

    def infer(self, *args: Any, **kwargs: Any) -> Spec: ...

    def scratch_bytes(self, *args: Any) -> int: ...

    def workspace_bytes(self, *args: Any) -> int: ...

    def run(self, *args: Any, out: Tensor | None = None, scratch: Tensor | None = None, **kwargs: Any) -> Tensor: ...

    def steps(self, *args: Any, out: Tensor, scratch: Tensor | None = None, **kwargs: Any) -> list[Step] | None:
        """The same as steps for the C kernels, for a few rows; None where they do not do it."""
        ...


class Operation:
    """A function that the scheduler can plan. Called with tensors it runs; called while tracing it is recorded.

    `infer(*args)` gives the result's shape and dtype. `compute(*args, out=...)` writes into `out`, or allocates when
    it is None. `workspace(*args)` is what torch allocates inside, in bytes. `native(*args, out)` describes it for the
    C kernels, which then compute it: most operations where rows are few.
    """

    shrinks = False

    def __init__(
        self,
        infer: Callable[..., Spec],
        compute: Callable[..., Tensor],
        *,
        places: bool = True,
        in_place: tuple[int, ...] = (),
        workspace: Callable[..., int] | None = None,
        native: Callable[..., list[Step] | None] | None = None,
    ) -> None:
        self.infer = infer
        self.compute = compute
        self.places = places
        self.in_place = in_place
        self.workspace = workspace
        self.native = native
        self.__name__ = self.__qualname__ = compute.__name__
        self.__module__ = compute.__module__
        self.__doc__ = compute.__doc__

    def __call__(self, *args: Any) -> Any:
        if has_torch_function(args):
            return handle_torch_function(self, args, *args)
        return self.run(*args)

    def run(self, *args: Any, out: Tensor | None = None, scratch: Tensor | None = None, **kwargs: Any) -> Tensor:
        if self.native is not None and isinstance(args[0], Tensor) and steps.known(args[0]):
            shape, dtype = self.infer(*args)
            place = torch.empty(shape, dtype=dtype) if out is None else out
            if steps.run(self.native(*args, out=place, **kwargs)):
                return place
        if self.places:
            return self.compute(*args, out=out, **kwargs)
        return self.compute(*args, **kwargs)

    def steps(self, *args: Any, out: Tensor, scratch: Tensor | None = None, **kwargs: Any) -> list[Step] | None:
        return None if self.native is None else self.native(*args, out=out, **kwargs)

    def scratch_bytes(self, *args: Any) -> int:
        return 0

    def workspace_bytes(self, *args: Any) -> int:
        return 0 if self.workspace is None else self.workspace(*args)


def _like_first(x: Tensor, *args: Any, **kwargs: Any) -> Spec:
    return tuple(x.shape), x.dtype


def _broadcast(a: Tensor | float, b: Tensor | float) -> Spec:
    if not isinstance(a, Tensor) or not isinstance(b, Tensor):
        return _like_first(a if isinstance(a, Tensor) else b)  # type: ignore[arg-type]
    # torch.broadcast_shapes would import sympy and 480 modules with it: a second, and 33 MiB.
    sizes = zip_longest(reversed(a.shape), reversed(b.shape), fillvalue=1)
    return tuple(n if m == 1 else m for m, n in sizes)[::-1], torch.promote_types(a.dtype, b.dtype)


def _gelu(x: Tensor, approximate: str = "none", *, out: Tensor | None = None) -> Tensor:
    if out is None:
        return F.gelu(x, approximate=approximate)
    return torch.ops.aten.gelu.out(x, approximate=approximate, out=out)


def _silu(x: Tensor, inplace: bool = False, *, out: Tensor | None = None) -> Tensor:
    return F.silu(x) if out is None else torch.ops.aten.silu.out(x, out=out)


def _silu_steps(x: Tensor, inplace: bool = False, *, out: Tensor) -> list[Step] | None:
    return steps.silu(x, out)


def _contiguous(x: Tensor, *, out: Tensor | None = None) -> Tensor:
    return x.clone(memory_format=torch.contiguous_format) if out is None else out.copy_(x)


_ADD = Operation(_broadcast, torch.add, in_place=(0, 1), native=steps.add)
_MUL = Operation(_broadcast, torch.mul, in_place=(0, 1), native=steps.times)
_TANH = Operation(_like_first, torch.tanh, in_place=(0,))
_CONTIGUOUS = Operation(_like_first, _contiguous)

TORCH: dict[Any, Operation] = {
    operator.add: _ADD,
    operator.mul: _MUL,
    torch.tanh: _TANH,
    F.gelu: Operation(_like_first, _gelu, in_place=(0,)),
    F.silu: Operation(_like_first, _silu, in_place=(0,), native=_silu_steps),
    "contiguous": _CONTIGUOUS,
}
"""Torch's functions and tensor methods (by name) as operations."""

VIEWS = {
    "view", "unflatten", "flatten", "transpose", "unsqueeze", "squeeze", "unbind", "split", "chunk", "narrow", "size",
    operator.getitem, builtins.getattr,
    operator.floordiv, operator.sub,
}
"""What makes no storage: views of tensors, and arithmetic on lengths."""


def lookup(target: Any) -> Computes:
    """The operation of a graph node's target; `KeyError` for one the scheduler does not know."""
    return target if isinstance(target, Operation) else TORCH[target]
