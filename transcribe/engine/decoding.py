"""Decoding: from logits to tokens, within a budget, without loops."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import SupportsFloat

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


class Answer:
    """What one sequence is answered, token by token, the most probable ones unless `choose` says otherwise.

    It ends at one of `stop`, after `budget` tokens, or in a loop. `take` gives it logits; `token` is then the one to go
    on from, None when it has ended.
    """

    def __init__(self, stop: frozenset[int], budget: int, choose: Choice | None = None) -> None:
        self.stop, self.budget, self.choose = stop, budget, choose or most_probable
        self.decoding = Decoding()
        self.token: int | None = None

    @property
    def ended(self) -> bool:
        return self.token is None

    def take(self, logits: Tensor) -> None:
        """Choose by the logits [vocabulary]. Raises `TranscribeError` if they are not finite."""
        result, token = self.decoding, self.choose(logits)
        self.token = None
        if token in self.stop:
            return
        result.tokens.append(token)
        period = loop_period(result.tokens)
        if period:
            result.looped = True
            result.tokens = _said_once(result.tokens, period)
        elif len(result.tokens) >= self.budget:
            result.truncated = True
        else:
            self.token = token


def most_probable(logits: Tensor) -> int:
    """The index of the largest of [vocabulary] logits. NaN or infinite logits are an error, never text."""
    wide = logits.float().cpu().numpy()  # of so many, numpy finds it in a fifth of torch's time
    token = int(wide.argmax())  # NaN counts as the largest
    _check_finite(wide.min(), wide[token])
    return token


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
        logits = logits.float().cpu()
        _check_finite(logits.min(), logits.max())
        probabilities = torch.softmax((logits - logits.max()) / self.temperature, -1)
        if self.top_p < 1.0:
            likeliest, order = probabilities.sort(descending=True)
            before = likeliest.cumsum(-1) - likeliest
            probabilities[order[before >= self.top_p]] = 0.0  # the likeliest stays, however small top_p is
        return int(torch.multinomial(probabilities, 1, generator=self.generator))


def _check_finite(low: SupportsFloat, high: SupportsFloat) -> None:
    """The least and the largest of the logits; NaN is both."""
    if not (math.isfinite(low) and math.isfinite(high)):
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
