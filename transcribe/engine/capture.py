"""A block as a graph: traced once a kind of block, for any shapes.

Loops over layers and windows stay in Python, so every layer of a stack replays one graph with its own weights. Two
blocks share a graph when their `signature` agrees: the same classes with the same plain attributes (head counts, flags)
and weights of the same form at the same paths. Position tables, masks and caches are inputs, never constants: nothing
that changes between runs can be baked in, because the tracer refuses tensors that are not weights.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch.fx
from torch import Tensor, nn

from .modules import Weighted
from .operations import TORCH, VIEWS, Operation

_PLAIN = (int, float, str, bool, type(None), tuple)
_NOT_PLAIN = ("training", "weight", "bias")


class _Value(torch.fx.Proxy):
    """What stands for a tensor while a block is traced.

    The first function that fx's own meets makes it look through all of torch, 10 ms, for methods called as functions,
    which no block does.
    """

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tracer = next(value.tracer for value in args if isinstance(value, cls))
        return tracer.create_proxy("call_function", function, args, kwargs or {})


class _Tracer(torch.fx.Tracer):
    def proxy(self, node: torch.fx.Node) -> torch.fx.Proxy:
        return _Value(node, self)

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return isinstance(m, Weighted)

    def create_arg(self, a: Any) -> Any:
        if isinstance(a, Tensor):
            raise TypeError("a tensor held by the block would become a constant of the plan; make it an input")
        return super().create_arg(a)


def trace(block: nn.Module) -> torch.fx.Graph:
    """The graph of `block.forward`. Raises `NotImplementedError` naming an operation the scheduler does not know."""
    if isinstance(block, Weighted):  # an operation by itself
        graph = torch.fx.Graph()
        graph.output(graph.call_module("", (graph.placeholder("x"),)))
        return graph
    # Unpacking a traced value (`a, b = x.chunk(2)`) leaves a reference cycle over the whole call stack, which would
    # keep the caller's tensors alive until a garbage collection: so tracing gets a stack of its own.
    with ThreadPoolExecutor(1) as executor:
        graph = executor.submit(_Tracer().trace, block).result()
    for node in graph.nodes:
        known = node.op in ("placeholder", "output", "call_module")
        known = known or isinstance(node.target, Operation) or node.target in TORCH or node.target in VIEWS
        if not known:
            name = getattr(node.target, "__name__", node.target)
            raise NotImplementedError(f"{type(block).__name__}: no rule for {name}; add one in engine/operations.py")
    graph.eliminate_dead_code(lambda node: node.op in ("placeholder", "output"))
    return graph


def signature(block: nn.Module) -> tuple[Any, ...]:
    """What decides a block's graph and the sizes in its plan, apart from the shapes of its inputs."""
    parts: list[Any] = []
    for path, module in block.named_modules():
        plain = tuple((k, v) for k, v in vars(module).items() if k not in _NOT_PLAIN and isinstance(v, _PLAIN))
        parts.append((path, type(module), plain, module.weight_form() if isinstance(module, Weighted) else None))
    return tuple(parts)
