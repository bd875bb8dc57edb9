"""Qwen3-ASR, 0.6B and 1.7B (Shi et al. 2026, "Qwen3-ASR Technical Report").

An audio encoder whose rows take the place of `<|audio_pad|>` in the prompt of a Qwen3 language model. The encoder sees
a log-mel spectrogram in chunks of 1 s: three strided convolutions make 13 rows of each, with sinusoids that restart
every chunk; rows attend to each other within windows of 8 chunks (`n_window_infer`), as transformers computes it with
every kind of attention. All rows of a recording go through a layer together, so that its weights are expanded once.
(audio.cpp has the same windows; transcribe.cpp attends over the whole clip, which differs from 8 s on.)

Read from the authors' safetensors, transformers 5's, transcribe.cpp's GGUF and audio.cpp's GGUF.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from transcribe.engine import Answer, KVCache, Scheduler
from transcribe.engine.decoding import Sampler
from transcribe.engine.functional import windowed_attention
from transcribe.engine.modules import Conv2d, LayerNorm, Linear
from transcribe.errors import ModelError, UsageError
from transcribe.text.tokenizer import load_tokenizer

from .blocks import causal_lm
from .blocks.answering import Answering, Autoregressive
from .blocks.causal_lm import LanguageModel
from .blocks.log_mel import LogMel
from .family import Capabilities, Window
from .loading import Required, load_weights, native_bfloat16, pick_device, pick_dtype, renamed
from .qwen3_asr_prompt import LANGUAGES, Prompt, Prompts

if TYPE_CHECKING:
    from transcribe.options import LoadOptions, Request
    from transcribe.weights import Checkpoint

RATE = 16_000
SHORTEST = 8_000  # samples: the authors pad shorter clips to half a second


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
    """Rows attend to each other within this much: 8 s."""

    def rows(self, frames: int) -> int:
        """What the convolutions make of so many frames of one chunk."""
        return math.ceil(frames / 8)


@dataclass(frozen=True)
class Config:
    """Sizes, from config.json or from `stt.qwen3_asr.*`."""

    audio: AudioConfig
    text: causal_lm.Config


class AudioAttention(nn.Module):
    """Self-attention within windows. The file has a bias between q, k and v, so they are not one product."""

    def __init__(self, c: AudioConfig) -> None:
        super().__init__()
        self.heads, self.window = c.heads, c.rows(c.chunk) * (c.window // c.chunk)
        self.q_proj, self.k_proj, self.v_proj = (Linear(c.width, c.width) for _ in range(3))
        self.out_proj = Linear(c.width, c.width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (proj(x).unflatten(-1, (self.heads, -1)) for proj in (self.q_proj, self.k_proj, self.v_proj))
        return self.out_proj(windowed_attention(q, k, v, self.window))


class AudioLayer(nn.Module):
    """Pre-norm attention and MLP."""

    def __init__(self, c: AudioConfig) -> None:
        super().__init__()
        self.self_attn_layer_norm = LayerNorm(c.width)
        self.self_attn = AudioAttention(c)
        self.final_layer_norm = LayerNorm(c.width)
        self.fc1 = Linear(c.width, c.ffn)
        self.fc2 = Linear(c.ffn, c.width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.self_attn(self.self_attn_layer_norm(x))
        return x + self.fc2(F.gelu(self.fc1(self.final_layer_norm(x))))


class AudioTower(nn.Module):
    """The modules of the encoder; what runs are `Stem`, `Entry`, the layers and `Projector`."""

    def __init__(self, c: AudioConfig) -> None:
        super().__init__()
        self.conv2d1 = Conv2d(1, c.channels)
        self.conv2d2 = Conv2d(c.channels, c.channels)
        self.conv2d3 = Conv2d(c.channels, c.channels)
        self.conv_out = Linear(c.channels * c.rows(c.mels), c.width, bias=False)
        self.layers = nn.ModuleList(AudioLayer(c) for _ in range(c.layers))
        self.ln_post = LayerNorm(c.width)


class MultiModalProjector(nn.Module):
    """The names of the projector's weights."""

    def __init__(self, audio: AudioConfig, text: causal_lm.Config) -> None:
        super().__init__()
        self.linear_1 = Linear(audio.width, audio.width)
        self.linear_2 = Linear(audio.width, text.width)


