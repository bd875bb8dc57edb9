"""Moonshine against transformers: a random tiny model through the real loader, from both kinds of file."""

import gguf
import numpy as np
import pytest
import torch
import transformers
from comparing import SWITCHES, open_model, relative
from tokenizers import Tokenizer, decoders, models

from transcribe.engine import KeyValue
from transcribe.engine.decoding import most_probable
from transcribe.options import Request

VOCABULARY = 160
SECONDS = (0.1, 1.0, 7.3)

# transcribe.cpp's names, independent of the family's own map
GGUF_TOP = {
    "model.encoder.conv1": "enc.conv.0", "model.encoder.conv2": "enc.conv.1", "model.encoder.conv3": "enc.conv.2",
    "model.encoder.groupnorm": "enc.conv.norm", "model.encoder.layer_norm": "enc.final_norm",
    "model.decoder.embed_tokens": "dec.token_embd", "model.decoder.norm": "dec.final_norm",
}  # fmt: skip
GGUF_LAYER = {
    "encoder": {
        "input_layernorm": "norm_attn", "self_attn.q_proj": "attn.q", "self_attn.k_proj": "attn.k",
        "self_attn.v_proj": "attn.v", "self_attn.o_proj": "attn.out", "post_attention_layernorm": "norm_ffn",
        "mlp.fc1": "ffn.fc1", "mlp.fc2": "ffn.fc2",
    },
    "decoder": {
        "input_layernorm": "norm_self", "self_attn.q_proj": "self_attn.q", "self_attn.k_proj": "self_attn.k",
        "self_attn.v_proj": "self_attn.v", "self_attn.o_proj": "self_attn.out",
        "post_attention_layernorm": "norm_cross",
        "encoder_attn.q_proj": "cross_attn.q", "encoder_attn.k_proj": "cross_attn.k",
        "encoder_attn.v_proj": "cross_attn.v", "encoder_attn.o_proj": "cross_attn.out", "final_layernorm": "norm_ffn",
        "mlp.fc1": "ffn.fc1", "mlp.fc2": "ffn.fc2",
    },
}  # fmt: skip


def new_reference() -> transformers.MoonshineForConditionalGeneration:
    config = transformers.MoonshineConfig(
        vocab_size=VOCABULARY, hidden_size=96, intermediate_size=128, encoder_num_hidden_layers=2,
        decoder_num_hidden_layers=2, encoder_num_attention_heads=4, decoder_num_attention_heads=4,
        partial_rotary_factor=0.9, pad_head_dim_to_multiple_of=16,
    )  # fmt: skip
    reference = transformers.MoonshineForConditionalGeneration(config).eval()
    generator = torch.Generator().manual_seed(5)
    for parameter in reference.parameters():
        scale = parameter[0].numel() ** -0.5 if parameter.dim() > 1 else 0.3
        shift = 1.0 if parameter.dim() == 1 else 0.0
        parameter.data = torch.randn(parameter.shape, generator=generator) * scale + shift
    return reference


def write_tokenizer(path) -> None:
    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"▁w{i}": i for i in range(3, VOCABULARY)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
    tokenizer.decoder = decoders.Replace("▁", " ")
    tokenizer.save(str(path))


