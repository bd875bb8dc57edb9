"""Keys and values that outlive a plan: rows of their own, outside the arena."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from .scheduler import Scheduler

GROWTH = 64  # rows a cache grows by; a window never holds more than one such step that it does not need


Place = tuple[int, int, int, int, int]
"""Addresses of keys and of values, their length, and the strides, in values, of rows and of heads."""


class KeyValue:
    """Keys and values computed once and read many times: each [time, heads, head_dim]."""

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        self.keys, self.values = keys.contiguous(), values.contiguous()

    @property
    def length(self) -> int:
        return self.keys.shape[0]

    def place(self) -> Place:
        """Where they are."""
        return self.keys.data_ptr(), self.values.data_ptr(), self.length, self.keys.stride(0), self.keys.stride(1)


class LayerCache:
    """One layer's cache, grown in steps up to `limit` rows: [heads, rows, head_dim] for keys and for values.

    What a head reads for one query lies end to end.
    """

    def __init__(self, engine: Scheduler, limit: int, heads: int, head_dim: int, dtype: torch.dtype) -> None:
        self.engine, self.limit = engine, limit
        self.length = 0
        self._addresses = (0, 0)
        # What they hold beyond `length` is not written yet.
        self.keys = engine.empty((heads, 0, head_dim), dtype)
        self.values = engine.empty((heads, 0, head_dim), dtype)

    @property
    def capacity(self) -> int:
        return self.keys.shape[1]

    def reserve(self, rows: int) -> None:
        """Make room for `rows` rows in all. Raises `ValueError` beyond the limit."""
        if rows > self.limit:
            raise ValueError(f"KV cache of {self.limit} rows cannot hold {rows}")
        if rows > self.capacity:
            capacity = min(self.limit, -(-rows // GROWTH) * GROWTH)
            self.keys = self._grown(self.keys, capacity)
            self.values = self._grown(self.values, capacity)
            self._addresses = (self.keys.data_ptr(), self.values.data_ptr())

    def _grown(self, old: Tensor, capacity: int) -> Tensor:
        new = self.engine.empty((old.shape[0], capacity, old.shape[2]), old.dtype)
        if self.length:
            new[:, : self.length] = old[:, : self.length]
        return new

    def append(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Copy rows [time, heads, head_dim] in; all rows so far, [length, heads, head_dim], as views of the cache."""
        self.reserve(self.length + keys.shape[0])
        start, self.length = self.length, self.length + keys.shape[0]
        for cache, rows in ((self.keys, keys), (self.values, values)):
            cache[:, start : self.length] = rows.transpose(0, 1)
        return self.keys[:, : self.length].transpose(0, 1), self.values[:, : self.length].transpose(0, 1)

    def place(self) -> Place:
        """Where the rows are, with one more that is yet to be written."""
        self.reserve(self.length + 1)
        self.length += 1
        return (*self._addresses, self.length, self.keys.stride(1), self.keys.stride(0))


class Lanes:
    """One layer's keys and values of several sequences, all `LayerCache`s or all `KeyValue`s: one query each."""

    def __init__(self, lanes: Sequence[Any]) -> None:
        self.lanes = lanes
        self.dtype = lanes[0].keys.dtype
        self._table = (ctypes.c_int64 * (5 * len(lanes)))()

    def table(self) -> int:
        """The `place` of each for the kernels: the address of int64 [sequences, 5]."""
        self._table[:] = [word for lane in self.lanes for word in lane.place()]
        return ctypes.addressof(self._table)


class KVCache:
    """The caches of a decoder's layers; `cache[i]` is layer i's."""

    def __init__(
        self, engine: Scheduler, layers: int, limit: int, heads: int, head_dim: int, dtype: torch.dtype
    ) -> None:
        self.engine = engine
        self.layers = [LayerCache(engine, limit, heads, head_dim, dtype) for _ in range(layers)]

    def __getitem__(self, layer: int) -> LayerCache:
        return self.layers[layer]

    def reserve(self, rows: int) -> None:
        """Make room for `rows` rows in all in every layer, and give back what the smaller caches leave behind."""
        if rows > self.layers[0].capacity:
            for layer in self.layers:
                layer.reserve(rows)
            self.engine.trim()