class Stem(nn.Module):
    """One chunk, [100, mels], through the convolutions: [13, channels * mels / 8].

    Chunk by chunk: the first convolution makes 6 MB of a second in float32, and more at once was no faster.
    """

    def __init__(self, tower: AudioTower) -> None:
        super().__init__()
        self.convs = nn.ModuleList([tower.conv2d1, tower.conv2d2, tower.conv2d3])

    def forward(self, mel: Tensor) -> Tensor:
        x = mel.transpose(0, 1).unsqueeze(-1)  # [mels, frames, 1]
        for conv in self.convs:
            x = F.gelu(conv(x))
        return x.transpose(0, 1).transpose(1, 2).contiguous().flatten(1)  # [mels / 8, rows, channels] before


class Entry(nn.Module):
    """What the convolutions made of whole chunks, [time, channels * mels / 8], with positions [13, width] within each.

    Gives the layers' rows [time, width].
    """

    def __init__(self, tower: AudioTower) -> None:
        super().__init__()
        self.out = tower.conv_out

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        return (self.out(x).unflatten(0, (-1, positions.size(0))) + positions).flatten(0, 1)


class Projector(nn.Module):
    """The encoder's rows [time, audio width] to the language model's [time, text width]."""

    def __init__(self, tower: AudioTower, projector: MultiModalProjector) -> None:
        super().__init__()
        self.norm, self.linear_1, self.linear_2 = tower.ln_post, projector.linear_1, projector.linear_2

    def forward(self, x: Tensor) -> Tensor:
        return self.linear_2(F.gelu(self.linear_1(self.norm(x))))


