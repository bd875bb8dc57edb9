import pytest
import torch
import torch.nn.functional as F
from torch import nn

from transcribe.engine import KVCache, Scheduler
from transcribe.engine.functional import attention, cached_attention, rotary_halves, windowed_attention
from transcribe.engine.modules import Conv2d, RMSNorm


def test_rotary_halves_turns_the_halves_of_each_head_against_each_other():
    x, angles = torch.randn(5, 3, 8), torch.randn(5, 4)
    turned = torch.complex(x[..., :4], x[..., 4:]) * torch.polar(torch.ones(5, 1, 4), angles[:, None])
    rotation = torch.stack([angles.cos(), angles.sin()], 1)
    assert torch.allclose(rotary_halves(x, rotation), torch.cat([turned.real, turned.imag], -1), atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(7, 24), (3, 4, 24)])
def test_rms_norm_is_torchs(dtype, shape):
    norm, x = RMSNorm(24, eps=1e-3), torch.randn(shape, dtype=dtype)
    norm.weight = torch.randn(24, dtype=dtype)
    expected = F.rms_norm(x.float(), (24,), norm.weight.float(), 1e-3)
    assert torch.allclose(norm(x).float(), expected, atol=1e-5 if dtype == torch.float32 else 0.05)


@pytest.mark.parametrize("pieces", [[9], [4, 5], [4, 1, 1, 3]])
def test_grouped_queries_see_what_came_before_in_any_pieces(pieces):
    q, k, v = torch.randn(9, 6, 8), torch.randn(9, 2, 8), torch.randn(9, 2, 8)
    repeated = (t.repeat_interleave(3, 1).transpose(0, 1) for t in (k, v))
    expected = F.scaled_dot_product_attention(q.transpose(0, 1), *repeated, is_causal=True).transpose(0, 1).flatten(1)
    cache = KVCache(Scheduler(), 1, limit=9, heads=2, head_dim=8, dtype=torch.float32)[0]
    parts = zip(*(t.split(pieces) for t in (q, k, v)), strict=True)
    assert torch.allclose(torch.cat([cached_attention(*part, cache) for part in parts]), expected, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [3, 20, 60, 73])
def test_windowed_attention_gives_the_bits_of_each_window_alone(dtype, rows):
    q, k, v = torch.randn(3, rows, 4, 8, dtype=dtype)
    expected = torch.cat([attention(*window) for window in zip(*(t.split(20) for t in (q, k, v)), strict=True)])
    assert torch.equal(windowed_attention(q, k, v, 20), expected)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-5), (torch.bfloat16, 3e-2)])
@pytest.mark.parametrize("shape", [(13, 20), (400, 33), (2, 1)])
def test_convolutions_on_a_plan_are_torchs(shape, dtype, tolerance):
    class Stem(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = Conv2d(1, 60), Conv2d(60, 6)

        def forward(self, x):
            return F.gelu(self.second(F.gelu(self.first(x.unsqueeze(-1)))))

    stem, x = Stem(), torch.randn(shape)
    expected = x[None]
    for conv in (stem.first, stem.second):
        conv.weight, conv.bias = torch.randn(conv.shapes()["weight"]) / conv.inputs, torch.randn(conv.outputs)
        expected = F.gelu(F.conv2d(expected, conv.weight, conv.bias, stride=2, padding=1))
        conv.weight, conv.bias = conv.weight.to(dtype), conv.bias.to(dtype)
        conv.prepare()
    made = Scheduler(poison=True)(stem, x.to(dtype)).permute(2, 0, 1)
    assert torch.allclose(made.float(), expected, atol=tolerance * float(expected.abs().max()))
