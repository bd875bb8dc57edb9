"""The C kernels against the torch path, which defines them: every format on every instruction set of this machine."""

import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from packed_blocks import plausible_blocks
from test_dequantize import assert_same_bits, every_type, random_blocks

from transcribe.kernels import linear, steps
from transcribe.kernels.dequantize import UNPACK, dequantize
from transcribe.kernels.linear import CROSSOVER, FEW_ROWS, packed_linear, scratch_bytes
from transcribe.weights.packed import PackedTensor

MANY_ROWS = FEW_ROWS * CROSSOVER[0] + 1
"""So many that torch multiplies, except bfloat16 on AMX."""

PLAIN = (torch.float32, torch.float16, torch.bfloat16)

WHOLE = ("Q4_K", "Q5_K", "Q6_K")
"""Formats that few rows of bfloat16 multiply as integers (csrc/lanes.h)."""


def weights(outputs: int, inputs: int):
    """A weight of every form: packed, and plain."""
    for kind in UNPACK:
        values = GGML_QUANT_SIZES[kind][0]
        blocks = -(-inputs // values)
        yield kind.name, PackedTensor(kind, (outputs, blocks * values), plausible_blocks(kind, outputs, blocks))
    for dtype in PLAIN:
        weight = torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(1)) / inputs**0.5
        yield str(dtype), weight.to(dtype)


def activations(rows: int, inputs: int) -> torch.Tensor:
    return torch.randn(rows, inputs, generator=torch.Generator().manual_seed(2))


def apply(x, weight, bias=None):
    return packed_linear(x, weight, bias, x.new_empty(x.shape[0], weight.shape[0]))


def exact(x, weight, bias=None):
    """In float64, and the sum of magnitudes that rounding errors scale with."""
    w = (weight if isinstance(weight, torch.Tensor) else weight.dequantize()).double()
    b = 0 if bias is None else bias.double()
    return x.double() @ w.t() + b, x.double().abs() @ w.t().abs() + (0 if bias is None else bias.double().abs())


