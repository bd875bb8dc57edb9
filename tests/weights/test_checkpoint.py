"""Opening what a user names: files, sets, directories, dialects, side files, and things that are no model."""

import io
import json
import pickle
import subprocess
import sys
import tarfile
import time
import warnings
import zipfile

import numpy as np
import psutil
import pytest
import torch
from gguf import GGMLQuantizationType as T
from gguf import GGUFValueType as V
from safetensors.torch import save_file
from weight_files import packed, write_gguf

from transcribe.errors import ModelError
from transcribe.weights import PackedTensor, open_checkpoint

TENSORS = {f"t{i}": packed(T.Q8_0, 4, 32, seed=i) for i in range(5)}


@pytest.fixture
def parts(tmp_path):
    """A model split in three by the gguf package."""
    write_gguf(tmp_path / "m.gguf", TENSORS, {"n": 3}, split_max_tensors=2)
    found = sorted(tmp_path.glob("*.gguf"))
    assert [p.name for p in found] == [f"m-{i:05}-of-00003.gguf" for i in (1, 2, 3)]
    return found


@pytest.mark.parametrize("which", [0, 1, 2, None])
def test_any_part_of_a_split_gguf_opens_the_set(parts, which):
    checkpoint = open_checkpoint(parts[0].parent if which is None else parts[which])
    assert checkpoint.metadata["n"] == 3
    assert set(checkpoint.tensors) == set(TENSORS)
    for name, (raw, _) in TENSORS.items():
        assert np.array_equal(checkpoint.tensor(name).data.numpy(), raw)


@pytest.mark.parametrize(("gone", "given"), [(0, 2), (1, 0), (2, 0)])
def test_a_missing_part_is_named(parts, gone, given):
    parts[gone].unlink()
    with pytest.raises(ModelError, match=f"{parts[gone].name}: missing, of a set of 3 files"):
        open_checkpoint(parts[given])


def test_joined_parts_are_explained(parts, tmp_path):
    joined = tmp_path / "joined.gguf"
    joined.write_bytes(b"".join(p.read_bytes() for p in parts))
    with pytest.raises(ModelError, match=r"split in 3, or several joined, but not named NAME-00001-of-00003.gguf"):
        open_checkpoint(joined)


def test_swapped_and_cut_parts_are_noticed(parts):
    contents = [p.read_bytes() for p in parts]
    parts[1].write_bytes(contents[2])
    with pytest.raises(ModelError, match=r"00002-of-00003\.gguf: not part 2 of 3 by its own metadata"):
        open_checkpoint(parts[0])
    parts[1].write_bytes(contents[1][:-100])
    with pytest.raises(ModelError, match=r"00002-of-00003\.gguf: truncated"):
        open_checkpoint(parts[0])


def test_a_directory_with_one_gguf_opens_it(tmp_path):
    write_gguf(tmp_path / "x-Q8_0.gguf", {"a": np.ones(2, np.float32)})
    (tmp_path / "README.md").write_text("hello")
    assert "a" in open_checkpoint(tmp_path).tensors


def test_a_directory_with_several_ggufs_asks_for_one(tmp_path):
    for name in ("a", "b"):
        write_gguf(tmp_path / f"{name}.gguf", {})
    with pytest.raises(ModelError, match=r"holds several GGUF files \(a.gguf, b.gguf\); give one"):
        open_checkpoint(tmp_path)


def test_a_directory_without_weights_says_so(tmp_path):
    with pytest.raises(ModelError, match=r"a directory without weights: expected model\.safetensors"):
        open_checkpoint(tmp_path)
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(ModelError, match=r"pytorch_model\.bin would have to be converted"):
        open_checkpoint(tmp_path)


def test_a_path_that_does_not_exist_says_so(tmp_path):
    with pytest.raises(ModelError, match="nothing: no such file or directory"):
        open_checkpoint(tmp_path / "nothing")
    with pytest.raises(ModelError, match="cannot be read"):
        open_checkpoint(tmp_path / ("x" * 5000))


def zip_of(name: str, content: bytes) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr(name, content)
    return buffer.getvalue()


def tar_of(name: str) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        archive.addfile(tarfile.TarInfo(name))
    return buffer.getvalue()


def torch_file(**options: bool) -> bytes:
    buffer = io.BytesIO()
    torch.save({"w": torch.ones(3)}, buffer, **options)
    return buffer.getvalue()


