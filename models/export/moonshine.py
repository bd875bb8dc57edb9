"""Moonshine as transcribe.cpp's converter writes it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from transcribe.errors import ModelError
from transcribe.text.languages import language_name

from ..loading import canonical_shapes
from ..moonshine import Config, Network, gguf_name, hugging_face_name, identify, read_layout
from . import Export, kept_keys, named, size_label
from .tokens import tokenizer_keys

if TYPE_CHECKING:
    from transcribe.weights import Checkpoint

STEM_KERNELS, STEM_STRIDES = (127, 7, 3), (64, 3, 2)


def export(checkpoint: Checkpoint) -> Export:
    """Raises `ModelError` for what is missing or cannot be said in the dialect."""
    config, stored = read_layout(checkpoint)
    tensors = named(Network(config), checkpoint, gguf_name, stored)
    if stored is gguf_name:
        return Export(kept_keys(checkpoint.metadata), {**tensors})
    variant, languages = identify(checkpoint, config)
    general = describe(variant, languages, size_label(checkpoint, tensors))
    head_multiple = checkpoint.config.get("pad_head_dim_to_multiple_of") or 0
    return Export(keys(config, general, variant, _tokenizer(checkpoint, config), head_multiple), {**tensors})


def tensor_names(config: Config) -> dict[str, str]:
    """transformers' names by the names in the file, in its order."""
    return {gguf_name(name): hugging_face_name(name) for name in canonical_shapes(Network(config))}


def describe(variant: str, languages: tuple[str, ...], size: str) -> dict[str, Any]:
    """`general.*` of a published model. Only the English ones are under the MIT licence."""
    english = languages == ("en",)
    title = " ".join(part.capitalize() for part in variant.split("-")[:2])
    licence = {
        "general.license": "mit",
        "general.license.name": "MIT License",
        "general.license.link": "https://opensource.org/license/mit",
    }
    return {
        "general.name": title if english else f"{title} ({', '.join(map(language_name, languages))})",
        "general.basename": "moonshine",
        "general.size_label": size,
        "general.author": "Useful Sensors",
        "general.organization": "UsefulSensors",
        **(licence if english else {}),
        "general.repo_url": f"https://huggingface.co/UsefulSensors/{variant}",
        "general.languages": list(languages),
    }


def keys(
    c: Config, general: Mapping[str, Any], variant: str, tokenizer: Mapping[str, Any], head_multiple: int
) -> dict[str, Any]:
    """All metadata of a file. `head_multiple` is what attention pads the width of a head to, 0 for nothing."""
    bos, eos = tokenizer["tokenizer.ggml.bos_token_id"], c.end

    def sizes(side: str, layers: int, activation: str) -> dict[str, Any]:
        values = {
            "n_layers": layers, "d_model": c.width, "n_heads": c.heads, "n_kv_heads": c.heads, "ffn_dim": c.ffn,
            "activation": activation,
        }  # fmt: skip
        return {f"stt.moonshine.{side}.{key}": value for key, value in values.items()}

    return {
        "general.architecture": "moonshine",
        **general,
        "stt.variant": variant,
        "stt.capability.lang_detect": False,
        "stt.capability.translate": False,
        "stt.capability.timestamps": False,
        **tokenizer,
        **sizes("encoder", c.encoder_layers, "gelu"),
        **sizes("decoder", c.decoder_layers, "silu"),
        "stt.moonshine.decoder.vocab_size": c.vocabulary,
        "stt.moonshine.decoder.max_position_embeddings": c.positions,
        "stt.moonshine.decoder.tie_word_embeddings": True,
        "stt.moonshine.partial_rotary_factor": float(c.rotary_share),
        "stt.moonshine.rope_theta": float(c.rope_theta),
        "stt.moonshine.attention_bias": False,
        "stt.moonshine.pad_head_dim_to_multiple_of": head_multiple,
        "stt.moonshine.conv_stem.channels": [c.width, 2 * c.width, c.width],
        "stt.moonshine.conv_stem.kernel_sizes": list(STEM_KERNELS),
        "stt.moonshine.conv_stem.strides": list(STEM_STRIDES),
        "stt.moonshine.conv_stem.groupnorm_num_groups": 1,
        "stt.moonshine.conv_stem.groupnorm_eps": 1e-5,
        "stt.moonshine.decoder_start_token_id": c.start,
        "stt.moonshine.bos_token_id": bos,
        "stt.moonshine.eos_token_id": eos,
        "stt.moonshine.pad_token_id": tokenizer["tokenizer.ggml.padding_token_id"],
        "stt.frontend.type": "raw",
        "stt.frontend.sample_rate": 16000,
        "stt.frontend.num_mels": 1,
    }


def _tokenizer(checkpoint: Checkpoint, c: Config) -> dict[str, Any]:
    found = tokenizer_keys(checkpoint, c.vocabulary, "bpe", "default")
    pieces: list[str] = found["tokenizer.ggml.tokens"]
    if "<unk>" not in pieces:
        raise ModelError(f"{checkpoint.path}: its tokenizer has no <unk>; is it Moonshine's?")
    generation = json.loads(checkpoint.side_file("generation_config.json") or b"{}")
    padding = generation.get("pad_token_id", checkpoint.config.get("pad_token_id"))
    return found | {
        "tokenizer.ggml.byte_fallback": True,
        "tokenizer.ggml.unknown_token_id": pieces.index("<unk>"),
        "tokenizer.ggml.bos_token_id": c.start,
        "tokenizer.ggml.eos_token_id": c.end,
        "tokenizer.ggml.padding_token_id": c.end if padding is None else padding,
        "tokenizer.ggml.add_bos_token": True,
    }
