"""Timed pieces of overlapping windows -> one text, with words and segments: pure functions.

Two windows that meet at a cut both hear what is around it. What starts before the cut is taken from the first, the
rest from the second, and the cut is moved to where it divides no piece of either.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from .transcript import Segment, Word

if TYPE_CHECKING:
    from transcribe.models.family import Piece


@dataclass
class Stretch:
    """What one window wrote: [start, stop) is its part of the recording, in seconds.

    Of its pieces, whose times count from `offset` on, those that start within [since, until) are taken.
    """

    written: Iterable[Piece]
    offset: float
    start: float
    stop: float
    since: float = -math.inf
    until: float = math.inf

    @property
    def pieces(self) -> list[Piece]:
        """Those taken, with times from the start of the recording: made anew when asked for, since they are many."""
        moved = (replace(p, start=p.start + self.offset, end=p.end + self.offset) for p in self.written)
        return [p for p in moved if self.since <= p.start < self.until]


@dataclass
class Joiner:
    """Gathers stretches in order. `reach` is how far, in seconds, a cut may be moved: the context of windows."""

    reach: float
    stretches: list[Stretch] = field(default_factory=list)

    def add(self, pieces: Iterable[Piece], offset: float, start: float, stop: float) -> None:
        """`pieces` with times from `offset` on, of a window from `start` to `stop`, all in seconds."""
        new = Stretch(pieces, offset, start, stop)
        if self.stretches:
            last = self.stretches[-1]
            middle = (last.stop + start) / 2  # silence may lie between
            last.until = new.since = place_of_cut(last.pieces, new.pieces, middle, self.reach)
        self.stretches.append(new)

    def segments(self, duration: float, spaced: bool = True) -> list[Segment]:
        """One segment a stretch that says something, with its words; a word that crosses a cut is the earlier one's.

        Without `spaced` every piece is a word: the language has no spaces.
        """
        segments: list[Segment] = []
        stop = None
        for stretch in self.stretches:
            words = words_of([p for p in stretch.pieces if p.start < duration], spaced)
            if words and segments and stop == stretch.start and spaced and not words[0].word.startswith(" "):
                segments[-1].words[-1] = _merged(segments[-1].words[-1], words.pop(0))
            stop = stretch.stop
            if words:
                segments.append(Segment(len(segments), 0.0, 0.0, "", words))
        _order([word for segment in segments for word in segment.words], duration)
        for segment in segments:
            segment.start, segment.end = segment.words[0].start, segment.words[-1].end
            segment.text = "".join(word.word for word in segment.words).strip()
            for word in segment.words:
                word.word = word.word.strip()
        return segments


def place_of_cut(before: Sequence[Piece], after: Sequence[Piece], cut: float, reach: float) -> float:
    """The time nearest to `cut`, and within `reach` of it, that no piece of either lies across; else `cut`."""
    pieces = [*before, *after]
    edges = [edge for p in pieces for edge in (p.start, p.end) if abs(edge - cut) <= reach]
    for at in sorted([cut, *edges], key=lambda at: abs(at - cut)):
        if not any(p.start < at < p.end for p in pieces):
            return at
    return cut


def words_of(pieces: Sequence[Piece], spaced: bool = True) -> list[Word]:
    """Pieces as words that keep their leading spaces. A word is as probable as its pieces on the average."""
    groups: list[list[Piece]] = []
    for piece in pieces:
        if not piece.text:
            continue
        if not spaced or piece.text.startswith(" ") or not groups:
            groups.append([])
        groups[-1].append(piece)
    return [
        Word("".join(p.text for p in group), group[0].start, group[-1].end,
             sum(p.probability for p in group) / len(group))
        for group in groups if "".join(p.text for p in group).strip()
    ]  # fmt: skip


def _merged(word: Word, rest: Word) -> Word:
    shares = len(word.word.strip()), len(rest.word)
    probability = sum(w.probability * n for w, n in zip((word, rest), shares, strict=True) if w.probability is not None)
    return Word(word.word + rest.word, word.start, rest.end, probability / sum(shares))


def _order(words: Sequence[Word], duration: float) -> None:
    """Make times follow each other within [0, duration], in place."""
    before = 0.0
    for word in words:
        before = word.start = min(max(word.start, before), duration)
    for word, limit in zip(words, [*(following.start for following in words[1:]), duration], strict=False):
        word.end = min(max(word.end, word.start), limit)
