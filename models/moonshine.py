"""Moonshine v1, tiny and base (Jeffries et al. 2024, "Moonshine: Speech Recognition for Live Transcription").

An encoder-decoder transformer on the raw waveform: three strided convolutions (64 * 3 * 2 = 384 samples a frame, 41.7
frames a second), encoder layers with rotary embedding, decoder layers with self- and cross-attention and a gated MLP,
and the embedding as output head. Read from Hugging Face safetensors and from transcribe.cpp's GGUF.

Activations are rows without a batch dimension: [time, width] for the encoder, one row a token for the decoder.
Modules are declared in the order in which transcribe.cpp's files have their tensors, which is how they are exported.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from transcribe.engine import Answer, KeyValue, KVCache, Lanes, Scheduler
from transcribe.engine.functional import attention, cached_attention, cross_attention, rotary_interleaved
from transcribe.engine.kv_cache import LayerCache
from transcribe.engine.modules import Embedding, FusedLinear, GroupNorm, LayerNorm, Linear, StridedConv
from transcribe.text.tokenizer import load_tokenizer

from .blocks.answering import Answering, Autoregressive
from .family import Capabilities, Window
from .loading import Required, load_weights, pick_device, pick_dtype, renamed

if TYPE_CHECKING:
    from transcribe.options import LoadOptions, Request
    from transcribe.text.tokenizer import Tokenizer
    from transcribe.weights import Checkpoint

RATE = 16_000


@dataclass(frozen=True)
class Config:
    """Sizes, from config.json or from `stt.moonshine.*`."""

    width: int
    heads: int
    encoder_layers: int
    decoder_layers: int
    ffn: int
    vocabulary: int
    positions: int
    rotary_share: float
    rope_theta: float
    start: int
    end: int

    @property
    def head_dim(self) -> int:
        return self.width // self.heads


class Encoder(nn.Module):
    """The modules of the encoder; the loop over its layers is the model's."""

    def __init__(self, c: Config) -> None:
        super().__init__()
        self.stem = Stem(c)
        self.layer_norm = LayerNorm(c.width, bias=False)
        self.layers = nn.ModuleList(EncoderLayer(c) for _ in range(c.encoder_layers))


class Stem(nn.Module):
    """The waveform [samples] to frames [samples / 384, width]."""

    def __init__(self, c: Config) -> None:
        super().__init__()
        self.conv1 = StridedConv(1, c.width, kernel=127, stride=64, bias=False)
        self.conv2 = StridedConv(c.width, 2 * c.width, kernel=7, stride=3)
        self.conv3 = StridedConv(2 * c.width, c.width, kernel=3, stride=2)
        self.groupnorm = GroupNorm(c.width)

    def forward(self, samples: Tensor) -> Tensor:
        x = torch.tanh(self.conv1(samples.unsqueeze(1)))  # [samples / 64, width]
        x = F.gelu(self.conv2(self.groupnorm(x)))  # [samples / 192, 2 * width]
        return F.gelu(self.conv3(x))


