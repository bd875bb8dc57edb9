"""Qwen3-ASR, 0.6B and 1.7B."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from transcribe.errors import ModelError

from .blocks import causal_lm
from .loading import Required

if TYPE_CHECKING:
    from transcribe.weights import Checkpoint


@dataclass(frozen=True)
class AudioConfig:
    """Sizes of the audio encoder. `chunk` and `window` count mel frames (10 ms)."""

    width: int
    layers: int
    heads: int
    ffn: int
    mels: int
    channels: int
    """Of the convolutions."""
    chunk: int
    """The convolutions see this much at a time: 1 s."""
    window: int
    """Frames attend to each other within this much: 8 s."""


@dataclass(frozen=True)
class Config:
    """Sizes, from config.json or from `stt.qwen3_asr.*`."""

    audio: AudioConfig
    text: causal_lm.Config


# Canonical names are those of transformers 5 without "model.".
_GGUF_NAMES = [
    (r"^audio_tower\.conv2d(\d)", lambda m: f"enc.conv.{int(m[1]) - 1}"),
    (r"^audio_tower\.layers\.", "enc.blocks."),
    (r"^audio_tower\.", "enc."),
    (r"^multi_modal_projector\.linear_", "enc.proj"),
    (r"^language_model\.embed_tokens", "dec.token_embd"),
    (r"^language_model\.norm", "dec.output_norm"),
    (r"^language_model\.layers\.", "dec.blocks."),
    (r"^lm_head", "dec.output"),
    (r"\.(self_attn_layer_norm|input_layernorm)\.", ".norm_attn."),
    (r"\.(final_layer_norm|post_attention_layernorm)\.", ".norm_ffn."),
    (r"\.self_attn\.", ".attn."),
    (r"\.mlp\.", ".ffn."),
    (r"\.(fc[12])\.", r".ffn.\1."),
    (r"\.(q|k|v|o|out|gate|up|down)_proj\.", r".\1."),
]
_THINKER_NAMES = [
    (r"^multi_modal_projector\.linear_", "audio_tower.proj"),
    (r"^language_model\.", "model."),
    (r"^", "thinker."),
]
_NATIVE_NAMES = [(r"^(?!lm_head)", "model.")]


def _renamed(name: str, rules: list[tuple[str, Any]]) -> str:
    for pattern, replacement in rules:
        name = re.sub(pattern, replacement, name)
    return name


def gguf_name(name: str) -> str:
    """A canonical tensor name as transcribe.cpp's GGUF has it."""
    return _renamed(name, _GGUF_NAMES)


def thinker_name(name: str) -> str:
    """A canonical tensor name as the authors' checkpoints have it."""
    return _renamed(name, _THINKER_NAMES)


def native_name(name: str) -> str:
    """A canonical tensor name as transformers 5 has it."""
    return _renamed(name, _NATIVE_NAMES)


def read_layout(checkpoint: Checkpoint) -> tuple[Config, Callable[[str], str]]:
    """The sizes, and what turns a canonical name into the checkpoint's.

    Four layouts: transcribe.cpp's GGUF, the authors' ("thinker."), transformers 5's ("model."), and either of the
    last two within audio.cpp's GGUF. Raises `ModelError` for what is missing or not supported.
    """
    if checkpoint.metadata.get("general.architecture") == "qwen3_asr":
        return _gguf_config(checkpoint), gguf_name
    if "thinker_config" in checkpoint.config:
        thinker = checkpoint.config["thinker_config"]
        if thinker.get("model_type") == "qwen3_forced_aligner":
            raise ModelError(f"{checkpoint.path}: a forced aligner writes no text; use a Qwen3-ASR model")
        return _hugging_face_config(checkpoint, thinker, thinker_name), thinker_name
    return _hugging_face_config(checkpoint, checkpoint.config, native_name), native_name


def _gguf_config(checkpoint: Checkpoint) -> Config:
    audio = Required(checkpoint, checkpoint.metadata, "stt.qwen3_asr.encoder.")
    text = Required(checkpoint, checkpoint.metadata, "stt.qwen3_asr.decoder.")
    audio.expect("activation", "gelu")
    audio.expect("output_dim", text["hidden_size"])
    text.expect("hidden_act", "silu")
    return Config(
        audio=AudioConfig(
            width=audio["d_model"],
            layers=audio["n_layers"],
            heads=audio["n_heads"],
            ffn=audio["ffn_dim"],
            mels=audio["num_mel_bins"],
            channels=audio["downsample_hidden"],
            chunk=2 * audio["n_window"],
            window=audio["n_window_infer"],
        ),
        text=causal_lm.Config(
            width=text["hidden_size"],
            layers=text["n_layers"],
            heads=text["n_heads"],
            kv_heads=text["n_kv_heads"],
            head_dim=text["head_dim"],
            ffn=text["intermediate_size"],
            vocabulary=text["vocab_size"],
            positions=text["max_position_embeddings"],
            rope_theta=text["rope_theta"],
            eps=text["rms_norm_eps"],
            tied=text["tie_word_embeddings"],
        ),
    )


def _hugging_face_config(checkpoint: Checkpoint, config: Mapping[str, Any], rename: Callable[[str], str]) -> Config:
    sizes = Required(checkpoint, config, "")
    audio = Required(checkpoint, sizes["audio_config"], "", "audio_config.")
    inner = sizes["text_config"]
    has_head = rename("lm_head.weight") in checkpoint.tensors
    text = Required(checkpoint, {**inner, **(inner.get("rope_parameters") or {})}, "", "text_config.")
    audio.expect("activation_function", "gelu")
    audio.expect("output_dim", text["hidden_size"])
    text.expect("hidden_act", "silu")
    return Config(
        audio=AudioConfig(
            width=audio["d_model"],
            layers=audio["encoder_layers"],
            heads=audio["encoder_attention_heads"],
            ffn=audio["encoder_ffn_dim"],
            mels=audio["num_mel_bins"],
            channels=audio["downsample_hidden_size"],
            chunk=2 * audio["n_window"],
            window=audio["n_window_infer"],
        ),
        text=causal_lm.Config(
            width=text["hidden_size"],
            layers=text["num_hidden_layers"],
            heads=text["num_attention_heads"],
            kv_heads=text["num_key_value_heads"],
            head_dim=text["head_dim"],
            ffn=text["intermediate_size"],
            vocabulary=text["vocab_size"],
            positions=text["max_position_embeddings"],
            rope_theta=text["rope_theta"],
            eps=text["rms_norm_eps"],
            tied=not has_head or all(c.get("tie_word_embeddings", True) for c in (config, inner)),
        ),
    )
