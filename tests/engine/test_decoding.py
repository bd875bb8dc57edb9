import pytest
import torch

from transcribe.engine.decoding import greedy, loop_period
from transcribe.errors import TranscribeError


def speaking(tokens):
    """A model that says these tokens, then its end token 0."""
    said = iter([*tokens, 0])

    def step(token):
        logits = torch.zeros(100)
        logits[next(said)] = 1.0
        return logits

    return step


def test_greedy_stops_at_the_end_token():
    result = greedy(speaking([5, 6, 7]), start=1, stop=frozenset({0}), budget=10)
    assert result.tokens == [5, 6, 7]
    assert not result.truncated
    assert not result.looped


def test_the_budget_marks_the_result_truncated():
    result = greedy(speaking([5, 6, 7, 8]), start=1, stop=frozenset({0}), budget=2)
    assert result.tokens == [5, 6]
    assert result.truncated


def test_each_step_gets_the_token_before_it():
    seen = []
    said = speaking([5, 6])
    greedy(lambda token: (seen.append(token), said(token))[1], start=1, stop=frozenset({0}), budget=10)
    assert seen == [1, 5, 6]


@pytest.mark.parametrize("phrase", [[7], [7, 8], [3, 4, 5, 6, 7, 8, 9]])
def test_a_loop_is_stopped_and_its_phrase_said_once(phrase):
    result = greedy(speaking([1, 2, *phrase * 60]), start=1, stop=frozenset({0}), budget=400)
    assert result.looped
    assert result.tokens == [1, 2, *phrase]


def test_a_chorus_is_no_loop():
    assert loop_period([1, 2, 3, 4, 5, 6, 7, 8] * 3) == 0
    assert loop_period([9] * 10) == 0


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_logits_that_are_not_finite_are_an_error(bad):
    def step(token):
        logits = torch.zeros(100)
        logits[3] = bad
        return logits

    with pytest.raises(TranscribeError, match="not finite"):
        greedy(step, start=1, stop=frozenset({0}), budget=10)
