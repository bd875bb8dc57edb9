"""Overlapping windows joined by their times."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transcribe.models.family import Piece

from transcribe.joining import Joiner, place_of_cut, words_of


def pieces(*texts: str, start: float = 0.0, step: float = 1.0, length: float = 0.4) -> list[Piece]:
    return [Piece(t, start + i * step, start + i * step + length, 0.5) for i, t in enumerate(texts)]


def test_a_cut_that_falls_in_a_piece_moves_to_its_nearer_edge():
    assert place_of_cut(pieces(" a", start=1.0), [], 1.1, 1.0) == 1.0
    assert place_of_cut(pieces(" a", start=1.0), [], 1.3, 1.0) == pytest.approx(1.4)
    assert place_of_cut(pieces(" a", start=1.0), pieces(" b", start=1.3, length=2.0), 1.2, 0.5) == 1.0
    assert place_of_cut(pieces(" a", start=0.0, length=9.0), [], 4.0, 1.0) == 4.0  # nowhere within reach


def test_what_two_windows_both_hear_is_written_once():
    joiner = Joiner(2.0)
    joiner.add(pieces(" a", " b", " c", " d"), 0.0, 0.0, 2.2)  # the cut is inside " c"
    joiner.add(pieces(" b", " c", " d", " e"), 1.0, 2.2, 5.0)
    assert [s.text for s in joiner.segments(5.0)] == ["a b c", "d e"]


def test_a_word_that_crosses_a_cut_is_one_word_of_the_earlier_segment():
    joiner = Joiner(1.0)
    joiner.add(pieces(" a", " hel", step=0.5), 0.0, 0.0, 1.0)
    joiner.add(pieces("lo", " c", step=0.5), 1.0, 1.0, 2.0)
    first, second = joiner.segments(2.0)
    assert (first.text, second.text) == ("a hello", "c")
    assert (first.words[1].word, first.words[1].start, first.words[1].end) == ("hello", 0.5, pytest.approx(1.4))


def test_after_silence_a_piece_without_a_space_begins_a_word():
    joiner = Joiner(1.0)
    joiner.add(pieces(" hel"), 0.0, 0.0, 1.0)
    joiner.add(pieces("lo"), 3.0, 3.0, 4.0)
    assert [s.text for s in joiner.segments(4.0)] == ["hel", "lo"]


def test_windows_with_silence_between_share_their_context():
    joiner = Joiner(2.0)
    joiner.add(pieces(" a"), 0.0, 0.0, 1.0)
    joiner.add(pieces(" a", " b", step=2.0), 0.0, 1.5, 3.0)
    assert [s.text for s in joiner.segments(3.0)] == ["a", "b"]


def test_words_are_as_probable_as_their_pieces_and_special_pieces_are_none():
    made = [Piece(" hel", 0, 1, 0.5), Piece("", 1, 2, 0.9), Piece("lo", 2, 3, 1.0), Piece(" x", 3, 4, 0.2)]
    assert [(w.word, w.probability) for w in words_of(made)] == [(" hello", 0.75), (" x", 0.2)]
    assert [w.word for w in words_of(made, spaced=False)] == [" hel", "lo", " x"]


times = st.floats(0, 30, allow_nan=False)


@given(st.lists(st.tuples(times, st.floats(0, 2), st.sampled_from([" a", "b", " c"])), max_size=20), times)
def test_times_follow_each_other_inside_the_recording(made, duration):
    joiner = Joiner(1.0)
    ordered = sorted(made)
    joiner.add([Piece(text, start, start + length, 1.0) for start, length, text in ordered], 0.0, 0.0, duration)
    words = [word for segment in joiner.segments(duration) for word in segment.words]
    edges = [edge for word in words for edge in (word.start, word.end)]
    assert edges == sorted(edges)
    assert all(0 <= edge <= duration for edge in edges)
