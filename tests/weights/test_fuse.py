"""Joining weights: one slice where they touch, a copy where they do not, never an expansion."""

import gc

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as T
from safetensors.torch import save_file
from weight_files import packed, write_gguf

from transcribe.errors import ModelError
from transcribe.weights import FuseReport, PackedTensor, fuse_rows, open_checkpoint
from transcribe.weights.checkpoint import PACKED


def fuse(checkpoint, *names, kind="gate+up", report=None, **options):
    return fuse_rows(*map(checkpoint.tensor, names), block="dec.0", kind=kind, report=report, **options)


def data(weight):
    return weight.data if isinstance(weight, PackedTensor) else weight


def shares_storage(left, right):
    return data(left).untyped_storage().data_ptr() == data(right).untyped_storage().data_ptr()


@pytest.fixture
def model(tmp_path):
    """gate touches up; q, k, v touch and differ in rows; an odd tensor lies between up and far."""
    return write_gguf(tmp_path / "m.gguf", {
        "gate": packed(T.Q8_0, 8, 64, seed=1), "up": packed(T.Q8_0, 8, 64, seed=2),
        "odd": np.ones(3, np.float32), "far": packed(T.Q8_0, 8, 64, seed=3),
        "q": packed(T.Q8_0, 16, 64, seed=4), "k": packed(T.Q8_0, 8, 64, seed=5), "v": packed(T.Q8_0, 8, 64, seed=6),
        "half": np.ones((8, 64), np.float16), "narrow": packed(T.Q8_0, 8, 32, seed=7),
        "bias.q": np.ones(8, np.float32), "bias.k": np.zeros(8, np.float32),
    })


@pytest.mark.parametrize("mmap", [True, False], ids=["mmap", "read"])
def test_neighbours_become_one_slice(model, mmap):
    checkpoint, report = open_checkpoint(model, mmap=mmap), FuseReport()
    fused = fuse(checkpoint, "gate", "up", report=report)
    assert fused.shape == (16, 64)
    assert shares_storage(fused, checkpoint.tensor("gate"))
    assert data(fused).data_ptr() == data(checkpoint.tensor("gate")).data_ptr()
    assert fused.nbytes == sum(checkpoint.tensors[n].nbytes for n in ("gate", "up"))
    expected = torch.cat([checkpoint.tensor("gate").data, checkpoint.tensor("up").data])
    assert torch.equal(fused.data, expected)
    assert report.lines() == ["gate+up: 1 aliased"]


def test_three_neighbours_of_different_heights_become_one_slice(model):
    checkpoint, report = open_checkpoint(model), FuseReport()
    fused = fuse(checkpoint, "q", "k", "v", kind="q+k+v", report=report)
    assert fused.shape == (32, 64)
    assert shares_storage(fused, checkpoint.tensor("q"))
    assert torch.equal(fused.data, torch.cat([checkpoint.tensor(n).data for n in "qkv"]))
    assert report.lines() == ["q+k+v: 1 aliased"]


@pytest.mark.parametrize("kind", [*PACKED, T.F32, T.F16, T.BF16], ids=lambda kind: kind.name)
def test_every_type_aliases_where_blocks_fill_whole_alignments(tmp_path, kind):
    stored = {T.F32: lambda seed: np.full((16, 256), seed, np.float32),
              T.F16: lambda seed: np.full((16, 256), seed, np.float16)}.get(
        kind, lambda seed: packed(kind, 16, 256, seed=seed))
    checkpoint = open_checkpoint(write_gguf(tmp_path / "m.gguf", {"gate": stored(1), "up": stored(2)}))
    fused = fuse(checkpoint, "gate", "up")
    assert shares_storage(fused, checkpoint.tensor("gate"))
    copied = fuse(checkpoint, "gate", "up", alias=False)
    assert not shares_storage(copied, checkpoint.tensor("gate"))
    assert fused.shape == copied.shape == (32, 256)
    assert torch.equal(data(fused).view(torch.uint8), data(copied).view(torch.uint8))


def test_safetensors_neighbours_become_one_slice(tmp_path):
    gate, up = torch.randn(4, 8), torch.randn(4, 8)
    save_file({"mlp.gate_proj.weight": gate, "mlp.up_proj.weight": up}, tmp_path / "model.safetensors")
    checkpoint = open_checkpoint(tmp_path)
    fused = fuse(checkpoint, "mlp.gate_proj.weight", "mlp.up_proj.weight")
    assert shares_storage(fused, checkpoint.tensor("mlp.up_proj.weight"))
    assert torch.equal(fused, torch.cat([gate, up]))


