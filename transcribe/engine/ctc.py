"""Connectionist temporal classification (Graves et al. 2006): from log-probabilities of frames to tokens with times.

A path names a token or the blank for every frame; its text is what is left of it when runs are joined and blanks
dropped. Greedy decoding takes the most probable path, prefix search (Hannun et al. 2014) the most probable text.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..errors import TranscribeError

NEVER = -math.inf


class Emission(NamedTuple):
    """A token of the text: the frames [start, stop) that name it, and its probability in the surest of them."""

    token: int
    start: int
    stop: int
    probability: float


def greedy(parts: Iterable[Tensor], blank: int) -> list[Emission]:
    """The text of the most probable path. `parts` are log-probabilities [frames, tokens] in turn, made when asked for.

    Raises `TranscribeError` if they are not finite.
    """
    best: list[Tensor] = []
    path: list[Tensor] = []
    for log_probs in parts:
        _check_finite(log_probs)
        surest, tokens = log_probs.max(-1)
        best.append(surest)
        path.append(tokens)
    return _emissions(torch.cat(path), torch.cat(best), blank) if path else []


def prefix_search(log_probs: Tensor, blank: int, beam: int) -> list[Emission]:
    """The most probable text among `beam` kept a frame; each token's frames are those of its most probable path.

    `log_probs`: [frames, tokens]. Raises `TranscribeError` if they are not finite.
    """
    _check_finite(log_probs)
    log_probs = log_probs.float().cpu()
    tokens = _most_probable_text(log_probs.numpy(), blank, beam)
    if not tokens:
        return []
    from torchaudio.functional import forced_align

    path, best = forced_align(log_probs[None], torch.tensor([tokens], dtype=torch.int32), blank=blank)
    return _emissions(path[0], best[0], blank)


def _check_finite(log_probs: Tensor) -> None:
    if log_probs.numel() and not torch.isfinite(log_probs.sum()):
        raise TranscribeError("the model's logits are not finite; try --dtype float32")


def _emissions(path: Tensor, best: Tensor, blank: int) -> list[Emission]:
    """Runs of a path [frames] that are not blank; `best` [frames] is the log-probability along it."""
    tokens, counts = torch.unique_consecutive(path, return_counts=True)
    stops = counts.cumsum(0)
    sure = best.float().exp().cpu()
    return [
        Emission(token, stop - count, stop, float(sure[stop - count : stop].max()))
        for token, count, stop in zip(tokens.tolist(), counts.tolist(), stops.tolist(), strict=True)
        if token != blank
    ]


def _most_probable_text(values: np.ndarray, blank: int, beam: int) -> tuple[int, ...]:
    """Prefix search: for each prefix the log-probability of the paths that end in a blank and of those that do not.

    A frame extends a prefix by its `beam` most probable tokens only.
    """
    kept: dict[tuple[int, ...], tuple[float, float]] = {(): (0.0, NEVER)}
    for row in values:
        likely = np.argpartition(-row, min(beam, len(row) - 1))[: beam + 1]
        extensions = [(int(token), float(row[token])) for token in likely if token != blank]
        scores = row.tolist()
        in_blank: defaultdict[tuple[int, ...], float] = defaultdict(lambda: NEVER)
        in_token: defaultdict[tuple[int, ...], float] = defaultdict(lambda: NEVER)
        for prefix, (ended, open_) in kept.items():
            either = _sum(ended, open_)
            in_blank[prefix] = _sum(in_blank[prefix], either + scores[blank])
            last = prefix[-1] if prefix else blank
            if prefix:
                in_token[prefix] = _sum(in_token[prefix], open_ + scores[last])
            for token, score in extensions:
                before = ended if token == last else either  # the same token again needs a blank between
                if before > NEVER:
                    longer = (*prefix, token)
                    in_token[longer] = _sum(in_token[longer], before + score)
        both = {prefix: (in_blank[prefix], in_token[prefix]) for prefix in {**in_blank, **in_token}}
        best = sorted(both, key=lambda prefix: -_sum(*both[prefix]))[:beam]
        kept = {prefix: both[prefix] for prefix in best}
    return max(kept, key=lambda prefix: _sum(*kept[prefix]))


def _sum(a: float, b: float) -> float:
    """log(exp(a) + exp(b))."""
    if a < b:
        a, b = b, a
    return a if b == NEVER else a + math.log1p(math.exp(b - a))
