"""Citrinet from each of its layouts: NeMo's archive, audio.cpp's directory, and the GGUF that `convert` writes."""

import json

import gguf
import pocket
import pytest
import torch
from nemo_clips import clips
from safetensors.torch import save_file
from transcribe.models import load
from transcribe.models.citrinet import read_config
from transcribe.models.export.citrinet import describe

from transcribe.convert import convert
from transcribe.errors import ModelError
from transcribe.options import LoadOptions
from transcribe.weights import open_checkpoint

NEMO = [pocket.DATA / "nemo" / f"{name}.nemo" for name in ("gamma-1", "gamma-0.25")]
F32 = LoadOptions(device="cpu", dtype="float32")


@pytest.fixture(scope="module", params=NEMO, ids=lambda path: path.stem)
def archive(request):
    return request.param


def log_probs(path, options=F32):
    model = load(open_checkpoint(path), options)
    return torch.cat(list(model.log_probs(model.encode(torch.from_numpy(clips()[1])))))


def write_directory(archive, folder):
    """As audio.cpp's model manager leaves it."""
    checkpoint = open_checkpoint(archive)
    tensors = {name: checkpoint.tensor(name).clone() for name in checkpoint.tensors}
    save_file(tensors, folder / "citrinet_256.safetensors")
    (folder / "citrinet_256_tokenizer.model").write_bytes(checkpoint.side_file("tokenizer.model"))
    config = describe(read_config(checkpoint))
    for block in config["jasper"]:
        del block["se_reduction_ratio" if block["se_reduction_ratio"] == 8 else "dropout"]
    del config["preemph"]
    (folder / "citrinet_256_config.json").write_text(json.dumps(config))
    return folder


def test_the_directory_of_audio_cpp_gives_the_same_bits(archive, tmp_path):
    assert torch.equal(log_probs(write_directory(archive, tmp_path)), log_probs(archive))


@pytest.mark.parametrize("source", ["nemo", "directory", "gguf"])
def test_a_float32_file_gives_the_same_bits(archive, tmp_path, source):
    given = {
        "nemo": lambda: archive,
        "directory": lambda: write_directory(archive, tmp_path),
        "gguf": lambda: convert(archive, tmp_path / "first.gguf", "f32").path,
    }[source]()
    path = convert(given, tmp_path / "model.gguf", "f32").path
    assert torch.equal(log_probs(path), log_probs(archive))
    checkpoint = open_checkpoint(path)
    assert (checkpoint.architecture, checkpoint.metadata["general.architecture"]) == ("citrinet_asr", "audiocpp")


def test_float16_stays_near(archive, tmp_path):
    converted = convert(archive, tmp_path / "model.gguf", "f16")
    assert set(converted.types) == {"F16"}
    assert (log_probs(converted.path).exp() - log_probs(archive).exp()).abs().max() < 0.01


def test_packed_types_are_for_matrices_only(archive, tmp_path):
    """Convolutions have rows of their kernel's length, so what is packed are the gates, where they are wide enough."""
    checkpoint = open_checkpoint(archive)
    matrices = [t for t in checkpoint.tensors.values() if len(t.shape) == 2 and t.shape[-1] % 32 == 0]
    converted = convert(archive, tmp_path / "model.gguf", "q8_0")
    assert converted.types.get("Q8_0", 0) == len(matrices) > 0
    assert set(converted.types) == {"Q8_0", "F32"}
    assert (log_probs(converted.path).exp() - log_probs(archive).exp()).abs().max() < 0.05


def test_keys_have_the_types_that_audio_cpp_writes(archive, tmp_path):
    path = convert(archive, tmp_path / "model.gguf", "f32").path
    fields = gguf.GGUFReader(path).fields
    kinds = {key: fields[f"audiocpp.{key}"].types[-1].name for key in (
        "model_spec.version", "embedded_files.offsets", "embedded_files.data", "tensor_ranks", "tensor_shapes")}
    assert list(kinds.values()) == ["UINT32", "UINT64", "UINT8", "INT32", "INT64"]


def test_the_language_is_in_the_file_name_or_in_the_file(archive, tmp_path):
    german = tmp_path / "stt_de_citrinet_1024.nemo"
    german.write_bytes(archive.read_bytes())
    assert load(open_checkpoint(german), F32).capabilities.languages == ("de",)
    assert load(open_checkpoint(convert(german, tmp_path / "x.gguf", "f16").path), F32).language == "de"


def changed(archive, folder, change):
    """audio.cpp's directory with its configuration changed."""
    write_directory(archive, folder)
    path = folder / "citrinet_256_config.json"
    config = json.loads(path.read_text())
    change(config)
    path.write_text(json.dumps(config))
    return folder


WRONG = {
    "jasper": (lambda c: c.update(jasper=3), "configuration is not that of a Citrinet"),
    "kernel": (lambda c: c["jasper"][1].pop("kernel"), r"jasper\[1\]\.kernel is missing"),
    "wide": (lambda c: c["jasper"][0].update(filters=99), "of the wrong shape"),
    "normalize": (lambda c: c.update(normalize="all_features"), "normalize is 'all_features'; only 'per_feature'"),
    "rate": (lambda c: c.update(sample_rate=8000), "sample_rate is 8000; only 16000"),
    "separable": (lambda c: c["jasper"][2].update(separable=False), r"jasper\[2\]\.separable is False; only True"),
    "residual": (lambda c: c["jasper"][1].update(stride=2, residual=True, residual_mode="add"), "does not fit the str"),
    "window": (lambda c: c.update(window_size=0.0), "of the wrong shape|not that of a Citrinet"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_configuration_gets_one_line(tmp_path, name):
    change, what = WRONG[name]
    folder = changed(NEMO[0], tmp_path, change)
    with pytest.raises(ModelError, match=what) as caught:
        load(open_checkpoint(folder), F32)
    assert str(caught.value).startswith(str(folder))
    assert "\n" not in str(caught.value)


def test_another_encoder_of_nemo_is_refused_by_name(tmp_path):
    folder = changed(NEMO[0], tmp_path, lambda c: c.pop("jasper"))
    with pytest.raises(ModelError, match="with nothing as its encoder; only ConvASREncoder"):
        load(open_checkpoint(folder), F32)


def test_without_its_tokenizer_it_says_so(tmp_path):
    folder = changed(NEMO[0], tmp_path, lambda c: None)
    (folder / "citrinet_256_tokenizer.model").write_bytes(b"?")
    with pytest.raises(ModelError, match=r"tokenizer\.model cannot be read"):
        load(open_checkpoint(folder), F32)
    (folder / "citrinet_256_tokenizer.model").unlink()
    with pytest.raises(ModelError, match=r"there is no tokenizer\.model"):
        load(open_checkpoint(folder), F32)
