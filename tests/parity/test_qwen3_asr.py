"""Qwen3-ASR against transformers: a random tiny model through the real loader, from all four layouts."""

import functools
import json

import gguf
import numpy as np
import pytest
import torch
import transformers
from comparing import SWITCHES, open_model, relative
from safetensors.torch import save_file
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

from transcribe import kernels
from transcribe.engine.decoding import most_probable
from transcribe.errors import ModelError, UsageError
from transcribe.kernels.library import chosen
from transcribe.options import Request
from transcribe.text.byte_level import BYTES

SECONDS = (0.3, 1.0, 8.0, 31.0, 95.0)
ALPHABET = sorted(BYTES)
MERGES = ["l a", "a n", "g u", "la n", "lan gu", "a g", "ag e", "langu age", "Ġ E", "ĠE n", "u s", "e r", "us er"]
SPECIAL = [
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|audio_start|>", "<|audio_end|>", "<|audio_pad|>", "<asr_text>",
]  # fmt: skip
PIECES = [*ALPHABET, *(merge.replace(" ", "") for merge in MERGES), *SPECIAL]
IDS = {piece: i for i, piece in enumerate(PIECES)}
LAYOUTS = ("native", "thinker", "gguf", "audiocpp")

# transcribe.cpp's names, independent of the family's own map
GGUF_TOP = {
    "model.audio_tower.conv2d1": "enc.conv.0", "model.audio_tower.conv2d2": "enc.conv.1",
    "model.audio_tower.conv2d3": "enc.conv.2", "model.audio_tower.conv_out": "enc.conv_out",
    "model.audio_tower.ln_post": "enc.ln_post", "model.multi_modal_projector.linear_1": "enc.proj1",
    "model.multi_modal_projector.linear_2": "enc.proj2", "model.language_model.embed_tokens": "dec.token_embd",
    "model.language_model.norm": "dec.output_norm",
}  # fmt: skip
GGUF_LAYER = {
    "audio_tower": {
        "self_attn_layer_norm": "norm_attn", "self_attn.q_proj": "attn.q", "self_attn.k_proj": "attn.k",
        "self_attn.v_proj": "attn.v", "self_attn.out_proj": "attn.out", "final_layer_norm": "norm_ffn",
        "fc1": "ffn.fc1", "fc2": "ffn.fc2",
    },
    "language_model": {
        "input_layernorm": "norm_attn", "post_attention_layernorm": "norm_ffn", "self_attn.q_proj": "attn.q",
        "self_attn.k_proj": "attn.k", "self_attn.v_proj": "attn.v", "self_attn.o_proj": "attn.o",
        "self_attn.q_norm": "attn.q_norm", "self_attn.k_norm": "attn.k_norm", "mlp.gate_proj": "ffn.gate",
        "mlp.up_proj": "ffn.up", "mlp.down_proj": "ffn.down",
    },
}  # fmt: skip


def new_reference() -> transformers.Qwen3ASRForConditionalGeneration:
    config = transformers.Qwen3ASRConfig(
        audio_config={
            "num_mel_bins": 128, "encoder_layers": 2, "encoder_attention_heads": 4, "encoder_ffn_dim": 96,
            "d_model": 64, "output_dim": 96, "downsample_hidden_size": 16,
        },
        text_config={
            "model_type": "qwen3", "vocab_size": len(PIECES), "hidden_size": 96, "intermediate_size": 128,
            "num_hidden_layers": 2, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 16,
            "max_position_embeddings": 2048, "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"},
            "tie_word_embeddings": True,
        },
        audio_token_id=IDS["<|audio_pad|>"], pad_token_id=IDS["<|endoftext|>"],
        eos_token_id=[IDS["<|im_end|>"], IDS["<|endoftext|>"]],
    )  # fmt: skip
    reference = transformers.Qwen3ASRForConditionalGeneration(config).eval()
    generator = torch.Generator().manual_seed(5)
    for parameter in reference.parameters():
        scale = parameter[0].numel() ** -0.5 if parameter.dim() > 1 else 0.3
        shift = 1.0 if parameter.dim() == 1 else 0.0
        parameter.data = torch.randn(parameter.shape, generator=generator) * scale + shift
    return reference


