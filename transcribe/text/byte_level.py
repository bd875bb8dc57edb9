"""Byte-level byte-pair encoding (Radford et al. 2019), from lists of tokens and merges.

Decoding reads one token at a time. A word that is a token is encoded as that (all 151,643 tokens of Qwen's vocabulary
merge into themselves). Any other needs merges; of the hundred and fifty thousand that a vocabulary has, a text can use
only those whose result stands in it, so the encoder is made of these, for each text, when one is encoded.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from transcribe.errors import ModelError, TranscribeError

from .tokenizer import CONTROL, NORMAL, Tokenizer

if TYPE_CHECKING:
    from transcribe.weights import Checkpoint

# How text is split before merging, by tokenizer.ggml.pre; tokens never reach across a split.
SPLITS = {
    "qwen2": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+",
}


def _byte_of_character() -> dict[str, int]:
    """Printable Latin-1 stands for itself; the other bytes follow from U+0100 on, in order."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(rest)}


BYTES = _byte_of_character()


@dataclass(frozen=True, kw_only=True)
class ByteLevelTokenizer(Tokenizer):
    """Tokens and merges ("left right") as GGUF's keys and vocab.json with merges.txt have them.

    `types` are ggml's token types; `merges` is called when a text is to be encoded. `split` names the pattern.
    """

    pieces: Sequence[str]
    types: Sequence[int]
    merges: Callable[[], Iterable[str]]
    split: str

    @property
    def vocab_size(self) -> int:
        return len(self.pieces)

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        text = bytearray()
        for i in ids:
            if self.types[i] == NORMAL:
                for character in self.pieces[i]:
                    byte = BYTES.get(character)
                    text += character.encode() if byte is None else bytes((byte,))
            elif self.types[i] != CONTROL or not skip_special:
                text += self.pieces[i].encode()
        return text.decode(errors="replace")

    def encode_all(self, texts: Sequence[str]) -> list[list[int]]:
        import tokenizers
        from tokenizers import models, normalizers, pre_tokenizers

        if self.split not in SPLITS:
            unknown = f"this model's tokenizer splits text in an unknown way, {self.split!r}"
            raise TranscribeError(f"{unknown}: text cannot be given to the model")
        normalizer = normalizers.NFC()
        splits = pre_tokenizers.Split(tokenizers.Regex(SPLITS[self.split]), behavior="isolated")
        steps = pre_tokenizers.Sequence([splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
        split = [steps.pre_tokenize_str(normalizer.normalize_str(text)) for text in texts]
        words = {word for parts in split for word, _ in parts}
        text = "\n".join(words)  # no token holds a line break as such
        found = {piece: i for i, piece in enumerate(self.pieces) if piece in text and self.types[i] == NORMAL}
        if words <= found.keys():
            return [[found[word] for word, _ in parts] for parts in split]
        pairs = {
            f"{piece[:at]} {piece[at:]}" for piece in found for at in range(1, len(piece))
            if piece[:at] in found and piece[at:] in found
        }  # fmt: skip
        merges = [(left, right) for merge in self.merges() if merge in pairs for left, right in (merge.split(" "),)]
        encoder = tokenizers.Tokenizer(models.BPE(found, merges, ignore_merges=True))
        encoder.normalizer, encoder.pre_tokenizer = normalizer, steps
        return [encoder.encode(text).ids for text in texts]

    def token_id(self, token: str) -> int | None:
        for i in reversed(range(len(self.pieces))):  # special tokens, which are asked for, stand at the end
            if self.pieces[i] == token:
                return i
        return None


def from_keys(checkpoint: Checkpoint, common: dict[str, Any]) -> ByteLevelTokenizer:
    """From a GGUF file's keys. `common` are those that any kind of tokenizer has."""
    keys = checkpoint.metadata
    if "tokenizer.ggml.merges" not in keys:
        raise ModelError(f"{checkpoint.path}: no tokenizer: there is no key tokenizer.ggml.merges; convert it again")
    return ByteLevelTokenizer(
        merges=lambda: keys["tokenizer.ggml.merges"], split=keys.get("tokenizer.ggml.pre", ""), **common
    )


def from_files(checkpoint: Checkpoint, vocabulary: bytes, merges: bytes, config: bytes) -> ByteLevelTokenizer:
    """From vocab.json, merges.txt and tokenizer_config.json, which names the tokens added since.

    Raises ModelError if one of them is damaged.
    """
    try:
        pieces = {int(i): str(piece) for piece, i in json.loads(vocabulary).items()}
        settings = json.loads(config)
        added = {int(i): token for i, token in settings.get("added_tokens_decoder", {}).items()}
        pieces |= {i: str(token["content"]) for i, token in added.items()}
        special = {i for i, token in added.items() if token.get("special")}
        lines = merges.decode().splitlines()
    except (ValueError, AttributeError, TypeError, KeyError):
        names = "vocab.json, merges.txt and tokenizer_config.json"
        raise ModelError(f"{checkpoint.path}: of {names} beside it one is damaged; download them again") from None
    ids = range(max(pieces, default=-1) + 1)

    def special_id(role: str) -> int | None:
        token = settings.get(role)
        content = token.get("content") if isinstance(token, dict) else token
        return next((i for i in added if pieces[i] == content), None)

    return ByteLevelTokenizer(
        pieces=[pieces.get(i, "") for i in ids],
        types=[CONTROL if i in special else NORMAL for i in ids],
        merges=lambda: lines,  # its first line, "#version", is no merge of any text
        split="qwen2",
        bos_token_id=special_id("bos_token"),
        eos_token_id=special_id("eos_token"),
        pad_token_id=special_id("pad_token"),
    )
