import itertools
import math

import pytest
import torch

from transcribe.engine.ctc import greedy, prefix_search
from transcribe.errors import TranscribeError

BLANK = 3


def log_probs(*path, sure=0.9):
    """Frames that name these tokens."""
    rows = torch.full((len(path), BLANK + 1), (1 - sure) / BLANK)
    rows[range(len(path)), list(path)] = sure
    return rows.log()


def test_runs_are_joined_and_blanks_part_equal_tokens():
    found = greedy(log_probs(BLANK, 0, 0, BLANK, 0, 1, BLANK).split(2), BLANK)
    assert [(e.token, e.start, e.stop) for e in found] == [(0, 1, 3), (0, 4, 5), (1, 5, 6)]
    assert all(e.probability == pytest.approx(0.9) for e in found)


@pytest.mark.parametrize("path", [(), (BLANK,) * 4])
def test_nothing_said_is_no_tokens(path):
    values = log_probs(*path) if path else torch.empty(0, BLANK + 1)
    assert greedy([values], BLANK) == prefix_search(values, BLANK, 4) == []


def text_of(path):
    return tuple(token for token, _ in itertools.groupby(path) if token != BLANK)


@pytest.mark.parametrize("seed", range(4))
def test_prefix_search_finds_the_most_probable_text(seed):
    values = torch.randn(6, BLANK + 1, generator=torch.Generator().manual_seed(seed)).log_softmax(-1)
    texts: dict[tuple, float] = {}
    for path in itertools.product(range(BLANK + 1), repeat=6):
        score = sum(float(values[frame, token]) for frame, token in enumerate(path))
        texts[text_of(path)] = texts.get(text_of(path), 0.0) + math.exp(score)
    best = max(texts, key=texts.__getitem__)
    assert tuple(e.token for e in prefix_search(values, BLANK, 100)) == best


def test_many_improbable_paths_outweigh_the_most_probable_one():
    values = torch.tensor([[0.4, 0.0, 0.0, 0.6], [0.4, 0.0, 0.0, 0.6]]).clamp(min=1e-9).log()
    assert greedy([values], BLANK) == []  # at 0.36
    assert [e.token for e in prefix_search(values, BLANK, 2)] == [0]  # at 0.64: before, after and over both


def test_tokens_of_a_search_have_frames_in_order():
    values = torch.randn(40, BLANK + 1, generator=torch.Generator().manual_seed(0)).log_softmax(-1)
    found = prefix_search(values, BLANK, 4)
    assert found
    edges = [edge for e in found for edge in (e.start, e.stop)]
    assert edges == sorted(edges)
    assert edges[-1] <= 40


def test_what_is_not_finite_is_an_error():
    with pytest.raises(TranscribeError, match="not finite"):
        greedy([torch.full((3, 4), math.nan)], BLANK)