def new_tokenizer() -> Tokenizer:
    """As Qwen's tokenizer.json is, with a small vocabulary."""
    vocabulary = {piece: i for piece, i in IDS.items() if piece not in SPECIAL}
    tokenizer = Tokenizer(models.BPE(vocabulary, [tuple(merge.split(" ")) for merge in MERGES]))
    tokenizer.normalizer, tokenizer.decoder = normalizers.NFC(), decoders.ByteLevel()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(PRETOKENIZE_REGEX), behavior="isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])  # fmt: skip
    tokenizer.add_tokens([AddedToken(token, special=token != "<asr_text>", normalized=False) for token in SPECIAL])
    return tokenizer


def thinker_files(reference) -> dict[str, bytes]:
    """Configuration and tokenizer as the authors publish them."""
    native = reference.config.to_dict()
    text = native["text_config"]
    text["rope_theta"] = text.pop("rope_parameters")["rope_theta"]
    thinker = {"audio_config": native["audio_config"], "text_config": text, "audio_token_id": IDS["<|audio_pad|>"]}
    config = {"model_type": "qwen3_asr", "thinker_config": thinker}
    added = {IDS[token]: {"content": token, "special": token != "<asr_text>"} for token in SPECIAL}
    return {
        "config.json": json.dumps(config).encode(),
        "vocab.json": json.dumps({piece: i for piece, i in IDS.items() if piece not in SPECIAL}).encode(),
        "merges.txt": "\n".join(["#version: 0.2", *MERGES, ""]).encode(),
        "tokenizer_config.json": json.dumps({"added_tokens_decoder": added, "eos_token": "<|im_end|>"}).encode(),
    }


def thinker_tensors(reference) -> dict[str, torch.Tensor]:
    def renamed(name: str) -> str:
        name = name.replace("model.language_model.", "model.").replace("model.audio_tower.", "audio_tower.")
        return "thinker." + name.replace("model.multi_modal_projector.linear_", "audio_tower.proj")

    return {renamed(name): value.clone() for name, value in reference.state_dict().items()}


def write_native(reference, folder) -> None:
    reference.save_pretrained(folder)
    new_tokenizer().save(str(folder / "tokenizer.json"))


def write_thinker(reference, folder) -> None:
    for name, data in thinker_files(reference).items():
        (folder / name).write_bytes(data)
    save_file(thinker_tensors(reference), folder / "model.safetensors")


def write_gguf(reference, folder) -> None:
    audio, text = reference.config.audio_config, reference.config.text_config
    writer = gguf.GGUFWriter(str(folder / "model.gguf"), "qwen3_asr")
    encoder = {
        "n_layers": 2, "d_model": audio.d_model, "n_heads": 4, "ffn_dim": 96, "num_mel_bins": 128,
        "downsample_hidden": 16, "output_dim": text.hidden_size, "n_window": 50, "n_window_infer": 800,
    }  # fmt: skip
    decoder = {
        "n_layers": 2, "hidden_size": text.hidden_size, "intermediate_size": 128, "n_heads": 6, "n_kv_heads": 2,
        "head_dim": 16, "max_position_embeddings": 2048, "vocab_size": len(PIECES),
    }  # fmt: skip
    for side, values in (("encoder", encoder), ("decoder", decoder)):
        for key, value in values.items():
            writer.add_uint32(f"stt.qwen3_asr.{side}.{key}", value)
    writer.add_string("stt.qwen3_asr.encoder.activation", "gelu")
    writer.add_string("stt.qwen3_asr.decoder.hidden_act", "silu")
    writer.add_float32("stt.qwen3_asr.decoder.rms_norm_eps", 1e-6)
    writer.add_float32("stt.qwen3_asr.decoder.rope_theta", 1e6)
    writer.add_bool("stt.qwen3_asr.decoder.tie_word_embeddings", True)
    writer.add_string("tokenizer.ggml.model", "gpt2")
    writer.add_string("tokenizer.ggml.pre", "qwen2")
    writer.add_uint32("tokenizer.ggml.eos_token_id", IDS["<|im_end|>"])
    writer.add_array("tokenizer.ggml.tokens", PIECES)
    types = [3 if piece in SPECIAL and piece != "<asr_text>" else 1 for piece in PIECES]
    writer.add_array("tokenizer.ggml.token_type", types)
    writer.add_array("tokenizer.ggml.merges", MERGES)
    filters = transformers.Qwen3ASRFeatureExtractor().mel_filters.T.astype(np.float32)
    writer.add_tensor("frontend.mel_filterbank", np.ascontiguousarray(filters))
    for name, value in sorted(reference.state_dict().items(), key=lambda item: gguf_order(item[0])):
        if name != "lm_head.weight":
            writer.add_tensor(gguf_name(name), value.numpy())
    finish(writer)


