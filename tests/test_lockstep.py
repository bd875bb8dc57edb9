"""Windows decoded together: who is in, who comes next, and what happens when memory runs out."""

import weakref

import torch
from transcribe.models.family import Decoded, Ongoing

from transcribe.errors import TranscribeError
from transcribe.lockstep import Job, Lockstep
from transcribe.options import Request

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
    return Job(torch.full((steps,), float(name)), Request())


def together(model, jobs, width):
    waiting = iter(jobs)
    lockstep = Lockstep(model, lambda: next(waiting, None), lambda: width)
    ended = [done for step in lockstep.run() for done in step]
    return [done.decoded.text if done.decoded else done.failed for done in ended], ended


def test_one_leaves_when_it_ends_and_the_next_enters():
    model = Counter()
    ended, jobs = together(model, [job(0, 3), job(1, 1), job(2, 2), job(3, 1)], width=2)
    assert ended == ["1", "0", "2", "3"]
    assert model.company == [[0, 1], [0, 2], [0, 2], [3]]
    assert [done.company for done in jobs] == [2, 2, 2, 1]


def test_one_at_a_time_keeps_their_order():
    model = Counter()
    ended, jobs = together(model, [job(0, 3), job(1, 1), job(2, 2)], width=1)
    assert ended == ["0", "1", "2"]
    assert all(len(company) == 1 for company in model.company)
    assert [done.company for done in jobs] == [1, 1, 1]


def test_jobs_that_come_while_others_end_are_taken():
    model, waiting = Counter(), [job(0, 1)]
    lockstep = Lockstep(model, lambda: waiting.pop(0) if waiting else None, lambda: 4)
    seen = []
    for step in lockstep.run():
        seen += [done.decoded.text for done in step]
        if step and len(seen) < 3:
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


def test_when_memory_runs_out_they_begin_again_one_by_one_and_fewer_come_after_them():
    model = Counter(width=2)
    ended, _ = together(model, [job(0, 2), job(1, 1), job(2, 1), job(3, 1), job(4, 2), job(5, 1)], width=4)
    assert ended == ["0", "1", "2", "3", "5", "4"]
    assert model.company == [[0, 1, 2, 3], [0], [0], [1], [2], [3], [4, 5], [4]]


def test_one_that_finds_no_room_to_begin_waits_for_another_to_end():
    class Full(Counter):
        def begin(self, samples, request):
            if samples[0] == 1 and len(self.begun) == 1 and not self.company:
                raise NO_MEMORY
            return super().begin(samples, request)

    model = Full()
    ended, _ = together(model, [job(0, 2), job(1, 2), job(2, 1)], width=3)
    assert ended == ["0", "1", "2"]
    assert all(len(company) == 1 for company in model.company)


def test_one_that_has_no_room_even_alone_comes_back_without_an_answer():
    ended, _ = together(Counter(width=0), [job(0, 2), job(1, 1)], width=2)
    assert ended == [None, None]


def test_an_error_in_company_is_put_down_to_the_one_that_fails_alone():
    class Broken(Counter):
        def advance(self, ongoing):
            if any(window.name == 1 for window in ongoing):
                raise RuntimeError("shapes cannot be multiplied")
            super().advance(ongoing)

    model = Broken()
    ended, _ = together(model, [job(0, 2), job(1, 1), job(2, 1), job(3, 1)], width=2)
    assert [str(end) for end in ended] == ["0", "shapes cannot be multiplied", "2", "3"]
    assert model.company[-1] == [2, 3]
