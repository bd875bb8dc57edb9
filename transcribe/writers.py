"""A transcript as text in the formats of the whisper family: pure functions, `Transcript` to `str`.

Times are clamped and ordered here, in whole milliseconds: whatever a model says, a player gets cues with
0 <= start <= end <= duration that follow each other and do not overlap.
"""

from __future__ import annotations

import json as _json
import math
from collections.abc import Callable, Iterable
from typing import Any

from .errors import UsageError
from .transcript import Transcript


def txt(transcript: Transcript) -> str:
    """The text, one line a segment; the whole text where there are no segments. Empty if nothing was said."""
    lines = [one_line(segment.text) for segment in transcript.segments] or [transcript.text.strip()]
    return "".join(f"{line}\n" for line in lines if line)


def srt(transcript: Transcript) -> str:
    """SubRip: numbered from 1, hours always, a comma before the milliseconds."""
    cues = (
        f"{number}\n{clock(start, ',')} --> {clock(end, ',')}\n{text.replace('-->', '->')}\n"
        for number, (start, end, text) in enumerate(_cues(transcript), 1)
    )
    return "\n".join(cues)


def vtt(transcript: Transcript) -> str:
    """WebVTT: hours only where there are any; `&`, `<` and `>` escaped as its cue text requires."""
    cues = (
        f"{clock(start, '.', hours=False)} --> {clock(end, '.', hours=False)}\n{_escape(text)}\n"
        for start, end, text in _cues(transcript)
    )
    return "\n".join(["WEBVTT\n", *cues])


def tsv(transcript: Transcript) -> str:
    """Tab-separated start and end in whole milliseconds, and the text; one header line."""
    rows = (f"{start}\t{end}\t{text.replace(chr(9), ' ')}\n" for start, end, text in _cues(transcript))
    return "".join(["start\tend\ttext\n", *rows])


def json(transcript: Transcript) -> str:
    """One JSON object, indented: whisper's keys and ours."""
    return _json.dumps(as_dict(transcript), ensure_ascii=False, indent=2, allow_nan=False) + "\n"


def jsonl(transcript: Transcript) -> str:
    """The same object on one line."""
    return json_line(as_dict(transcript))


WRITERS: dict[str, Callable[[Transcript], str]] = {
    "txt": txt,
    "srt": srt,
    "vtt": vtt,
    "tsv": tsv,
    "json": json,
    "jsonl": jsonl,
}
ALL = ("txt", "srt", "vtt", "tsv", "json")
NEED_SEGMENTS = ("srt", "vtt", "tsv")


def formats(choice: str, timestamps: str = "segment") -> tuple[str, ...]:
    """The formats that `choice` stands for; "all" is every one that whisper writes.

    Raises `UsageError` for an unknown one, or one made of times when `timestamps` is "none".
    """
    chosen = ALL if choice == "all" else (choice,)
    if choice not in WRITERS and choice != "all":
        raise UsageError(f"no output format {choice!r}; there are {', '.join(WRITERS)} and all")
    if timestamps == "none" and any(name in NEED_SEGMENTS for name in chosen):
        raise UsageError(f"--output-format {choice} needs times: drop --timestamps none, or use txt or json")
    return chosen


def json_line(record: dict[str, Any]) -> str:
    """`record` as one line of JSON; what JSON cannot hold (NaN, infinity) becomes null."""
    return _json.dumps(_finite(record), ensure_ascii=False, allow_nan=False) + "\n"


def encode(text: str) -> bytes:
    """UTF-8; a stray byte of a file name becomes a JSON escape (`\\udcff`) that reads back as that name."""
    return text.encode("utf-8", "backslashreplace")


def as_dict(transcript: Transcript) -> dict[str, Any]:
    """The JSON object: times in seconds to the millisecond; `words` only where a segment has any."""
    segments = []
    for segment, (start, end) in _timed(transcript.segments, transcript.duration):
        record = {"id": segment.id, "start": start / 1000, "end": end / 1000, "text": segment.text}
        if segment.words:
            record["words"] = [
                {"word": word.word, "start": s / 1000, "end": e / 1000, "probability": word.probability}
                for word, (s, e) in _timed(segment.words, transcript.duration)
            ]
        segments.append(record)
    record = {
        "text": transcript.text,
        "language": transcript.language,
        "duration": round(transcript.duration, 3),
        "segments": segments,
        "model": transcript.model,
        "family": transcript.family,
        "decoded_seconds": round(transcript.decoded_seconds, 3),
        "covered_seconds": round(transcript.covered_seconds, 3),
        "truncated": transcript.truncated,
        "no_speech": transcript.no_speech,
        "timestamps_from": transcript.timestamps_from,
        "warnings": transcript.warnings,
        "stats": transcript.stats,
    }
    return _finite(record)


def clock(milliseconds: int, mark: str, hours: bool = True) -> str:
    """`HH:MM:SS` and milliseconds after `mark`; without `hours`, they are left out while they are zero."""
    seconds, ms = divmod(milliseconds, 1000)
    minutes, s = divmod(seconds, 60)
    h, m = divmod(minutes, 60)
    return f"{h:02}:{m:02}:{s:02}{mark}{ms:03}" if hours or h else f"{m:02}:{s:02}{mark}{ms:03}"


def one_line(text: str) -> str:
    """`text` without line breaks, which would end a cue or a row."""
    return " ".join(part.strip() for part in text.splitlines() if part.strip())


def _cues(transcript: Transcript) -> Iterable[tuple[int, int, str]]:
    """(start, end, text) in milliseconds for every segment that says something."""
    for segment, (start, end) in _timed(transcript.segments, transcript.duration):
        if text := one_line(segment.text):
            yield start, end, text


def _timed(spans: list[Any], duration: float) -> list[tuple[Any, tuple[int, int]]]:
    """Each span with its (start, end) in milliseconds: ordered, within [0, duration], not overlapping."""
    limit = max(0, math.floor(duration * 1000 + 1e-6))
    starts: list[int] = []
    for span in spans:
        start = min(max(_milliseconds(span.start), 0), limit)
        starts.append(max(start, starts[-1] if starts else 0))
    ends = [
        min(max(_milliseconds(span.end), start), following)
        for span, start, following in zip(spans, starts, [*starts, limit][1:], strict=True)
    ]
    return list(zip(spans, zip(starts, ends, strict=True), strict=True))


def _milliseconds(seconds: float) -> int:
    return round(seconds * 1000) if abs(seconds) < 1e9 else 0  # NaN and infinity too


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value


def _escape(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
