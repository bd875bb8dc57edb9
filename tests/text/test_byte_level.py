"""Byte-level tokens from GGUF keys and from files, against the `tokenizers` package with the whole vocabulary."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers

from transcribe.errors import ModelError, TranscribeError
from transcribe.text.byte_level import BYTES, SPLITS, ByteLevelTokenizer
from transcribe.text.tokenizer import load_tokenizer

MERGES = ["h e", "l l", "ll o", "he llo", "Ġ w", "o r", "Ġw or", "l d", "Ġwor ld", "Ã ©", "1 2", "Ġ Ġ", "Ċ Ċ", "' s"]
WORDS = sorted(BYTES) + [merge.replace(" ", "") for merge in MERGES]
PIECES = [*WORDS, "<|end|>", "<tag>"]
TYPES = [1] * len(WORDS) + [3, 1]
KEYS = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "qwen2",
    "tokenizer.ggml.tokens": PIECES,
    "tokenizer.ggml.token_type": TYPES,
    "tokenizer.ggml.merges": MERGES,
    "tokenizer.ggml.eos_token_id": len(WORDS),
}
ADDED = {len(WORDS): {"content": "<|end|>", "special": True}, len(WORDS) + 1: {"content": "<tag>", "special": False}}
FILES = {
    "vocab.json": json.dumps({piece: i for i, piece in enumerate(WORDS)}).encode(),
    "merges.txt": "\n".join(["#version: 0.2", *MERGES, ""]).encode(),
    "tokenizer_config.json": json.dumps({"added_tokens_decoder": ADDED, "eos_token": "<|end|>"}).encode(),
}


def checkpoint(metadata=None, files=None, format="gguf"):
    return SimpleNamespace(
        path=Path("model"), format=format, metadata=metadata or {}, config={}, side_file=(files or {}).get
    )


@pytest.fixture(scope="module", params=["keys", "files"])
def tokenizer(request):
    return load_tokenizer(checkpoint(KEYS) if request.param == "keys" else checkpoint(files=FILES))


def reference() -> tokenizers.Tokenizer:
    whole = tokenizers.Tokenizer(
        models.BPE({piece: i for i, piece in enumerate(WORDS)}, [tuple(merge.split(" ")) for merge in MERGES])
    )
    whole.normalizer, whole.decoder = normalizers.NFC(), decoders.ByteLevel()
    split = pre_tokenizers.Split(tokenizers.Regex(SPLITS["qwen2"]), behavior="isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    whole.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    return whole


TEXTS = ["hello world", "hello  world's 12345\n\nhé", "e\u0301", "日本語 🙂", "<|end|> <tag>", ""]


@pytest.mark.parametrize("text", TEXTS)
def test_texts_are_encoded_as_with_the_whole_vocabulary(tokenizer, text):
    assert tokenizer.encode(text) == reference().encode(text).ids


@given(st.lists(st.text("helo wrd'sé12\n<|", max_size=12), max_size=3))
def test_any_texts_encode_alike_and_decode_to_themselves(texts):
    tokenizer = load_tokenizer(checkpoint(KEYS))
    encoded = tokenizer.encode_all(texts)
    assert encoded == [reference().encode(text).ids for text in texts]
    assert [tokenizer.decode(ids) for ids in encoded] == texts


def test_bytes_join_into_characters_across_tokens_and_broken_ones_are_replaced(tokenizer):
    euro = [PIECES.index(character) for character in "âĤ¬"]
    assert tokenizer.decode(euro) == "€"
    assert tokenizer.decode(euro[:2]) == "\ufffd"


def test_control_tokens_are_dropped_unless_asked_for_and_others_are_text(tokenizer):
    ids = [PIECES.index("hello"), len(WORDS), len(WORDS) + 1]
    assert tokenizer.decode(ids) == "hello<tag>"
    assert tokenizer.decode(ids, skip_special=False) == "hello<|end|><tag>"


def test_special_tokens_are_found(tokenizer):
    assert tokenizer.eos_token_id == tokenizer.token_id("<|end|>") == len(WORDS)
    assert tokenizer.token_id("absent") is None
    assert tokenizer.vocab_size == len(PIECES)


def test_merges_are_not_read_to_decode_nor_for_words_that_are_tokens():
    def merges():
        raise AssertionError("merges were read")

    tokenizer = ByteLevelTokenizer(pieces=PIECES, types=TYPES, merges=merges, split="qwen2")
    assert tokenizer.decode([PIECES.index("hello")]) == "hello"
    assert tokenizer.encode_all(["hello world", "or", ""]) == [
        [PIECES.index("hello"), PIECES.index("Ġworld")], [PIECES.index("or")], [],
    ]  # fmt: skip
    with pytest.raises(AssertionError, match="merges were read"):
        tokenizer.encode("hello word")


def test_an_unknown_way_to_split_only_decodes():
    tokenizer = load_tokenizer(checkpoint({**KEYS, "tokenizer.ggml.pre": "klingon"}))
    assert tokenizer.decode([PIECES.index("hello")]) == "hello"
    with pytest.raises(TranscribeError, match="'klingon'"):
        tokenizer.encode("hello")


def test_missing_merges_are_named():
    keys = {key: value for key, value in KEYS.items() if key != "tokenizer.ggml.merges"}
    with pytest.raises(ModelError, match=r"tokenizer\.ggml\.merges"):
        load_tokenizer(checkpoint(keys))


@pytest.mark.parametrize("name", FILES)
def test_a_missing_file_is_named(name):
    files = {other: data for other, data in FILES.items() if other != name}
    with pytest.raises(ModelError, match=rf"no {name} beside it"):
        load_tokenizer(checkpoint(files=files, format="safetensors"))


@pytest.mark.parametrize("name", FILES)
def test_a_damaged_file_is_one_line(name):
    with pytest.raises(ModelError, match=r"^model: of vocab\.json, merges\.txt and .* one is damaged"):
        load_tokenizer(checkpoint(files={**FILES, name: b"\xff{"}, format="safetensors"))