def gguf_name(name: str) -> str:
    stem, _, kind = name.rpartition(".")
    if stem in GGUF_TOP:
        return f"{GGUF_TOP[stem]}.{kind}"
    _, side, _, layer, rest = stem.split(".", 4)
    return f"{'enc' if side == 'audio_tower' else 'dec'}.blocks.{layer}.{GGUF_LAYER[side][rest]}.{kind}"


def gguf_order(name: str) -> list[int]:
    """Where the converters put a tensor that is fused with another: q, k, v, then gate, up."""
    return [i for i, part in enumerate(("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")) if part in name]


def write_audiocpp(reference, folder) -> None:
    writer = gguf.GGUFWriter(str(folder / "model.gguf"), "audiocpp")
    writer.add_string("audiocpp.model_spec.family", "qwen3_asr")
    files, tensors = thinker_files(reference), thinker_tensors(reference)
    writer.add_array("audiocpp.embedded_files.names", list(files))
    ends = np.cumsum([len(data) for data in files.values()]).tolist()
    array = gguf.GGUFValueType.ARRAY
    offsets = [0, *ends]
    writer.add_key_value("audiocpp.embedded_files.offsets", offsets, array, gguf.GGUFValueType.UINT64)
    data = list(b"".join(files.values()))
    writer.add_key_value("audiocpp.embedded_files.data", data, array, gguf.GGUFValueType.UINT8)
    writer.add_array("audiocpp.tensor_names", list(tensors))
    writer.add_array("audiocpp.tensor_ranks", [value.dim() for value in tensors.values()])
    shapes = [size for value in tensors.values() for size in value.shape]
    writer.add_key_value("audiocpp.tensor_shapes", shapes, array, gguf.GGUFValueType.INT64)
    for i, (name, value) in enumerate(tensors.items()):
        writer.add_tensor(name if len(name) < 64 else f"_audiocpp.{i}", value.numpy())
    finish(writer)


def finish(writer) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Models this small only lose by more."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def reference():
    return new_reference()


