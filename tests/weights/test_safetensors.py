"""safetensors files: single, sharded, sound and not."""

import json
import struct

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from transcribe.errors import ModelError
from transcribe.weights import open_checkpoint

both_ways = pytest.mark.parametrize("mmap", [True, False], ids=["mmap", "read"])

TENSORS = {
    "f32": torch.randn(3, 4), "f16": torch.randn(2, 2, 2).half(), "bf16": torch.randn(5).bfloat16(),
    "i64": torch.tensor(7), "i32": torch.arange(6, dtype=torch.int32), "i8": torch.arange(3, dtype=torch.int8),
}


def raw(head: object, data: bytes = b"") -> bytes:
    text = head if isinstance(head, bytes) else json.dumps(head).encode()
    return struct.pack("<Q", len(text)) + text + data


def tensor(dtype: str = "F32", shape: object = (2,), offsets: object = (0, 8)) -> dict:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def write_shards(folder, names=("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")):
    """TENSORS in two shards and their index."""
    where = {name: names[i % 2] for i, name in enumerate(TENSORS)}
    for shard in names:
        save_file({name: TENSORS[name] for name in TENSORS if where[name] == shard}, folder / shard)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    return [folder / shard for shard in names]


def assert_all_there(checkpoint):
    assert checkpoint.format == "safetensors"
    assert set(checkpoint.tensors) == set(TENSORS)
    for name, expected in TENSORS.items():
        assert checkpoint.tensors[name].shape == tuple(expected.shape)
        assert checkpoint.tensor(name).dtype == expected.dtype
        assert torch.equal(checkpoint.tensor(name), expected)


@both_ways
def test_a_single_file(tmp_path, mmap):
    path = tmp_path / "any.name"
    save_file(TENSORS, path, metadata={"format": "pt"})
    checkpoint = open_checkpoint(path, mmap=mmap)
    assert_all_there(checkpoint)
    assert checkpoint.metadata == {"format": "pt"}


@pytest.mark.parametrize("given", ["", "model.safetensors.index.json", "model-00002-of-00002.safetensors"])
@both_ways
def test_a_sharded_set_opens_by_any_of_its_parts(tmp_path, given, mmap):
    write_shards(tmp_path)
    assert_all_there(open_checkpoint(tmp_path / given, mmap=mmap))


def test_a_missing_shard_is_named(tmp_path):
    write_shards(tmp_path)[1].unlink()
    with pytest.raises(ModelError, match=r"model-00002-of-00002\.safetensors: missing, of a set of 2 files"):
        open_checkpoint(tmp_path)


def test_a_shard_without_its_index_is_refused(tmp_path):
    first = write_shards(tmp_path)[0]
    (tmp_path / "model.safetensors.index.json").unlink()
    with pytest.raises(ModelError, match=r"one shard of 2; its index model.safetensors.index.json is missing"):
        open_checkpoint(first)


def test_a_shard_that_lacks_its_tensors_is_refused(tmp_path):
    first, second = write_shards(tmp_path)
    second.write_bytes(first.read_bytes())
    with pytest.raises(ModelError, match=r"index\.json: 3 not in the shards it names"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("where", [{"x": "../secret"}, {"x": 1}, {}, [], "x"])
def test_an_unsound_index_is_refused(tmp_path, where):
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    with pytest.raises(ModelError, match="not an index of safetensors shards"):
        open_checkpoint(tmp_path)


def test_data_at_an_odd_place_is_read(tmp_path):
    path = tmp_path / "model.safetensors"
    values = np.array([1.5, -2.0], np.float32)
    head = json.dumps({"x": tensor()}).encode()
    path.write_bytes(raw(head + b" " * ((4 - len(head)) % 8 + 1), values.tobytes()))
    assert open_checkpoint(path).tensors["x"].offset % 4
    assert open_checkpoint(path).tensor("x").tolist() == [1.5, -2.0]


def test_an_unread_type_matters_only_when_it_is_needed(tmp_path):
    path = tmp_path / "model.safetensors"
    save_file({"x": torch.zeros(4, dtype=torch.float8_e4m3fn), "y": torch.ones(2)}, path)
    checkpoint = open_checkpoint(path)
    checkpoint.require({"y": (2,)})
    with pytest.raises(ModelError, match=r"1 of a type that is not read \(x is F8_E4M3\)"):
        checkpoint.require({"x": (4,)})
    with pytest.raises(ModelError, match="tensor 'x' is F8_E4M3, which is not read"):
        checkpoint.tensor("x")


DAMAGED = {
    "no JSON": (raw(b"{nothing here}"), "the safetensors header is damaged"),
    "not UTF-8": (raw(b'{"\xff": 1}'), "the safetensors header is damaged"),
    "deep": (raw(b'{"x":' + b"[" * 100_000 + b"}"), "the safetensors header is damaged"),
    "twice": (raw(b'{"x": {"dtype":"F32"}, "x": {}}'), "a name occurs twice"),
    "metadata": (raw({"__metadata__": [1]}), "__metadata__ is not a JSON object"),
    "no entry": (raw({"x": 5}), "entry of tensor 'x' is damaged"),
    "negative": (raw({"x": tensor(shape=[-2])}), "entry of tensor 'x' is damaged"),
    "fraction": (raw({"x": tensor(shape=[2.0])}), "entry of tensor 'x' is damaged"),
    "backwards": (raw({"x": tensor(offsets=[8, 0])}), "entry of tensor 'x' is damaged"),
    "one offset": (raw({"x": tensor(offsets=[8])}), "entry of tensor 'x' is damaged"),
    "wrong size": (raw({"x": tensor(shape=[3])}, bytes(64)), "of F32 .3. takes 12 bytes, but its place has 8"),
    "overflow": (raw({"x": tensor(shape=[0, 1 << 63], offsets=[0, 0])}), "the impossible shape"),
    "overlap": (raw({"x": tensor(), "y": tensor(offsets=[4, 12])}, bytes(64)), "'x' and 'y' overlap"),
    "head cut": (raw({"x": tensor()})[:30], "truncated: needs [0-9]+ bytes, has 30;"),
    "data cut": (raw({"x": tensor()}, bytes(7)), "truncated: needs [0-9]+ bytes, has [0-9]+;"),
}


@both_ways
@pytest.mark.parametrize("name", DAMAGED)
def test_damage_is_named(save, name, mmap):
    content, message = DAMAGED[name]
    with pytest.raises(ModelError, match=message) as caught:
        open_checkpoint(save(content), mmap=mmap)
    assert "\n" not in str(caught.value)


def test_a_file_cut_anywhere_is_refused(tmp_path, save):
    save_file(TENSORS, tmp_path / "whole")
    content = (tmp_path / "whole").read_bytes()
    for length in range(0, len(content), 5):
        with pytest.raises(ModelError):
            open_checkpoint(save(content[:length]))
