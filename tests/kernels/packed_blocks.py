"""Packed weights for the tests of the kernels."""

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

T = GGMLQuantizationType
HALVES = {
    T.Q4_0: (0,), T.Q4_1: (0, 2), T.Q5_0: (0,), T.Q5_1: (0, 2), T.Q8_0: (0,),
    T.Q2_K: (80, 82), T.Q3_K: (108,), T.Q4_K: (0, 2), T.Q5_K: (0, 2), T.Q6_K: (208,),
}  # fmt: skip
"""Where a block has float16 numbers."""


def plausible_blocks(kind: GGMLQuantizationType, rows: int, blocks: int, seed: int = 0) -> torch.Tensor:
    """Random bits with float16 scales of about 0.01: packed weights of any format, whose sums are finite."""
    generator = np.random.default_rng([int(kind), seed])
    size = GGML_QUANT_SIZES[kind][1]
    raw = generator.integers(0, 256, (rows, blocks, size), np.uint8)
    for at in HALVES[kind]:
        scale = generator.normal(0, 0.01, (rows, blocks, 1)).astype(np.float16)
        raw[..., at : at + 2] = scale.view(np.uint8)
    return torch.from_numpy(raw.reshape(rows, -1))
