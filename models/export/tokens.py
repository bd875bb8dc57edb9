"""A tokenizer as the keys of a GGUF file."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

from gguf import TokenType

from transcribe.errors import ModelError
from transcribe.text.byte_level import ByteLevelTokenizer
from transcribe.text.tokenizer import JsonTokenizer, load_tokenizer

if TYPE_CHECKING:
    from transcribe.weights import Checkpoint

BYTE = re.compile(r"<0x[0-9A-F]{2}>")


def tokenizer_keys(checkpoint: Checkpoint, vocabulary: int, model: str, pre: str) -> dict[str, Any]:
    """`tokenizer.ggml.*` of a checkpoint whose tokenizer is byte-pair encoding: kind, pieces by id, types, merges.

    `vocabulary` is the number of rows of the embedding: ids without a token get a name. `model` is "gpt2" for
    byte-level pieces, "bpe" for SentencePiece's; `pre` is how text is split before merging. Raises `ModelError` for a
    tokenizer of another kind or one too large.
    """
    tokenizer = load_tokenizer(checkpoint)
    if isinstance(tokenizer, ByteLevelTokenizer):
        pieces = dict(enumerate(tokenizer.pieces))
        types = dict(enumerate(tokenizer.types))
        merges = [merge for merge in tokenizer.merges() if merge and not merge.startswith("#version")]
    elif isinstance(tokenizer, JsonTokenizer):
        pieces, types, merges = _read_json(checkpoint, json.loads(tokenizer.tokenizer.to_str()))
    else:
        raise ModelError(f"{checkpoint.path}: its tokenizer has no merges, which are needed to convert it")
    if max(pieces) >= vocabulary:
        raise ModelError(f"{checkpoint.path}: its tokenizer has id {max(pieces)}, but the model {vocabulary} tokens")
    return {
        "tokenizer.ggml.model": model,
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": [pieces.get(id) or f"<|unused_{id}|>" for id in range(vocabulary)],
        "tokenizer.ggml.token_type": [int(types.get(id, TokenType.NORMAL)) for id in range(vocabulary)],
        "tokenizer.ggml.merges": merges,
    }


def _read_json(checkpoint: Checkpoint, stored: dict[str, Any]) -> tuple[dict[int, str], dict[int, int], list[str]]:
    model, added = stored["model"], stored["added_tokens"]
    if model.get("type") != "BPE":
        raise ModelError(f"{checkpoint.path}: its tokenizer.json is of type {model.get('type')}; only BPE is converted")
    pieces: dict[int, str] = {id: piece for piece, id in model["vocab"].items()}
    pieces.update((token["id"], token["content"]) for token in added)
    types: dict[int, int] = {}
    if model.get("byte_fallback"):
        types.update((id, TokenType.BYTE) for id, piece in pieces.items() if BYTE.fullmatch(piece))
    types.update((token["id"], TokenType.CONTROL) for token in added if token["special"])
    types.update((id, TokenType.UNKNOWN) for id, piece in pieces.items() if piece == model.get("unk_token"))
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    return pieces, types, merges
