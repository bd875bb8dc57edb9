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


Choice = Callable[[Tensor], int]
"""From logits [vocabulary] to a token."""


def generate(
    logits: Tensor, step: Callable[[int], Tensor], stop: frozenset[int], budget: int, choose: Choice | None = None
) -> Decoding:
    """Choose tokens, the most probable ones unless told otherwise, until one of `stop`, or `budget`, or a loop.

    `logits` [vocabulary] decide the first token, `step(token)` gives those that follow a token. Raises
    `TranscribeError` on non-finite logits.
    """
    choose = choose or most_probable
    result = Decoding()
    while True:
        token = choose(logits)
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
        logits = step(token)


def greedy(step: Callable[[int], Tensor], start: int, stop: frozenset[int], budget: int) -> Decoding:
    """`generate` from a start token: the most probable token each time."""
    return generate(step(start), step, stop, budget)


def most_probable(logits: Tensor) -> int:
    """The index of the largest of [vocabulary] logits. NaN or infinite logits are an error, never text."""
    _check_finite(logits)
    return int(logits.argmax())


class Sampler:
    """Draws a token by its probability at a temperature above 0, among the likeliest that make up `top_p`.

    Nucleus sampling (Holtzman et al. 2020). The same seed draws the same tokens; None seeds at random.
    """

    def __init__(self, temperature: float, top_p: float = 1.0, seed: int | None = None) -> None:
        self.temperature, self.top_p = temperature, top_p
        self.generator = torch.Generator()
        if seed is None:
            self.generator.seed()
        else:
            self.generator.manual_seed(seed)

    def __call__(self, logits: Tensor) -> int:
        _check_finite(logits)
        logits = logits.float().cpu()
        probabilities = torch.softmax((logits - logits.max()) / self.temperature, -1)
        if self.top_p < 1.0:
            likeliest, order = probabilities.sort(descending=True)
            before = likeliest.cumsum(-1) - likeliest
            probabilities[order[before >= self.top_p]] = 0.0  # the likeliest stays, however small top_p is
        return int(torch.multinomial(probabilities, 1, generator=self.generator))


def _check_finite(logits: Tensor) -> None:
    low, high = torch.aminmax(logits)
    if not (torch.isfinite(low) and torch.isfinite(high)):
        raise TranscribeError("the model's logits are not finite; try --dtype float32")


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
