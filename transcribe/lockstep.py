"""Windows through a model, several at a time: each begins alone, and all that have begun are decoded in lockstep.

A token's cost is reading the weights, which the windows then share. What a window is answered does not depend on its
company.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from .windows import Window

if TYPE_CHECKING:
    from transcribe.models.family import Decoded, Model

    from .errors import TranscribeError
    from .options import Request


@dataclass
class Job:
    """A window to be transcribed, and then `decoded`, or `failed`, or neither where memory ran out."""

    window: Window
    begin: int
    """The sample of the recording that `samples` begin at."""
    samples: torch.Tensor
    request: Request
    whole: bool = True
    """Not a half of one that failed for its length."""
    decoded: Decoded | None = None
    failed: TranscribeError | None = None


class Lockstep:
    """Takes jobs from `next_job` (None: no more for now) while fewer than `width()` are under way.

    `model_seconds` is the time spent in the model, `most` the most jobs that were under way at a time.
    """

    def __init__(self, model: Model, next_job: Callable[[], Job | None], width: Callable[[], int]) -> None:
        self.model, self.next_job, self.width = model, next_job, width
        self.model_seconds = 0.0
        self.most = 0
        self.alone = False  # memory ran out: one at a time from now on
        self._held: list[Job] = []  # to begin before any new one

    def run(self) -> Iterator[Job]:
        """Jobs as they end. The consumer may add jobs between two of them."""
        ongoing: list[tuple[Job, Any]] = []
        while True:
            while not ongoing or (not self.alone and len(ongoing) < self.width()):
                job = self._held.pop(0) if self._held else self.next_job()
                if job is None:
                    break
                begun = self._begin(job)
                if begun is None and ongoing:
                    self.alone = True
                    self._held.append(job)
                    break
                self.most = max(self.most, len(ongoing) + 1)
                if begun is None or begun.over:
                    yield self._end(job, begun)
                else:
                    ongoing.append((job, begun))
                begun = None  # nothing but `ongoing` keeps caches: they are to be gone when the next window begins
            if not ongoing:
                return
            if self._advance([begun for _, begun in ongoing]):
                done = [self._end(job, begun) for job, begun in ongoing if begun.over]
                ongoing = [(job, begun) for job, begun in ongoing if not begun.over]
                yield from done
            elif len(ongoing) == 1:
                (job, _), ongoing = ongoing[0], []
                yield self._end(job, None)
            else:  # what they have so far may be half of a token: all begin again
                self.alone = True
                self._held, ongoing = [job for job, _ in ongoing] + self._held, []

    @staticmethod
    def _end(job: Job, begun: Any) -> Job:
        if begun is not None:
            job.decoded, job.failed = begun.decoded, begun.failed
        return job

    def _begin(self, job: Job) -> Any:
        return self._within(lambda: self.model.begin(job.samples, job.request))

    def _advance(self, ongoing: list[Any]) -> bool:
        """False if memory ran out."""
        return self._within(lambda: (self.model.advance(ongoing), True)) is not None

    def _within(self, call: Callable[[], Any]) -> Any:
        """What a call gives, timed; None if memory ran out."""
        began = time.perf_counter()
        try:
            return call()
        except (MemoryError, RuntimeError) as error:
            if not _is_out_of_memory(error):
                raise
            return None
        finally:
            self.model_seconds += time.perf_counter() - began


def _is_out_of_memory(error: MemoryError | RuntimeError) -> bool:
    """Torch has a class for this on CUDA; on the CPU and on MPS only the text tells."""
    text = str(error)
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or any(
        sign in text for sign in ("can't allocate memory", "not enough memory", "out of memory")
    )
