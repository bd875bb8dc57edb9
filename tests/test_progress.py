"""What the bar is told: ended recordings, audio seconds a second, the share of bytes."""

import pytest

from transcribe import progress
from transcribe.progress import Meter
from transcribe.worklist import Item


@pytest.fixture
def drawn(tmp_path, monkeypatch):
    """A meter over recordings of 100, 200 and 700 bytes, what it draws, and a clock to set."""
    items = []
    for number, size in enumerate((100, 200, 700)):
        path = tmp_path / f"{number}.wav"
        path.write_bytes(b"x" * size)
        items.append(Item(str(path), str(path)))
    clock = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: clock[0])
    lines = []
    return Meter(items, lambda *drawn: lines.append(drawn)), lines, clock


def test_several_recordings_are_measured_by_their_bytes(drawn):
    meter, lines, clock = drawn
    clock[0] = 10.0
    meter.reached(0, 20.0, 40.0)
    assert lines[-1] == ("0 of 3 files, 2.0 s of audio a second", 50.0, 1000)
    meter.reached(1, 30.0, None)  # nobody knows how long it is
    assert lines[-1] == ("0 of 3 files, 5.0 s of audio a second", 50.0, 1000)
    meter.ended(1)
    assert lines[-1] == ("1 of 3 files, 5.0 s of audio a second", 250.0, 1000)
    meter.reached(0, 50.0, 40.0)  # longer than it declares
    meter.ended(0)
    meter.ended(2)
    assert lines[-1] == ("3 of 3 files, 8.0 s of audio a second", 1000.0, 1000)


def test_one_recording_is_measured_by_its_seconds():
    lines = []
    meter = Meter([Item("a.wav", "a.wav")], lambda *drawn: lines.append(drawn))
    meter.reached(0, 3.0, 12.0)
    meter.ended(0)
    assert lines == [("a.wav", 3.0, 12.0)]


def test_without_a_bar_no_file_is_looked_at():
    meter = Meter([Item("/nowhere", "/nowhere")] * 2, None)
    meter.reached(0, 1.0, 2.0)
    meter.ended(0)
    assert meter.sizes == []