@pytest.fixture(scope="module", params=LAYOUTS)
def path(request, reference, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    globals()[f"write_{request.param}"](reference, folder)
    return folder


@pytest.fixture(scope="module")
def model(path):
    return open_model(path)


@functools.cache
def noise(seconds: float) -> torch.Tensor:
    """Noise whose loudness changes, with digital silence at the start."""
    generator = np.random.default_rng(int(10 * seconds))
    samples = generator.standard_normal(int(16000 * seconds), np.float32) * 0.1
    samples *= np.sin(np.arange(len(samples), dtype=np.float32) / 9000) ** 2
    samples[:1000] = 0
    return torch.from_numpy(samples)


@functools.cache
def reference_features(seconds: float) -> dict[str, torch.Tensor]:
    extractor = transformers.Qwen3ASRFeatureExtractor()
    made = extractor(
        noise(seconds).numpy(), sampling_rate=16000, padding=True, return_attention_mask=True, return_tensors="pt"
    )
    return {"input_features": made["input_features"], "input_features_mask": made["attention_mask"]}


def padded(seconds: float) -> torch.Tensor:
    samples = noise(seconds)
    return torch.nn.functional.pad(samples, (0, max(0, 8000 - len(samples))))


def reference_rows(reference, seconds: float) -> torch.Tensor:
    return reference.model.get_audio_features(**reference_features(seconds)).pooler_output


def token_ids(model, rows: int) -> list[int]:
    """The prompt with a token for each row of audio."""
    prompt = model.prompts.make(None, None)
    return [*prompt.before, *[IDS["<|audio_pad|>"]] * rows, *prompt.after]


def decode_tokens(model, samples, tokens):
    """Logits [1 + tokens, vocabulary] after the prompt and after each of these tokens."""
    language_model = model.language_model
    with torch.inference_mode():
        rows, cache = model.rows(samples, model.prompts.make(None, None)), language_model.new_cache(2000)
        logits = [language_model.logits(rows, cache)]
        logits += [language_model.step([token], [cache])[0] for token in tokens]
        return torch.stack(logits)


@pytest.mark.parametrize("seconds", SECONDS)
def test_features_match_transformers(model, seconds):
    expected = reference_features(seconds)
    frames = int(expected["input_features_mask"].sum())
    features = model.front_end(padded(seconds))
    assert features.shape == (frames, 128)
    assert relative(features, expected["input_features"][0, :, :frames].t()) < 1e-4


@pytest.mark.parametrize("seconds", SECONDS)
def test_encoder_matches_transformers(reference, model, seconds):
    with torch.inference_mode():
        assert relative(model.encode(padded(seconds)), reference_rows(reference, seconds)) < 1e-4


@pytest.mark.parametrize("seconds", SECONDS)
def test_logits_match_transformers(reference, model, seconds):
    tokens = list(range(40, 52))
    with torch.inference_mode():
        ids = [*token_ids(model, len(reference_rows(reference, seconds))), *tokens]
        expected = reference(input_ids=torch.tensor([ids]), **reference_features(seconds)).logits[0, -13:]
    assert relative(decode_tokens(model, noise(seconds), tokens), expected) < 1e-4


@pytest.mark.parametrize("seconds", SECONDS)
def test_greedy_tokens_match_transformers(reference, model, seconds):
    with torch.inference_mode():
        ids = torch.tensor([token_ids(model, len(reference_rows(reference, seconds)))])
        expected = reference.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), **reference_features(seconds), max_new_tokens=16,
            do_sample=False,
        )[0, ids.shape[1] :].tolist()  # fmt: skip
        language_model, cache = model.language_model, model.language_model.new_cache(2000)
        logits = language_model.logits(model.rows(noise(seconds), model.prompts.make(None, None)), cache)
        tokens = [most_probable(logits)]
        while len(tokens) < len(expected):
            tokens.append(most_probable(language_model.step(tokens[-1:], [cache])[0]))
    assert tokens == expected


@pytest.mark.parametrize("computes", ["", "torch"])
def test_a_sequence_has_the_bits_it_has_alone_whatever_its_company(path, computes):
    before = chosen().path
    kernels.use(computes)
    try:
        model = open_model(path)
        language_model, prompt = model.language_model, model.prompts.make(None, None)
        with torch.inference_mode():
            rows = [model.rows(noise(seconds), prompt) for seconds in (0.3, 1.0, 8.0)]
            together, alone = ([language_model.new_cache(400) for _ in rows] for _ in range(2))
            for caches in (together, alone):
                for x, cache in zip(rows, caches, strict=True):
                    language_model.logits(x, cache)
            for tokens in ([5, 17, 40], [6, 6, 6], [70, 1, 9]):
                found = language_model.step(tokens, together)
                for token, cache, row in zip(tokens, alone, found, strict=True):
                    assert torch.equal(language_model.step([token], [cache])[0], row)
    finally:
        kernels.use(before)


@pytest.mark.parametrize("switch", SWITCHES)
def test_every_switch_gives_the_same_bits(path, model, switch, monkeypatch):
    samples, tokens = noise(9.3), [7, 12, 99, 4]
    expected = decode_tokens(model, samples, tokens)
    if switch == "poison":
        monkeypatch.setenv("TRANSCRIBE_POISON", "1")
    other = open_model(path, **({} if switch == "poison" else switch))
    assert torch.equal(decode_tokens(other, samples, tokens), expected)
    request = Request(max_tokens=20)
    assert other.transcribe(samples, request).tokens == model.transcribe(samples, request).tokens


def test_bfloat16_stays_near_float32(path, model):
    with torch.inference_mode():
        expected = model.encode(noise(8.0))
        assert relative(open_model(path, dtype="bfloat16").encode(noise(8.0)).float(), expected) < 0.05


