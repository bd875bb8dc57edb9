"""Converting: the numbers stay the reference's, the file is the dialect's, and nothing is left of what failed."""

from pathlib import Path
from typing import get_args

import gguf
import numpy as np
import pytest
import torch
import transformers
from gguf import GGMLQuantizationType as T
from gguf import GGUFValueType as V
from tokenizers import AddedToken, Tokenizer, decoders, models
from transcribe.models import load

from transcribe import cli
from transcribe.convert import PRESETS, convert
from transcribe.engine.decoding import most_probable
from transcribe.errors import ModelError, TranscribeError, UsageError
from transcribe.options import LoadOptions
from transcribe.weights import open_checkpoint
from transcribe.weights.write import Entry, write_gguf

VOCABULARY = 300
PIECES = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), *"▁abcdefghij", "ab", "abc", "▁ab"]
MERGES = [("a", "b"), ("ab", "c"), ("▁", "ab")]


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    """A folder as Hugging Face has it, of a Moonshine with random weights."""
    folder = tmp_path_factory.mktemp("moonshine-tiny-vi") / "moonshine-tiny-vi"
    config = transformers.MoonshineConfig(
        vocab_size=VOCABULARY, hidden_size=96, intermediate_size=80, encoder_num_hidden_layers=2,
        decoder_num_hidden_layers=2, encoder_num_attention_heads=4, decoder_num_attention_heads=4,
        partial_rotary_factor=0.9, pad_head_dim_to_multiple_of=8,
    )  # fmt: skip
    model = transformers.MoonshineForConditionalGeneration(config)
    generator = torch.Generator().manual_seed(5)
    for parameter in model.parameters():
        scale, shift = (parameter[0].numel() ** -0.5, 0.0) if parameter.dim() > 1 else (0.3, 1.0)
        parameter.data = torch.randn(parameter.shape, generator=generator) * scale + shift
    model.save_pretrained(folder)
    bpe = models.BPE({piece: i for i, piece in enumerate(PIECES)}, MERGES, unk_token="<unk>", byte_fallback=True)
    tokenizer = Tokenizer(bpe)
    tokenizer.add_special_tokens([AddedToken("<s>"), AddedToken("</s>"), AddedToken("<<ST_0>>")])
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def converted(source, tmp_path, type, name="model.gguf") -> Path:
    return convert(Path(source), tmp_path / name, type).path


def run(path, tokens=(1, 40, 262, 7)) -> torch.Tensor:
    """The logits that follow each of these tokens after a second of noise."""
    model = load(open_checkpoint(path), LoadOptions(device="cpu", dtype="float32"))
    samples = torch.randn(16000, generator=torch.Generator().manual_seed(1)) * 0.1
    with torch.inference_mode():
        memory, cache = model.memory(model.encode(samples)), model.new_cache()
        return torch.stack([model.logits([token], [cache], [memory])[0] for token in tokens])