WRONG = {
    "empty": (b"", "an empty file"),
    "html": (b"\n<!DOCTYPE html><html>not found</html>", "an HTML or XML page"),
    "xml": (b"<?xml version='1.0'?><Error>AccessDenied</Error>", "an HTML or XML page"),
    "git-lfs": (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n", "a git-lfs pointer"),
    "pickle": (pickle.dumps({"w": 1}), "a pickle"),
    "torch": (torch_file(), r"a PyTorch archive \(pickle\)"),
    "old torch": (torch_file(_use_new_zipfile_serialization=False), "a PyTorch pickle"),
    "ggml": (b"lmgg" + bytes(100), "an old ggml .bin model"),
    "zip": (zip_of("model.gguf", b"x"), "a zip archive"),
    "tar": (tar_of("model_weights.ckpt"), "a tar archive"),
    "text": ("Ceci n'est pas un modèle.\n".encode(), "a text file"),
    "json": (b'{"model_type": "whisper"}', "a JSON file"),
    "wav": (b"RIFF\x24\0\0\0WAVEfmt ", "a recording; give it as the input"),
    "zeros": (bytes(5000), "a file of zeros"),
    "noise": (bytes(range(256)) * 9, "a file of an unknown kind"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_file_is_told_what_it_is(save, name):
    content, what = WRONG[name]
    path = save(content)
    with pytest.raises(ModelError, match=f"^{path}: not a model but {what}") as caught:
        open_checkpoint(path)
    assert "\n" not in str(caught.value)
    assert ";" in str(caught.value)


def test_a_wrong_file_is_refused_quickly_in_little_memory(save):
    path = save(b"<html>" + bytes(1 << 20))
    program = (
        "import psutil, sys, time; start = time.perf_counter()\n"
        "from transcribe.weights import open_checkpoint\n"
        "from transcribe.errors import ModelError\n"
        f"try: open_checkpoint({str(path)!r})\n"
        "except ModelError: pass\n"
        "print(time.perf_counter() - start, psutil.Process().memory_info().rss, 'torch' in sys.modules)\n")
    seconds, resident, with_torch = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()
    assert float(seconds) < 1
    assert int(resident) < 100 << 20
    assert with_torch == "False"


def test_opening_and_reading_give_no_warning(tmp_path):
    path = write_gguf(tmp_path / "m.gguf", TENSORS)
    code = f"from transcribe.weights import open_checkpoint; open_checkpoint({str(path)!r}).tensor('t1').dequantize()"
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_tensors_outlive_their_checkpoint_and_its_file(tmp_path):
    path = write_gguf(tmp_path / "m.gguf", TENSORS)
    tensor = open_checkpoint(path).tensor("t1")
    path.unlink()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert np.array_equal(tensor.data.numpy(), TENSORS["t1"][0])


@pytest.mark.parametrize("mmap", [True, False], ids=["mmap", "read"])
def test_the_pages_of_a_mapping_can_be_entered_before_they_are_read(tmp_path, mmap):
    path = write_gguf(tmp_path / "m.gguf", {"w": packed(T.Q8_0, 64, 1 << 16)})
    checkpoint = open_checkpoint(path, mmap=mmap)
    checkpoint.files[0].enter()
    if mmap and sys.platform == "linux":
        until = time.monotonic() + 10
        while _resident(path) < path.stat().st_size and time.monotonic() < until:
            time.sleep(0.01)
        assert _resident(path) >= path.stat().st_size
    assert np.array_equal(checkpoint.tensor("w").data.numpy(), packed(T.Q8_0, 64, 1 << 16)[0])


def _resident(path):
    return sum(part.rss for part in psutil.Process().memory_maps() if part.path == str(path))


def test_reading_notices_that_the_file_has_shrunk(tmp_path):
    path = write_gguf(tmp_path / "m.gguf", TENSORS)
    checkpoint = open_checkpoint(path, mmap=False)
    path.write_bytes(path.read_bytes()[:-200])
    with pytest.raises(ModelError, match="has become shorter since it was opened"):
        checkpoint.tensor("t4")


def test_require_lists_the_first_faults_and_counts_all(tmp_path):
    path = write_gguf(tmp_path / "m.gguf", {"a": np.ones((2, 3), np.float32), "b": np.ones(4, np.float32)})
    checkpoint = open_checkpoint(path)
    checkpoint.require({"a": (2, 3)})
    with pytest.raises(ModelError) as caught:
        checkpoint.require({"a": (3, 2), "b": (4,), **{f"m{i}": (1,) for i in range(5)}})
    assert str(caught.value) == (
        f"{path}: of 7 tensors needed, 5 missing (m0, m1, m2, ...), 1 of the wrong shape (a is [2, 3], needs [3, 2]); "
        "is it complete, and of the right family?")
    with pytest.raises(ModelError, match="has no tensor 'c'"):
        checkpoint.tensor("c")


def test_side_files_lie_beside_the_weights(tmp_path):
    save_file({"w": torch.ones(1)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "moonshine"}))
    for given in (tmp_path, tmp_path / "model.safetensors"):
        checkpoint = open_checkpoint(given)
        assert checkpoint.config == {"model_type": "moonshine"}
        assert checkpoint.architecture == "moonshine"
        assert checkpoint.side_file("tokenizer.json") is None


def test_a_model_without_config_has_no_architecture(tmp_path):
    save_file({"w": torch.ones(1)}, tmp_path / "model.safetensors")
    checkpoint = open_checkpoint(tmp_path)
    assert (checkpoint.config, checkpoint.architecture) == ({}, "")


@pytest.mark.parametrize("config", ["[]", "{", "\udcff"])
def test_a_damaged_config_is_refused(tmp_path, config):
    save_file({"w": torch.ones(1)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(config, errors="surrogateescape")
    with pytest.raises(ModelError, match=r"config\.json is not a JSON object"):
        open_checkpoint(tmp_path).config  # noqa: B018


def test_the_architecture_of_a_gguf(tmp_path):
    assert open_checkpoint(write_gguf(tmp_path / "m.gguf", {}, arch="qwen3_asr")).architecture == "qwen3_asr"


LONG = "model.layers.0.a_module_with_a_very_long_name.another_one.self_attn.q_proj.weight"
FILES = {"config.json": b'{"model_type": "other"}', "tokenizer.model": bytes(range(256))}


def audiocpp(path, *, names=("w", LONG, "scalar"), shapes=((2, 1, 64), (4, 32), ()), **changes):
    """audio.cpp's dialect: physical names and shapes that are not the logical ones."""
    blobs = list(FILES.values())
    offsets = [0, len(blobs[0]), len(blobs[0]) + len(blobs[1])]
    metadata = {
        "audiocpp.model_spec.family": "qwen3_asr",
        "audiocpp.tensor_names": list(names),
        "audiocpp.tensor_ranks": ([len(shape) for shape in shapes], V.ARRAY, V.INT32),
        "audiocpp.tensor_shapes": ([n for shape in shapes for n in shape], V.ARRAY, V.INT64),
        "audiocpp.embedded_files.names": list(FILES),
        "audiocpp.embedded_files.offsets": (offsets, V.ARRAY, V.UINT64),
        "audiocpp.embedded_files.data": (b"".join(blobs), V.ARRAY, V.UINT8),
    }
    metadata = {key: v for key, v in (metadata | changes).items() if v is not None}
    return write_gguf(path / "audio.gguf", {
        "w": packed(T.Q8_0, 2, 64), "_audiocpp.1": packed(T.Q4_0, 4, 32), "scalar": np.ones(1, np.float32),
    }, metadata, arch="audiocpp")


def test_audiocpp_names_shapes_and_family_are_the_logical_ones(tmp_path):
    checkpoint = open_checkpoint(audiocpp(tmp_path))
    assert checkpoint.architecture == "qwen3_asr"
    assert {name: info.shape for name, info in checkpoint.tensors.items()} == {
        "w": (2, 1, 64), LONG: (4, 32), "scalar": ()}
    assert checkpoint.tensor("scalar").item() == 1.0
    weight = checkpoint.tensor("w")
    assert isinstance(weight, PackedTensor)
    assert np.array_equal(weight.data.numpy(), packed(T.Q8_0, 2, 64)[0])


def test_audiocpp_side_files_are_embedded(tmp_path):
    (tmp_path / "config.json").write_text('{"of": "another model"}')
    (tmp_path / "extra.txt").write_text("beside")
    checkpoint = open_checkpoint(audiocpp(tmp_path))
    assert {name: checkpoint.side_file(name) for name in FILES} == FILES
    assert checkpoint.config == {"model_type": "other"}
    assert checkpoint.side_file("extra.txt") == b"beside"


def test_audiocpp_reads_the_older_text_form_of_side_files(tmp_path):
    checkpoint = open_checkpoint(audiocpp(tmp_path, **{
        "audiocpp.embedded_files.names": ["config.json"], "audiocpp.embedded_files.contents": ['{"a": "æ"}'],
        "audiocpp.embedded_files.offsets": None, "audiocpp.embedded_files.data": None}))
    assert checkpoint.config == {"a": "æ"}


@pytest.mark.parametrize(("spec", "family"), [('{"family": "citrinet_asr"}', "citrinet_asr"), ("{", "other")])
def test_audiocpp_family_comes_from_the_spec_else_the_config(tmp_path, spec, family):
    path = audiocpp(tmp_path, **{"audiocpp.model_spec.family": None, "audiocpp.model_spec.json": spec})
    assert open_checkpoint(path).architecture == family


@pytest.mark.parametrize(("changes", "message"), [
    ({"names": ("w", "x")}, "have 2, 3 and 5 items for 3 tensors"),
    ({"names": ("w", "w", "x")}, "two tensors are named 'w'"),
    ({"shapes": ((2, 64), (5, 32), ())}, r"of shape .5, 32. is stored as .4, 32."),
    ({"shapes": ((2, 64), (8, 16), ())}, "is Q4_0, which has rows of whole blocks of 32"),
    ({"audiocpp.tensor_ranks": None}, "audiocpp.tensor_ranks is missing or of the wrong type"),
    ({"audiocpp.tensor_names": 3}, "audiocpp.tensor_names is missing or of the wrong type"),
])
def test_a_damaged_audiocpp_table_is_refused(tmp_path, changes, message):
    with pytest.raises(ModelError, match=message):
        open_checkpoint(audiocpp(tmp_path, **changes))


@pytest.mark.parametrize("offsets", [[0, 5], [0, 23, 1 << 40], [30, 23, 279]])
def test_damaged_side_files_are_refused(tmp_path, offsets):
    path = audiocpp(tmp_path, **{"audiocpp.embedded_files.offsets": (offsets, V.ARRAY, V.UINT64)})
    checkpoint = open_checkpoint(path)
    with pytest.raises(ModelError, match=r"the embedded file .* is damaged"):
        [checkpoint.side_file(name) for name in FILES]