def test_biases_join_too(model):
    assert fuse(open_checkpoint(model), "bias.q", "bias.k").tolist() == [1.0] * 8 + [0.0] * 8


@pytest.mark.parametrize("names", [("up", "far"), ("up", "gate"), ("gate", "gate")])
def test_a_gap_or_another_order_is_copied(model, names):
    checkpoint, report = open_checkpoint(model), FuseReport()
    fused = fuse(checkpoint, *names, report=report)
    assert not shares_storage(fused, checkpoint.tensor("up"))
    assert torch.equal(fused.data, torch.cat([checkpoint.tensor(n).data for n in names]))
    assert report.lines() == ["gate+up: packed by copying (1 block; not adjacent)"]
    assert report.bytes_copied == {"gate+up": fused.nbytes}


def test_separate_storages_are_copied(model):
    report = FuseReport()
    parts = [open_checkpoint(model).tensor(name) for name in ("gate", "up")]
    fuse_rows(*parts, block="dec.0", kind="gate+up", report=report)
    assert report.lines() == ["gate+up: packed by copying (1 block; separate storages)"]


def test_different_types_stay_separate(model):
    checkpoint, report = open_checkpoint(model), FuseReport()
    parts = fuse(checkpoint, "gate", "half", report=report)
    assert isinstance(parts, tuple)
    assert shares_storage(parts[0], checkpoint.tensor("gate"))
    assert torch.equal(parts[1], checkpoint.tensor("half"))
    assert report.lines() == ["gate+up: kept separate (1 block; types differ)"]


def test_the_argument_forces_copies(model):
    checkpoint, report = open_checkpoint(model), FuseReport()
    for _ in range(28):
        fuse(checkpoint, "gate", "up", report=report, alias=False)
    assert report.lines() == ["gate+up: packed by copying (28 blocks; disabled by --no-alias)"]


@pytest.mark.parametrize(("setting", "disabled"), [("1", True), ("yes", True), ("0", False), ("", False)])
def test_the_environment_forces_copies(model, monkeypatch, setting, disabled):
    monkeypatch.setenv("TRANSCRIBE_NO_GATE_UP_ALIAS", setting)
    checkpoint, report = open_checkpoint(model), FuseReport()
    assert shares_storage(fuse(checkpoint, "gate", "up", report=report), checkpoint.tensor("gate")) is not disabled
    reason = "packed by copying (1 block; disabled by TRANSCRIBE_NO_GATE_UP_ALIAS)" if disabled else "1 aliased"
    assert report.lines() == [f"gate+up: {reason}"]


def test_the_report_has_one_line_a_kind(model):
    checkpoint, report = open_checkpoint(model), FuseReport()
    fuse(checkpoint, "gate", "up", report=report)
    fuse(checkpoint, "up", "far", report=report)
    fuse(checkpoint, "q", "k", "v", kind="q+k+v", report=report)
    assert report.lines() == ["gate+up: 1 aliased; packed by copying (1 block; not adjacent)", "q+k+v: 1 aliased"]


@pytest.mark.parametrize("alias", [True, False])
def test_a_row_length_mismatch_names_the_block(model, alias):
    with pytest.raises(ModelError, match=r"^dec.0: gate\+up cannot be joined, .8, 64. and .8, 32. differ"):
        fuse(open_checkpoint(model), "gate", "narrow", alias=alias)


@pytest.mark.parametrize("alias", [True, False])
def test_a_size_mismatch_names_the_block(model, alias):
    gate = open_checkpoint(model).tensor("gate")
    lying = PackedTensor(gate.type, gate.shape, gate.data[:, :34])  # half of each row's bytes
    with pytest.raises(ModelError, match=r"^dec.0: gate\+up"):
        fuse_rows(lying, lying, block="dec.0", kind="gate+up", alias=alias)


def test_dropping_the_fused_view_leaves_the_checkpoint_usable(model):
    checkpoint = open_checkpoint(model)
    before = checkpoint.tensor("gate").data.clone()
    fused = fuse(checkpoint, "gate", "up")
    del fused
    gc.collect()
    assert torch.equal(checkpoint.tensor("gate").data, before)


def test_the_fused_view_outlives_the_checkpoint(model):
    checkpoint = open_checkpoint(model)
    expected = torch.cat([checkpoint.tensor("gate").data, checkpoint.tensor("up").data])
    fused = fuse(checkpoint, "gate", "up")
    del checkpoint
    gc.collect()
    assert torch.equal(fused.data, expected)