def write_gguf(reference, path) -> None:
    c = reference.config
    writer = gguf.GGUFWriter(str(path), "moonshine")
    for side in ("encoder", "decoder"):
        prefix = f"stt.moonshine.{side}."
        writer.add_uint32(prefix + "n_layers", 2)
        writer.add_uint32(prefix + "d_model", c.hidden_size)
        writer.add_uint32(prefix + "n_heads", 4)
        writer.add_uint32(prefix + "n_kv_heads", 4)
        writer.add_uint32(prefix + "ffn_dim", c.intermediate_size)
        writer.add_string(prefix + "activation", "gelu" if side == "encoder" else "silu")
    writer.add_uint32("stt.moonshine.decoder.vocab_size", VOCABULARY)
    writer.add_uint32("stt.moonshine.decoder.max_position_embeddings", c.max_position_embeddings)
    writer.add_bool("stt.moonshine.decoder.tie_word_embeddings", True)
    writer.add_float32("stt.moonshine.partial_rotary_factor", 0.9)
    writer.add_float32("stt.moonshine.rope_theta", 10000.0)
    writer.add_uint32("stt.moonshine.decoder_start_token_id", 1)
    writer.add_uint32("stt.moonshine.eos_token_id", 2)
    writer.add_string("tokenizer.ggml.model", "bpe")
    writer.add_array("tokenizer.ggml.tokens", ["<unk>", "<s>", "</s>", *(f"▁w{i}" for i in range(3, VOCABULARY))])
    writer.add_array("tokenizer.ggml.token_type", [2, 3, 3] + [1] * (VOCABULARY - 3))
    for name, value in reference.state_dict().items():
        if name == "proj_out.weight":
            continue
        stem, _, kind = name.rpartition(".")
        if stem in GGUF_TOP:
            stem = GGUF_TOP[stem]
        else:
            _, side, _, layer, rest = stem.split(".", 4)
            stem = f"{side[:3]}.blocks.{layer}.{GGUF_LAYER[side][rest]}"
        writer.add_tensor(f"{stem}.{kind}", value.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(scope="module")
def reference():
    return new_reference()


@pytest.fixture(scope="module", params=["safetensors", "gguf"])
def path(request, reference, tmp_path_factory):
    folder = tmp_path_factory.mktemp("moonshine")
    if request.param == "gguf":
        write_gguf(reference, folder / "model.gguf")
        return folder / "model.gguf"
    reference.save_pretrained(folder)
    write_tokenizer(folder / "tokenizer.json")
    return folder


def noise(seconds: float) -> torch.Tensor:
    generator = np.random.default_rng(int(10 * seconds))
    return torch.from_numpy(generator.standard_normal(int(16000 * seconds), np.float32)) * 0.1


def decode_tokens(model, samples, tokens):
    """Logits [tokens, vocabulary] with these tokens fed one at a time."""
    with torch.inference_mode():
        memory, cache = model.memory(model.encode(samples)), model.new_cache()
        return torch.stack([model.logits([token], [cache], [memory])[0] for token in tokens])


@pytest.mark.parametrize("seconds", SECONDS)
def test_encoder_matches_transformers(reference, path, seconds):
    samples = noise(seconds)
    with torch.inference_mode():
        expected = reference.model.encoder(samples[None]).last_hidden_state[0]
        assert relative(open_model(path).encode(samples), expected) < 1e-4


@pytest.mark.parametrize("seconds", SECONDS)
def test_logits_match_transformers(reference, path, seconds):
    samples, tokens = noise(seconds), [1, *torch.randint(3, VOCABULARY, (40,)).tolist()]
    with torch.inference_mode():
        expected = reference(samples[None], decoder_input_ids=torch.tensor([tokens])).logits[0]
    assert relative(decode_tokens(open_model(path), samples, tokens), expected) < 1e-4


@pytest.mark.parametrize("seconds", SECONDS)
def test_greedy_tokens_match_transformers(reference, path, seconds):
    samples, model = noise(seconds), open_model(path)
    with torch.inference_mode():
        expected = reference.generate(samples[None], max_new_tokens=24, do_sample=False)[0].tolist()
        memory: list[KeyValue] = model.memory(model.encode(samples))
        cache, tokens = model.new_cache(), [1]
        while len(tokens) < len(expected):
            tokens.append(most_probable(model.logits(tokens[-1:], [cache], [memory])[0]))
    assert tokens == expected


@pytest.mark.parametrize("switch", SWITCHES)
def test_every_switch_gives_the_same_bits(path, switch, monkeypatch):
    samples, tokens = noise(3.0), [1, 7, 12, 99, 4]
    expected = decode_tokens(open_model(path), samples, tokens)
    if switch == "poison":
        monkeypatch.setenv("TRANSCRIBE_POISON", "1")
    other = open_model(path, **({} if switch == "poison" else switch))
    assert torch.equal(decode_tokens(other, samples, tokens), expected)
    request = Request(max_tokens=20)
    assert other.transcribe(samples, request).tokens == open_model(path).transcribe(samples, request).tokens


def test_bfloat16_stays_near_float32(path):
    samples = noise(3.0)
    with torch.inference_mode():
        expected = open_model(path).encode(samples)
        assert relative(open_model(path, dtype="bfloat16").encode(samples.bfloat16()).float(), expected) < 0.05
