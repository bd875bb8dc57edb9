"""Small blocks for the tests of the engine."""

import torch
import torch.nn.functional as F
from torch import nn

from transcribe.engine.functional import attention, cached_attention, rotary_interleaved
from transcribe.engine.modules import FusedLinear, LayerNorm, Linear, Weighted


def fill(module: nn.Module, seed: int = 0) -> nn.Module:
    """Give every weight random content."""
    generator = torch.Generator().manual_seed(seed)
    for part in module.modules():
        if isinstance(part, Weighted):
            for name, shape in part.shapes().items():
                setattr(part, name, torch.randn(shape, generator=generator) / max(1, shape[-1]) ** 0.5)
            part.prepare()
    return module


class Projections(nn.Module):
    """Keys and values: views of one fused product."""

    def __init__(self, width: int = 32, heads: int = 4):
        super().__init__()
        self.heads, self.head_dim = heads, width // heads
        self.kv_proj = FusedLinear(width, {"k_proj": width, "v_proj": width}, kind="k/v")

    def forward(self, x):
        kv = self.kv_proj(x).unflatten(-1, (2, self.heads, self.head_dim))
        return kv[:, 0], kv[:, 1]


class Layer(nn.Module):
    """A pre-norm layer with rotary attention and a gated MLP."""

    def __init__(self, width: int = 32, heads: int = 4):
        super().__init__()
        self.heads, self.head_dim = heads, width // heads
        self.norm1, self.norm2 = LayerNorm(width), LayerNorm(width, bias=False)
        self.qkv = FusedLinear(width, {"q": width, "k": width, "v": width}, kind="q/k/v")
        self.out = Linear(width, width)
        self.up = Linear(width, 4 * width)
        self.down = Linear(2 * width, width)

    def project(self, x, rotation):
        qkv = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, self.head_dim))
        qk = rotary_interleaved(qkv[:, :2], rotation)
        return qk[:, 0], qk[:, 1], qkv[:, 2]

    def forward(self, x, rotation):
        return self.mlp(x + self.out(attention(*self.project(x, rotation))))

    def mlp(self, x):
        value, gate = self.up(self.norm2(x)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * value)


class CachedLayer(Layer):
    """The same, attending to everything in a cache."""

    def forward(self, x, rotation, cache):
        return self.mlp(x + self.out(cached_attention(*self.project(x, rotation), cache)))


def rotation(positions: int, pairs: int = 3) -> torch.Tensor:
    angles = torch.arange(positions)[:, None] / 10 ** torch.arange(pairs)
    return torch.polar(torch.ones_like(angles), angles)
