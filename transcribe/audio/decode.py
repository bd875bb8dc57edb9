"""Files and open streams: any container and codec FFmpeg knows, decoded block by block.

The bytes decide, not the file's name and not the lengths in its header: those are only compared with what
came out.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import av
import av.error
import av.logging
import numpy as np

from transcribe.errors import AudioError

from .riff import declared_length
from .stream import AudioStream, Samples

av.logging.set_level(None)  # FFmpeg must not write to stderr: what matters comes back as an exception

HEAD_BYTES = 4096  # read ahead, to see what this is
ISO_MEDIA = (b"ftyp", b"moov", b"mdat", b"wide", b"free", b"skip")  # how an MP4 may begin, after a length
# Containers whose length field is optional or missing: FFmpeg then guesses from the first frames' bit rate.
GUESSED_LENGTH = {"mp3", "aac", "ac3", "eac3", "dts", "amr", "loas", "mpeg", "mpegts"}
PICTURES = ("image2", "_pipe", "gif", "apng")
# Full scale of FFmpeg's sample formats, without the "p" of the planar ones.
FULL_SCALE = {"u8": 2.0**7, "s16": 2.0**15, "s32": 2.0**31, "s64": 2.0**63, "flt": 1.0, "dbl": 1.0}


def open_audio(source: str | Path | BinaryIO) -> AudioStream:
    """Open a path or a binary file object, which may be a pipe: read from where it stands, left open.

    Raises `AudioError` in one line that names the source: no such file, a directory, no permission, an empty
    file, not audio, a video without sound.
    """
    if not isinstance(source, (str, Path)):
        name = getattr(source, "name", None)
        return _open(source, name if isinstance(name, str) else "audio stream", owned=False)
    name = os.fsdecode(os.fspath(source)).encode(errors="backslashreplace").decode()
    if os.path.isdir(source):
        raise AudioError(f"{name}: a directory, not a recording")
    try:
        return _open(open(source, "rb"), name, owned=True)
    except OSError as error:
        if error.filename is None and error.errno is None:
            raise
        raise AudioError(f"{name}: {(error.strerror or str(error)).lower()}") from None
    except ValueError as error:  # a null character in the path
        raise AudioError(f"{name!r}: {error}") from None


def _open(file: BinaryIO, name: str, owned: bool) -> AudioStream:
    """Open the container, and close what was opened if that fails."""
    reader = _Reader(file, owned)
    try:
        if not reader.head:
            raise AudioError(f"{name}: empty file")
        try:
            # A playlist must not send FFmpeg to other files or to the network.
            container = av.open(
                reader, "r", container_options={"protocol_whitelist": "none"}, metadata_errors="replace"
            )
        except (av.error.FFmpegError, ValueError):
            if reader.is_mp4:
                raise AudioError(f"{name}: an MP4 without its index, cut short perhaps") from None
            raise AudioError(f"{name}: not audio or video in any known format") from None
        return FileStream(name, container, reader)
    except BaseException:
        reader.close()
        raise


class _Reader:
    """A binary file for FFmpeg, without a name to judge by; a pipe is read ahead once, to see what it is."""

    def __init__(self, file: BinaryIO, owned: bool) -> None:
        self.file, self.owned = file, owned
        self.spool: Any = None
        self.origin = 0
        self.size: int | None = None
        self.pipe = not (hasattr(file, "seekable") and file.seekable())
        if self.pipe:
            self.head = self.unread = self._read_head()
            if self.is_mp4:  # its index may stand at the end, so it needs a file that seeks
                self.spool = tempfile.TemporaryFile()  # noqa: SIM115  closed by close()
                self.spool.write(self.head)
                shutil.copyfileobj(file, self.spool)
                self.spool.seek(0)
                self.pipe = False
        else:
            self.origin = file.tell()
            self.size = file.seek(0, os.SEEK_END) - self.origin
            file.seek(self.origin)
            self.head = self._read_head()
            file.seek(self.origin)

    def _read_head(self) -> bytes:
        head = b""
        while len(head) < HEAD_BYTES and (more := self.file.read(HEAD_BYTES - len(head))):
            head += more
        return head

    @property
    def is_mp4(self) -> bool:
        return self.head[4:8] in ISO_MEDIA

    def read(self, size: int) -> bytes:
        if self.pipe and self.unread:
            given, self.unread = self.unread[:size], self.unread[size:]
            return given
        return (self.spool or self.file).read(size) or b""

    def seekable(self) -> bool:
        return not self.pipe

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        file = self.spool or self.file
        return file.seek(offset + (self.origin if whence == os.SEEK_SET else 0), whence) - self.origin

    def tell(self) -> int:
        return (self.spool or self.file).tell() - self.origin

    def close(self) -> None:
        if self.spool is not None:
            self.spool.close()
        if self.owned:
            self.file.close()


class FileStream(AudioStream):
    """The first audio track of an open container."""

    def __init__(self, name: str, container: av.container.InputContainer, reader: _Reader) -> None:
        super().__init__(name)
        self.container, self.reader = container, reader
        tracks = container.streams.audio
        if not tracks:
            pictures = any(word in container.format.name for word in PICTURES)
            what = "a video without sound" if container.streams.video and not pictures else "not audio"
            raise AudioError(f"{name}: {what} ({container.format.name})")
        if len(tracks) > 1:
            self.warnings.append(f"{len(tracks)} audio tracks, only the first is used")
        self.track = tracks[0]
        self.decoder = self.track.codec_context
        if self.decoder is None:
            raise AudioError(f"{name}: its sound is in no known codec, or its header is damaged")
        if self.decoder.name == "pcm_f24le":
            # What FFmpeg takes for 24-bit floats is in practice 24-bit integers in the upper bytes of 32.
            self.decoder = av.CodecContext.create("pcm_s32le", "r")
            self.decoder.layout, self.decoder.sample_rate = self.track.layout, self.track.sample_rate
        self.endless = False  # a WAV whose writer never filled in the length: its last packet is always short
        self.declared_seconds, self.exact = self._declared()

    def _declared(self) -> tuple[float | None, bool]:
        """The length the source declares, in seconds, and whether falling short of it means damage."""
        if riff := declared_length(self.reader.head, self.reader.size):
            seconds, self.endless = riff
            return seconds, seconds is not None
        if self.track.duration and self.track.time_base:
            seconds = float(self.track.duration * self.track.time_base)
        elif stamp := self.track.metadata.get("DURATION"):  # Matroska's length of one track
            seconds = _clock(stamp)
        else:
            seconds = (self.container.duration or 0) / av.time_base
        if not seconds or seconds <= 0:
            return None, False
        by_rate = 8 * (self.reader.size or 0) / (self.decoder.bit_rate or 1)
        guessed = self.container.format.name in GUESSED_LENGTH and abs(seconds - by_rate) < 0.02 * seconds
        return seconds, not guessed

    def pieces(self) -> Iterator[tuple[Samples, int]]:
        decoded = broken = bad_samples = 0
        seconds = 0.0
        for frame in self._frames():
            if frame is None:
                broken += 1
                continue
            mono = _mono(frame)
            if not np.isfinite(mono).all():
                bad_samples += int(np.count_nonzero(~np.isfinite(mono)))
                mono = np.nan_to_num(mono, nan=0.0, posinf=0.0, neginf=0.0)
            decoded += len(mono)
            seconds += len(mono) / frame.sample_rate
            yield mono, frame.sample_rate
        if broken and not decoded:
            raise AudioError(f"{self.name}: not audio, or damaged: nothing in it could be decoded")
        if bad_samples:
            self.warnings.append(f"{bad_samples} samples are not finite numbers, taken as silence")
        declared = self.declared_seconds if self.exact else None
        self.damaged = bool(broken) or (declared is not None and seconds < _least(declared))
        if self.damaged:
            whole = "" if declared is None else f"of {declared:.1f} "
            packets = f" (packets broken: {broken})" if broken else ""
            self.warnings.append(f"damaged: decoded {seconds:.1f} {whole}s{packets}")
        elif not decoded:
            self.warnings.append("no samples: there is nothing to hear")

    def _frames(self) -> Iterator[av.AudioFrame | None]:
        """Decoded frames; None for each packet that is broken, and for a source that breaks off."""
        try:
            for packet in self.container.demux(self.track):
                if packet.is_corrupt and not self.endless:
                    yield None
                try:
                    yield from self.decoder.decode(packet)
                except av.error.EOFError:
                    return
                except (av.error.FFmpegError, ValueError):
                    yield None
        except av.error.EOFError:
            return
        except (av.error.FFmpegError, OSError):
            yield None

    def close(self) -> None:
        self.container.close()
        self.reader.close()


def _least(declared: float) -> float:
    """The seconds that must come out of so many: encoder delay and rounding may take a little off."""
    return declared - max(0.25, 0.005 * declared)


def _mono(frame: av.AudioFrame) -> Samples:
    """The mean over all channels: float32 [n], full scale at 1.

    FFmpeg's own mix to mono leaves out the bass channel, weighs the others by where they stand, and may clip.
    """
    samples = frame.to_ndarray()
    if not frame.format.is_planar:
        samples = samples.reshape(-1, frame.layout.nb_channels).T
    kind = frame.format.name.removesuffix("p")
    mono = samples.mean(0, dtype=np.float32) if len(samples) > 1 else samples[0].astype(np.float32)
    if kind == "u8":
        mono -= FULL_SCALE[kind]
    if FULL_SCALE[kind] != 1:
        mono /= np.float32(FULL_SCALE[kind])
    return mono


def _clock(stamp: str) -> float | None:
    """Seconds of "HH:MM:SS.fraction"; None for anything else."""
    try:
        hours, minutes, seconds = stamp.split(":")
        return int(hours) * 3600 + int(minutes) * 60 + float(seconds)
    except ValueError:
        return None