class Network(nn.Module):
    """Every module with weights, under its canonical name."""

    def __init__(self, c: Config, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.audio_tower = AudioTower(c.audio)
        self.multi_modal_projector = MultiModalProjector(c.audio, c.text)
        self.language_model = causal_lm.Decoder(c.text, dtype)
        if not c.text.tied:
            self.lm_head = Linear(c.text.width, c.text.vocabulary, bias=False)


class Qwen3ASR(Autoregressive[Answering]):
    """A loaded Qwen3-ASR."""

    family = "qwen3_asr"
    # The model takes minutes, but rows attend within 8 s only, keys and values take 2.9 MiB a second in float32, and a
    # language model that loses the thread loses it for the whole window. Half a minute holds some sentences.
    window = Window(max_seconds=30.0, min_seconds=SHORTEST / RATE)
    capabilities = Capabilities(LANGUAGES, detects_language=True, prompt=True, temperature=True)

    def __init__(self, checkpoint: Checkpoint, options: LoadOptions) -> None:
        self.config, rename = read_layout(checkpoint)
        c = self.config
        self.device = pick_device(options.device)
        # The dtype it was trained in, where that is fast: half the keys and values, a multiple of the matrix speed.
        fast = torch.bfloat16 if native_bfloat16(self.device) else torch.float32
        self.dtype = pick_dtype(options.dtype, self.device, auto=fast)
        self.prompts = Prompts(load_tokenizer(checkpoint), checkpoint)
        network = Network(c, self.dtype)
        report = load_weights(network, checkpoint, rename, options, self.dtype, self.device)
        self.front_end = LogMel.of(checkpoint, c.audio.mels, self.device)
        tower = network.audio_tower
        self.stem, self.entry, self.layers = Stem(tower), Entry(tower), tower.layers
        self.projector = Projector(tower, network.multi_modal_projector)
        self.positions = sinusoids(c.audio.rows(c.audio.chunk), c.audio.width).to(self.device, self.dtype)
        decoder = network.language_model
        head = causal_lm.Head.tied(decoder) if c.text.tied else causal_lm.Head(decoder.norm, network.lm_head)
        self.engine = Scheduler(self.device, recycle=options.recycle)
        self.language_model = LanguageModel(self.engine, c.text, decoder, head, self.dtype)
        self.variant = variant_of(checkpoint, c)
        self.notes = [*report.lines(), f"{self.variant}: {str(self.dtype).removeprefix('torch.')} on {self.device}"]

    def encode(self, samples: Tensor) -> Tensor:
        """Waveform, float32 [samples] at 16 kHz -> rows for the language model, 13 a second: [time, text width]."""
        c = self.config.audio
        features = self.engine(self.front_end, samples)
        chunks, each = math.ceil(len(features) / c.chunk), c.rows(c.chunk)
        x = self.engine.empty((chunks, each, c.channels * c.rows(c.mels)), self.dtype)
        for i, place in enumerate(x):
            chunk = features[i * c.chunk : (i + 1) * c.chunk].to(self.dtype)
            last = len(chunk)
            made = self.engine(self.stem, F.pad(chunk, (0, 0, 0, c.chunk - last)))  # not silence but zeros, as trained
            if not self.engine.is_dry:
                place.copy_(made)
        x = self.engine(self.entry, x.flatten(0, 1), self.positions)[: (chunks - 1) * each + c.rows(last)]
        for layer in self.layers:
            x = self.engine(layer, x)
        return self.engine(self.projector, x)

    def rows(self, samples: Tensor, prompt: Prompt) -> Tensor:
        """The whole prompt as the language model takes it: text, audio, text."""
        audio = self.encode(F.pad(samples, (0, SHORTEST - len(samples))) if len(samples) < SHORTEST else samples)
        before, after = self.language_model.embed(prompt.before), self.language_model.embed(prompt.after)
        return torch.cat([before, audio, after])

    def budget(self, seconds: float) -> int:
        """Tokens that this much speech can need. Scripts with a token a letter take a dozen a second."""
        return int(16 * seconds) + 32

    @torch.inference_mode()
    def begin(self, samples: Tensor, request: Request) -> Answering:
        """Encode a window, float32 [n] at 16 kHz, and choose the first token. `UsageError`: the prompt is too long."""
        self.engine.begin()
        began = time.perf_counter()
        prompt = self.prompts.make(request.prompt, request.language)
        rows = self.rows(samples.to(self.device), prompt)
        self.engine.trim()
        encoded = time.perf_counter()
        budget = request.max_tokens or self.budget(len(samples) / RATE)
        self._check_length(len(rows), budget)
        cache = self.language_model.new_cache(len(rows) + budget)
        cache.reserve(len(rows))
        logits = self.language_model.logits(rows, cache)
        prefilled = time.perf_counter()
        stats = {"encode_s": encoded - began, "prefill_s": prefilled - encoded, "prefill_tokens": float(len(rows))}
        choose = Sampler(request.temperature, request.top_p, request.seed) if request.temperature else None
        answer = Answer(self.prompts.stop, budget, choose)
        window = Answering(answer, cache, partial(self._read, request.language), stats)
        window.take(logits)
        return window

    def step(self, tokens: list[int], windows: Sequence[Answering]) -> Tensor:
        """The logits [windows, vocabulary] after one more token of each."""
        return self.language_model.step(tokens, [window.cache for window in windows])

    def _read(self, wanted: str | None, tokens: list[int]) -> tuple[str, str | None]:
        text, language = self.prompts.read(tokens)
        return text, wanted or language

    @torch.inference_mode()
    def peak_bytes(self, seconds: float, together: int = 1) -> int:
        """Activations and caches at the peak of so many windows of this length, by a dry run of the same code."""
        with self.engine.dry() as account:
            caches: list[KVCache] = []
            for _ in range(together):
                samples = self.engine.empty((int(seconds * RATE),), torch.float32)
                rows = self.rows(samples, self.prompts.make(None, None))
                limit = len(rows) + self.budget(seconds)
                caches.append(self.language_model.new_cache(limit))
                caches[-1].reserve(len(rows))
                self.language_model.logits(rows, caches[-1])
                del rows
                caches[-1].reserve(limit)
            self.language_model.step([0] * together, caches)
            return account.peak_bytes

    def _check_length(self, prompt: int, budget: int) -> None:
        limit = self.config.text.positions
        if prompt + budget > limit:
            raise UsageError(
                f"the prompt with its audio is {prompt} tokens and the answer may be {budget}, {self.variant} takes "
                f"{limit} in all; shorten the prompt"
            )


def sinusoids(length: int, width: int) -> Tensor:
    """Whisper's position embedding: sines, then cosines, of timescales from 1 to 10,000: float32 [length, width]."""
    timescales = torch.exp(-math.log(10_000) / (width // 2 - 1) * torch.arange(width // 2, dtype=torch.float32))
    angles = torch.arange(length, dtype=torch.float32)[:, None] * timescales
    return torch.cat([angles.sin(), angles.cos()], 1)


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


def gguf_name(name: str) -> str:
    """A canonical tensor name as transcribe.cpp's GGUF has it."""
    return renamed(name, _GGUF_NAMES)


def thinker_name(name: str) -> str:
    """A canonical tensor name as the authors' checkpoints have it."""
    return renamed(name, _THINKER_NAMES)


def native_name(name: str) -> str:
    """A canonical tensor name as transformers 5 has it."""
    return renamed(name, _NATIVE_NAMES)


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


# field: (key in stt.qwen3_asr.encoder, key in audio_config)
_AUDIO_KEYS = {
    "width": ("d_model", "d_model"),
    "layers": ("n_layers", "encoder_layers"),
    "heads": ("n_heads", "encoder_attention_heads"),
    "ffn": ("ffn_dim", "encoder_ffn_dim"),
    "mels": ("num_mel_bins", "num_mel_bins"),
    "channels": ("downsample_hidden", "downsample_hidden_size"),
    "chunk": ("n_window", "n_window"),  # half a chunk
    "window": ("n_window_infer", "n_window_infer"),
}
# field: (key in stt.qwen3_asr.decoder, key in text_config)
_TEXT_KEYS = {
    "width": ("hidden_size", "hidden_size"),
    "layers": ("n_layers", "num_hidden_layers"),
    "heads": ("n_heads", "num_attention_heads"),
    "kv_heads": ("n_kv_heads", "num_key_value_heads"),
    "head_dim": ("head_dim", "head_dim"),
    "ffn": ("intermediate_size", "intermediate_size"),
    "vocabulary": ("vocab_size", "vocab_size"),
    "positions": ("max_position_embeddings", "max_position_embeddings"),
    "rope_theta": ("rope_theta", "rope_theta"),
    "eps": ("rms_norm_eps", "rms_norm_eps"),
}


def _gguf_config(checkpoint: Checkpoint) -> Config:
    audio = Required(checkpoint, checkpoint.metadata, "stt.qwen3_asr.encoder.")
    text = Required(checkpoint, checkpoint.metadata, "stt.qwen3_asr.decoder.")
    audio.expect("activation", "gelu")
    return _config(audio, text, 0, tied=text["tie_word_embeddings"])


def _hugging_face_config(checkpoint: Checkpoint, config: Mapping[str, Any], rename: Callable[[str], str]) -> Config:
    sizes = Required(checkpoint, config, "")
    audio = Required(checkpoint, sizes["audio_config"], "", "audio_config.")
    inner = sizes["text_config"]
    text = Required(checkpoint, {**inner, **(inner.get("rope_parameters") or {})}, "", "text_config.")
    audio.expect("activation_function", "gelu")
    has_head = rename("lm_head.weight") in checkpoint.tensors
    tied = not has_head or all(c.get("tie_word_embeddings", True) for c in (config, inner))
    return _config(audio, text, 1, tied)


def _config(audio: Required, text: Required, dialect: int, tied: bool) -> Config:
    audio.expect("output_dim", text["hidden_size"])
    text.expect("hidden_act", "silu")
    sizes = {field: audio[keys[dialect]] for field, keys in _AUDIO_KEYS.items()}
    sizes["chunk"] *= 2
    return Config(
        AudioConfig(**sizes),
        causal_lm.Config(tied=tied, **{field: text[keys[dialect]] for field, keys in _TEXT_KEYS.items()}),
    )


def variant_of(checkpoint: Checkpoint, c: Config) -> str:
    named = checkpoint.metadata.get("stt.variant")
    return named or {1024: "qwen3-asr-0.6b", 2048: "qwen3-asr-1.7b"}.get(c.text.width, "qwen3-asr")


def load(checkpoint: Checkpoint, options: LoadOptions) -> Qwen3ASR:
    """Build the model a checkpoint holds. Raises `ModelError` for anything that is missing or unknown."""
    return Qwen3ASR(checkpoint, options)
