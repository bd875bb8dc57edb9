from pathlib import Path
from types import SimpleNamespace

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers

from transcribe.errors import ModelError, TranscribeError
from transcribe.text.tokenizer import PieceTokenizer, load_tokenizer

NORMAL, UNKNOWN, CONTROL, BYTE = 1, 2, 3, 6
WORDS = ["▁", "▁he", "llo", "▁wor", "ld", "▁▁", "é", "日", "o", "<0x41>x"]
PIECES = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *WORDS, "<<ST_0>>"]
TYPES = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * len(WORDS), CONTROL]
KEYS = {
    "tokenizer.ggml.model": "bpe",
    "tokenizer.ggml.tokens": PIECES,
    "tokenizer.ggml.token_type": TYPES,
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
    "tokenizer.ggml.padding_token_id": 2,
}


def checkpoint(metadata=None, files=None, config=None, format="gguf"):
    return SimpleNamespace(
        path=Path("model.gguf"),
        format=format,
        metadata=metadata or {},
        config=config or {},
        side_file=lambda name: (files or {}).get(name),
    )


def ids(*pieces):
    return [PIECES.index(piece) for piece in pieces]


def reference():
    """The same vocabulary as the `tokenizers` package has it, set up as Moonshine's tokenizer.json is."""
    vocabulary = {piece: i for i, piece in enumerate(PIECES[:-1])}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>", "<<ST_0>>"])
    return tokenizer


@pytest.fixture(scope="module")
def pieces():
    return load_tokenizer(checkpoint(KEYS))


def test_pieces_join_into_words_without_the_first_space(pieces):
    assert pieces.decode(ids("▁he", "llo", "▁wor", "ld")) == "hello world"


def test_only_one_leading_space_is_dropped(pieces):
    assert pieces.decode(ids("▁▁", "o")) == " o"


def test_byte_tokens_join_into_characters_across_tokens(pieces):
    assert pieces.decode(ids("▁he", "<0xE2>", "<0x82>", "<0xAC>", "o")) == "he€o"


def test_a_piece_that_looks_like_a_byte_is_text(pieces):
    assert pieces.decode(ids("<0x41>x")) == "<0x41>x"


def test_broken_utf8_becomes_the_replacement_character(pieces):
    assert pieces.decode(ids("o", "<0xE2>", "o")) == "o\ufffdo"


def test_special_tokens_are_dropped_unless_asked_for(pieces):
    tokens = ids("<s>", "▁he", "<<ST_0>>", "<unk>", "</s>")
    assert pieces.decode(tokens) == "he"
    assert pieces.decode(tokens, skip_special=False) == "<s> he<<ST_0>><unk></s>"


def test_nothing_decodes_to_nothing(pieces):
    assert pieces.decode([]) == ""


def test_ids_and_sizes_come_from_the_keys(pieces):
    assert (pieces.bos_token_id, pieces.eos_token_id, pieces.pad_token_id) == (1, 2, 2)
    assert pieces.vocab_size == len(PIECES)
    assert pieces.token_id("<<ST_0>>") == len(PIECES) - 1
    assert pieces.token_id("absent") is None


def test_a_decode_only_tokenizer_says_so(pieces):
    with pytest.raises(TranscribeError, match="only decodes"):
        pieces.encode("hello")


@given(st.text())
def test_pieces_decode_as_the_tokenizers_package_does(text):
    theirs = reference()
    tokens = theirs.encode(text).ids
    ours = PieceTokenizer(pieces=PIECES, types=TYPES)
    assert ours.decode(tokens) == theirs.decode(tokens)


def test_loading_reads_no_piece():
    class Lazy(list):
        def __getitem__(self, index):
            raise AssertionError("a piece was read")

        __iter__ = __getitem__

    load_tokenizer(checkpoint({**KEYS, "tokenizer.ggml.tokens": Lazy(PIECES)}))


def test_a_tokenizer_json_encodes_and_decodes():
    files = {"tokenizer.json": reference().to_str().encode()}
    config = {"bos_token_id": 1, "eos_token_id": [2, 0], "pad_token_id": None}
    tokenizer = load_tokenizer(checkpoint(files=files, config=config, format="safetensors"))
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, None)
    assert tokenizer.vocab_size == len(PIECES)
    assert tokenizer.token_id("</s>") == 2
    assert tokenizer.decode([1, *tokenizer.encode("héo 日"), 2]) == "héo 日"
    assert tokenizer.decode([1], skip_special=False) == "<s>"


def test_keys_win_over_a_side_file():
    both = checkpoint(KEYS, files={"tokenizer.json": b"never read"})
    assert isinstance(load_tokenizer(both), PieceTokenizer)


@pytest.mark.parametrize("name", ["model", "tokens", "token_type"])
def test_a_missing_key_is_named(name):
    keys = {key: value for key, value in KEYS.items() if key != f"tokenizer.ggml.{name}"}
    with pytest.raises(ModelError, match=rf"^model\.gguf: .*tokenizer\.ggml\.{name}\b"):
        load_tokenizer(checkpoint(keys))


def test_a_missing_tokenizer_json_is_named():
    with pytest.raises(ModelError, match=r"tokenizer\.json"):
        load_tokenizer(checkpoint(format="safetensors"))


def test_a_broken_tokenizer_json_is_one_line():
    with pytest.raises(ModelError, match=r"^model\.gguf: its tokenizer\.json cannot be read: .+$"):
        load_tokenizer(checkpoint(files={"tokenizer.json": b"{}"}, format="safetensors"))


def test_an_unknown_kind_is_refused_by_name():
    with pytest.raises(ModelError, match="'wordpiece'"):
        load_tokenizer(checkpoint({**KEYS, "tokenizer.ggml.model": "wordpiece"}))


def test_lengths_that_disagree_are_refused():
    with pytest.raises(ModelError, match="270 tokens but 3 token types"):
        load_tokenizer(checkpoint({**KEYS, "tokenizer.ggml.token_type": [2, 3, 3]}))
