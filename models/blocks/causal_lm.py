"""A causal language model over rows of embeddings: Llama's layer as Qwen3 has it.

Root-mean-square norms before attention and MLP, grouped queries (Ainslie et al. 2023) with a norm on each query and key
head, rotary positions, SwiGLU (Shazeer 2020) whose gate and up projections are one product.

A family composes: it makes the rows (`LanguageModel.embed`, scaled, added to or replaced by what its encoder gives),
and passes a `layer` or a `head` of its own where they differ from those here. Any layer is a module that maps rows
[time, width], the rotation of their positions and the layer's cache to rows; any head maps rows to logits. The rows are
one sequence's next ones, with its cache, or the next one of each of several sequences, with `Lanes` of their caches.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from transcribe.engine import KVCache, Lanes, Scheduler
from transcribe.engine.functional import cached_attention, rotary_halves
from transcribe.engine.kv_cache import LayerCache
from transcribe.engine.modules import Embedding, FusedLinear, Linear, RMSNorm

CHUNK = 256  # rows of a prompt at most at once: enough for matrix speed, and the intermediates are those of 256 rows


@dataclass(frozen=True)
class Config:
    """Sizes of a language model."""

    width: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocabulary: int
    positions: int
    """The longest prompt and answer together."""
    rope_theta: float
    eps: float
    tied: bool
    """The head's weight is the embedding's."""


class Attention(nn.Module):
    """Causal self-attention over everything in the cache; q, k and v are one product."""

    def __init__(self, c: Config) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = c.heads, c.kv_heads, c.head_dim
        parts = {"q_proj": c.heads, "k_proj": c.kv_heads, "v_proj": c.kv_heads}
        self.qkv_proj = FusedLinear(c.width, {name: n * c.head_dim for name, n in parts.items()}, "q/k/v", copies=False)
        self.o_proj = Linear(c.heads * c.head_dim, c.width, bias=False)

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [time, heads, head_dim], keys and values [time, kv_heads, head_dim]."""
        return self.qkv_proj(x).unflatten(-1, (-1, self.head_dim)).split((self.heads, self.kv_heads, self.kv_heads), 1)

    def forward(self, x: Tensor, rotation: Tensor, cache: LayerCache | Lanes) -> Tensor:
        q, k, v = self.project(x)
        return self.o_proj(cached_attention(rotary_halves(q, rotation), rotary_halves(k, rotation), v, cache))


class NormedAttention(Attention):
    """The same, with each query and key head normalised."""

    def __init__(self, c: Config) -> None:
        super().__init__(c)
        self.q_norm, self.k_norm = RMSNorm(c.head_dim, c.eps), RMSNorm(c.head_dim, c.eps)

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = super().project(x)
        return self.q_norm(q), self.k_norm(k), v


class GatedMLP(nn.Module):
    """SwiGLU; the gate and up projections are one product over one slice of the file."""

    def __init__(self, c: Config) -> None:
        super().__init__()
        self.gate_up_proj = FusedLinear(c.width, {"gate_proj": c.ffn, "up_proj": c.ffn}, kind="gate+up")
        self.down_proj = Linear(c.ffn, c.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(F.silu(gate) * up)


class DecoderLayer(nn.Module):
    """Pre-norm attention and MLP."""

    def __init__(self, c: Config, attention: Callable[[Config], nn.Module] = NormedAttention) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(c.width, c.eps)
        self.self_attn = attention(c)
        self.post_attention_layernorm = RMSNorm(c.width, c.eps)
        self.mlp = GatedMLP(c)

    def forward(self, x: Tensor, rotation: Tensor, cache: LayerCache | Lanes) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), rotation, cache)
        return x + self.mlp(self.post_attention_layernorm(x))


class Decoder(nn.Module):
    """The modules of a language model; the loop over its layers is `LanguageModel`'s."""

    def __init__(self, c: Config, dtype: torch.dtype, layer: Callable[[Config], nn.Module] = DecoderLayer) -> None:
        super().__init__()
        self.embed_tokens = Embedding(c.vocabulary, c.width, dtype)
        self.layers = nn.ModuleList(layer(c) for _ in range(c.layers))
        self.norm = RMSNorm(c.width, c.eps)


class Head(nn.Module):
    """The last norm and the projection to logits; tied, the projection's weight is the embedding's."""

    def __init__(self, norm: nn.Module, projection: Linear) -> None:
        super().__init__()
        self.norm, self.projection = norm, projection

    @classmethod
    def tied(cls, decoder: Decoder) -> Head:
        """The head of a decoder whose embedding is loaded."""
        projection = Linear(decoder.embed_tokens.width, decoder.embed_tokens.count, bias=False)
        projection.weight = decoder.embed_tokens.weight
        return cls(decoder.norm, projection)

    def forward(self, x: Tensor) -> Tensor:
        return self.projection(self.norm(x))


class LanguageModel:
    """Runs a decoder on the engine. Rows are [time, width] in the compute dtype."""

    def __init__(self, engine: Scheduler, c: Config, decoder: Decoder, head: nn.Module, dtype: torch.dtype) -> None:
        self.engine, self.config, self.decoder, self.head, self.dtype = engine, c, decoder, head, dtype
        self.rotations = self._rotation_table(1024)

    def new_cache(self, limit: int) -> KVCache:
        """An empty cache that may grow to `limit` rows, prompt and answer together."""
        c = self.config
        return KVCache(self.engine, c.layers, limit, c.kv_heads, c.head_dim, self.dtype)

    def embed(self, tokens: list[int]) -> Tensor:
        """The rows of these tokens."""
        return self.engine(self.decoder.embed_tokens, torch.tensor(tokens, device=self.engine.device))

    def logits(self, rows: Tensor, cache: KVCache) -> Tensor:
        """Append rows to the cache, a chunk at a time; the logits [vocabulary] that follow the last row."""
        chunk = math.ceil(len(rows) / math.ceil(len(rows) / CHUNK))  # all about as long: less memory than full and rest
        for start in range(0, len(rows), chunk):
            x = rows[start : start + chunk]
            position = cache[0].length
            cache.reserve(position + len(x))
            rotation = self._rotation(position, position + len(x))
            for i, layer in enumerate(self.decoder.layers):
                x = self.engine(layer, x, rotation, cache[i])
        return self.engine(self.head, x[-1:])[0]

    def step(self, tokens: list[int], caches: list[KVCache]) -> Tensor:
        """The logits [sequences, vocabulary] that follow one more token of each sequence.

        Each row has the bits that it has alone.
        """
        positions = [cache[0].length for cache in caches]
        for cache, position in zip(caches, positions, strict=True):
            cache.reserve(position + 1)
        rotation = self._rotation(0, max(positions) + 1)[positions]
        x = self.embed(tokens)
        for i, layer in enumerate(self.decoder.layers):
            x = self.engine(layer, x, rotation, Lanes([cache[i] for cache in caches]))
        return self.engine(self.head, x)

    def _rotation(self, start: int, stop: int) -> Tensor:
        if stop > len(self.rotations):
            self.rotations = self._rotation_table(2 * stop)
        return self.rotations[start:stop]

    def _rotation_table(self, positions: int) -> Tensor:
        """Cosines and sines of position * theta ** (-2 j / head_dim): [positions, 2, head_dim / 2]."""
        c = self.config
        frequency = 1.0 / c.rope_theta ** (torch.arange(0, c.head_dim, 2, dtype=torch.float32) / c.head_dim)
        angles = torch.arange(positions, dtype=torch.float32)[:, None] * frequency
        return torch.stack([angles.cos(), angles.sin()], 1).to(self.engine.device, self.dtype)
