"""Any container, any header: what comes out, and what is said about it."""

from __future__ import annotations

import io
import os
import struct
from pathlib import Path

import numpy as np
import pytest

from transcribe.audio import RATE, open_audio
from transcribe.errors import AudioError

PCM_GUID = bytes.fromhex("0100000000001000800000aa00389b71")


class Pipe(io.RawIOBase):
    """Bytes that come a little at a time and cannot be read twice."""

    def __init__(self, data: bytes) -> None:
        self.data = io.BytesIO(data)

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        return self.data.read(min(size, 1000) if size >= 0 else -1)


def decode(source):
    """The samples, and the stream that gave them."""
    with open_audio(source) as stream:
        return np.concatenate([*stream.blocks(), np.zeros(0, np.float32)]), stream


def pitch(samples: np.ndarray) -> float:
    """The strongest frequency in hertz."""
    spectrum = np.abs(np.fft.rfft(samples * np.hanning(len(samples))))
    return float(np.argmax(spectrum) * RATE / len(samples))


@pytest.mark.parametrize(
    ("container", "codec", "rate"),
    [
        ("flac", "flac", 44100), ("mp3", "libmp3lame", 44100), ("ogg", "libopus", 48000), ("ipod", "aac", 22050),
        ("webm", "libopus", 48000), ("matroska", "aac", 48000), ("wav", "pcm_s24le", 8000),
        ("aiff", "pcm_s16be", 11025), ("au", "pcm_mulaw", 8000), ("adts", "aac", 44100),
    ],
)
@pytest.mark.parametrize("kind", [io.BytesIO, Pipe])
def test_containers_and_codecs(encode, sine, container, codec, rate, kind):
    samples, stream = decode(kind(encode(container, codec, [sine(2, rate)], rate=rate)))
    assert stream.decoded_seconds == pytest.approx(2, abs=0.06)
    assert pitch(samples) == pytest.approx(440, abs=1)
    assert np.sqrt(np.mean(samples[RATE // 2 : -RATE // 2] ** 2)) == pytest.approx(0.5 / np.sqrt(2), rel=0.1)
    assert not stream.damaged
    assert stream.warnings == []


def test_content_decides_and_not_the_name(encode, sine, tmp_path):
    path = tmp_path / "talk.wav"
    path.write_bytes(encode("mp3", "libmp3lame", [sine(1, 44100)]))
    assert pitch(decode(path)[0]) == pytest.approx(440, abs=2)


def test_names_that_ffmpeg_would_take_for_something_else(wav, sine, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    data = wav((sine(0.1, RATE) * 32767).astype("<i2").tobytes())
    for name in ("http:x.wav", "-i.wav", "Høns på æg.wav", "[x] 100%d.wav", os.fsdecode(b"caf\xe9.wav")):
        Path(name).write_bytes(data)
        assert len(decode(name)[0]) == RATE // 10


@pytest.mark.parametrize(("layout", "channels"), [("stereo", 2), ("5.1", 6)])
def test_speech_in_one_channel_is_heard_whichever_it_is(encode, sine, layout, channels):
    for channel in range(channels):
        samples = np.zeros((channels, 16000), np.float32)
        samples[channel] = sine(1, 16000)[0]
        mixed, _ = decode(io.BytesIO(encode("flac", "flac", [samples], rate=16000, layout=layout)))
        np.testing.assert_allclose(mixed, samples.mean(0), atol=1e-3)


def test_sample_formats_of_wav(wav, sine):
    wave = sine(0.5, 8000)[0]
    whole = (wave * (2**31 - 1)).astype("<i4")
    extensible = struct.pack("<HHI", 22, 24, 4) + PCM_GUID
    files = {
        "u8": wav((np.round(wave * 127) + 128).astype(np.uint8).tobytes(), bits=8, rate=8000),
        "s16": wav((wave * 32767).astype("<i2").tobytes(), rate=8000),
        "s24": wav(whole.view(np.uint8).reshape(-1, 4)[:, 1:].tobytes(), bits=24, rate=8000),
        "s32": wav(whole.tobytes(), bits=32, rate=8000),
        "24 bits in 32": wav(whole.tobytes(), tag=0xFFFE, bits=32, rate=8000, extension=extensible),
        "f32": wav(wave.astype("<f4").tobytes(), tag=3, bits=32, rate=8000),
        "f64": wav(wave.astype("<f8").tobytes(), tag=3, bits=64, rate=8000),
    }
    expected, _ = decode(io.BytesIO(files["f32"]))
    assert len(expected) == RATE // 2
    for name, data in files.items():
        np.testing.assert_allclose(decode(io.BytesIO(data))[0], expected, atol=0.01, err_msg=name)


@pytest.mark.parametrize("size", [0, 0x7FFFFFFF, 0x7FFFF000, 0x80000000, 0xFFFFFFFF])
@pytest.mark.parametrize("kind", [io.BytesIO, Pipe])
def test_a_placeholder_length_is_not_believed(wav, sine, size, kind):
    data = (sine(1, RATE) * 32767).astype("<i2").tobytes()
    samples, stream = decode(kind(wav(data, data_size=size)))
    assert len(samples) == RATE
    assert stream.declared_seconds is None
    assert (stream.damaged, stream.warnings) == (False, [])


def test_odd_chunks_and_rf64(wav, sine):
    data = (sine(1, RATE) * 32767).astype("<i2").tobytes()
    sizes = struct.pack("<QQQI", len(data) + 100, len(data), len(data) // 2, 0)
    assert len(decode(io.BytesIO(wav(data, before=b"LIST" + struct.pack("<I", 5) + b"INFOx\0")))[0]) == RATE
    assert len(decode(io.BytesIO(wav(data[:-1])))[0]) == RATE - 1
    large = wav(data, data_size=0xFFFFFFFF, magic=b"RF64", before=b"ds64\x1c\0\0\0" + sizes)
    samples, stream = decode(io.BytesIO(large))
    assert (len(samples), stream.declared_seconds, stream.damaged) == (RATE, 1.0, False)


@pytest.mark.parametrize(
    ("container", "codec"),
    [("flac", "flac"), ("mp3", "libmp3lame"), ("matroska", "aac"), ("wav", "pcm_s16le"), ("aiff", "pcm_s16be")],
)
def test_a_file_cut_in_the_middle_says_how_much_was_decoded(encode, sine, container, codec):
    data = encode(container, codec, [sine(10, 44100)])
    samples, stream = decode(io.BytesIO(data[: len(data) // 2]))
    assert 4 < len(samples) / RATE < 6
    assert stream.damaged
    assert stream.declared_seconds == pytest.approx(10, abs=0.1)
    assert len(stream.warnings) == 1
    assert "damaged: decoded" in stream.warnings[0]
    assert "of 10.0 s" in stream.warnings[0]


def test_a_damaged_middle_keeps_what_follows(encode, sine):
    for container, codec in (("ipod", "aac"), ("mp3", "libmp3lame")):
        data = bytearray(encode(container, codec, [sine(20, 44100)]))
        data[len(data) // 2 : len(data) // 2 + 4096] = bytes(4096)
        samples, stream = decode(io.BytesIO(bytes(data)))
        assert 18.5 < len(samples) / RATE < 20
        assert stream.damaged


def test_a_variable_rate_mp3_without_a_length_is_not_called_damaged(encode, sine):
    quiet = np.concatenate([sine(3, 44100), np.zeros((1, 44100 * 3), np.float32)], 1)
    _, stream = decode(io.BytesIO(encode("mp3", "libmp3lame", [quiet], options={"write_xing": "0"})))
    assert stream.decoded_seconds == pytest.approx(6, abs=0.1)
    assert (stream.damaged, stream.warnings) == (False, [])


def test_the_first_of_several_tracks_with_a_warning(encode, sine):
    tracks = [sine(1, 44100, hertz=440), sine(1, 44100, hertz=880)]
    samples, stream = decode(io.BytesIO(encode("matroska", "aac", tracks)))
    assert pitch(samples) == pytest.approx(440, abs=2)
    assert stream.warnings == ["2 audio tracks, only the first is used"]


def test_the_sound_of_a_video_shorter_than_its_pictures(encode, sine):
    samples, stream = decode(io.BytesIO(encode("mp4", "aac", [sine(1, 44100)], video=True)))
    assert len(samples) / RATE == pytest.approx(1, abs=0.05)
    assert not stream.damaged


@pytest.mark.parametrize("size", [0, 0xFFFFFFFF])
def test_a_header_without_samples_is_a_warning(wav, size):
    samples, stream = decode(io.BytesIO(wav(b"", data_size=size)))
    assert len(samples) == 0
    assert stream.warnings == ["no samples: there is nothing to hear"]
    assert not stream.damaged


def test_samples_that_are_not_numbers_become_silence(wav, sine):
    wave = sine(1, RATE)[0]
    wave[[5, 50]] = np.nan, np.inf
    samples, stream = decode(io.BytesIO(wav(wave.astype("<f4").tobytes(), tag=3, bits=32)))
    assert samples[5] == samples[50] == 0
    assert "2 samples are not finite" in stream.warnings[0]


def test_each_failure_is_one_line_that_names_the_file(encode, tmp_path):
    jpeg = bytes.fromhex("ffd8ffe000104a46494600010100000100010000") + bytes(200)
    movie = encode("mp4", "aac", [], video=True)
    broken = encode("ipod", "aac", [np.random.default_rng(0).uniform(-1, 1, (1, 44100)).astype(np.float32)])
    silent = encode("ipod", "aac", [np.zeros((1, 44100), np.float32)])  # all index: the cut is in the middle of it
    cases = {
        "empty.wav": (b"", "empty file"),
        "text.wav": (b"hello, this is not audio\n" * 99, "not audio"),
        "paper.mp3": (b"%PDF-1.4\n1 0 obj\n<<>>\nendobj\n" * 50, "not audio"),
        "photo.wav": (jpeg, "not audio"),
        "list.m3u8": (b"#EXTM3U\n#EXTINF:10,\nfile:///etc/passwd\n#EXT-X-ENDLIST\n", "not audio"),
        "movie.mp4": (movie, "a video without sound"),
        "index.m4a": (silent[: len(silent) // 2], "its sound is in no known codec"),
        "cut.m4a": (broken[: len(broken) // 2], "an MP4 without its index"),
    }
    for name, (data, what) in cases.items():
        path = tmp_path / name
        path.write_bytes(data)
        with pytest.raises(AudioError) as caught:
            decode(path)
        assert str(caught.value).startswith(f"{path}: {what}"), caught.value
        assert "\n" not in str(caught.value)
    for path, what in ((tmp_path, "a directory"), (tmp_path / "none.wav", "no such file")):
        with pytest.raises(AudioError, match=what):
            open_audio(path)


def test_permission_denied(monkeypatch):
    def refuse(path, mode):
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr("builtins.open", refuse)  # root may read everything, so no file would do
    with pytest.raises(AudioError, match=r"^secret\.wav: permission denied$"):
        open_audio("secret.wav")


def test_a_file_object_is_read_from_where_it_stands_and_left_open(wav, sine):
    file = io.BytesIO(b"before" + wav((sine(1, RATE) * 32767).astype("<i2").tobytes()))
    file.seek(6)
    assert len(decode(file)[0]) == RATE
    assert not file.closed


def test_ffmpeg_prints_nothing(encode, sine, capfd):
    data = encode("mp3", "libmp3lame", [sine(2, 44100)])
    decode(io.BytesIO(data[:9000] + bytes(3000) + data[12000:]))
    with pytest.raises(AudioError):
        decode(io.BytesIO(b"nothing of the kind" * 50))
    assert capfd.readouterr() == ("", "")
