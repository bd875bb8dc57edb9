"""What every source of audio becomes: a stream of mono float32 blocks at 16 kHz."""

from __future__ import annotations

from collections.abc import Iterator
from types import TracebackType

import av
import numpy as np
import numpy.typing as npt

RATE = 16000  # samples a second
PIECE_SECONDS = 0.5  # decoders give a few hundred samples at a time: resample and hand on this much at once

Samples = npt.NDArray[np.float32]


class AudioStream:
    """One recording, read once from front to end. A context manager; subclasses give `pieces` and `close`.

    `declared_seconds` is what the source says about itself (None if it does not say), `decoded_seconds` what
    has been given out so far. `damaged`: part of the source could not be decoded; `warnings` says so.
    """

    def __init__(self, name: str, declared_seconds: float | None = None) -> None:
        self.name = name
        self.declared_seconds = declared_seconds
        self.warnings: list[str] = []
        self.damaged = False
        self._given = 0

    @property
    def decoded_seconds(self) -> float:
        return self._given / RATE

    def pieces(self) -> Iterator[tuple[Samples, int]]:
        """Mono float32 [n] at the source's own rate, and that rate, which may change on the way."""
        raise NotImplementedError

    def blocks(self) -> Iterator[Samples]:
        """Mono float32 [n] at 16 kHz, at most some seconds. Raises `AudioError` if nothing can be decoded."""
        for block in resample(gather(self.pieces())):
            self._given += len(block)
            yield block

    def close(self) -> None:
        """Release what the stream holds open."""

    def __enter__(self) -> AudioStream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def gather(pieces: Iterator[tuple[Samples, int]]) -> Iterator[tuple[Samples, int]]:
    """Join small pieces of one rate to about `PIECE_SECONDS`."""
    waiting: list[Samples] = []
    size, rate = 0, 0
    for samples, piece_rate in pieces:
        if waiting and (piece_rate != rate or size >= PIECE_SECONDS * rate):
            yield np.concatenate(waiting), rate
            waiting, size = [], 0
        waiting.append(samples)
        size, rate = size + len(samples), piece_rate
    if waiting:
        yield np.concatenate(waiting), rate


def resample(pieces: Iterator[tuple[Samples, int]]) -> Iterator[Samples]:
    """Bring every piece to 16 kHz, piece by piece; the filter runs on across pieces of one rate."""
    resampler: av.AudioResampler | None = None
    current = RATE
    for samples, rate in pieces:
        if rate != current:
            yield from _frames(resampler, None)
            resampler = None if rate == RATE else av.AudioResampler("flt", "mono", RATE)
            current = rate
        if resampler is None:
            yield samples
        else:
            frame = av.AudioFrame.from_ndarray(samples[None], format="flt", layout="mono")
            frame.sample_rate = rate
            yield from _frames(resampler, frame)
    yield from _frames(resampler, None)


def _frames(resampler: av.AudioResampler | None, frame: av.AudioFrame | None) -> Iterator[Samples]:
    """What the resampler gives for a frame; for None, what it still holds."""
    for out in resampler.resample(frame) if resampler else ():
        if out.samples:
            yield out.to_ndarray()[0]
