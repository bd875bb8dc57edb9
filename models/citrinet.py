"""Citrinet (Majumdar et al. 2021, "Citrinet: Closing the Gap between Non-Autoregressive and Autoregressive ASR").

A convolutional encoder with a CTC head: blocks of separable convolutions over time, each followed by a gate on the
channels (squeeze-and-excitation over the whole clip) and a residual; three blocks halve the rate, so a frame is 80 ms.
Read from NeMo archives, and from audio.cpp's safetensors and GGUF, whose tensors keep NeMo's names.

Activations are rows of one clip, [time, channels]. NeMo pads clips to a common length and masks what it padded before
every convolution and in every gate; a clip by itself, at its own length, needs no mask to give the same.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from transcribe.audio.normalized import Framing
from transcribe.engine import Scheduler, heap
from transcribe.engine.ctc import Emission, greedy, prefix_search
from transcribe.errors import ModelError
from transcribe.text.sentencepiece_model import load_sentencepiece

from .blocks.answering import AtOnce
from .blocks.normalized_mel import NormalizedMel
from .blocks.separable import ChannelGate, Pointwise, SeparableConv, rejoin
from .family import Capabilities, Decoded, Piece, Pieces, Window
from .loading import Required, canonical_shapes, dense, pick_device, pick_dtype, renamed

if TYPE_CHECKING:
    from transcribe.options import LoadOptions, Request
    from transcribe.weights import Checkpoint

RATE = 16_000
NORM_EPS = 1e-3  # NeMo's, for every batch normalisation of this encoder
FRAMES = 128  # decoded at once


@dataclass(frozen=True)
class BlockConfig:
    """One block. `strides` are those of its convolutions in turn, `residual` that of the way around them, if any."""

    inputs: int
    filters: int
    kernel: int
    dilation: int
    strides: tuple[int, ...]
    residual: int | None
    reduction: int | None
    """Channels to each inner one of the gate, if there is one."""


@dataclass(frozen=True)
class Config:
    """Sizes, from NeMo's configuration."""

    bands: int
    window: int
    framing: Framing
    blocks: tuple[BlockConfig, ...]
    classes: int
    """Tokens and the blank, which is the last."""

    @property
    def frame(self) -> int:
        """Samples from one frame of the encoder to the next."""
        hop = self.framing.hop
        for block in self.blocks:
            for stride in block.strides:
                hop *= stride
        return hop


