"""Decoding: from logits to tokens, within a budget, without loops."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..errors import TranscribeError

LOOP_TOKENS = 24  # a repetition shorter than this may be a chorus, or somebody who says "no" a few times
LOOP_TIMES = 4


@dataclass
class Decoding:
    """Tokens without the end token; `truncated` if the budget ran out, `looped` if the loop guard stopped it."""

    tokens: list[int] = field(default_factory=list)
    truncated: bool = False
    looped: bool = False


def greedy(step: Callable[[int], Tensor], start: int, stop: frozenset[int], budget: int) -> Decoding:
    """Take the most probable token until one of `stop`, or `budget` tokens, or a loop.

    `step(token)` gives the logits [vocabulary] that follow it. Raises `TranscribeError` on non-finite logits.
    """
    result = Decoding()
    token = start
    while True:
        token = most_probable(step(token))
        if token in stop:
            return result
        result.tokens.append(token)
        period = loop_period(result.tokens)
        if period:
            result.looped = True
            result.tokens = _said_once(result.tokens, period)
            return result
        if len(result.tokens) >= budget:
            result.truncated = True
            return result


def most_probable(logits: Tensor) -> int:
    """The index of the largest of [vocabulary] logits. NaN or infinite logits are an error, never text."""
    low, high = torch.aminmax(logits)
    if not (torch.isfinite(low) and torch.isfinite(high)):
        raise TranscribeError("the model's logits are not finite; try --dtype float32")
    return int(logits.argmax())


def loop_period(tokens: list[int]) -> int:
    """The length of the phrase that the tokens end in repeating, or 0.

    A loop is a phrase said at least `LOOP_TIMES` times in a row, over at least `LOOP_TOKENS` tokens.
    """
    for period in range(1, len(tokens) // LOOP_TIMES + 1):
        span = max(LOOP_TIMES * period, LOOP_TOKENS)
        if span <= len(tokens) and tokens[-span:-period] == tokens[-span + period :]:
            return period
    return 0


def _said_once(tokens: list[int], period: int) -> list[int]:
    """The tokens with the phrase at their end said once."""
    end = len(tokens) - period
    while end >= period and tokens[end - period : end] == tokens[-period:]:
        end -= period
    return tokens[: end + period]
