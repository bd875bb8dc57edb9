"""Windows through a model, several at a time: each begins alone, and all that have begun are decoded in lockstep.

A token's cost is reading the weights, which the windows then share. What a window is answered does not depend on its
company, and a window that fails does not take its company with it.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch

if TYPE_CHECKING:
    from transcribe.models.family import Decoded, Model

    from .options import Request


@dataclass
class Job:
    """A window to be transcribed, and then `decoded`, or `failed`, or neither where memory ran out.

    `seconds` is the time it took of the model, `company` the most windows that were under way with it, itself included.
    """

    samples: torch.Tensor
    request: Request
    decoded: Decoded | None = field(default=None, init=False)
    failed: Exception | None = field(default=None, init=False)
    seconds: float = field(default=0.0, init=False)
    company: int = field(default=0, init=False)


J = TypeVar("J", bound=Job)


class Lockstep(Generic[J]):
    """Takes jobs from `next_job` (None: none for now) while fewer than `width()` are under way.

    `limit` is how many memory has room for, as far as it is known.
    """

    def __init__(self, model: Model, next_job: Callable[[], J | None], width: Callable[[], int]) -> None:
        self.model, self.next_job, self.width = model, next_job, width
        self.limit = sys.maxsize

    def run(self) -> Iterator[list[J]]:
        """After each step the jobs that ended, perhaps none; the consumer may add some. Ends when there are none."""
        ongoing: list[tuple[J, Any]] = []
        waiting: J | None = None  # for memory
        while True:
            while len(ongoing) < min(self.limit, self.width()):
                job, waiting = waiting or self.next_job(), None
                if job is None:
                    break
                begun = self._begin(job)
                if begun is None and job.failed is None and ongoing:
                    waiting, self.limit = job, len(ongoing)
                    break
                if begun is None or begun.over:
                    yield [_end(job, begun)]
                else:
                    ongoing.append((job, begun))
                    for other in [job for job, _ in ongoing]:
                        other.company = max(other.company, len(ongoing))
                begun = None  # nothing but `ongoing` keeps caches: they are to be gone when the next window begins
            if not ongoing:
                return
            error = self._advance(ongoing)
            if error is not None and len(ongoing) > 1:  # what they have may be half of a token: all begin again
                if _is_out_of_memory(error):
                    self.limit = len(ongoing) // 2
                jobs, ongoing, error = [job for job, _ in ongoing], [], None
                for job in jobs:
                    yield [self._alone(job)]
            elif error is not None:
                job, ongoing = ongoing[0][0], []
                job.failed, error = _unless_memory(error), None
                yield [job]
            else:
                done = [_end(job, begun) for job, begun in ongoing if begun.over]
                ongoing = [(job, begun) for job, begun in ongoing if not begun.over]
                yield done

    def _alone(self, job: J) -> J:
        """A job from its beginning to its end."""
        begun = self._begin(job)
        while begun is not None and not begun.over:
            if (error := self._advance([(job, begun)])) is not None:
                job.failed = _unless_memory(error)
                return job
        return _end(job, begun)

    def _begin(self, job: J) -> Any:
        """What the model keeps of a window; None if that failed or memory ran out."""
        began = time.perf_counter()
        job.company = max(job.company, 1)
        try:
            return self.model.begin(job.samples, job.request)
        except Exception as error:
            job.failed = _unless_memory(error)
            return None
        finally:
            job.seconds += time.perf_counter() - began

    def _advance(self, ongoing: list[tuple[J, Any]]) -> Exception | None:
        """One more token of each; what went wrong."""
        began = time.perf_counter()
        try:
            self.model.advance([begun for _, begun in ongoing])
        except Exception as error:
            return error
        finally:
            share = (time.perf_counter() - began) / len(ongoing)
            for job, _ in ongoing:
                job.seconds += share
        return None


def _end(job: J, begun: Any) -> J:
    if begun is not None:
        job.decoded, job.failed = begun.decoded, begun.failed
    return job


def _unless_memory(error: Exception) -> Exception | None:
    return None if _is_out_of_memory(error) else error


def _is_out_of_memory(error: Exception) -> bool:
    """Torch has a class for this on CUDA; on the CPU and on MPS only the text tells."""
    text = str(error)
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or (
        isinstance(error, RuntimeError)
        and any(sign in text for sign in ("can't allocate memory", "not enough memory", "out of memory"))
    )