class Block(nn.Module):
    """Separable convolutions, the gate, and the residual: [time, inputs] -> [time / stride, filters]."""

    def __init__(self, c: BlockConfig) -> None:
        super().__init__()
        last = len(c.strides) - 1
        self.residual = None if c.residual is None else Pointwise(c.inputs, c.filters, c.residual, NORM_EPS)
        self.convs = nn.ModuleList(
            SeparableConv(
                c.inputs if i == 0 else c.filters, c.filters, c.kernel, stride, c.dilation, NORM_EPS, relu=i < last
            )
            for i, stride in enumerate(c.strides)
        )
        self.gate = None if c.reduction is None else ChannelGate(c.filters, c.filters // c.reduction)

    def forward(self, x: Tensor) -> Tensor:
        # The residual first: then the convolutions may work in x's place.
        around = None if self.residual is None else self.residual(x)
        for conv in self.convs:
            x = conv(x)
        gate = None if self.gate is None else self.gate(x)
        return rejoin(x, gate, around)


class Encoder(nn.Module):
    """The waveform [samples] -> [time, filters], as one block of the engine: nothing in it outlives its use."""

    together = True  # the kernels do convolutions of any number of rows

    def __init__(self, c: Config, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.front_end = NormalizedMel(c.bands, c.window, c.framing, dtype)
        self.blocks = nn.Sequential(*(Block(block) for block in c.blocks))

    def forward(self, samples: Tensor) -> Tensor:
        return self.blocks(self.front_end(samples))


class Network(nn.Module):
    """All modules with weights; paths in it are the canonical tensor names."""

    def __init__(self, c: Config, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.encoder = Encoder(c, dtype)
        self.decoder = Pointwise(c.blocks[-1].filters, c.classes)


class Citrinet(AtOnce):
    """A loaded Citrinet."""

    family = "citrinet"

    def __init__(self, checkpoint: Checkpoint, options: LoadOptions) -> None:
        self.config = read_config(checkpoint)
        self.device = pick_device(options.device)
        self.dtype = pick_dtype(options.dtype, self.device)
        self.tokenizer = load_sentencepiece(checkpoint)
        if self.tokenizer.vocab_size + 1 != self.config.classes:
            raise ModelError(
                f"{checkpoint.path}: its tokenizer has {self.tokenizer.vocab_size} pieces, its decoder "
                f"{self.config.classes - 1} and the blank; they do not belong together"
            )
        self.network = Network(self.config, self.dtype)
        load_weights(self.network, checkpoint, self.config, self.dtype, self.device)
        self.engine = Scheduler(self.device, recycle=options.recycle)
        heap.own_pages()
        self.variant = variant_of(self.config)
        self.language = language_of(checkpoint)
        times = ("none", "segment", "word")
        self.capabilities = Capabilities((self.language,), timestamps=times, beam=True, lockstep=False)
        self.frame_seconds = self.config.frame / RATE
        # Longer than the clips it was trained on: the gates are averages, which more of the same does not move.
        self.window = Window(
            max_seconds=48.0, min_seconds=0.5, context_seconds=4.0, grid_seconds=self.frame_seconds
        )
        self.notes = [f"{self.variant}: {str(self.dtype).removeprefix('torch.')} on {self.device}"]

    def encode(self, samples: Tensor) -> Tensor:
        """Waveform, float32 [samples] at 16 kHz -> [frames, filters]."""
        return self.engine(self.network.encoder, samples.to(self.device))

    def log_probs(self, encoded: Tensor) -> Iterator[Tensor]:
        """Of the classes, float32 [frames, classes], some frames at a time: all of them are as much as the encoder."""
        for rows in encoded.split(FRAMES):
            yield self.engine(self.network.decoder, rows).float().log_softmax(-1)

    @torch.inference_mode()
    def transcribe(self, samples: Tensor, request: Request) -> Decoded:
        """One window by itself: float32 [n] at 16 kHz, n >= 320."""
        self.engine.begin()
        began = time.perf_counter()
        rows = self.encode(samples)
        encoded = time.perf_counter()
        blank, parts = self.config.classes - 1, self.log_probs(rows)
        if request.beam_size > 1:
            emissions = prefix_search(torch.cat(list(parts)), blank, request.beam_size)
        else:
            emissions = greedy(parts, blank)
        truncated = request.max_tokens is not None and len(emissions) > request.max_tokens
        emissions = emissions[: request.max_tokens]
        tokens = [emission.token for emission in emissions]
        stats = {
            "encode_s": encoded - began,
            "decode_s": time.perf_counter() - encoded,
            "tokens": float(len(tokens)),
        }
        pieces = Pieces(self._piece(emission) for emission in emissions)
        text = self.tokenizer.decode(tokens).strip()
        return Decoded(text, tokens, truncated, language=self.language, stats=stats, pieces=pieces)

    def _piece(self, emission: Emission) -> Piece:
        start, end = (frame * self.frame_seconds for frame in (emission.start, emission.stop))
        return Piece(self.tokenizer.piece(emission.token), start, end, emission.probability)

    @torch.inference_mode()
    def peak_bytes(self, seconds: float, together: int = 1) -> int:
        """Activations at the peak of a window of this length, by a dry run of the same code: there is only one."""
        with self.engine.dry() as account:
            rows = self.encode(self.engine.empty((int(seconds * RATE),), torch.float32))
            self.engine(self.network.decoder, rows[:FRAMES])
            return account.peak_bytes


def load(checkpoint: Checkpoint, options: LoadOptions) -> Citrinet:
    """Build the model a checkpoint holds. Raises `ModelError` for anything that is missing or unknown."""
    return Citrinet(checkpoint, options)


def variant_of(config: Config) -> str:
    return f"citrinet-{config.blocks[0].filters}"


def language_of(checkpoint: Checkpoint) -> str:
    """The language as the file says or else its path: stt_de_citrinet_1024.nemo is German."""
    named = checkpoint.metadata.get("general.languages")
    found = re.findall(r"(?<![a-z])stt_([a-z]{2})_", str(checkpoint.files[0].path.resolve()))
    return named[0] if named else found[-1] if found else "en"


def load_weights(
    network: Network, checkpoint: Checkpoint, config: Config, dtype: torch.dtype, device: torch.device
) -> None:
    """Fill the network, its batch normalisations folded into the convolutions before them.

    Raises `ModelError` for what is missing or has another shape.
    """
    rename = nemo_names(config)
    checkpoint.require({rename(name): shape for name, shape in canonical_shapes(network).items()})
    for path, module in network.named_modules():
        if isinstance(module, (NormalizedMel, SeparableConv, Pointwise, ChannelGate)):
            stored = {name: checkpoint.tensor(rename(f"{path}.{name}")) for name in module.shapes()}
            module.fill({name: dense(tensor, torch.float32).to(device) for name, tensor in stored.items()}, dtype)


def nemo_names(config: Config) -> Callable[[str], str]:
    """What turns a canonical tensor name into NeMo's.

    There a block is a list of its layers: of each convolution the depthwise and the pointwise one, the normalisation,
    the activation and a dropout, the last two not after the last convolution, but the gate instead.
    """

    def conv(match: re.Match[str]) -> str:
        layer = 5 * int(match[2]) + {"depthwise": 0, "pointwise": 1, "norm": 2}[match[3]]
        return f"encoder.encoder.{match[1]}.mconv.{layer}" + (".conv" if match[3] != "norm" else "")

    def gate(match: re.Match[str]) -> str:
        layer = 5 * len(config.blocks[int(match[1])].strides) - 2
        return f"encoder.encoder.{match[1]}.mconv.{layer}"

    rules: list[tuple[str, str | Callable[[re.Match[str]], str]]] = [
        (r"^encoder\.front_end", "preprocessor.featurizer"),
        (r"^encoder\.blocks\.(\d+)\.convs\.(\d+)\.(\w+)", conv),
        (r"^encoder\.blocks\.(\d+)\.gate", gate),
        (r"^encoder\.blocks\.(\d+)\.residual\.norm", r"encoder.encoder.\1.res.0.1"),
        (r"^encoder\.blocks\.(\d+)\.residual", r"encoder.encoder.\1.res.0.0.conv"),
        (r"^decoder", "decoder.decoder_layers.0"),
    ]
    return lambda name: renamed(name, rules)


def read_config(checkpoint: Checkpoint) -> Config:
    """The sizes, from NeMo's configuration or from what audio.cpp's converter keeps of it.

    Raises `ModelError` for what is missing or not supported.
    """
    config = checkpoint.config
    try:
        if "jasper" in config:  # audio.cpp's: kernels are final, and only the last convolution of a block strides
            front_end = Required(checkpoint, FRONT_END | {"features": config.get("n_mels")} | config, "")
            return _config(checkpoint, front_end, config["jasper"], {"stride_last": True, "residual_mode": "add"})
        encoder = config.get("encoder") or {}
        kind = str(encoder.get("_target_", "nothing")).rpartition(".")[2]
        if kind != "ConvASREncoder":
            raise ModelError(f"{checkpoint.path}: a NeMo model with {kind} as its encoder; only ConvASREncoder is run")
        given = Required(checkpoint, {"normalization_mode": "batch"} | encoder, "", "encoder.")
        given.expect("activation", "relu")
        given.expect("normalization_mode", "batch")
        front_end = Required(checkpoint, FRONT_END | (config.get("preprocessor") or {}), "", "preprocessor.")
        return _config(checkpoint, front_end, given["jasper"], {"residual_mode": encoder.get("residual_mode", "add")})
    except (TypeError, ValueError, AttributeError, ArithmeticError, LookupError) as error:
        raise ModelError(f"{checkpoint.path}: its configuration is not that of a Citrinet ({error})") from None


FRONT_END = {
    "window_size": 0.02, "window_stride": 0.01, "n_fft": None, "preemph": 0.97, "normalize": "per_feature",
    "log": True, "log_zero_guard_type": "add", "log_zero_guard_value": 2.0**-24, "mag_power": 2.0,
    "frame_splicing": 1, "exact_pad": False,
}  # fmt: skip
"""NeMo's defaults."""
BLOCK = {
    "residual": True, "separable": False, "groups": 1, "heads": -1, "se": False, "se_reduction_ratio": 8,
    "se_context_size": -1, "kernel_size_factor": 1.0, "stride_last": False, "future_context": -1,
    "residual_dense": False,
}  # fmt: skip


def _config(checkpoint: Checkpoint, front_end: Required, blocks: Any, defaults: dict[str, Any]) -> Config:
    front_end.expect("sample_rate", RATE)
    for key in ("normalize", "log", "log_zero_guard_type", "mag_power", "frame_splicing", "exact_pad"):
        front_end.expect(key, FRONT_END[key])
    window = int(front_end["window_size"] * RATE)
    framing = Framing(
        hop=int(front_end["window_stride"] * RATE),
        points=front_end["n_fft"] or 2 ** math.ceil(math.log2(window)),
        preemphasis=front_end["preemph"] or 0.0,
        guard=float(front_end["log_zero_guard_value"]),
    )
    made: list[BlockConfig] = []
    for index, block in enumerate(blocks):
        given = Required(checkpoint, BLOCK | defaults | block, "", f"jasper[{index}].")
        defaults["residual_mode"] = given["residual_mode"]  # as in NeMo, the blocks that follow inherit it
        made.append(_block(given, made[-1].filters if made else front_end["features"]))
    head = checkpoint.tensors.get("decoder.decoder_layers.0.weight")
    return Config(front_end["features"], window, framing, tuple(made), head.shape[0] if head else 0)


def _block(given: Required, inputs: int) -> BlockConfig:
    for key, value in (("separable", True), ("groups", 1), ("heads", -1), ("se_context_size", -1),
                       ("future_context", -1), ("residual_dense", False)):  # fmt: skip
        given.expect(key, value)
    kernel, stride, dilation = (_single(given[key]) for key in ("kernel", "stride", "dilation"))
    kernel = max(int(kernel * float(given["kernel_size_factor"])), 1)
    kernel += kernel % 2 == 0  # as NeMo rounds: to an odd one
    strides = [stride] * given["repeat"]
    if given["stride_last"]:
        strides[:-1] = [1] * (len(strides) - 1)
    around = {"stride_add": stride, "add": 1}.get(given["residual_mode"]) if given["residual"] else None
    if given["residual"] and around != math.prod(strides):
        raise ValueError(f"{given.shown}residual_mode {given['residual_mode']!r} does not fit the strides {strides}")
    if stride > 1 and dilation > 1:
        raise ValueError(f"{given.shown}stride and dilation are both above 1")
    reduction = given["se_reduction_ratio"] if given["se"] else None
    return BlockConfig(inputs, given["filters"], kernel, dilation, tuple(strides), around, reduction)


def _single(value: Any) -> int:
    """NeMo has sizes as lists of one."""
    return int(value[0] if isinstance(value, list) else value)
