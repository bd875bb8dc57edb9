"""A recording cut into windows that tile it: the only place that decides where.

Only one window's samples are held at a time, so memory does not depend on the recording's length. A window may be given
with its context, what is before and after it; only the windows themselves tile the recording.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from .audio.activity import FRAME, Detector, mean_square
from .audio.stream import RATE, Samples

Frames = npt.NDArray[np.float32]

SPEECH = 0.35  # the probability from which a frame counts as speech: rather hear noise than miss a word
CERTAIN = 0.5  # and the one that some frame of a window must reach,
SHORTEST = 3  # with this many frames of speech (0.1 s), for the window to be given to the model
PAD = 8  # frames (0.26 s) kept on each side of speech where windows meet: soft onsets and endings score low
MARGIN = 31  # frames (1 s) of silence that the model hears too: an ordinary clip reaches it as it is, untrimmed
PAUSE = 62  # frames (2 s) without speech end a window: what follows is another utterance
# Frames (4 s) given to the detector, which takes twice as long over 16 at a time. Always exactly so many, but for what
# is left when a window is full: torch's kernels for the CPU are made for a size, and kept.
AT_ONCE = 128
GAP = 3  # frames (0.1 s) without speech make a place to cut


@dataclass(frozen=True)
class Window:
    """A stretch of the recording. The arrays are views that hold until the next window is asked for.

    `start` counts samples from the start of the recording; `samples` is float32 [n], 16 kHz mono; `speech`
    and `power` are one number for each 32 ms: the probability of speech, and the mean square. `around` is the window
    with at most `context` samples on either side, `lead` of them before it.
    """

    start: int
    samples: Samples
    speech: Frames
    power: Frames
    around: Samples
    lead: int = 0
    context: int = 0

    @property
    def stop(self) -> int:
        return self.start + len(self.samples)

    def voiced(self, margin: int = PAD) -> tuple[int, int] | None:
        """From the first speech to the last, with a margin in frames: [start, stop) in samples of the window."""
        frames = np.flatnonzero(self.speech >= SPEECH)
        if len(frames) < SHORTEST or self.speech.max() < CERTAIN:
            return None
        start, stop = (int(frames[0]) - margin) * FRAME, (int(frames[-1]) + 1 + margin) * FRAME
        return max(0, start), min(len(self.samples), stop)

    def heard(self, grid: int = 1) -> tuple[int, Samples] | None:
        """What the model is to hear, and where that begins in the recording: a multiple of `grid` samples.

        The speech with a margin; and where the margin reaches an end of the window, the context there.
        """
        bounds = self.voiced(MARGIN)
        if bounds is None:
            return None
        start, stop = bounds
        first = -self.lead if start == 0 else start
        last = len(self.around) - self.lead if stop == len(self.samples) else stop
        first += -(self.start + first) % grid
        return self.start + first, self.around[self.lead + first : self.lead + last]

    def copy(self) -> Window:
        """One that holds for ever."""
        around = self.around.copy()
        samples = around[self.lead : self.lead + len(self.samples)]
        return replace(self, samples=samples, around=around, speech=self.speech.copy(), power=self.power.copy())

    def halves(self) -> tuple[Window, Window] | None:
        """The window cut in two at the quietest point of its middle third; None if it is too short to cut."""
        third = len(self.speech) // 3
        if third < 1:
            return None
        at = quietest(self.speech, self.power, third, len(self.speech) - third)
        return self._part(0, at), self._part(at, len(self.speech))

    def _part(self, start: int, stop: int) -> Window:
        """Some of its frames, with what context there is."""
        first, last = start * FRAME, min(stop * FRAME, len(self.samples))
        before = min(self.context, self.lead + first)
        around = self.around[self.lead + first - before : self.lead + last + self.context]
        inside = slice(start, stop)
        return Window(
            self.start + first, self.samples[first:last], self.speech[inside], self.power[inside],
            around, before, self.context,
        )  # fmt: skip


def windows(
    blocks: Iterable[Samples], detector: Detector, max_seconds: float, context_seconds: float = 0.0
) -> Iterator[Window]:
    """Windows of at most `max_seconds` that follow each other without a gap or an overlap, each with its context.

    A window carries as much as fits: the silence before it is a window of its own, which holds no speech. It
    is cut in its last third, in the longest gap between words, or where it is quietest if there is no gap.
    """
    held = _Held(int(max_seconds * RATE) // FRAME, detector, int(context_seconds * RATE) // FRAME)
    for block in blocks:
        while len(block):
            block = block[held.append(block) :]
            if held.full:
                yield held.front(held.cut())
                held.drop()
    held.finish()
    while held.left > 0:
        yield held.front(held.cut())
        held.drop()


class _Held:
    """The samples not yet given out and the context before them, in one buffer for the longest window and its context.

    `lead` is how many frames of it are context.
    """

    def __init__(self, limit: int, detector: Detector, context: int) -> None:
        size = limit + 2 * context
        self.samples = np.zeros(size * FRAME, np.float32)
        self.speech, self.power = np.zeros(size, np.float32), np.zeros(size, np.float32)
        self.detector, self.limit, self.context = detector, limit, context
        self.start = self.count = 0  # in samples: what was given out before, and what is held
        self.frames = self.lead = 0  # frames of it with a probability, and those given out before
        self.given = 0
        self.ended = False

    @property
    def full(self) -> bool:
        return self.count == len(self.samples)

    @property
    def left(self) -> int:
        """Samples not yet given out."""
        return self.count - self.lead * FRAME

    def append(self, block: Samples) -> int:
        """Take what fits; the number of samples taken."""
        taken = min(len(block), len(self.samples) - self.count)
        self.samples[self.count : self.count + taken] = block[:taken]
        self.count += taken
        while self.count // FRAME - self.frames >= AT_ONCE:
            self._measure(self.frames + AT_ONCE)
        if self.full:
            self._measure(self.count // FRAME)
        return taken

    def finish(self) -> None:
        """The recording is over: the last frame is filled up with silence."""
        self.ended = True
        frames = -(-self.count // FRAME)
        self.samples[self.count : frames * FRAME] = 0
        self._measure(frames)

    def _measure(self, frames: int) -> None:
        new = slice(self.frames, frames)
        samples = self.samples[self.frames * FRAME : frames * FRAME]
        self.speech[new], self.power[new] = self.detector(samples), mean_square(samples)
        self.frames = frames

    def cut(self) -> int:
        """After how many of the frames not given out the next window ends."""
        reach = min(self.frames, self.lead + self.limit)
        speech, total = self.speech[self.lead : reach], reach - self.lead
        last = self.ended and reach == self.frames
        voiced = np.flatnonzero(speech >= SPEECH)
        if not len(voiced):
            return total if last else max(1, total - PAD)
        first = int(voiced[0])
        if first > 2 * PAD and not last:
            return first - PAD
        for start, stop in gaps(speech):
            if start > first and stop - start >= PAUSE and not (last and stop == total):
                return (start + stop) // 2
        if last:
            return total
        return quietest(speech, self.power[self.lead : reach], total - total // 3, total)

    def front(self, frames: int) -> Window:
        lead = self.lead * FRAME
        self.given = min(frames * FRAME, self.left)
        inside = slice(self.lead, self.lead + frames)
        context = self.context * FRAME
        return Window(
            self.start, self.samples[lead : lead + self.given], self.speech[inside], self.power[inside],
            self.samples[: min(lead + self.given + context, self.count)], lead, context,
        )  # fmt: skip

    def drop(self) -> None:
        """Forget the window last given out but for the context it is for the next; move the rest to the front."""
        frames = self.lead + -(-self.given // FRAME)
        lead = min(self.context, frames)
        gone = frames - lead
        rest, left = max(self.count - gone * FRAME, 0), self.frames - gone
        self.samples[:rest] = self.samples[gone * FRAME : gone * FRAME + rest]
        for values in (self.speech, self.power):
            values[:left] = values[gone : self.frames]
        self.start += self.given
        self.count, self.frames, self.lead = rest, left, lead


def gaps(speech: Frames) -> list[tuple[int, int]]:
    """The runs of frames without speech: [start, stop)."""
    edges = np.flatnonzero(np.diff(np.concatenate([[1], speech >= SPEECH, [1]]).astype(np.int8))).tolist()
    return list(zip(edges[0::2], edges[1::2], strict=True))


def quietest(speech: Frames, power: Frames, low: int, high: int) -> int:
    """The best frame boundary in [low, high) to cut at: the middle of a gap, or else between soft frames."""
    inside = [(min(stop, high) - max(start, low), start, stop) for start, stop in gaps(speech)]
    length, start, stop = max(inside, default=(0, 0, 0))
    if length >= GAP:
        return (max(start, low) + min(stop, high)) // 2
    pairs = power[max(low, 1) - 1 : high - 1] + power[max(low, 1) : high]
    return max(low, 1) + int(np.argmin(pairs))
