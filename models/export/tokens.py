"""A tokenizer.json as the keys of a GGUF file."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

from gguf import TokenType

from transcribe.errors import ModelError
from transcribe.text.tokenizer import JsonTokenizer, load_tokenizer

if TYPE_CHECKING:
    from transcribe.weights import Checkpoint

BYTE = re.compile(r"<0x[0-9A-F]{2}>")


def tokenizer_keys(checkpoint: Checkpoint, vocabulary: int, model: str, pre: str) -> dict[str, Any]:
    """`tokenizer.ggml.*` of a checkpoint with a BPE tokenizer.json: its kind, pieces by id, their types, merges.

    `vocabulary` is the number of rows of the embedding: ids without a token get a name. `model` is "gpt2" for
    byte-level BPE, "bpe" for SentencePiece's; `pre` is how text is split before merging. Raises `ModelError` for a
    tokenizer of another kind or one too large.
    """
    tokenizer = load_tokenizer(checkpoint)
    if not isinstance(tokenizer, JsonTokenizer):
        raise ModelError(f"{checkpoint.path}: its tokenizer is not a tokenizer.json, which is needed to convert")
    stored = json.loads(tokenizer.tokenizer.to_str())
    kind = stored["model"].get("type")
    if kind != "BPE":
        raise ModelError(f"{checkpoint.path}: its tokenizer.json is of type {kind}; only BPE can be converted")
    pieces: dict[int, str] = {id: piece for piece, id in stored["model"]["vocab"].items()}
    special = {token["id"] for token in stored["added_tokens"] if token["special"]}
    pieces.update((token["id"], token["content"]) for token in stored["added_tokens"])
    if max(pieces) >= vocabulary:
        raise ModelError(f"{checkpoint.path}: its tokenizer has id {max(pieces)}, but the model {vocabulary} tokens")
    unknown = stored["model"].get("unk_token")

    def type_of(id: int) -> int:
        if id in pieces and pieces[id] == unknown:
            return int(TokenType.UNKNOWN)
        if id in special:
            return int(TokenType.CONTROL)
        falls_back = stored["model"].get("byte_fallback") and BYTE.fullmatch(pieces.get(id, ""))
        return int(TokenType.BYTE if falls_back else TokenType.NORMAL)

    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in stored["model"]["merges"]]
    return {
        "tokenizer.ggml.model": model,
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": [pieces.get(id, f"<|unused_{id}|>") for id in range(vocabulary)],
        "tokenizer.ggml.token_type": [type_of(id) for id in range(vocabulary)],
        "tokenizer.ggml.merges": merges,
    }


def size_label(parameters: int) -> str:
    """How many parameters, as names of models have it: 0.6B, 27M."""
    for unit, letter in ((10**9, "B"), (10**6, "M")):
        if parameters >= unit * 0.5:
            return f"{parameters / unit:.1f}{letter}" if unit == 10**9 else f"{parameters / unit:.0f}{letter}"
    return f"{parameters / 1000:.0f}K"
