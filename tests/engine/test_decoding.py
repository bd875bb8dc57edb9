import pytest
import torch

from transcribe.engine.decoding import Answer, Sampler, loop_period
from transcribe.errors import TranscribeError


def greedy(step, start, stop, budget):
    """The answer that follows a start token, where `step(token)` gives the logits after a token."""
    answer = Answer(stop, budget)
    answer.take(step(start))
    while not answer.ended:
        answer.take(step(answer.token))
    return answer.decoding


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


def test_sampling_follows_the_probabilities():
    logits = torch.tensor([1.0, 0.0, 0.0, 2.0]).log()
    draw = Sampler(temperature=1.0, seed=3)
    counts = torch.bincount(torch.tensor([draw(logits.clamp(min=-50)) for _ in range(900)]), minlength=4)
    assert counts[1] == counts[2] == 0
    assert counts[3] / counts[0] == pytest.approx(2.0, rel=0.2)


def test_a_low_temperature_takes_the_most_probable():
    draw = Sampler(temperature=1e-6, seed=0)
    assert {draw(torch.tensor([1.0, 1.2, 1.1])) for _ in range(20)} == {1}


def test_top_p_leaves_out_the_unlikely_but_never_everything():
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()
    assert {draw(logits) for draw in [Sampler(1.0, top_p=0.7, seed=1)] for _ in range(100)} == {0, 1}
    assert {draw(logits) for draw in [Sampler(1.0, top_p=1e-9, seed=1)] for _ in range(20)} == {0}


def test_a_seed_repeats_the_draws():
    logits = torch.zeros(1000)
    first, again, other = ([draw(logits) for _ in range(8)] for draw in (Sampler(1.0, seed=s) for s in (1, 1, 2)))
    assert first == again != other


def test_sampling_from_logits_that_are_not_finite_is_an_error():
    with pytest.raises(TranscribeError, match="not finite"):
        Sampler(1.0)(torch.tensor([0.0, float("nan")]))
