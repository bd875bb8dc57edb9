"""A tokenizer.model, read by the `sentencepiece` package (Kudo and Richardson 2018)."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from transcribe.errors import ModelError

from .tokenizer import WORD_START, Tokenizer

if TYPE_CHECKING:
    from transcribe.weights import Checkpoint


@dataclass(frozen=True, kw_only=True)
class SentencePieceTokenizer(Tokenizer):
    """Pieces of any of the package's models."""

    processor: Any

    @property
    def vocab_size(self) -> int:
        return self.processor.get_piece_size()

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        return self.processor.decode([i for i in ids if not (skip_special and self._special(i))])

    def encode_all(self, texts: Sequence[str]) -> list[list[int]]:
        return self.processor.encode(list(texts))

    def token_id(self, token: str) -> int | None:
        id = self.processor.piece_to_id(token)
        return id if self.processor.id_to_piece(id) == token else None

    def piece(self, id: int) -> str:
        """What one token adds to a text: a leading space where it begins a word, nothing if it is special."""
        text = "" if self._special(id) else self.processor.id_to_piece(id).replace(WORD_START, " ")
        return sys.intern(text)  # an hour of them is kept

    def _special(self, id: int) -> bool:
        return self.processor.is_control(id) or self.processor.is_unknown(id)


def load_sentencepiece(checkpoint: Checkpoint) -> SentencePieceTokenizer:
    """The checkpoint's tokenizer.model. Raises `ModelError` if it is missing or damaged."""
    import sentencepiece

    data = checkpoint.side_file("tokenizer.model")
    if data is None:
        raise ModelError(f"{checkpoint.path}: no tokenizer: there is no tokenizer.model with it; download it again")
    processor = sentencepiece.SentencePieceProcessor()
    try:
        processor.LoadFromSerializedProto(data)
    except RuntimeError:
        raise ModelError(f"{checkpoint.path}: its tokenizer.model cannot be read; download it again") from None
    return SentencePieceTokenizer(processor=processor)
