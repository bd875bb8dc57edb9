"""What a file that is no model looks like, from its first bytes."""

from __future__ import annotations

# Enough to see a tar's magic at 257 and the first name in a zip.
HEAD_BYTES = 512

MAGICS = (
    (0, b"version https://git-lfs", "a git-lfs pointer, not the file itself; fetch it with git lfs pull"),
    (0, b"\x80\x02", "a PyTorch pickle; convert it to safetensors"),
    (0, b"\x80\x03", "a pickle; convert it to safetensors"),
    (0, b"\x80\x04", "a pickle; convert it to safetensors"),
    (0, b"\x80\x05", "a pickle; convert it to safetensors"),
    (0, b"lmgg", "an old ggml .bin model (whisper.cpp); convert the original to GGUF"),
    (0, b"fmgg", "an old ggml .bin model; convert the original to GGUF"),
    (0, b"tjgg", "an old ggml .bin model; convert the original to GGUF"),
    (0, b"PK", "a zip archive; unpack it and give the model inside"),
    (0, b"\x1f\x8b", "a gzip archive; unpack it and give the model inside"),
    (257, b"ustar", "a tar archive without a NeMo model in it; unpack it and give the model inside"),
    (0, b"RIFF", "a recording; give it as the input and the model with --model"),
    (0, b"ID3", "a recording; give it as the input and the model with --model"),
    (0, b"fLaC", "a recording; give it as the input and the model with --model"),
    (0, b"OggS", "a recording; give it as the input and the model with --model"),
    (4, b"ORTM", "an ONNX Runtime model; give a GGUF or safetensors file"),
)
OTHERWISE = "give a GGUF, safetensors or .nemo file, or a directory that holds one"


def describe(head: bytes) -> str:
    """What the file looks like and what to do, as "an HTML page; ..."."""
    if not head:
        return "an empty file; download it again"
    text = head.lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    if text.startswith((b"<!doctype", b"<html", b"<?xml")):
        return "an HTML or XML page, likely an error page saved by a download; download it again"
    if head.startswith(b"PK\x03\x04") and b"data.pkl" in head:
        return "a PyTorch archive (pickle); convert it to safetensors"
    for at, magic, what in MAGICS:
        if head[at : at + len(magic)] == magic:
            return what
    if not head.strip(b"\0"):
        return "a file of zeros, as an unfinished download leaves; download it again"
    if _is_text(head):
        return f"a {'JSON' if text[:1] in b'{[' else 'text'} file; {OTHERWISE}"
    return f"a file of an unknown kind (it begins with {head[:4]!r}); {OTHERWISE}"


def _is_text(head: bytes) -> bool:
    return all(byte >= 32 or byte in b"\t\n\r\f\x1b" for byte in head)
