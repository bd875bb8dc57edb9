"""How far a run is, for the bar: recordings ended, seconds of audio a second, the share of bytes read."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from contextlib import suppress

from .console import Show
from .worklist import STDIN, Item


class Meter:
    """Told how far recordings are and which have ended, it draws by `show`; None where there is nothing to draw on.

    Of several recordings nobody knows the length before they are read: their bytes stand for it.
    """

    def __init__(self, items: Sequence[Item], show: Show | None) -> None:
        self.items, self.show = items, show
        self.sizes = [_size(item) for item in items] if show else []
        self.total = sum(self.sizes)
        self.began = time.monotonic()
        self.under_way: dict[int, float] = {}
        """The bytes done of each."""
        self.seconds: dict[int, float] = {}
        self.bytes_done = self.seconds_done = 0.0
        self.ended_count = 0

    def reached(self, number: int, seconds: float, declared: float | None) -> None:
        """The recording of this number is so many seconds far."""
        if self.show is None:
            return
        if len(self.items) == 1:
            self.show(self.items[0].source, seconds, declared)
            return
        self.seconds[number] = seconds
        self.under_way[number] = self.sizes[number] * min(seconds / declared, 1.0) if declared else 0.0
        self._draw()

    def ended(self, number: int) -> None:
        """Nothing more comes of it."""
        if self.show is None or len(self.items) == 1:
            return
        self.ended_count += 1
        self.under_way.pop(number, None)
        self.bytes_done += self.sizes[number]
        self.seconds_done += self.seconds.pop(number, 0.0)
        self._draw()

    def _draw(self) -> None:
        assert self.show is not None
        seconds = self.seconds_done + sum(self.seconds.values())
        rate = seconds / max(time.monotonic() - self.began, 1e-3)
        text = f"{self.ended_count} of {len(self.items)} files, {rate:.1f} s of audio a second"
        self.show(text, self.bytes_done + sum(self.under_way.values()), self.total)


def _size(item: Item) -> int:
    with suppress(OSError):
        return os.path.getsize(item.source) if item.source != STDIN else 0
    return 0
