"""Qwen3-ASR as transcribe.cpp's converter writes it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import torch

from transcribe.audio.features import FRAME, HOP, RATE, mel_filters
from transcribe.errors import ModelError

from ..qwen3_asr import LANGUAGES, Config, Network, gguf_name, read_layout, variant_of
from . import Export, kept_keys, named, size_label
from .tokens import tokenizer_keys

if TYPE_CHECKING:
    from collections.abc import Mapping

    from transcribe.weights import Checkpoint

FILTERS, WINDOW = "frontend.mel_filterbank", "frontend.window"
CLIP = 30  # seconds: what Whisper's front end pads to; this family does not pad


def export(checkpoint: Checkpoint) -> Export:
    """Raises `ModelError` for what is missing or cannot be said in the dialect."""
    config, stored = read_layout(checkpoint)
    tensors = named(Network(config), checkpoint, gguf_name, stored)
    made = {FILTERS: mel_filters(config.audio.mels).numpy(), WINDOW: torch.hann_window(FRAME).numpy()}
    front_end = {name: name if name in checkpoint.tensors else values for name, values in made.items()}
    if stored is gguf_name:
        return Export(kept_keys(checkpoint.metadata), {**front_end, **tensors})
    variant = variant_of(checkpoint, config)
    general = {
        "general.architecture": "qwen3_asr",
        "general.name": variant.replace("qwen3-asr-", "Qwen3-ASR ").replace("b", "B"),
        "general.basename": "qwen3-asr",
        "general.size_label": size_label(checkpoint, tensors),
        "general.author": "Alibaba Qwen Team",
        "general.organization": "Qwen",
        "general.license": "apache-2.0",
        "general.license.name": "Apache License 2.0",
        "general.license.link": "https://www.apache.org/licenses/LICENSE-2.0",
        "general.languages": list(LANGUAGES),
        "stt.variant": variant,
        "stt.capability.lang_detect": True,
    }
    keys = general | _tokenizer(checkpoint, config) | _sizes(checkpoint, config) | _front_end(config)
    return Export(keys, {**front_end, **tensors})


def _tokenizer(checkpoint: Checkpoint, c: Config) -> dict[str, Any]:
    keys = tokenizer_keys(checkpoint, c.text.vocabulary, "gpt2", "qwen2")
    ids = {piece: id for id, piece in enumerate(keys["tokenizer.ggml.tokens"])}
    roles = {
        "tokenizer.ggml.eos_token_id": "<|im_end|>",
        "tokenizer.ggml.padding_token_id": "<|endoftext|>",
        "stt.qwen3_asr.audio_token_id": "<|audio_pad|>",
        "stt.qwen3_asr.audio_start_token_id": "<|audio_start|>",
        "stt.qwen3_asr.audio_end_token_id": "<|audio_end|>",
    }
    absent = [piece for piece in roles.values() if piece not in ids]
    if absent:
        raise ModelError(f"{checkpoint.path}: its tokenizer has no {absent[0]}; is it Qwen3-ASR's, and complete?")
    template = json.loads(checkpoint.side_file("chat_template.json") or b"{}").get("chat_template")
    return {
        **keys,
        **{key: ids[piece] for key, piece in roles.items()},
        "tokenizer.ggml.add_bos_token": False,
        **({"tokenizer.chat_template": template} if template else {}),
    }


def _sizes(checkpoint: Checkpoint, c: Config) -> dict[str, Any]:
    audio: Mapping[str, Any] = checkpoint.config.get("thinker_config", checkpoint.config)["audio_config"]
    # Three-dimensional rotary positions; all three are the same for audio and text, so any split is.
    half = c.text.head_dim // 2
    spatial = half * 20 // 64
    encoder = {
        "n_layers": c.audio.layers,
        "d_model": c.audio.width,
        "n_heads": c.audio.heads,
        "ffn_dim": c.audio.ffn,
        "num_mel_bins": c.audio.mels,
        "downsample_hidden": c.audio.channels,
        "output_dim": c.text.width,
        "max_source_positions": audio.get("max_source_positions", 1500),
        "n_window": c.audio.chunk // 2,
        "n_window_infer": c.audio.window,
        "conv_chunksize": audio.get("conv_chunksize", 500),
        "activation": "gelu",
    }
    decoder = {
        "n_layers": c.text.layers,
        "hidden_size": c.text.width,
        "intermediate_size": c.text.ffn,
        "n_heads": c.text.heads,
        "n_kv_heads": c.text.kv_heads,
        "head_dim": c.text.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": float(c.text.eps),
        "rope_theta": float(c.text.rope_theta),
        "rope_mrope_section_t": half - 2 * spatial,
        "rope_mrope_section_h": spatial,
        "rope_mrope_section_w": spatial,
        "rope_mrope_interleaved": True,
        "max_position_embeddings": c.text.positions,
        "tie_word_embeddings": c.text.tied,
        "vocab_size": c.text.vocabulary,
    }
    return {
        **{f"stt.qwen3_asr.encoder.{key}": value for key, value in encoder.items()},
        **{f"stt.qwen3_asr.decoder.{key}": value for key, value in decoder.items()},
    }


def _front_end(c: Config) -> dict[str, Any]:
    values = {
        "type": "mel",
        "num_mels": c.audio.mels,
        "sample_rate": RATE,
        "n_fft": FRAME,
        "win_length": FRAME,
        "hop_length": HOP,
        "window": "hann_periodic",
        "normalize": "per_utterance",
        "dither": 0.0,
        "pre_emphasis": 0.0,
        "f_min": 0.0,
        "f_max": RATE / 2,
        "pad_mode": "reflect",
        "center": True,
        "mel_norm": "slaney",
        "chunk_length": CLIP,
        "n_samples": CLIP * RATE,
        "nb_max_frames": CLIP * RATE // HOP,
    }
    return {f"stt.frontend.{key}": value for key, value in values.items()}
