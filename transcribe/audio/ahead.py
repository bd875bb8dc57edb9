"""Making an iterator's items before they are asked for."""

from __future__ import annotations

import queue
import threading
from collections.abc import Generator, Iterator
from typing import TypeVar

T = TypeVar("T")


def ahead(items: Iterator[T], most: int) -> Generator[T]:
    """The same items, made in a thread that is at most `most` of them ahead; what it raises is raised here.

    Closing ends the thread at its next item.
    """
    made: queue.Queue[tuple[bool, T | BaseException | None]] = queue.Queue(most)
    closed = threading.Event()

    def work() -> None:
        try:
            for item in items:
                made.put((True, item))
                if closed.is_set():
                    return
            made.put((False, None))
        except BaseException as error:
            made.put((False, error))

    threading.Thread(target=work, name="ahead", daemon=True).start()
    try:
        while (next_ := made.get())[0]:
            yield next_[1]  # type: ignore[misc]
        if isinstance(next_[1], BaseException):
            raise next_[1]
    finally:
        closed.set()
        while not made.empty():  # so that the thread is not left waiting for room
            made.get_nowait()
