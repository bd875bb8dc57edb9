"""A causal language model over rows of embeddings."""

from __future__ import annotations

from dataclasses import dataclass


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
