"""K formats: the values come back near, and no worse than ggml's own quantisers leave them."""

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as T

from transcribe.convert.kquants import quantize

# Error of ggml's reference quantisers on normally distributed values, as a share of these.
ERRORS = {T.Q4_K: 0.0714, T.Q5_K: 0.0362, T.Q6_K: 0.0178}


@pytest.fixture(params=ERRORS, ids=lambda type: type.name)
def type(request):
    return request.param


def through(values: np.ndarray, type: T) -> np.ndarray:
    return gguf.dequantize(quantize(values.astype(np.float32), type), type)


def test_normal_values_come_back_as_near_as_ggmls(type):
    values = np.random.default_rng(0).standard_normal((128, 1024)) * 0.05
    assert np.linalg.norm(through(values, type) - values) < ERRORS[type] * np.linalg.norm(values) * 1.005


def test_values_on_the_grid_come_back_exactly(type):
    levels = {T.Q4_K: 16, T.Q5_K: 32, T.Q6_K: 64}[type]
    row = np.arange(256) % 32 % levels
    if type == T.Q6_K:
        row = np.arange(256) % 16 * 4 - 32
    values = np.stack([row, row[::-1]]) * 0.25
    np.testing.assert_allclose(through(values, type), values, atol=0.25 * 31 / 1000 if type != T.Q6_K else 0.02)


@pytest.mark.parametrize("values", [0.0, 0.01, -0.02], ids=["zero", "positive", "negative"])
def test_a_constant_block_comes_back(type, values):
    block = np.full((3, 512), values)
    block[1, :256] = 0
    np.testing.assert_allclose(through(block, type), block, atol=2e-4)


def test_blocks_do_not_touch_each_other(type):
    values = np.random.default_rng(1).standard_normal((4, 512)).astype(np.float32)
    alone = [quantize(part, type) for part in values.reshape(8, 1, 256)]
    np.testing.assert_array_equal(quantize(values, type).reshape(8, -1), np.concatenate(alone))


def test_a_large_value_hurts_its_own_sub_block_only(type):
    values = np.random.default_rng(2).standard_normal((1, 256)) * 0.01
    values[0, 40] = 1.0
    error = np.abs(through(values, type) - values)[0]
    assert error[40] < 0.02
    assert error[64:].max() < 0.03
