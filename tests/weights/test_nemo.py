"""NeMo archives: tensors as views of the tar, and nothing in the pickle that could run."""

import gzip
import io
import os
import pickle
import tarfile
import zipfile

import pytest
import torch

from transcribe.errors import ModelError
from transcribe.weights import open_checkpoint

CONFIG = b"""
target: nemo.collections.asr.models.ctc_bpe_models.EncDecCTCModelBPE
model_defaults: {repeat: 5, inner: {kernel: [3]}}
encoder:
  jasper:
  - repeat: ${model.model_defaults.repeat}
    kernel: ${model_defaults.inner.kernel}
    other: ${nothing.there}
"""
STATE = {
    "a.weight": torch.arange(6, dtype=torch.float32).view(2, 3),
    "a.half": torch.ones(5, dtype=torch.float16),
    "a.count": torch.tensor(7),
    "a.part": torch.arange(10, dtype=torch.float32)[4:],
    "a.turned": torch.ones(2, 3).t(),
}


def saved(state, **options) -> bytes:
    buffer = io.BytesIO()
    torch.save(state, buffer, **options)
    return buffer.getvalue()


def write(path, members, mode="w:"):
    with tarfile.open(path, mode) as tar:
        for name, data in members.items():
            member = tarfile.TarInfo(f"./{name}")
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return path


def members(weights: bytes | None = None, config: bytes = CONFIG):
    weights = saved(STATE) if weights is None else weights
    return {"ab12_tokenizer.model": b"pieces", "model_config.yaml": config, "model_weights.ckpt": weights}


@pytest.mark.parametrize("mode", ["w:", "w:gz"])
@pytest.mark.parametrize("mmap", [True, False])
def test_tensors_are_what_torch_load_gives(tmp_path, mode, mmap):
    checkpoint = open_checkpoint(write(tmp_path / "m.nemo", members(), mode), mmap=mmap)
    assert checkpoint.format == "nemo"
    expected = torch.load(io.BytesIO(saved(STATE)), weights_only=True)
    for name in ("a.weight", "a.half", "a.count", "a.part"):
        found = checkpoint.tensor(name)
        assert torch.equal(found, expected[name])
        assert found.dtype == expected[name].dtype


def test_tensors_are_views_of_the_archive(tmp_path):
    checkpoint = open_checkpoint(write(tmp_path / "m.nemo", members()))
    storages = {checkpoint.tensor(name).untyped_storage().data_ptr() for name in ("a.weight", "a.half")}
    assert len(storages) == 1


def test_the_configuration_has_its_references_resolved(tmp_path):
    checkpoint = open_checkpoint(write(tmp_path / "m.nemo", members()))
    block = {"repeat": 5, "kernel": [3], "other": "${nothing.there}"}
    assert checkpoint.config["encoder"]["jasper"] == [block]
    assert checkpoint.architecture == "EncDecCTCModelBPE"
    assert checkpoint.side_file("tokenizer.model") == b"pieces"
    assert checkpoint.side_file("tokenizer.json") is None


def test_a_directory_with_one_archive_opens_it(tmp_path):
    write(tmp_path / "m.nemo", members())
    assert "a.weight" in open_checkpoint(tmp_path).tensors


def test_a_strided_tensor_is_refused_by_name_where_it_is_needed(tmp_path):
    checkpoint = open_checkpoint(write(tmp_path / "m.nemo", members()))
    with pytest.raises(ModelError, match=r"a\.turned is strided Float"):
        checkpoint.require({"a.turned": (3, 2)})


class Runs:
    def __reduce__(self):
        return os.mkdir, ("never-made",)


def zipped(data: bytes) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("model/data.pkl", data)
    return buffer.getvalue()


WRONG = {
    "no weights": ({"model_config.yaml": CONFIG}, r"without model_weights\.ckpt"),
    "code": (members(zipped(pickle.dumps({"a": Runs()}))), r"holds a posix\.mkdir; only plain tensors are read"),
    "no tensors": (members(zipped(pickle.dumps({"a": 1}))), "is not a dictionary of tensors"),
    "damaged": (members(zipped(pickle.dumps({"a": 1})[:-3])), r"model_weights\.ckpt is damaged"),
    "old": (members(saved(STATE, _use_new_zipfile_serialization=False)), "not a PyTorch archive"),
    "yaml": (members(config=b"a: [1"), "is not a YAML mapping"),
    "yaml objects": (members(config=b"!!python/object/apply:os.mkdir [x]"), "is not a YAML mapping"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_archive_gets_one_line(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    content, what = WRONG[name]
    path = write(tmp_path / "m.nemo", content)
    with pytest.raises(ModelError, match=f"^{path}: .*{what}") as caught:
        open_checkpoint(path)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "never-made").exists()


@pytest.mark.parametrize("keep", [0.3, 0.6, 0.85])
def test_a_truncated_archive_is_damaged_or_lacks_bytes(tmp_path, keep):
    path = write(tmp_path / "m.nemo", members(saved({"w": torch.zeros(40_000)})))
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * keep)])
    with pytest.raises(ModelError, match="download it again"):
        open_checkpoint(path)


def test_gzip_of_something_else_is_no_model(tmp_path):
    path = tmp_path / "m.gz"
    path.write_bytes(gzip.compress(b"hello" * 1000))
    with pytest.raises(ModelError, match="not a model but a gzip archive"):
        open_checkpoint(path)