class SelfAttention(nn.Module):
    """Projections of self-attention; q, k and v as one product."""

    def __init__(self, c: Config) -> None:
        super().__init__()
        self.heads, self.head_dim = c.heads, c.head_dim
        self.qkv_proj = FusedLinear(c.width, {"q_proj": c.width, "k_proj": c.width, "v_proj": c.width}, kind="q/k/v")
        self.o_proj = Linear(c.width, c.width, bias=False)

    def project(self, x: Tensor, rotation: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated queries and keys, and values: each [time, heads, head_dim]."""
        qkv = self.qkv_proj(x).unflatten(-1, (3, self.heads, self.head_dim))
        qk = rotary_interleaved(qkv[:, :2], rotation)
        return qk[:, 0], qk[:, 1], qkv[:, 2]

    def forward(self, x: Tensor, rotation: Tensor) -> Tensor:
        return self.o_proj(attention(*self.project(x, rotation)))


class CausalSelfAttention(SelfAttention):
    """Self-attention over everything decoded so far."""

    def forward(self, x: Tensor, rotation: Tensor, cache: LayerCache) -> Tensor:  # type: ignore[override]
        return self.o_proj(cached_attention(*self.project(x, rotation), cache))


class CrossAttention(nn.Module):
    """Attention to the encoder's frames, whose keys and values are computed once a window by `memory`."""

    def __init__(self, c: Config) -> None:
        super().__init__()
        self.heads, self.head_dim = c.heads, c.head_dim
        self.q_proj = Linear(c.width, c.width, bias=False)
        self.memory = Memory(c)
        self.o_proj = Linear(c.width, c.width, bias=False)

    def forward(self, x: Tensor, memory: KeyValue) -> Tensor:
        q = self.q_proj(x).unflatten(-1, (self.heads, self.head_dim))
        return self.o_proj(cross_attention(q, memory))


class Memory(nn.Module):
    """Keys and values of the encoder's frames: [time, width] -> two of [time, heads, head_dim]."""

    def __init__(self, c: Config) -> None:
        super().__init__()
        self.heads, self.head_dim = c.heads, c.head_dim
        self.kv_proj = FusedLinear(c.width, {"k_proj": c.width, "v_proj": c.width}, kind="k/v")

    def forward(self, frames: Tensor) -> tuple[Tensor, Tensor]:
        kv = self.kv_proj(frames).unflatten(-1, (2, self.heads, self.head_dim))
        return kv[:, 0], kv[:, 1]


class MLP(nn.Module):
    """Two layers with GELU."""

    def __init__(self, c: Config) -> None:
        super().__init__()
        self.fc1 = Linear(c.width, c.ffn)
        self.fc2 = Linear(c.ffn, c.width)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(x)))


class GatedMLP(nn.Module):
    """SwiGLU (Shazeer 2020); the checkpoint stores value and gate as one projection, value first."""

    def __init__(self, c: Config) -> None:
        super().__init__()
        self.fc1 = Linear(c.width, 2 * c.ffn)
        self.fc2 = Linear(c.ffn, c.width)

    def forward(self, x: Tensor) -> Tensor:
        value, gate = self.fc1(x).chunk(2, dim=-1)
        return self.fc2(F.silu(gate) * value)


class EncoderLayer(nn.Module):
    """Pre-norm self-attention and MLP."""

    def __init__(self, c: Config) -> None:
        super().__init__()
        self.input_layernorm = LayerNorm(c.width, bias=False)
        self.self_attn = SelfAttention(c)
        self.post_attention_layernorm = LayerNorm(c.width, bias=False)
        self.mlp = MLP(c)

    def forward(self, x: Tensor, rotation: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), rotation)
        return x + self.mlp(self.post_attention_layernorm(x))


class DecoderLayer(nn.Module):
    """Pre-norm causal self-attention, cross-attention and gated MLP."""

    def __init__(self, c: Config) -> None:
        super().__init__()
        self.input_layernorm = LayerNorm(c.width, bias=False)
        self.self_attn = CausalSelfAttention(c)
        self.post_attention_layernorm = LayerNorm(c.width, bias=False)
        self.encoder_attn = CrossAttention(c)
        self.final_layernorm = LayerNorm(c.width, bias=False)
        self.mlp = GatedMLP(c)

    def forward(self, x: Tensor, rotation: Tensor, cache: LayerCache, memory: KeyValue) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), rotation, cache)
        x = x + self.encoder_attn(self.post_attention_layernorm(x), memory)
        return x + self.mlp(self.final_layernorm(x))


class Decoder(nn.Module):
    """The modules of the decoder; the loop over its layers is the model's."""

    def __init__(self, c: Config, dtype: torch.dtype) -> None:
        super().__init__()
        self.embed_tokens = Embedding(c.vocabulary, c.width, dtype)
        self.norm = LayerNorm(c.width, bias=False)
        self.layers = nn.ModuleList(DecoderLayer(c) for _ in range(c.decoder_layers))


