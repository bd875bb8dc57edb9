"""Token ids to text and back, from what a checkpoint carries.

Three kinds: SentencePiece-style pieces in the keys of a GGUF file, which only decode; byte-level tokens with merges,
in such keys or in files (byte_level.py); and a `tokenizer.json`, which the `tokenizers` package reads.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from transcribe.errors import ModelError, TranscribeError

if TYPE_CHECKING:
    import tokenizers

    from transcribe.weights import Checkpoint

NORMAL, UNKNOWN, CONTROL, BYTE = 1, 2, 3, 6  # values of tokenizer.ggml.token_type
WORD_START = "▁"  # U+2581, SentencePiece's mark for a space


@dataclass(frozen=True, kw_only=True)
class Tokenizer(ABC):
    """What a family may ask of a tokenizer. A special id is None where the checkpoint names none."""

    bos_token_id: int | None = None
    eos_token_id: int | None = None
    pad_token_id: int | None = None

    @property
    @abstractmethod
    def vocab_size(self) -> int:
        """Number of ids, special tokens included."""

    @abstractmethod
    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        """The text of these tokens; bytes that are not UTF-8 become U+FFFD."""

    def encode(self, text: str) -> list[int]:
        """The ids of this text, without special tokens. Raises TranscribeError if it only decodes."""
        return self.encode_all([text])[0]

    @abstractmethod
    def encode_all(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of each of these texts, for little more than those of one."""

    @abstractmethod
    def token_id(self, token: str) -> int | None:
        """The id of this exact piece or special token, or None."""


@dataclass(frozen=True, kw_only=True)
class PieceTokenizer(Tokenizer):
    """SentencePiece-style pieces with bytes as fallback, as GGUF files keep them. Decodes only.

    `pieces` and `types` (ggml's token types) are read one id at a time, so loading costs nothing a piece.
    """

    pieces: Sequence[str]
    types: Sequence[int]

    @property
    def vocab_size(self) -> int:
        return len(self.pieces)

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        text = bytearray()
        for i in ids:
            kind, piece = self.types[i], self.pieces[i]
            if kind == BYTE:
                text.append(int(piece[3:5], 16))  # "<0xHH>"
            elif kind not in (CONTROL, UNKNOWN):
                text += piece.replace(WORD_START, " ").encode()
            elif not skip_special:
                text += piece.encode()
        return text.decode(errors="replace").removeprefix(" ")

    def encode_all(self, texts: Sequence[str]) -> list[list[int]]:
        raise TranscribeError("this model's tokenizer only decodes: text cannot be given to the model")

    def token_id(self, token: str) -> int | None:
        return next((i for i, piece in enumerate(self.pieces) if piece == token), None)


@dataclass(frozen=True, kw_only=True)
class JsonTokenizer(Tokenizer):
    """A tokenizer.json, read by the `tokenizers` package."""

    tokenizer: tokenizers.Tokenizer

    @property
    def vocab_size(self) -> int:
        return self.tokenizer.get_vocab_size(with_added_tokens=True)

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        return self.tokenizer.decode(list(ids), skip_special_tokens=skip_special)

    def encode_all(self, texts: Sequence[str]) -> list[list[int]]:
        self.tokenizer.encode_special_tokens = True  # a special token's name in a text is text
        return [self.tokenizer.encode(text, add_special_tokens=False).ids for text in texts]

    def token_id(self, token: str) -> int | None:
        return self.tokenizer.token_to_id(token)


def load_tokenizer(checkpoint: Checkpoint) -> Tokenizer:
    """The checkpoint's tokenizer: from its GGUF keys if it has them, else from its files.

    Raises ModelError that names what is missing, or the kind that is not read.
    """
    if "tokenizer.ggml.model" in checkpoint.metadata:
        return _from_keys(checkpoint)
    if data := checkpoint.side_file("tokenizer.json"):
        return _from_json(checkpoint, data)
    names = ("vocab.json", "merges.txt", "tokenizer_config.json")
    files = [checkpoint.side_file(name) for name in names]
    if any(files):
        absent = [name for name, data in zip(names, files, strict=True) if data is None]
        if absent:
            raise ModelError(f"{checkpoint.path}: no tokenizer: there is no {absent[0]} beside it; download it")
        from .byte_level import from_files

        return from_files(checkpoint, *(data or b"" for data in files))
    missing = "key tokenizer.ggml.model" if checkpoint.format == "gguf" else "tokenizer.json beside it"
    raise ModelError(f"{checkpoint.path}: no tokenizer: there is no {missing}; download or convert it again")


def _from_keys(checkpoint: Checkpoint) -> Tokenizer:
    keys, path = checkpoint.metadata, checkpoint.path
    kind = keys["tokenizer.ggml.model"]
    if kind not in ("bpe", "unigram", "gpt2"):
        raise ModelError(f"{path}: a tokenizer of kind {kind!r} is not supported; bpe, unigram and gpt2 are")
    pieces = keys.get("tokenizer.ggml.tokens", ())
    types = keys.get("tokenizer.ggml.token_type", ())
    for key, value in (("tokens", pieces), ("token_type", types)):
        if not len(value):
            raise ModelError(f"{path}: no tokenizer: there is no key tokenizer.ggml.{key}; convert it again")
    if len(pieces) != len(types):
        raise ModelError(f"{path}: {len(pieces)} tokens but {len(types)} token types; convert it again")
    common = {
        "pieces": pieces,
        "types": types,
        "bos_token_id": keys.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": keys.get("tokenizer.ggml.eos_token_id"),
        "pad_token_id": keys.get("tokenizer.ggml.padding_token_id"),
    }
    if kind == "gpt2":
        from .byte_level import from_keys

        return from_keys(checkpoint, common)
    return PieceTokenizer(**common)


def _from_json(checkpoint: Checkpoint, data: bytes) -> JsonTokenizer:
    import tokenizers

    try:
        tokenizer = tokenizers.Tokenizer.from_buffer(data)
    except Exception as error:  # the package raises nothing narrower
        raise ModelError(f"{checkpoint.path}: its tokenizer.json cannot be read: {error}") from None

    def special_id(key: str) -> int | None:
        value: Any = checkpoint.config.get(key)  # a number, a list whose first is the usual one, or null
        return value[0] if isinstance(value, list) and value else value

    return JsonTokenizer(
        tokenizer=tokenizer,
        bos_token_id=special_id("bos_token_id"),
        eos_token_id=special_id("eos_token_id"),
        pad_token_id=special_id("pad_token_id"),
    )
