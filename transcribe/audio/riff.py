"""What a WAV header says about its length, before FFmpeg corrects it to the bytes that are there."""

from __future__ import annotations

import struct

# Writers that cannot seek back leave a length of 0, 0x7FFFFFFF, 0xFFFFFFFF, or one of these rounded down.
PLACEHOLDER = 0x7FFF0000


def declared_length(head: bytes, there: int | None) -> tuple[float | None, bool] | None:
    """The seconds a RIFF or RF64 header declares, and whether the length is only a placeholder.

    `head` is the start of the file and `there` its size in bytes if known. None if this is not a WAV or its
    `data` chunk does not begin within `head`.
    """
    if head[:4] not in (b"RIFF", b"RF64") or head[8:12] != b"WAVE":
        return None
    at, bytes_a_second, large = 12, 0, 0
    while at + 8 <= len(head):
        kind, size = head[at : at + 4], struct.unpack_from("<I", head, at + 4)[0]
        body = at + 8
        if kind == b"data":
            size = large or size
            if size == 0 or (size >= PLACEHOLDER and (there is None or there < size)):
                return None, True
            return (size / bytes_a_second if bytes_a_second else None), False
        if kind == b"fmt " and len(head) >= body + 12:
            bytes_a_second = struct.unpack_from("<I", head, body + 8)[0]
        elif kind == b"ds64" and len(head) >= body + 16:
            large = struct.unpack_from("<Q", head, body + 8)[0]
        at = body + size + size % 2
    return None
