"""An iterator run ahead of its reader in a thread."""

import threading
import time

import pytest

from transcribe.audio.ahead import ahead


def settled(condition) -> bool:
    """Whether `condition` comes true within two seconds."""
    end = time.monotonic() + 2
    while not condition() and time.monotonic() < end:
        time.sleep(0.005)
    return condition()


def test_items_come_in_order_and_made_before_they_are_asked_for():
    made = []

    def items():
        for number in range(9):
            made.append(number)
            yield number

    ahead_of = ahead(items(), 3)
    assert next(ahead_of) == 0
    assert settled(lambda: len(made) == 5)  # three that wait, and one for which there is no room
    time.sleep(0.02)
    assert len(made) == 5
    assert list(ahead_of) == list(range(1, 9))


def test_an_error_comes_after_the_items_before_it():
    def items():
        yield 1
        raise ZeroDivisionError("oops")

    ahead_of = ahead(items(), 5)
    assert next(ahead_of) == 1
    with pytest.raises(ZeroDivisionError, match="oops"):
        next(ahead_of)


def test_closing_ends_the_thread_and_the_iterator():
    closed = threading.Event()

    def items():
        try:
            while True:
                yield 0
        finally:
            closed.set()

    ahead_of = ahead(items(), 2)
    next(ahead_of)
    ahead_of.close()
    assert closed.wait(2)
    assert settled(lambda: not any(thread.name == "ahead" for thread in threading.enumerate()))
