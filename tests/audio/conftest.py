"""Recordings made on the spot: PyAV encodes what the tests then decode."""

from __future__ import annotations

import io
import struct
from collections.abc import Callable, Sequence
from fractions import Fraction

import av
import numpy as np
import pytest

Encode = Callable[..., bytes]


def tone(seconds: float, rate: int, channels: int = 1, hertz: float = 440.0) -> np.ndarray:
    """A sine of amplitude 0.5: float32 [channels, n]."""
    wave = 0.5 * np.sin(2 * np.pi * hertz * np.arange(round(seconds * rate)) / rate)
    return np.repeat(wave[None], channels, 0).astype(np.float32)


def encode_media(
    container: str, codec: str, tracks: Sequence[np.ndarray] = (), rate: int = 44100, layout: str = "mono",
    video: bool = False, options: dict[str, str] | None = None,
) -> bytes:
    """A media file in memory: an audio track for each float array [channels, n], perhaps a video track."""
    buffer = io.BytesIO()
    with av.open(buffer, "w", format=container, options=options or {}) as out:
        picture = out.add_stream("mpeg4", rate=10, width=32, height=32, pix_fmt="yuv420p") if video else None
        streams = [out.add_stream(codec, rate=rate, layout=layout) for _ in tracks]
        if picture:
            for index in range(20):
                frame = av.VideoFrame.from_ndarray(np.zeros((32, 32, 3), np.uint8), format="rgb24")
                frame.pts, frame.time_base = index, Fraction(1, 10)
                out.mux(picture.encode(frame))
            out.mux(picture.encode(None))
        for stream, samples in zip(streams, tracks, strict=True):
            frame = av.AudioFrame.from_ndarray(np.ascontiguousarray(samples), format="fltp", layout=layout)
            frame.sample_rate, frame.pts, frame.time_base = rate, 0, Fraction(1, rate)
            form, size = stream.codec_context.format, stream.frame_size or None
            resampler = av.AudioResampler(form, layout, rate, size)
            for piece in [*resampler.resample(frame), *resampler.resample(None)]:
                out.mux(stream.encode(piece))
            out.mux(stream.encode(None))
    return buffer.getvalue()


def riff_wave(
    data: bytes, tag: int = 1, channels: int = 1, rate: int = 16000, bits: int = 16,
    data_size: int | None = None, before: bytes = b"", extension: bytes = b"", magic: bytes = b"RIFF",
) -> bytes:
    """A WAV file byte by byte, so that its header can lie."""
    block = channels * bits // 8
    fmt = struct.pack("<HHIIHH", tag, channels, rate, rate * block, block, bits) + extension
    size = len(data) if data_size is None else data_size
    chunks = before + b"fmt " + struct.pack("<I", len(fmt)) + fmt + b"data" + struct.pack("<I", size) + data
    body = b"WAVE" + chunks
    return magic + struct.pack("<I", min(len(body), 0xFFFFFFFF) if data_size is None else data_size) + body


@pytest.fixture
def encode() -> Encode:
    return encode_media


@pytest.fixture
def wav() -> Encode:
    return riff_wave


@pytest.fixture
def sine() -> Callable[..., np.ndarray]:
    return tone