class Network(nn.Module):
    """All modules with weights; paths in it are the canonical tensor names."""

    def __init__(self, c: Config, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.encoder, self.decoder = Encoder(c), Decoder(c, dtype)


class Head(nn.Module):
    """Rows to logits; the weight is the embedding's."""

    def __init__(self, norm: LayerNorm, embedding: Embedding) -> None:
        super().__init__()
        self.norm = norm
        self.proj = Linear(embedding.width, embedding.count, bias=False)
        self.proj.weight = embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(self.norm(x))


@dataclass
class Answered(Answering):
    """A window's text, and each decoder layer's keys and values of its frames."""

    memory: list[KeyValue]


class Moonshine(Autoregressive[Answered]):
    """A loaded Moonshine."""

    family = "moonshine"
    # Trained on clips of up to 30 s. The stem needs 895 samples for one frame; half a second is what still makes words.
    window = Window(max_seconds=30.0, min_seconds=0.5)

    def __init__(self, checkpoint: Checkpoint, options: LoadOptions) -> None:
        self.config, rename = read_layout(checkpoint)
        self.device = pick_device(options.device)
        self.dtype = pick_dtype(options.dtype, self.device)
        self.tokenizer: Tokenizer = load_tokenizer(checkpoint)
        network = Network(self.config, self.dtype)
        report = load_weights(network, checkpoint, rename, options, self.dtype, self.device)
        self.encoder, self.decoder = network.encoder, network.decoder
        self.head = Head(self.decoder.norm, self.decoder.embed_tokens)
        self.engine = Scheduler(self.device, recycle=options.recycle)
        self.rotations = rotation_table(self.config).to(self.device)
        self.variant, languages = identify(checkpoint, self.config)
        self.capabilities = Capabilities(languages=languages)
        # The authors allow 6.5 tokens a second of English and 13 of other languages; a few more for short clips.
        self.tokens_per_second = 6.5 if languages == ("en",) else 13.0
        self.notes = [*report.lines(), f"{self.variant}: {str(self.dtype).removeprefix('torch.')} on {self.device}"]

    def encode(self, samples: Tensor) -> Tensor:
        """Waveform [samples] at 16 kHz -> frames [time, width]."""
        x = self.engine(self.encoder.stem, samples)
        rotation = self._rotation(0, x.shape[0])
        for layer in self.encoder.layers:
            x = self.engine(layer, x, rotation)
        return self.engine(self.encoder.layer_norm, x)

    def memory(self, frames: Tensor) -> list[KeyValue]:
        """Each decoder layer's keys and values of the encoder's frames."""
        return [KeyValue(*self.engine(layer.encoder_attn.memory, frames)) for layer in self.decoder.layers]

    def logits(self, tokens: list[int], caches: list[KVCache], memories: list[list[KeyValue]]) -> Tensor:
        """The logits [sequences, vocabulary] after one more token of each; a row has the bits that it has alone."""
        positions = [cache[0].length for cache in caches]
        x = self.engine(self.decoder.embed_tokens, torch.tensor(tokens, device=self.device))
        rotation = self._rotation(0, max(positions) + 1)[positions]
        for i, layer in enumerate(self.decoder.layers):
            cache, memory = Lanes([cache[i] for cache in caches]), Lanes([memory[i] for memory in memories])
            x = self.engine(layer, x, rotation, cache, memory)
        return self.engine(self.head, x)

    def new_cache(self) -> KVCache:
        c = self.config
        return KVCache(self.engine, c.decoder_layers, c.positions, c.heads, c.head_dim, self.dtype)

    def budget(self, seconds: float) -> int:
        """Tokens that this much speech can need: one position is the start token's."""
        return min(self.config.positions - 1, int(self.tokens_per_second * seconds) + 24)

    @torch.inference_mode()
    def begin(self, samples: Tensor, request: Request) -> Answered:
        """Encode a window: float32 [n] at 16 kHz, n >= 895."""
        self.engine.begin()
        began = time.perf_counter()
        memory = self.memory(self.encode(samples.to(self.device, self.dtype)))
        stats = {"encode_s": time.perf_counter() - began}
        budget = min(self.budget(len(samples) / RATE), request.max_tokens or self.config.positions)
        answer = Answer(frozenset({self.config.end}), budget)
        answer.token = self.config.start
        return Answered(answer, self.new_cache(), self._read, stats, memory)

    def step(self, tokens: list[int], windows: Sequence[Answered]) -> Tensor:
        """The logits [windows, vocabulary] after one more token of each."""
        return self.logits(tokens, [window.cache for window in windows], [window.memory for window in windows])

    def _read(self, tokens: list[int]) -> tuple[str, str]:
        return self.tokenizer.decode(tokens).strip(), self.capabilities.languages[0]

    @torch.inference_mode()
    def peak_bytes(self, seconds: float, together: int = 1) -> int:
        """Activations and caches at the peak of so many windows of this length, by a dry run of the same code."""
        with self.engine.dry() as account:
            caches, memories = [], []
            for _ in range(together):
                samples = self.engine.empty((int(seconds * RATE),), self.dtype)
                memories.append(self.memory(self.encode(samples)))
                caches.append(self.new_cache())
                caches[-1].reserve(self.budget(seconds))
            self.logits([self.config.start] * together, caches, memories)
            return account.peak_bytes

    def _rotation(self, start: int, stop: int) -> Tensor:
        if stop > self.rotations.shape[0]:
            self.rotations = rotation_table(self.config, 2 * stop).to(self.device)
        return self.rotations[start:stop]


def rotation_table(c: Config, positions: int = 2048) -> Tensor:
    """exp(i * position * frequency): complex64 [positions, rotated pairs]."""
    turned = int(c.head_dim * c.rotary_share)
    frequency = 1.0 / c.rope_theta ** (torch.arange(0, turned, 2, dtype=torch.float32) / turned)
    angles = torch.arange(positions, dtype=torch.float32)[:, None] * frequency
    return torch.polar(torch.ones_like(angles), angles)


def load(checkpoint: Checkpoint, options: LoadOptions) -> Moonshine:
    """Build the model a checkpoint holds. Raises `ModelError` for anything that is missing or unknown."""
    return Moonshine(checkpoint, options)


def identify(checkpoint: Checkpoint, c: Config) -> tuple[str, tuple[str, ...]]:
    """The variant and its languages, as the file says or else its path: moonshine-tiny-ja is Japanese."""
    variant = checkpoint.metadata.get("stt.variant")
    if variant is None:
        path = str(checkpoint.files[0].path.resolve())
        found = re.findall(r"moonshine-(?:tiny|base)(?:-(?:ar|ja|ko|uk|vi|zh)(?![a-z]))?", path)
        variant = found[-1] if found else {288: "moonshine-tiny", 416: "moonshine-base"}.get(c.width, "moonshine")
    ending = variant.rpartition("-")[2]
    return variant, tuple(checkpoint.metadata.get("general.languages") or (ending if len(ending) == 2 else "en",))


# Canonical names are Hugging Face's without "model."; the stem is a module of ours.
_GGUF_NAMES = [
    (r"^encoder\.stem\.conv(\d)", lambda m: f"enc.conv.{int(m[1]) - 1}"),
    (r"^encoder\.stem\.groupnorm", "enc.conv.norm"),
    (r"^encoder\.layer_norm", "enc.final_norm"),
    (r"^decoder\.norm", "dec.final_norm"),
    (r"^decoder\.embed_tokens", "dec.token_embd"),
    (r"^encoder\.layers\.(\d+)\.input_layernorm", r"enc.blocks.\1.norm_attn"),
    (r"^encoder\.layers\.(\d+)\.post_attention_layernorm", r"enc.blocks.\1.norm_ffn"),
    (r"^encoder\.layers\.(\d+)\.self_attn", r"enc.blocks.\1.attn"),
    (r"^encoder\.layers\.(\d+)\.mlp", r"enc.blocks.\1.ffn"),
    (r"^decoder\.layers\.(\d+)\.input_layernorm", r"dec.blocks.\1.norm_self"),
    (r"^decoder\.layers\.(\d+)\.post_attention_layernorm", r"dec.blocks.\1.norm_cross"),
    (r"^decoder\.layers\.(\d+)\.final_layernorm", r"dec.blocks.\1.norm_ffn"),
    (r"^decoder\.layers\.(\d+)\.encoder_attn(\.memory)?", r"dec.blocks.\1.cross_attn"),
    (r"^decoder\.layers\.(\d+)\.", r"dec.blocks.\1."),
    (r"\.mlp\.", ".ffn."),
    (r"\.([qkv])_proj\.", r".\1."),
    (r"\.o_proj\.", ".out."),
]


def gguf_name(name: str) -> str:
    """A canonical tensor name as transcribe.cpp's GGUF has it."""
    return renamed(name, _GGUF_NAMES)


def hugging_face_name(name: str) -> str:
    """A canonical tensor name as Hugging Face's safetensors have it."""
    return "model." + name.replace("encoder.stem.", "encoder.").replace(".memory.", ".")


def read_layout(checkpoint: Checkpoint) -> tuple[Config, Callable[[str], str]]:
    """The sizes, and what turns a canonical name into the checkpoint's: transcribe.cpp's or Hugging Face's.

    Raises `ModelError` for what is missing or not supported.
    """
    if checkpoint.metadata.get("general.architecture") == "moonshine":
        return _gguf_config(checkpoint), gguf_name
    return _hugging_face_config(checkpoint), hugging_face_name


def _gguf_config(checkpoint: Checkpoint) -> Config:
    kv = Required(checkpoint, checkpoint.metadata, "stt.moonshine.")
    kv.expect("encoder.activation", "gelu")
    kv.expect("decoder.activation", "silu")
    kv.expect("decoder.tie_word_embeddings", True)
    return Config(
        width=kv["encoder.d_model"],
        heads=kv["encoder.n_heads"],
        encoder_layers=kv["encoder.n_layers"],
        decoder_layers=kv["decoder.n_layers"],
        ffn=kv["encoder.ffn_dim"],
        vocabulary=kv["decoder.vocab_size"],
        positions=kv["decoder.max_position_embeddings"],
        rotary_share=kv["partial_rotary_factor"],
        rope_theta=kv["rope_theta"],
        start=kv["decoder_start_token_id"],
        end=kv["eos_token_id"],
    )


def _hugging_face_config(checkpoint: Checkpoint) -> Config:
    config = {**checkpoint.config, **checkpoint.config.get("rope_parameters", {})}  # nested since transformers 5
    config.setdefault("tie_word_embeddings", True)
    kv = Required(checkpoint, config, "")
    kv.expect("encoder_hidden_act", "gelu")
    kv.expect("decoder_hidden_act", "silu")
    kv.expect("tie_word_embeddings", True)
    return Config(
        width=kv["hidden_size"],
        heads=kv["encoder_num_attention_heads"],
        encoder_layers=kv["encoder_num_hidden_layers"],
        decoder_layers=kv["decoder_num_hidden_layers"],
        ffn=kv["intermediate_size"],
        vocabulary=kv["vocab_size"],
        positions=kv["max_position_embeddings"],
        rotary_share=kv["partial_rotary_factor"],
        rope_theta=kv["rope_theta"],
        start=kv["decoder_start_token_id"],
        end=kv["eos_token_id"],
    )
