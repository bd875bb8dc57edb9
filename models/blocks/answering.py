"""How families answer: token by token, several windows in lockstep, or at once."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

import torch
from torch import Tensor

from transcribe.engine import Answer, KVCache
from transcribe.errors import TranscribeError

from ..family import Decoded, Ongoing

if TYPE_CHECKING:
    from transcribe.options import Request


@dataclass
class Answering(Ongoing):
    """A window whose text is being written. `read` makes text and language of tokens."""

    answer: Answer
    cache: KVCache
    read: Callable[[list[int]], tuple[str, str | None]]
    stats: dict[str, float]

    def take(self, logits: Tensor) -> None:
        """Choose the next token by the logits [vocabulary]; over when that was the last one."""
        try:
            self.answer.take(logits)
        except TranscribeError as error:
            self.failed = error
            return
        if self.answer.ended:
            done = self.answer.decoding
            text, language = self.read(done.tokens)
            self.stats["tokens"] = float(len(done.tokens))
            self.decoded = Decoded(text, done.tokens, done.truncated, done.looped, language, self.stats)


W = TypeVar("W", bound=Answering)


class Autoregressive(Generic[W]):
    """A family's `begin` encodes a window and makes it a W; its `step` takes one more token of each."""

    def begin(self, samples: Tensor, request: Request) -> W:
        raise NotImplementedError

    def step(self, tokens: list[int], windows: Sequence[W]) -> Tensor:
        """The logits [windows, vocabulary] after one more token of each; the bits of a row do not depend on others."""
        raise NotImplementedError

    @torch.inference_mode()
    def advance(self, ongoing: Sequence[W]) -> None:
        """One more token of each."""
        began = time.perf_counter()
        tokens = [window.answer.token for window in ongoing if window.answer.token is not None]
        for window, row in zip(ongoing, self.step(tokens, ongoing), strict=True):
            window.take(row)
        share = (time.perf_counter() - began) / len(ongoing)
        for window in ongoing:
            window.stats["decode_s"] = window.stats.get("decode_s", 0.0) + share

    def transcribe(self, samples: Tensor, request: Request) -> Decoded:
        """One window by itself. Raises `TranscribeError` if the model fails."""
        window = self.begin(samples, request)
        while not window.over:
            self.advance([window])
        if window.decoded is None:
            raise window.failed or TranscribeError("the model did not answer")
        return window.decoded


class AtOnce:
    """A family that has no tokens to wait for: `transcribe` gives a window's answer, and none is ever under way."""

    def transcribe(self, samples: Tensor, request: Request) -> Decoded:
        raise NotImplementedError

    def begin(self, samples: Tensor, request: Request) -> Ongoing:
        """A window's whole answer."""
        window = Ongoing()
        window.decoded = self.transcribe(samples, request)
        return window

    def advance(self, ongoing: Sequence[Ongoing]) -> None:
        raise AssertionError("no window is under way")
