"""Qwen3-ASR converted from every layout it is read from."""

import gguf
import pytest
import test_qwen3_asr as qwen
import torch

from transcribe.convert import convert
from transcribe.engine.decoding import most_probable
from transcribe.weights import open_checkpoint

TOKENS = [40, 70, 100, 5]


@pytest.fixture(scope="module", params=qwen.LAYOUTS)
def source(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    getattr(qwen, f"write_{request.param}")(qwen.new_reference(), folder)
    return folder


def test_float32_gives_the_same_bits(source, tmp_path):
    path = convert(source, tmp_path / "model.gguf", "f32").path
    before, after = qwen.open_model(source), qwen.open_model(path)
    expected, found = (qwen.decode_tokens(model, qwen.noise(1.0), TOKENS) for model in (before, after))
    assert torch.equal(found, expected)
    assert after.prompts.make("user En language", "en") == before.prompts.make("user En language", "en")
    assert after.prompts.stop == before.prompts.stop


def test_q8_0_stays_near_and_writes_the_same_token(source, tmp_path):
    path = convert(source, tmp_path / "model.gguf", "q8_0").path
    expected, found = (qwen.decode_tokens(qwen.open_model(each), qwen.noise(8.0), TOKENS) for each in (source, path))
    assert qwen.relative(found, expected) < 0.05
    assert most_probable(found[0]) == most_probable(expected[0])


def test_the_file_has_all_that_transcribe_cpp_reads(tmp_path):
    qwen.write_thinker(qwen.new_reference(), tmp_path)
    path = convert(tmp_path, tmp_path / "model.gguf", "bf16").path
    keys, tensors = open_checkpoint(path).metadata, gguf.GGUFReader(path).tensors
    assert keys["tokenizer.ggml.tokens"] == qwen.PIECES
    types = keys["tokenizer.ggml.token_type"]
    assert [piece for piece, type in zip(qwen.PIECES, types, strict=True) if type == 3] == qwen.SPECIAL[:-1]
    assert keys["tokenizer.ggml.merges"] == qwen.MERGES
    assert (keys["tokenizer.ggml.model"], keys["tokenizer.ggml.pre"]) == ("gpt2", "qwen2")
    assert keys["tokenizer.ggml.eos_token_id"] == qwen.IDS["<|im_end|>"]
    assert keys["stt.qwen3_asr.audio_start_token_id"] == qwen.IDS["<|audio_start|>"]
    sections = [keys[f"stt.qwen3_asr.decoder.rope_mrope_section_{axis}"] for axis in "thw"]
    assert sum(sections) == keys["stt.qwen3_asr.decoder.head_dim"] // 2
    names = [tensor.name for tensor in tensors]
    assert names[:2] == ["frontend.mel_filterbank", "frontend.window"]
    assert len(names) == len(set(names)) == 2 + 13 + 2 * 16 + 2 + 2 * 11
    for layer in range(2):
        at = names.index(f"dec.blocks.{layer}.ffn.gate.weight")
        gate, up = tensors[at : at + 2]
        assert up.name == f"dec.blocks.{layer}.ffn.up.weight"
        assert gate.data_offset + gate.n_bytes == up.data_offset
    assert any("gate+up: 2 aliased" in note for note in qwen.open_model(path).notes)