def audiocpp(source, path) -> Path:
    """The same model in one file as audio.cpp has it: original names, small files embedded."""
    checkpoint = open_checkpoint(source)
    files = {name: (source / name).read_bytes() for name in ("config.json", "generation_config.json", "tokenizer.json")}
    offsets = np.cumsum([0, *map(len, files.values())]).tolist()
    shapes = [tensor.shape for tensor in checkpoint.tensors.values()]
    writer = gguf.GGUFWriter(path, "audiocpp")
    writer.add_string("audiocpp.model_spec.family", "moonshine")
    writer.add_array("audiocpp.tensor_names", list(checkpoint.tensors))
    writer.add_key_value("audiocpp.tensor_ranks", [len(shape) for shape in shapes], V.ARRAY, V.INT32)
    writer.add_key_value("audiocpp.tensor_shapes", [n for shape in shapes for n in shape], V.ARRAY, V.INT64)
    writer.add_array("audiocpp.embedded_files.names", list(files))
    writer.add_key_value("audiocpp.embedded_files.offsets", offsets, V.ARRAY, V.UINT64)
    writer.add_key_value("audiocpp.embedded_files.data", b"".join(files.values()), V.ARRAY, V.UINT8)
    for index, name in enumerate(checkpoint.tensors):
        writer.add_tensor(f"_audiocpp.{index}", checkpoint.tensor(name).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_float32_gives_the_same_bits_whatever_the_layout(source, tmp_path):
    expected = run(source)
    ours = converted(source, tmp_path, "f32")
    theirs = audiocpp(source, tmp_path / "moonshine-tiny-vi.gguf")
    assert torch.equal(run(theirs), expected)
    again = converted(theirs, tmp_path, "f32", "again.gguf")
    assert torch.equal(run(ours), expected)
    assert torch.equal(run(again), expected)
    assert again.read_bytes() == converted(ours, tmp_path, "f32", "third.gguf").read_bytes()


TOLERANCES = {"f16": 0.01, "bf16": 0.04, "q8_0": 0.05, "q4_0": 0.6, "q4_k_m": 0.05}  # here q4_k_m falls back to q8_0


@pytest.mark.parametrize(("type", "tolerance"), TOLERANCES.items())
def test_smaller_types_stay_near(source, tmp_path, type, tolerance):
    expected, found = run(source), run(converted(source, tmp_path, type))
    assert 0 < (found - expected).abs().max() < tolerance * expected.abs().max()


def test_q8_0_writes_the_same_tokens(source, tmp_path):
    def greedy(path):
        tokens = [1]
        while len(tokens) < 6:
            tokens.append(most_probable(run(path, tokens)[-1]))
        return tokens

    assert greedy(converted(source, tmp_path, "q8_0")) == greedy(source)


def test_a_type_kept_is_copied_byte_for_byte(source, tmp_path):
    first = converted(source, tmp_path, "q4_0", "first.gguf")
    assert converted(first, tmp_path, "q4_0", "second.gguf").read_bytes() == first.read_bytes()


def test_a_packed_file_is_packed_anew_from_its_values(source, tmp_path):
    packed = converted(source, tmp_path, "q8_0")
    plain, again = converted(packed, tmp_path, "f32", "f.gguf"), converted(packed, tmp_path, "q4_1", "q.gguf")
    old, new = (open_checkpoint(path).tensor("enc.blocks.0.attn.q.weight") for path in (plain, again))
    expected = gguf.quants.quantize(old.numpy(), T.Q4_1)
    np.testing.assert_array_equal(new.data.numpy(), expected)


def test_the_keys_say_all_that_the_checkpoint_does(source, tmp_path):
    keys = open_checkpoint(converted(source, tmp_path, "q8_0")).metadata
    assert keys["general.architecture"] == "moonshine"
    assert (keys["general.name"], keys["stt.variant"]) == ("Moonshine Tiny (Vietnamese)", "moonshine-tiny-vi")
    assert (keys["general.languages"], keys["general.file_type"]) == (["vi"], 7)
    assert "general.license" not in keys  # only the English models are under MIT
    assert keys["stt.moonshine.encoder.ffn_dim"] == 80
    assert keys["stt.moonshine.pad_head_dim_to_multiple_of"] == 8
    tokens, types = keys["tokenizer.ggml.tokens"], keys["tokenizer.ggml.token_type"]
    assert tokens == [*PIECES, "<<ST_0>>", *(f"<|unused_{i}|>" for i in range(len(PIECES) + 1, VOCABULARY))]
    assert types == [2, 3, 3] + [6] * 256 + [1] * (len(PIECES) - 259) + [3] + [1] * (VOCABULARY - len(PIECES) - 1)
    assert keys["tokenizer.ggml.merges"] == [f"{a} {b}" for a, b in MERGES]
    assert list(keys)[-3:] == ["tokenizer.ggml.tokens", "tokenizer.ggml.token_type", "tokenizer.ggml.merges"]


def test_what_is_multiplied_together_lies_end_to_end(source, tmp_path):
    path = converted(source, tmp_path, "q8_0")
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    for attention in ("enc.blocks.1.attn", "dec.blocks.0.self_attn"):
        q, k, v = (tensors[f"{attention}.{part}.weight"] for part in "qkv")
        assert q.data_offset + q.n_bytes == k.data_offset
        assert k.data_offset + k.n_bytes == v.data_offset
    assert any("q/k/v" in note and "aliased" in note for note in load(open_checkpoint(path), LoadOptions()).notes)


POLICY = {  # as transcribe.cpp's quantiser stores them: under q8_0, q4_k_m and bf16
    "dec.token_embd.weight": (T.Q8_0, T.Q6_K, T.BF16),
    "dec.output.weight": (T.Q8_0, T.Q4_K, T.BF16),
    "enc.blocks.3.attn.q.weight": (T.Q8_0, T.Q4_K, T.BF16),
    "enc.blocks.3.attn.out.weight": (T.Q8_0, T.Q8_0, T.BF16),
    "dec.blocks.3.cross_attn.out.weight": (T.Q8_0, T.Q8_0, T.BF16),
    "dec.blocks.3.attn.o.weight": (T.Q8_0, T.Q8_0, T.BF16),
    "dec.blocks.3.ffn.gate.weight": (T.Q8_0, T.Q4_K, T.BF16),
    "enc.conv_out.weight": (T.Q8_0, T.Q4_K, T.BF16),
    "enc.blocks.3.attn.q.bias": (T.F32, T.F32, T.F32),
    "enc.blocks.3.norm_attn.weight": (T.F32, T.F32, T.F32),
    "dec.output_norm.weight": (T.F32, T.F32, T.F32),
    "dec.blocks.3.attn.q_norm.weight": (T.F32, T.F32, T.F32),
    "enc.ln_post.weight": (T.F32, T.F32, T.F32),
    "prj.layer_norms.2.weight": (T.F32, T.F32, T.F32),
    "enc.conv.norm.weight": (T.F32, T.F32, T.F32),
    "enc.blocks.3.conv.bn.running_var": (T.F32, T.F32, T.F32),
    "frontend.mel_filterbank": (T.F32, T.F32, T.F32),
    "enc.conv.0.weight": (T.F32, T.F32, T.F16),
    "enc.blocks.3.conv.depthwise.weight": (T.F32, T.F32, T.F16),
    "enc.blocks.3.conv.pointwise1.weight": (T.F16, T.F16, T.F16),
}


@pytest.mark.parametrize("name", POLICY)
def test_types_are_those_of_transcribe_cpps_quantiser(name):
    assert tuple(PRESETS[type].type_of(name, (512, 512)) for type in ("q8_0", "q4_k_m", "bf16")) == POLICY[name]
    assert PRESETS["f32"].type_of(name, (512, 512)) == T.F32


@pytest.mark.parametrize(("row", "under"), [(512, T.Q4_K), (896, T.Q8_0), (80, T.F16)])
def test_rows_of_broken_blocks_get_what_fits(row, under):
    assert PRESETS["q4_k_m"].type_of("enc.blocks.0.ffn.fc1.weight", (8, row)) == under


def test_a_row_of_broken_blocks_becomes_float16(source, tmp_path):
    tensors = open_checkpoint(converted(source, tmp_path, "q8_0")).tensors
    assert tensors["enc.blocks.0.ffn.fc2.weight"].shape[-1] == 80
    assert tensors["enc.blocks.0.ffn.fc2.weight"].type == T.F16
    assert tensors["enc.blocks.0.ffn.fc1.weight"].type == T.Q8_0


def test_the_command_line_offers_every_preset():
    assert set(get_args(cli.WeightType)) == set(PRESETS)


def damaged(source, tmp_path, change) -> Path:
    """A copy of the model with its weights changed."""
    from safetensors.torch import load_file, save_file

    folder = tmp_path / "damaged"
    folder.mkdir()
    for name in ("config.json", "tokenizer.json"):
        (folder / name).write_bytes((source / name).read_bytes())
    tensors = load_file(source / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    return folder


NAME = "model.encoder.layers.0.mlp.fc1.weight"
DAMAGE = {
    "missing": (lambda tensors: tensors.pop(NAME), "1 missing"),
    "nan": (lambda tensors: tensors[NAME][3].fill_(torch.nan), f"{NAME}.*infinity or no number"),
    "large": (lambda tensors: tensors[NAME][3].fill_(1e6), f"{NAME}.*too large for float16.*--type bf16"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_failure_leaves_nothing_of_the_new_file_and_all_of_the_old(source, tmp_path, damage):
    change, message = DAMAGE[damage]
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "model.gguf").write_bytes(b"old")
    with pytest.raises(ModelError, match=message):
        convert(damaged(source, tmp_path, change), tmp_path / "out" / "model.gguf", "f16", overwrite=True)
    assert [(path.name, path.read_bytes()) for path in (tmp_path / "out").iterdir()] == [("model.gguf", b"old")]


def test_destinations_that_must_not_be_written_are_refused_before_any_work(tmp_path):
    nowhere = tmp_path / "missing"  # the source is never looked at
    (tmp_path / "there.gguf").write_bytes(b"old")
    (tmp_path / "folder.gguf").mkdir()
    for name, message in {
        "there.gguf": "exists already; --overwrite",
        "folder.gguf": "a folder has this name",
        "model.bin": "ends in .gguf",
        "there.gguf/model.gguf": "cannot write into this output folder: it is a file",
    }.items():
        with pytest.raises(UsageError, match=message):
            convert(nowhere, tmp_path / name, "f16")
    with pytest.raises(UsageError, match="no such type; there are f32, f16, bf16, q8_0"):
        convert(nowhere, tmp_path / "model.gguf", "q9")


def test_a_model_is_not_converted_onto_itself(source, tmp_path):
    path = converted(source, tmp_path, "f16")
    before = path.read_bytes()
    (tmp_path / "link.gguf").symlink_to(path)
    for destination in (path, tmp_path / "link.gguf"):
        with pytest.raises(UsageError, match="this is the model to be converted"):
            convert(path, destination, "q8_0", overwrite=True)
    assert path.read_bytes() == before


def test_a_model_larger_than_the_disk_is_refused(source, tmp_path, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 1000}))
    with pytest.raises(TranscribeError, match="MB are needed, the disk has less free"):
        converted(source, tmp_path, "f16")
    assert not any(tmp_path.iterdir())


def test_a_family_we_do_not_know_is_refused(tmp_path):
    write_gguf(tmp_path / "other.gguf", {"general.architecture": "llama"}, [])
    with pytest.raises(ModelError, match=r"architecture 'llama'; supported families: .*moonshine"):
        converted(tmp_path / "other.gguf", tmp_path, "f16")


def test_a_tokenizer_of_another_kind_is_refused(source, tmp_path):
    folder = damaged(source, tmp_path, lambda tensors: None)
    Tokenizer(models.WordLevel({"<unk>": 0}, "<unk>")).save(str(folder / "tokenizer.json"))
    with pytest.raises(ModelError, match="of type WordLevel; only BPE is converted"):
        converted(folder, tmp_path, "f16")


def test_the_writer_refuses_bytes_that_do_not_add_up(tmp_path):
    short = Entry("w", (4,), T.F32, lambda: [np.zeros(3, np.float32)])
    with pytest.raises(ValueError, match=r"'w': -4 bytes of 16"):
        write_gguf(tmp_path / "model.gguf", {"general.architecture": "test"}, [short])
    assert not any(tmp_path.iterdir())


def test_the_writer_keeps_values_and_their_types(tmp_path):
    keys = {
        "general.architecture": "test", "no": False, "count": 7, "large": 1 << 40, "below": -3, "share": 0.5,
        "ids": [1, -2], "scores": [0.5, -1.0], "pieces": ["ä", "\udcff"], "empty": [], "raw": b"\0\xff",
    }  # fmt: skip
    write_gguf(tmp_path / "model.gguf", keys, [])
    found = open_checkpoint(tmp_path / "model.gguf").metadata
    assert {**found, "empty": []} == keys
    kinds = {name: field.types for name, field in gguf.GGUFReader(tmp_path / "model.gguf").fields.items()}
    assert (kinds["count"], kinds["share"], kinds["no"]) == ([V.UINT32], [V.FLOAT32], [V.BOOL])
    assert (kinds["ids"], kinds["raw"]) == ([V.ARRAY, V.INT32], [V.ARRAY, V.UINT8])


def test_the_command_says_what_it_wrote(source, tmp_path, capsys):
    path = tmp_path / "new" / "model.gguf"
    assert cli.main(["convert", str(source), str(path), "--type", "Q8_0"]) == 0
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"transcribe: {path}: 1.1 MiB, 60 tensors (29 Q8_0, ")
    assert captured.err.count("\n") == 1
    assert cli.main(["convert", str(source), str(path), "--type", "q8_0"]) == UsageError.exit_code
    assert cli.main(["convert", str(source), str(path), "--type", "q9"]) == UsageError.exit_code
    assert "'q9' is not one of 'f32', 'f16', 'bf16', 'q8_0'" in capsys.readouterr().err