@pytest.mark.parametrize("context", [None, "language user", "  Zażółć\n<|im_end|> "])
@pytest.mark.parametrize("language", [None, "en"])
def test_the_prompt_is_tokenised_as_a_whole(model, context, language):
    prompt = model.prompts.make(context, language)
    tokenizer, text = new_tokenizer(), "system\n" + (context or "")
    tokenizer.encode_special_tokens = True  # a context cannot end its turn
    system = tokenizer.encode(text).ids
    tokenizer.encode_special_tokens = False
    rest = "<|im_end|>\n<|im_start|>user\n<|audio_start|>"
    answer = "<|audio_end|><|im_end|>\n<|im_start|>assistant\n" + ("language English<asr_text>" if language else "")
    assert prompt.before == [IDS["<|im_start|>"], *system, *tokenizer.encode(rest).ids]
    assert prompt.after == tokenizer.encode(answer).ids


READINGS = [
    ("language English<asr_text> Hello.", ("Hello.", "en")),
    ("language Filipino<asr_text>Kumusta", ("Kumusta", "fil")),
    ("language Chinese,English<asr_text>你好", ("你好", "zh")),
    ("language None<asr_text>", ("", None)),
    ("language Klingon<asr_text>nuqneH", ("nuqneH", None)),
    ("language<asr_text>Hello", ("Hello", None)),
    ("Hello", ("Hello", None)),
    ("Well,<asr_text> hello", ("Well, hello", None)),
    ("language English Hello", ("Hello", "en")),
    ("language English", ("", "en")),
    ("language Engl", ("", None)),
    ("language", ("", None)),
    ("languages are many", ("languages are many", None)),
    ("", ("", None)),
]


@pytest.mark.parametrize(("answer", "expected"), READINGS)
def test_the_header_of_an_answer_is_stripped_and_no_speech_is_lost(model, answer, expected):
    assert model.prompts.read(new_tokenizer().encode(answer).ids) == expected


def test_audio_shorter_than_a_frame_is_padded(model):
    assert model.transcribe(torch.zeros(7), Request(max_tokens=3)).stats["prefill_tokens"] > 7


def test_a_seed_repeats_a_sampled_answer(model):
    def sampled(seed):
        return model.transcribe(noise(1.0), Request(temperature=1.5, seed=seed, max_tokens=12)).tokens

    assert sampled(1) == sampled(1) != sampled(2)


def test_a_prompt_that_does_not_fit_says_the_limit(model):
    with pytest.raises(UsageError, match=r"takes 2048 in all; shorten the prompt"):
        model.transcribe(noise(1.0), Request(prompt="xyz" * 1000))


def test_the_peak_is_that_of_a_dry_run_of_the_longest_answer(model):
    assert 0 < model.peak_bytes(1.0) < model.peak_bytes(20.0)


def test_a_tokenizer_of_another_model_is_refused(reference, tmp_path):
    write_native(reference, tmp_path)
    tokenizer = Tokenizer(models.BPE({character: i for i, character in enumerate(ALPHABET)}, []))
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ModelError, match=r"its tokenizer has no <\|im_start\|>"):
        open_model(tmp_path)


def test_a_missing_tokenizer_file_is_named(reference, tmp_path):
    write_thinker(reference, tmp_path)
    (tmp_path / "merges.txt").unlink()
    with pytest.raises(ModelError, match=r"no merges\.txt beside it"):
        open_model(tmp_path)


def test_the_forced_aligner_is_refused(reference, tmp_path):
    write_thinker(reference, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["thinker_config"]["model_type"] = "qwen3_forced_aligner"
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="forced aligner"):
        open_model(tmp_path)


def test_an_untied_head_is_used(reference, model, tmp_path):
    config = transformers.Qwen3ASRConfig.from_dict({**reference.config.to_dict(), "tie_word_embeddings": False})
    untied = transformers.Qwen3ASRForConditionalGeneration(config).eval()
    untied.load_state_dict(reference.state_dict())
    untied.lm_head.weight.data = -reference.lm_head.weight
    write_native(untied, tmp_path)
    assert relative(decode_tokens(open_model(tmp_path), noise(1.0), []), -decode_tokens(model, noise(1.0), [])) < 1e-4
