"""Dequantisation by torch against the reference implementation in the gguf package, bit for bit."""

import gguf
import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES

from transcribe.kernels import dequantize as module
from transcribe.kernels.dequantize import UNPACK, dequantize

TYPES = sorted(UNPACK, key=lambda kind: kind.name)
every_type = pytest.mark.parametrize("kind", TYPES, ids=lambda kind: kind.name)


@pytest.fixture(autouse=True)
def _torch_path(use):
    use("torch")


def random_blocks(kind: gguf.GGMLQuantizationType, rows: int = 9, blocks: int = 5) -> np.ndarray:
    """Any bytes are a valid block; its float16 scales then cover zeros, subnormals, infinities and NaN."""
    return np.random.default_rng(int(kind)).integers(0, 256, (rows, blocks * GGML_QUANT_SIZES[kind][1]), np.uint8)


def reference(raw: np.ndarray, kind: gguf.GGMLQuantizationType) -> np.ndarray:
    with np.errstate(all="ignore"):
        return gguf.quants.dequantize(raw, kind)


def assert_same_bits(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal including the sign of zero; any NaN equals any other."""
    integers = {4: torch.int32, 2: torch.int16}[actual.dtype.itemsize]
    nan = expected.isnan()
    assert actual.dtype == expected.dtype
    assert torch.equal(actual.isnan(), nan)
    assert torch.equal(actual.view(integers)[~nan], expected.view(integers)[~nan])


@every_type
def test_random_blocks_equal_the_reference(kind):
    raw = random_blocks(kind, rows=200)
    assert_same_bits(dequantize(torch.from_numpy(raw), kind), torch.from_numpy(reference(raw, kind)))


@every_type
@pytest.mark.parametrize("byte", [0x00, 0x0F, 0x3F, 0x40, 0x7B, 0x80, 0xC0, 0xF0, 0xFF])
def test_blocks_of_one_byte_equal_the_reference(kind, byte):
    raw = np.full((2, 3 * GGML_QUANT_SIZES[kind][1]), byte, np.uint8)
    assert_same_bits(dequantize(torch.from_numpy(raw), kind), torch.from_numpy(reference(raw, kind)))


@every_type
def test_each_bit_of_a_block_lands_where_the_reference_puts_it(kind):
    size = GGML_QUANT_SIZES[kind][1]
    raw = np.packbits(np.eye(8 * size, dtype=np.uint8), axis=1)
    scales = np.full(size, 0x3C, np.uint8)  # 1.06 as float16: without a scale every bit would give zero
    raw = np.concatenate([raw, raw ^ scales])
    assert_same_bits(dequantize(torch.from_numpy(raw), kind), torch.from_numpy(reference(raw, kind)))


@every_type
def test_bfloat16_is_the_float32_result_rounded(kind):
    raw = torch.from_numpy(random_blocks(kind))
    assert_same_bits(dequantize(raw, kind, torch.bfloat16), dequantize(raw, kind).to(torch.bfloat16))


@pytest.mark.parametrize("kind", [k for k in TYPES if not k.name.endswith("_K")], ids=lambda kind: kind.name)
def test_quantised_values_come_back_close(kind):
    values = np.random.default_rng(0).standard_normal((4, 512), np.float32)
    raw = gguf.quants.quantize(values, kind)
    error = (dequantize(torch.from_numpy(raw), kind) - torch.from_numpy(values)).abs().max()
    assert error < 0.6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_out_is_written_and_decides_the_dtype(dtype):
    kind = gguf.GGMLQuantizationType.Q8_0
    raw = torch.from_numpy(random_blocks(kind))
    wide = torch.zeros(9, 200, dtype=dtype)
    out = wide[:, :160]  # rows with a gap between them
    assert dequantize(raw, kind, out=out) is out
    assert_same_bits(out.contiguous(), dequantize(raw, kind).to(dtype))
    assert not wide[:, 160:].any()


@every_type
def test_chunks_and_strided_rows_do_not_change_the_result(kind, monkeypatch):
    raw = torch.from_numpy(random_blocks(kind, rows=12))
    whole = dequantize(raw, kind)
    monkeypatch.setattr(module, "_CPU_CHUNK", whole.shape[1] * 5)
    assert_same_bits(dequantize(raw, kind), whole)
    assert_same_bits(dequantize(raw[::3], kind), whole[::3])


def test_no_rows_give_no_rows():
    raw = torch.empty(0, 34, dtype=torch.uint8)
    assert dequantize(raw, gguf.GGMLQuantizationType.Q8_0).shape == (0, 32)


def test_what_does_not_fit_is_refused():
    kind = gguf.GGMLQuantizationType.Q8_0
    with pytest.raises(ValueError, match="blocks of 34 bytes"):
        dequantize(torch.zeros(2, 33, dtype=torch.uint8), kind)
    with pytest.raises(ValueError, match="out is"):
        dequantize(torch.zeros(2, 34, dtype=torch.uint8), kind, out=torch.empty(2, 33))
    with pytest.raises(ValueError, match="F16 is not a packed type"):
        dequantize(torch.zeros(2, 34, dtype=torch.uint8), gguf.GGMLQuantizationType.F16)