@every_type
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_expansion_has_the_bits_of_the_torch_path(kind, dtype, compiled, use):
    raw = torch.from_numpy(random_blocks(kind, rows=100))
    wide = torch.zeros(100, raw.shape[1] // GGML_QUANT_SIZES[kind][1] * GGML_QUANT_SIZES[kind][0] + 8, dtype=dtype)
    expanded = dequantize(raw[::2], kind, out=wide[::2, :-8])
    use("torch")
    assert_same_bits(expanded.contiguous(), dequantize(raw[::2], kind, dtype))
    assert not wide[1::2].any()
    assert not wide[:, -8:].any()


@every_type
@pytest.mark.parametrize("byte", [0x00, 0x3F, 0x7B, 0x80, 0xF0, 0xFF])
def test_extreme_blocks_have_the_bits_of_the_torch_path(kind, byte, compiled, use):
    raw = torch.full((2, 3 * GGML_QUANT_SIZES[kind][1]), byte, dtype=torch.uint8)
    narrow, wide = dequantize(raw, kind, torch.bfloat16), dequantize(raw, kind)
    use("torch")
    assert_same_bits(wide, dequantize(raw, kind))
    assert_same_bits(narrow, dequantize(raw, kind, torch.bfloat16))


@pytest.mark.parametrize(("outputs", "inputs"), [(1, 32), (7, 288), (133, 512), (260, 1056)])
def test_products_are_right_to_float32_rounding(outputs, inputs, compiled):
    for name, weight in weights(outputs, inputs):
        x, bias = activations(3, weight.shape[1]), activations(1, outputs)[0]
        for b in (None, bias):
            right, magnitude = exact(x, weight, b)
            error = ((apply(x, weight, b).double() - right).abs() / magnitude).max()
            assert error < 1e-6, name


def test_a_row_has_the_same_bits_in_any_batch_and_on_any_number_of_threads(compiled):
    threads = torch.get_num_threads()
    for name, weight in weights(203, 544):
        x = activations(FEW_ROWS, weight.shape[1])
        alone = torch.cat([apply(row, weight) for row in x.split(1)])
        for rows in range(2, FEW_ROWS + 1):
            assert torch.equal(apply(x[:rows], weight), alone[:rows]), (name, rows)
        torch.set_num_threads(3)
        assert torch.equal(apply(x[5:], weight), alone[5:]), name
        torch.set_num_threads(threads)


@pytest.mark.parametrize("inputs", [1, 15, 17, 100])
def test_plain_weights_need_no_whole_blocks(inputs, compiled):
    for dtype in PLAIN:
        weight, x = torch.randn(9, inputs).to(dtype), activations(5, inputs)
        right, magnitude = exact(x, weight)
        assert ((apply(x, weight).double() - right).abs() <= 1e-6 * magnitude).all()


def in_bfloat16(weight):
    """The values that bfloat16 activations meet in the torch path."""
    return weight.to(torch.bfloat16) if isinstance(weight, torch.Tensor) else weight.dequantize(torch.bfloat16)


@pytest.mark.parametrize(("outputs", "inputs"), [(1, 32), (7, 288), (133, 512), (260, 1056)])
def test_bfloat16_products_are_right_to_float32_rounding(outputs, inputs, compiled):
    """Before the result itself is rounded; W's values are rounded by instructions for bfloat16 only."""
    rounds = compiled in ("amx", "avx512bf16")
    for name, weight in weights(outputs, inputs):
        x, bias = activations(6, weight.shape[1]).bfloat16(), activations(1, outputs)[0].bfloat16()
        right, magnitude = exact(x, in_bfloat16(weight) if rounds and name not in WHOLE else weight, bias)
        error = (apply(x, weight, bias).double() - right).abs() - right.abs() / 256
        assert (error < 1e-6 * magnitude).all(), name


def test_bfloat16_rows_have_the_same_bits_in_any_batch_and_on_any_number_of_threads(compiled):
    threads = torch.get_num_threads()
    for name, weight in weights(203, 544):
        wide = activations(FEW_ROWS, weight.shape[1] + 5).bfloat16()
        x = wide[:, 2:-3]
        alone = torch.cat([apply(row, weight) for row in x.contiguous().split(1)])
        for rows in range(2, FEW_ROWS + 1):
            assert torch.equal(apply(x[:rows], weight), alone[:rows]), (name, rows)
        torch.set_num_threads(3)
        assert torch.equal(apply(x[5:], weight), alone[5:]), name
        torch.set_num_threads(threads)


@pytest.mark.parametrize("kind", WHOLE)
def test_integers_are_as_near_as_rounding_w_where_one_activation_dwarfs_the_others(kind, compiled):
    kind = GGMLQuantizationType[kind]
    weight = PackedTensor(kind, (64, 768), plausible_blocks(kind, 64, 3))
    x = activations(2, 768)
    x[:, 100] = 3000
    x = x.bfloat16()
    right, _ = exact(x, weight)
    error = (apply(x, weight).double() - right).norm()
    assert error < (x.double() @ in_bfloat16(weight).double().t() - right).norm() + (right / 256).norm()


@pytest.mark.parametrize("kind", WHOLE)
def test_what_is_no_number_is_none_in_the_product(kind, compiled):
    kind = GGMLQuantizationType[kind]
    weight = PackedTensor(kind, (20, 512), plausible_blocks(kind, 20, 2))
    x = activations(3, 512)
    x[0, 300], x[2, 7] = torch.nan, torch.inf
    assert apply(x.bfloat16(), weight).isfinite().all(1).tolist() == [False, True, False]
    assert not apply(torch.zeros(1, 512).bfloat16(), weight).any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_of_several_formats_share_activations(dtype, compiled):
    parts = [weight for _, weight in weights(40, 512)]
    x = activations(2, 512).to(dtype)
    out, scratch = x.new_empty(2, 40 * len(parts)), max(scratch_bytes(part, dtype, 2) for part in parts)
    assert steps.run(steps.linear(x, tuple(parts), None, out, torch.empty(scratch, dtype=torch.uint8)))
    for part, found in zip(parts, out.split(40, 1), strict=True):
        assert torch.equal(found, apply(x, part))


@pytest.mark.parametrize(("outputs", "inputs"), [(45, 768), (203, 544)])
def test_a_row_has_the_same_bits_as_long_as_the_kernels_multiply(outputs, inputs, compiled):
    kind = GGMLQuantizationType.Q5_1
    weight = PackedTensor(kind, (outputs, inputs), plausible_blocks(kind, outputs, inputs // 32))
    bias = activations(1, outputs)[0]
    threads = torch.get_num_threads()
    for dtype in (torch.float32, torch.bfloat16):
        x = activations(530, inputs).to(dtype)
        alone = torch.cat([apply(row, weight, bias) for row in x[:70].split(1)])
        for rows in (17, 32, 33, 48, 65, 530):
            if not linear._by_kernels(weight, dtype, rows):
                continue
            together = apply(x[:rows], weight, bias)
            assert torch.equal(together[:70], alone[:rows]), rows
            assert torch.equal(apply(x[-rows:], weight, bias)[-9:], apply(x[-9:], weight, bias)), rows
            torch.set_num_threads(3)
            assert torch.equal(apply(x[:rows], weight, bias), together), rows
            torch.set_num_threads(threads)


def test_many_rows_of_bfloat16_are_right_to_float32_rounding(compiled):
    for name, weight in weights(203, 544):
        x, bias = activations(100, weight.shape[1]).bfloat16(), activations(1, 203)[0].bfloat16()
        right, magnitude = exact(x, in_bfloat16(weight), bias)
        error = (apply(x, weight, bias).double() - right).abs() - right.abs() / 256
        assert (error < 2e-6 * magnitude).all(), name


@pytest.mark.parametrize("inputs", [1, 15, 17, 100])
def test_plain_bfloat16_products_need_no_whole_blocks(inputs, compiled):
    for dtype in PLAIN:
        weight, x = torch.randn(9, inputs).to(torch.bfloat16).to(dtype), activations(5, inputs).bfloat16()
        right, magnitude = exact(x, weight)
        error = (apply(x, weight).double() - right).abs() - right.abs() / 256
        assert (error <= 1e-6 * magnitude).all()


def test_scratch_may_be_the_callers(compiled):
    for name, weight in weights(40, 512):
        x = activations(6, weight.shape[1]).bfloat16()
        scratch = torch.empty(scratch_bytes(weight, x.dtype, 6), dtype=torch.uint8)
        assert torch.equal(packed_linear(x, weight, None, x.new_empty(6, 40), scratch), apply(x, weight)), name


def test_rows_with_gaps_are_read_and_written_where_they_are(compiled):
    for name, weight in weights(37, 256):
        x = activations(4, weight.shape[1] + 7)[:, 3:-4]
        wide = torch.zeros(4, 60)
        assert packed_linear(x, weight, None, wide[:, 10:47]).data_ptr() == wide[:, 10:].data_ptr()
        assert torch.equal(wide[:, 10:47], apply(x.contiguous(), weight)), name
        assert not wide[:, :10].any()
        assert not wide[:, 47:].any()


def test_rows_of_a_weight_are_sliced_without_a_copy(compiled):
    """A fused weight and its parts give the same bits."""
    for name, weight in weights(64, 256):
        x = activations(1, weight.shape[1])
        if isinstance(weight, torch.Tensor):
            part = weight[17:50]
        else:
            part = PackedTensor(weight.type, (33, weight.shape[1]), weight.data[17:50])
        assert torch.equal(apply(x, part), apply(x, weight)[:, 17:50]), name


def test_many_rows_agree_with_few(compiled):
    for name, weight in weights(40, 512):
        x, bias = activations(MANY_ROWS, weight.shape[1]), activations(1, 40)[0]
        right, magnitude = exact(x, weight, bias)
        assert ((apply(x, weight, bias).double() - right).abs() <= 1e-6 * magnitude).all(), name


def test_few_rows_of_float32_need_no_scratch(compiled):
    weight = PackedTensor(GGMLQuantizationType.Q8_0, (64, 256), plausible_blocks(GGMLQuantizationType.Q8_0, 64, 8))
    assert scratch_bytes(weight, torch.float32, 1) == 0
    assert scratch_bytes(weight, torch.float32, MANY_ROWS) > 0


def test_other_dtypes_are_left_to_torch(compiled):
    weight = PackedTensor(GGMLQuantizationType.Q8_0, (8, 64), plausible_blocks(GGMLQuantizationType.Q8_0, 8, 2))
    x = activations(2, 64)
    assert not linear._by_kernels(weight, torch.float64, 2)
    torch.testing.assert_close(apply(x.double(), weight), apply(x, weight).double(), atol=1e-5, rtol=1e-5)
