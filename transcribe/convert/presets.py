"""Which type each tensor of a converted file gets, as the quantiser of its dialect decides it.

A preset names the type of matrices. transcribe.cpp's goes by names: what is small and must be exact stays float32, and
its loader takes convolutions in float32 or float16 only. audio.cpp's goes by form: a type of 16 or 32 bits is for all
tensors, a packed one for matrices.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, LlamaFileType

from transcribe.errors import UsageError

T = GGMLQuantizationType
Kind = Literal["matrix", "embedding", "attention_out", "pointwise", "convolution", "exact"]

EXACT = re.compile(
    r"""
    \.bias$ | norm_.*\.weight$ | _norms?\.(\d+\.)?weight$ | \.(conv\.norm|embed\.norm|norm[123]|ln_pre|ln_post)\.weight$
    | \.bn\. | conv_bn\. | \.running_(mean|var)$ | \.pos_bias_[uv]$ | \.pos_enc$ | ^frontend\.
    | ^(enc|dec)\.pos_emb\.weight$ | ^dec\.norm\.weight$ | ^enc\.embed\.weight$ | ^enc\.embedder\.comp\.log_k$
    | ^dec\.time_embed\.inv_freq$ | ^prj\.(query|window_positions)$
    """,
    re.VERBOSE,
)
EMBEDDING = re.compile(r"^dec\.(token_embd|embed\.token)\.weight$")
ATTENTION_OUT = re.compile(r"attn\.(linear_out|out|o)\.weight$")
POINTWISE = re.compile(r"enc\.blocks\..*\.conv[._]pointwise[12]\.weight$")
CONVOLUTION = re.compile(r"\.conv\..*weight$ | \.conv_depthwise\.weight$ | \.attn\.fsmn\.weight$", re.VERBOSE)


@dataclass(frozen=True)
class Preset:
    """The type of each kind of tensor, and what `general.file_type` calls the whole.

    `fallback` is for rows that are no whole number of blocks, and float16 for those that are none of its either.
    """

    file_type: LlamaFileType
    matrix: T
    embedding: T | None = None
    attention_out: T | None = None
    fallback: T = T.F16
    pointwise: T = T.F16
    convolution: T = T.F32
    exact: T = T.F32

    def type_of(self, name: str, shape: tuple[int, ...]) -> T:
        """The type of a tensor in the file, by its name in transcribe.cpp's dialect and its shape."""
        own: T | None = getattr(self, kind_of(name))
        wanted = self.matrix if own is None else own  # T.F32 is 0
        row = shape[-1] if shape else 1
        return next(type for type in (wanted, self.fallback, T.F16) if row % GGML_QUANT_SIZES[type][0] == 0)

    def type_by_form(self, name: str, shape: tuple[int, ...], stored: T | None) -> T:
        """The type of a tensor in audio.cpp's dialect; what is not packed keeps the type it is stored in."""
        block = GGML_QUANT_SIZES[self.matrix][0]
        if block == 1:
            return self.matrix
        if len(shape) == 2 and name.endswith(".weight") and shape[-1] % block == 0:
            return self.matrix
        return T.F32 if stored is None else stored


PRESETS = {
    "f32": Preset(LlamaFileType.ALL_F32, T.F32, pointwise=T.F32),
    "f16": Preset(LlamaFileType.MOSTLY_F16, T.F16),
    "bf16": Preset(LlamaFileType.MOSTLY_BF16, T.BF16, convolution=T.F16),
    "q8_0": Preset(LlamaFileType.MOSTLY_Q8_0, T.Q8_0),
    "q6_k": Preset(LlamaFileType.MOSTLY_Q6_K, T.Q6_K, fallback=T.Q8_0),
    "q5_k_m": Preset(LlamaFileType.MOSTLY_Q5_K_M, T.Q5_K, T.Q6_K, T.Q8_0, T.Q8_0),
    "q5_1": Preset(LlamaFileType.MOSTLY_Q5_1, T.Q5_1),
    "q5_0": Preset(LlamaFileType.MOSTLY_Q5_0, T.Q5_0),
    "q4_k_m": Preset(LlamaFileType.MOSTLY_Q4_K_M, T.Q4_K, T.Q6_K, T.Q8_0, T.Q8_0),
    "q4_1": Preset(LlamaFileType.MOSTLY_Q4_1, T.Q4_1),
    "q4_0": Preset(LlamaFileType.MOSTLY_Q4_0, T.Q4_0),
}


def kind_of(name: str) -> Kind:
    """What a tensor is, by its name."""
    if EMBEDDING.search(name):
        return "embedding"
    if EXACT.search(name):
        return "exact"
    if POINTWISE.search(name):
        return "pointwise"
    if CONVOLUTION.search(name):
        return "convolution"
    return "attention_out" if ATTENTION_OUT.search(name) else "matrix"


def preset(type: str) -> Preset:
    """The preset of this name. Raises `UsageError` that lists them."""
    if type.lower() not in PRESETS:
        raise UsageError(f"--type {type}: there is no such type; there are {', '.join(PRESETS)}")
    return PRESETS[type.lower()]
