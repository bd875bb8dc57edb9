"""The plan of a block for concrete shapes: what each step computes, into which place, and what dies when.

Shapes come from walking the graph once with phantoms: tensors of the right form that are never read or written (their
pages are never touched). Views of phantoms are real views, so torch itself says what shares memory with what.

The lifetime of a *storage* runs from the step that makes it to the last step that reads it through any view. An
operand that dies where an element-wise result of its form is born gives its storage to the result. The rest is placed
in one arena. A result that leaves the block gets memory of its own from the start; a result that is a view of an
intermediate (keys and values of a fused projection) is copied out at the end, before its storage is released.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.fx
from torch import Tensor, nn

from .arena import place
from .operations import VIEWS, Computes, Spec, lookup

Node = torch.fx.Node


@dataclass(eq=False)
class Storage:
    """One stretch of memory: its bytes, the first and the last step that need it, and whose memory it is."""

    nbytes: int
    born: int
    dies: int
    arena: bool
    leaves: bool = False
    offset: int = -1


@dataclass(frozen=True)
class Ref:
    """An operand that exists only at run time: the register that holds it."""

    register: int


@dataclass
class Step:
    """One entry of the flat list: `operation`, or the module in register `module`, on `args` into register `dst`.

    `into` is the register of the operand whose storage the result takes over.
    """

    dst: int
    operation: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    module: int | None = None
    into: int | None = None
    spec: Spec | None = None
    storage: Storage | None = None
    scratch: Storage | None = None
    workspace: int = 0
    frees: tuple[int, ...] = ()
    releases: tuple[Storage, ...] = ()

    @property
    def is_view(self) -> bool:
        return self.spec is None


@dataclass
class Plan:
    """The steps of one block, its registers, and its peak. Inputs belong to the caller and are not counted."""

    steps: list[Step] = field(default_factory=list)
    registers: int = 0
    inputs: list[int] = field(default_factory=list)
    modules: list[tuple[int, str]] = field(default_factory=list)
    outputs: list[tuple[int, bool]] = field(default_factory=list)
    """Registers of the results, and whether each is copied out."""
    specs: list[Spec] = field(default_factory=list)
    single: bool = True
    arena_bytes: int = 0
    heap_bytes: int = 0
    kept_bytes: int = 0
    """What one run keeps alive when nothing is recycled: every intermediate, no scratch."""

    @property
    def peak_bytes(self) -> int:
        """The most that one run has at any time: the arena, and what torch allocates beside it."""
        return self.arena_bytes + self.heap_bytes


def make_plan(graph: torch.fx.Graph, block: nn.Module, inputs: Sequence[Any], recycle: bool = True) -> Plan:
    """Plan `graph` for inputs of these forms: tensors, which are not read, and objects that pass through."""
    return _Planner(graph, block, recycle).plan(inputs)


class _Planner:
    def __init__(self, graph: torch.fx.Graph, block: nn.Module, recycle: bool) -> None:
        self.nodes = list(graph.nodes)
        self.block, self.recycle = block, recycle
        self.result = Plan()
        self.value: dict[Node, Any] = {}
        self.register: dict[Node, int] = {}
        self.root: dict[Node, Storage | None] = {}
        self.storages: list[Storage] = []
        self.clock: list[int] = []  # the graph position of each step
        self.last_use = self._last_uses()

    def _last_uses(self) -> dict[Node, int]:
        """For each node the position of the last one that reads it, through any chain of views."""
        position = {node: i for i, node in enumerate(self.nodes)}
        last: dict[Node, int] = {}
        for node in reversed(self.nodes):
            last[node] = max([position[node], *(last[u] if _is_view(u) else position[u] for u in node.users)])
        return last

    def plan(self, inputs: Sequence[Any]) -> Plan:
        wanted = sum(node.op == "placeholder" for node in self.nodes)
        if wanted != len(inputs):
            raise TypeError(f"{type(self.block).__name__} takes {wanted} inputs, {len(inputs)} given")
        given = iter(inputs)
        for position, node in enumerate(self.nodes):
            if node.op == "placeholder":
                self.result.inputs.append(self._bind(node, next(given), None))
            elif node.op == "output":
                self._outputs(node.args[0])
            elif _is_view(node):
                self._view(position, node)
            else:
                self._compute(position, node)
        self._lay_out()
        return self.result

    def _new_register(self) -> int:
        self.result.registers += 1
        return self.result.registers - 1

    def _bind(self, node: Node, value: Any, root: Storage | None) -> int:
        self.value[node], self.root[node], self.register[node] = value, root, self._new_register()
        return self.register[node]

    def _values(self, args: Any) -> Any:
        return torch.fx.map_arg(args, lambda node: self.value[node])

    def _operands(self, args: Any) -> Any:
        """Lengths and other constants as they are; what exists only at run time as a Ref."""

        def operand(node: Node) -> Any:
            value = self.value[node]
            return Ref(self.register[node]) if node.op == "placeholder" or _holds_tensor(value) else value

        return torch.fx.map_arg(args, operand)

    def _append(self, position: int, step: Step) -> None:
        self.clock.append(position)
        self.result.steps.append(step)

    def _view(self, position: int, node: Node) -> None:
        call = _callable(node)
        value = call(*self._values(node.args), **self._values(node.kwargs))
        base = node.args[0]
        dst = self._bind(node, value, self.root[base] if isinstance(base, Node) else None)
        if _holds_tensor(value):
            self._append(position, Step(dst, call, self._operands(node.args), self._operands(node.kwargs)))

    def _compute(self, position: int, node: Node) -> None:
        args = self._values(node.args)
        operation: Computes
        module = None
        if node.op == "call_module":
            operation = self.block.get_submodule(str(node.target))  # type: ignore[assignment]
            module = self._new_register()
            self.result.modules.append((module, str(node.target)))
        else:
            operation = lookup(node.target)
        spec = operation.infer(*args, **self._values(node.kwargs))
        phantom = _phantom(*spec)
        donor = self._donor(position, node, operation, phantom)
        storage = self.root[donor] if donor else self._new_storage(phantom.nbytes, position, operation.places)
        assert storage is not None
        storage.dies = max(storage.dies, self.last_use[node])
        scratch = operation.scratch_bytes(*args)
        step = Step(
            self._bind(node, phantom, storage),
            operation if module is None else None,
            self._operands(node.args),
            self._operands(node.kwargs),
            module=module,
            into=None if donor is None else self.register[donor],
            spec=spec,
            storage=storage,
            scratch=self._new_storage(scratch, position, True) if scratch else None,
            workspace=operation.workspace_bytes(*args),
        )
        self._append(position, step)

    def _new_storage(self, nbytes: int, position: int, arena: bool) -> Storage:
        self.storages.append(Storage(nbytes, position, position, arena))
        return self.storages[-1]

    def _donor(self, position: int, node: Node, operation: Computes, result: Tensor) -> Node | None:
        """An operand that dies here and has the result's form, or more for one that shrinks: it gives its storage."""
        operands = [a for a in node.args if isinstance(a, Node)]
        for candidate in (node.args[i] for i in operation.in_place if self.recycle):
            if not isinstance(candidate, Node):
                continue
            storage = self.root[candidate]
            if storage is None or storage.dies > position:
                continue
            value = self.value[candidate]
            whole = value.dtype == result.dtype and value.is_contiguous() and storage.nbytes == value.nbytes
            shrinks = operation.shrinks and storage.arena and value.nbytes >= result.nbytes
            alone = sum(self.root[other] is storage for other in operands) == 1
            if whole and alone and (shrinks or value.shape == result.shape):
                return candidate
        return None

    def _outputs(self, result: Any) -> None:
        self.result.single = isinstance(result, Node)
        nodes = [result] if self.result.single else list(result)
        roots = [self.root[node] for node in nodes]
        for node, storage in zip(nodes, roots, strict=True):
            value = self.value[node]
            self.result.specs.append((tuple(value.shape), value.dtype))
            if storage is not None and storage.nbytes == value.nbytes and roots.count(storage) == 1:
                storage.leaves, storage.arena = True, False
            self.result.outputs.append((self.register[node], storage is not None and not storage.leaves))

    def _lay_out(self) -> None:
        plan = self.result
        shared = [s for s in self.storages if s.arena]
        offsets, plan.arena_bytes = place([(s.nbytes, s.born, s.dies) for s in shared])
        for storage, offset in zip(shared, offsets, strict=True):
            storage.offset = offset
        own = [s for s in self.storages if not s.arena]
        for position, step in zip(self.clock, plan.steps, strict=True):
            dying = [s for s in self.storages if s.dies == position and not s.leaves]
            step.releases = tuple(s for s in dying if s.arena)
            freed = {id(s) for s in dying if not s.arena}
            step.frees = tuple(r for node, r in self.register.items() if id(self.root[node]) in freed)
            live = sum(s.nbytes for s in own if s.born <= position <= s.dies or (s.leaves and s.born <= position))
            plan.heap_bytes = max(plan.heap_bytes, live + step.workspace)
        end = len(self.nodes) - 1
        copies = [_nbytes(spec) for spec, (_, copied) in zip(plan.specs, plan.outputs, strict=True) if copied]
        at_end = sum(s.nbytes for s in own if s.leaves or s.dies == end)
        plan.heap_bytes = max(plan.heap_bytes, at_end + sum(copies))
        results = {id(step.storage): step.storage for step in plan.steps if step.storage is not None}
        plan.kept_bytes = sum(s.nbytes for s in results.values() if not s.leaves)


def _phantom(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A tensor of this form that is never touched, in pages of its own.

    From the heap, phantoms would leave as many holes in it, and what a run allocates there would spread over them.
    """
    nbytes = _nbytes((shape, dtype))
    if not nbytes:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(mmap.mmap(-1, nbytes), dtype=dtype).view(shape)


def _is_view(node: Node) -> bool:
    return node.op in ("call_function", "call_method") and node.target in VIEWS


def _callable(node: Node) -> Callable[..., Any]:
    if node.op == "call_method":
        name = str(node.target)
        return lambda tensor, *args, **kwargs: getattr(tensor, name)(*args, **kwargs)
    return node.target  # type: ignore[return-value]


def _holds_tensor(value: Any) -> bool:
    return isinstance(value, Tensor) or (isinstance(value, (tuple, list)) and any(map(_holds_tensor, value)))


def _nbytes(spec: Spec) -> int:
    count = 1
    for size in spec[0]:
        count *= size
    return count * spec[1].itemsize
