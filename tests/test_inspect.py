import json

import gguf
import numpy as np
import pytest

from transcribe import cli
from transcribe.errors import ModelError
from transcribe.inspect import as_text, describe, size


def write(path, architecture, tensors, tokens=True):
    """A GGUF with `tensors`: name -> (shape, type)."""
    writer = gguf.GGUFWriter(path, architecture)
    if tokens:
        writer.add_token_list(["a", "b"])
    for name, (shape, kind) in tensors.items():
        data = np.zeros(shape, np.float32)
        if kind != gguf.GGMLQuantizationType.F32:
            writer.add_tensor(name, gguf.quantize(data, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


F32, Q8_0, F16 = (gguf.GGMLQuantizationType[name] for name in ("F32", "Q8_0", "F16"))


@pytest.fixture
def llama(tmp_path):
    """A model of a family we do not run: one block touches, one has a tensor between, one two types."""
    matrix = (32, 32)
    tensors = {
        "blk.0.ffn_gate.weight": (matrix, Q8_0), "blk.0.ffn_up.weight": (matrix, Q8_0),
        "blk.1.ffn_gate.weight": (matrix, Q8_0), "blk.1.norm.weight": ((32,), F32),
        "blk.1.ffn_up.weight": (matrix, Q8_0),
        "blk.2.ffn_gate.weight": (matrix, Q8_0), "blk.2.ffn_up.weight": (matrix, F16),
        "blk.0.attn_q.weight": (matrix, Q8_0), "blk.0.attn_k.weight": (matrix, Q8_0),
        "blk.0.attn_v.weight": (matrix, Q8_0), "blk.0.attn_q_norm.weight": ((32,), F32),
    }  # fmt: skip
    return write(tmp_path / "llama.gguf", "llama", tensors)


def test_a_family_we_do_not_run_is_described_and_named(llama):
    report = describe(llama)
    assert report["architecture"] == "llama"
    assert report["family"] is None
    assert report["peak"] is None
    assert "moonshine" in report["problem"]
    assert not report["problem"].startswith(str(llama))
    assert "family        none (unsupported)\n" in as_text(report)


def test_types_are_counted_and_sum_up(llama):
    report = describe(llama)
    matrices = 1024 // 32 * 34  # bytes of one: blocks of 32 in 34 bytes
    assert report["types"]["Q8_0"] == {"tensors": 8, "parameters": 8 * 1024, "bytes": 8 * matrices}
    assert report["types"]["F32"] == {"tensors": 2, "parameters": 64, "bytes": 256}
    for total, each in (("tensors", "tensors"), ("parameters", "parameters"), ("bytes", "bytes")):
        assert report[total] == sum(sums[each] for sums in report["types"].values())


def test_what_lies_end_to_end_is_told_from_what_does_not(llama):
    report = describe(llama)
    assert report["adjacent"] == {"gate+up": {"blocks": 3, "adjacent": 1}, "q/k/v": {"blocks": 1, "adjacent": 1}}
    text = as_text(report)
    assert "gate+up       1 of 3 blocks end to end" in text


def test_hugging_face_names_are_understood(tmp_path):
    matrix = ((32, 32), F32)
    names = ["mlp.gate_proj", "mlp.up_proj", "self_attn.k_proj", "self_attn.q_proj", "self_attn.v_proj"]
    path = write(tmp_path / "m.gguf", "x", {f"model.layers.0.{name}.weight": matrix for name in names})
    assert describe(path)["adjacent"] == {
        "gate+up": {"blocks": 1, "adjacent": 1},
        "q/k/v": {"blocks": 1, "adjacent": 0},  # in the order of the alphabet
    }


def test_a_missing_tokenizer_and_missing_tensors_are_said(tmp_path):
    path = write(tmp_path / "m.gguf", "moonshine", {"enc.conv.0.weight": ((4, 1, 127), F32)}, tokens=False)
    report = describe(path)
    assert report["family"] == "moonshine"
    assert report["tokenizer"] is None
    assert report["problem"]
    assert "tokenizer     none found\n" in as_text(report)


def test_the_command_prints_text_or_json_and_exits_0(llama, capsys):
    assert cli.main(["inspect", str(llama)]) == 0
    assert "architecture  llama" in capsys.readouterr().out
    assert cli.main(["inspect", "--json", "--seconds", "10", str(llama)]) == 0
    assert json.loads(capsys.readouterr().out) == describe(llama, 10.0)


def test_what_is_no_model_is_one_line_and_exit_3(tmp_path, capsys):
    page = tmp_path / "page.gguf"
    page.write_text("<!DOCTYPE html><html></html>")
    with pytest.raises(ModelError):
        describe(page)
    assert cli.main(["inspect", str(page)]) == 3
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"transcribe: {page}: ")
    assert err.count("\n") == 1


@pytest.mark.parametrize(("count", "text"), [(0, "0 B"), (1536, "1.5 KiB"), (2**20, "1.0 MiB"), (3 * 2**30, "3.0 GiB")])
def test_sizes_are_readable(count, text):
    assert size(count) == text
