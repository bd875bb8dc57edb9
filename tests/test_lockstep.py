"""Windows decoded together: who is in, who comes next, and what happens when memory runs out."""

import weakref

import numpy as np
import pytest
import torch
from transcribe.models.family import Decoded, Ongoing

from transcribe.errors import TranscribeError
from transcribe.lockstep import Job, Lockstep
from transcribe.options import Request
from transcribe.windows import Window

NO_MEMORY = RuntimeError("not enough memory")


class Counting(Ongoing):
    def __init__(self, name: int, steps: int) -> None:
        super().__init__()
        self.name, self.left = name, steps


class Counter:
    """A model whose windows take as many steps as they have samples; `company` is who was under way at each step."""

    def __init__(self, width=99) -> None:
        self.company: list[list[int]] = []
        self.begun: list[int] = []
        self.width = width

    def begin(self, samples, request):
        self.begun.append(int(samples[0]))
        window = Counting(int(samples[0]), len(samples))
        if window.name < 0:
            window.failed = TranscribeError("not finite")
        return window

    def advance(self, ongoing):
        self.company.append([window.name for window in ongoing])
        if len(ongoing) > self.width:
            raise NO_MEMORY
        for window in ongoing:
            window.left -= 1
            if window.left == 0:
                window.decoded = Decoded(str(window.name), [])


def job(name: int, steps: int) -> Job:
    window = Window(0, *(np.zeros(1, np.float32) for _ in range(4)))
    return Job(window, 0, torch.full((steps,), float(name)), Request())


def together(model, jobs, width):
    waiting = iter(jobs)
    lockstep = Lockstep(model, lambda: next(waiting, None), lambda: width)
    return [done.decoded.text if done.decoded else done.failed for done in lockstep.run()], lockstep


def test_one_leaves_when_it_ends_and_the_next_enters():
    model = Counter()
    ended, lockstep = together(model, [job(0, 3), job(1, 1), job(2, 2), job(3, 1)], width=2)
    assert ended == ["1", "0", "2", "3"]
    assert model.company == [[0, 1], [0, 2], [0, 2], [3]]
    assert lockstep.most == 2


def test_one_at_a_time_keeps_their_order():
    model = Counter()
    ended, lockstep = together(model, [job(0, 3), job(1, 1), job(2, 2)], width=1)
    assert ended == ["0", "1", "2"]
    assert all(len(company) == 1 for company in model.company)
    assert lockstep.most == 1


def test_jobs_that_come_while_others_end_are_taken():
    model, waiting = Counter(), [job(0, 1)]
    lockstep = Lockstep(model, lambda: waiting.pop(0) if waiting else None, lambda: 4)
    seen = []
    for done in lockstep.run():
        seen.append(done.decoded.text)
        if len(seen) < 3:
            waiting.append(job(len(seen), 2))
    assert seen == ["0", "1", "2"]


def test_what_has_ended_is_gone_when_the_next_begins():
    class Watching(Counter):
        def __init__(self):
            super().__init__()
            self.known = []

        def begin(self, samples, request):
            assert all(known() is None for known in self.known)
            window = super().begin(samples, request)
            self.known.append(weakref.ref(window))
            return window

    ended, _ = together(Watching(), [job(0, 2), job(1, 1), job(2, 3)], width=1)
    assert ended == ["0", "1", "2"]


def test_one_that_fails_does_not_take_others_with_it():
    ended, _ = together(Counter(), [job(0, 2), job(-1, 2), job(2, 1)], width=3)
    assert ended[0].args == ("not finite",)
    assert ended[1:] == ["2", "0"]


def test_when_memory_runs_out_they_go_on_one_by_one():
    model = Counter(width=1)
    ended, _ = together(model, [job(0, 2), job(1, 1), job(2, 1)], width=2)
    assert ended == ["0", "1", "2"]
    assert model.company == [[0, 1], [0], [0], [1], [2]]


def test_one_that_has_no_room_even_alone_comes_back_without_an_answer():
    ended, _ = together(Counter(width=0), [job(0, 2), job(1, 1)], width=2)
    assert ended == [None, None]


def test_other_errors_pass_through():
    class Broken(Counter):
        def advance(self, ongoing):
            raise RuntimeError("shapes cannot be multiplied")

    with pytest.raises(RuntimeError, match="shapes"):
        together(Broken(), [job(0, 1)], width=2)
