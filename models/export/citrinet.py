"""Citrinet as audio.cpp's converter writes it: NeMo's names, and configuration and tokenizer as files inside."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np

from transcribe.errors import ModelError

from ..citrinet import RATE, BlockConfig, Config, Network, language_of, nemo_names, read_config, variant_of
from ..loading import canonical_shapes
from . import Export, named, size_label

if TYPE_CHECKING:
    from transcribe.weights import Checkpoint

FAMILY = "citrinet_asr"
CONFIG, TOKENIZER = "citrinet_256_config.json", "citrinet_256_tokenizer.model"  # of a model of any width
PACKAGE = {
    "family": FAMILY,
    "sources": [{
        "format": "gguf",
        "roots": {"model": ".", "weights": "$gguf"},
        "files": {"config": f"model:{CONFIG}", "tokenizer": f"model:{TOKENIZER}"},
        "tensors": {"weights": "weights:"},
    }],
}  # fmt: skip


def export(checkpoint: Checkpoint) -> Export:
    """Raises `ModelError` for what is missing or cannot be said in the dialect."""
    config = read_config(checkpoint)
    names = nemo_names(config)
    network = Network(config)
    tensors = named(network, checkpoint, names, names)
    shapes = list(canonical_shapes(network).values())
    tokenizer = checkpoint.side_file("tokenizer.model")
    if tokenizer is None:
        raise ModelError(f"{checkpoint.path}: no tokenizer: there is no tokenizer.model with it; download it again")
    try:
        described = json.dumps(describe(config), indent=2).encode()
    except ValueError as error:
        raise ModelError(f"{checkpoint.path}: {error}, which audio.cpp's files cannot say") from None
    variant = variant_of(config)
    keys = {
        "general.architecture": "audiocpp",
        "general.name": variant.capitalize(),
        "general.basename": "citrinet",
        "general.size_label": size_label(checkpoint, tensors),
        "general.languages": [language_of(checkpoint)],
        "audiocpp.tensor_name_format": "native",
        "audiocpp.source_format": checkpoint.format,
        "audiocpp.model_spec.version": 1,
        "audiocpp.model_spec.family": FAMILY,
        "audiocpp.model_spec.json": json.dumps(PACKAGE),
        "audiocpp.embedded_files.names": [CONFIG, TOKENIZER],
        "audiocpp.embedded_files.offsets": np.cumsum([0, len(described), len(tokenizer)]).astype(np.uint64),
        "audiocpp.embedded_files.data": described + tokenizer,
        "audiocpp.tensor_names": list(tensors),
        "audiocpp.tensor_ranks": np.array([len(shape) for shape in shapes], np.int32),
        "audiocpp.tensor_shapes": np.array([size for shape in shapes for size in shape], np.int64),
    }
    return Export(keys, {**tensors}, "audio.cpp")


def describe(c: Config) -> dict[str, Any]:
    """The configuration as audio.cpp reads it. Raises `ValueError` for strides it has no words for."""
    pieces = c.classes - 1
    return {
        "target": "nemo.collections.asr.models.ctc_bpe_models.EncDecCTCModelBPE",
        "sample_rate": RATE,
        "n_mels": c.bands,
        "n_fft": c.framing.points,
        "window_size": c.window / RATE,
        "window_stride": c.framing.hop / RATE,
        "window": "hann",
        "normalize": "per_feature",
        "preemph": c.framing.preemphasis,
        "pad_to": 16,
        "vocab_size": pieces,
        "vocab_count": pieces,
        "num_classes": c.classes,
        "blank_id": pieces,
        "tokenizer_model_file": TOKENIZER,
        "jasper": [_block(index, block) for index, block in enumerate(c.blocks)],
    }


def _block(index: int, c: BlockConfig) -> dict[str, Any]:
    if any(stride > 1 for stride in c.strides[:-1]):
        raise ValueError(f"block {index} strides before its last convolution")
    stride = c.strides[-1]
    return {
        "filters": c.filters,
        "repeat": len(c.strides),
        "kernel": c.kernel,
        "stride": stride,
        "dilation": c.dilation,
        "dropout": 0.0,
        "residual": c.residual is not None,
        "residual_mode": "stride_add" if stride > 1 else "add",
        "separable": True,
        "se": c.reduction is not None,
        "se_reduction_ratio": c.reduction or 8,
    }
