"""Turn the small English model that a Python package carries into a GGUF file.

`moonshine-voice` 0.0.49 (MIT) ships Moonshine v1 tiny, 27 million parameters, as two ONNX Runtime files with
uint8 matrices, one scale and one zero point a matrix. `build` writes it as Q8_0 in transcribe.cpp's dialect,
so it runs here and in ggml engines alike. The package is never imported: only its files are read.
"""

from __future__ import annotations

import hashlib
import importlib.util
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from .errors import ModelError

if TYPE_CHECKING:
    from .models.moonshine import Config
    from .weights.write import Entry

PACKAGE = "moonshine-voice==0.0.49"
INSTALL = "install it with: pip install 'transcribe[default-model]', or name another model with --model"

SHA256 = {
    "encoder_model.ort": "94e90a4654fc45cdfedb77c4c08e1739f48862998e58fada384b25118134f221",
    "decoder_model_merged.ort": "cf524c4862d36e9e5ab032eddc73637efd822d70e868ac575cf1a46e1e4708a0",
    "tokenizer.bin": "6884b35fd6377d4c4d32336a0bc152f36b64d1e45b6503683cdc238250a8472d",
}

UNKNOWN, BOS, EOS, FIRST_BYTE, FIRST_PIECE, FIRST_ADDED = 0, 1, 2, 3, 259, 32000
Q8_0_BLOCK, Q8_0_MAX = 32, 127


class Affine(NamedTuple):
    """A matrix as the package stores it, [out, in]: `steps` (int16, zero point taken off) times `scale`."""

    steps: np.ndarray
    scale: float

    def dequantize(self) -> np.ndarray:
        """float32 [out, in]."""
        return self.steps.astype(np.float32) * np.float32(self.scale)


def build(destination: Path) -> Path:
    """Write the default model to the file `destination` and return it; the same bytes every time.

    The file appears under its name only when it is whole. Raises ModelError when the package or its reader is
    not installed, or when a file of the package is not the one this conversion was checked with.
    """
    from .weights.write import write_gguf

    files = read_assets(assets_directory())
    weights = read_weights(files)
    tokens = read_tokens(files["tokenizer.bin"])
    destination.parent.mkdir(parents=True, exist_ok=True)
    write_gguf(destination, keys(tokens), list(entries(weights)))
    return destination


def assets_directory() -> Path:
    """The directory of the installed package that holds its model and its clips, without importing it."""
    spec = importlib.util.find_spec("moonshine_voice")
    if spec is None or not spec.submodule_search_locations:
        raise ModelError(f"the default model is not here: it comes from the package {PACKAGE}; {INSTALL}")
    return Path(spec.submodule_search_locations[0]) / "assets"


def clip(name: str) -> Path:
    """A recording of English speech that the package carries: beckett.wav (10 s) or two_cities.wav (44 s)."""
    return assets_directory() / name


def read_assets(directory: Path) -> dict[str, bytes]:
    """The three files of the model, by name, each checked against its SHA-256."""
    files = {}
    for name, expected in SHA256.items():
        path = directory / "tiny-en" / name
        try:
            data = path.read_bytes()
        except OSError:
            raise ModelError(f"{path}: missing; the default model is in {PACKAGE} only; {INSTALL}") from None
        if hashlib.sha256(data).hexdigest() != expected:
            raise ModelError(f"{path}: not the file of {PACKAGE} (SHA-256 differs); {INSTALL}")
        files[name] = data
    return files


def read_weights(files: dict[str, bytes]) -> dict[str, np.ndarray | Affine]:
    """Every parameter of transformers' MoonshineForConditionalGeneration by its name there.

    Matrices and the embedding are `Affine`, everything else float32 in PyTorch's layout. The output head is
    left out: it is the embedding (the package keeps the same matrix twice).
    """
    parameters: dict[str, np.ndarray | Affine] = {}
    for file, prefix in (("encoder_model.ort", "model.encoder."), ("decoder_model_merged.ort", "")):
        stored, nodes = _read_graph(files[file])
        for name, value in stored.items():
            plain = re.sub(r"_(add_tensor|merged_\d)$", "", name)
            if value.dtype == np.float32 and re.fullmatch(r"[\w.]+\.(weight|bias)", plain):
                parameters[prefix + plain] = value
        for node, inputs in nodes.items():
            path = node.strip("/").replace("/", ".")
            if matrix := next((i for i in inputs if i.endswith("_quantized") and i in stored), None):
                steps = _affine(stored, matrix.removesuffix("_quantized"))
                if path.endswith("MatMul_quant"):  # y = x W here, y = W x in PyTorch
                    steps = Affine(steps.steps.T, steps.scale)
                parameters[prefix + re.sub(r"\.(MatMul_quant|Gather)$", ".weight", path)] = steps
            elif path in ("groupnorm.Mul", "groupnorm.Add"):
                kind = "weight" if path.endswith("Mul") else "bias"
                parameters[f"{prefix}groupnorm.{kind}"] = stored[inputs[1]].reshape(-1)
    del parameters["proj_out.weight"]
    return parameters


def _affine(stored: dict[str, np.ndarray], name: str) -> Affine:
    zero_point = int(stored[f"{name}_zero_point"].item())
    return Affine(stored[f"{name}_quantized"].astype(np.int16) - zero_point, stored[f"{name}_scale"].item())


def _read_graph(data: bytes) -> tuple[dict[str, np.ndarray], dict[str, list[str]]]:
    """The stored tensors of an ORT file by name, and each node's inputs by node name, subgraphs included."""
    try:
        from onnxruntime.tools.ort_format_model.ort_flatbuffers_py import fbs
    except ImportError:
        raise ModelError(f"converting the default model needs the package onnxruntime; {INSTALL}") from None
    dtypes = {1: np.dtype("<f4"), 2: np.dtype("u1"), 7: np.dtype("<i8")}  # onnx.TensorProto.DataType
    stored: dict[str, np.ndarray] = {}
    nodes: dict[str, list[str]] = {}

    def visit(graph: Any) -> None:
        for tensor in (graph.Initializers(i) for i in range(graph.InitializersLength())):
            shape = [tensor.Dims(i) for i in range(tensor.DimsLength())]
            raw = tensor.RawDataAsNumpy()
            stored[tensor.Name().decode()] = raw.view(dtypes[tensor.DataType()]).reshape(shape)
        for node in (graph.Nodes(i) for i in range(graph.NodesLength())):
            nodes[node.Name().decode()] = [node.Inputs(i).decode() for i in range(node.InputsLength())]
            for attribute in (node.Attributes(i) for i in range(node.AttributesLength())):
                if attribute.G() is not None:
                    visit(attribute.G())

    visit(fbs.InferenceSession.InferenceSession.GetRootAs(data, 0).Model().Graph())
    return stored, nodes


def read_tokens(data: bytes) -> list[str]:
    """The pieces of tokenizer.bin by id; the bare bytes that stand for themselves are named <0x00> to <0xFF>.

    Each is led by its length: one byte, or two of which the first is the low seven bits plus 128.
    """
    tokens: list[str] = []
    at = 0
    while at < len(data):
        length = data[at]
        at += 1
        if length >= 128:
            length += data[at] * 128 - 128
            at += 1
        piece = data[at : at + length]
        is_byte = FIRST_BYTE <= len(tokens) < FIRST_PIECE
        tokens.append(f"<0x{piece[0]:02X}>" if is_byte else piece.decode())
        at += length
    return tokens


def pack_q8_0(matrix: Affine) -> np.ndarray:
    """ggml's Q8_0 of a matrix [out, in]: uint8 [out, in / 32 * 34], each block a float16 scale and 32 int8.

    A block whose steps fit in an int8 keeps them as they are under the matrix's own scale: only the scale is
    rounded, to float16 (at most 1 part in 2048). The few others get the usual scale, max / 127.
    """
    rows, columns = matrix.steps.shape
    steps = matrix.steps.reshape(rows, columns // Q8_0_BLOCK, Q8_0_BLOCK)
    largest = np.abs(steps).max(axis=-1, keepdims=True)
    stretch = np.maximum(largest, Q8_0_MAX) / np.float32(Q8_0_MAX)
    blocks = np.empty((*steps.shape[:2], 2 + Q8_0_BLOCK), np.uint8)
    blocks[..., :2] = (stretch * np.float32(matrix.scale)).astype("<f2").view(np.uint8)
    blocks[..., 2:] = np.rint(steps / stretch).astype(np.int8).view(np.uint8)
    return blocks.reshape(rows, -1)


def config() -> Config:
    """The sizes of Moonshine tiny."""
    from .models.moonshine import Config

    return Config(width=288, heads=8, encoder_layers=6, decoder_layers=6, ffn=1152, vocabulary=32768, positions=194,
                  rotary_share=0.9, rope_theta=10000.0, start=BOS, end=EOS)


def entries(weights: dict[str, np.ndarray | Affine]) -> Iterator[Entry]:
    """The weights as the GGUF file has them, in its order: matrices Q8_0, everything else float32."""
    from gguf import GGMLQuantizationType

    from .models.export.moonshine import tensor_names
    from .weights.write import Entry

    for name, source in tensor_names(config()).items():
        value = weights[source]
        if isinstance(value, Affine):
            yield Entry(name, value.steps.shape, GGMLQuantizationType.Q8_0, partial(_packed, value))
        else:
            yield Entry(name, value.shape, GGMLQuantizationType.F32, partial(iter, [value]))


def _packed(value: Affine) -> Iterator[np.ndarray]:
    yield pack_q8_0(value)


def keys(tokens: list[str]) -> dict[str, Any]:
    """The metadata of the file, as transcribe.cpp's loader reads it."""
    from gguf import LlamaFileType, TokenType

    from .models.export import moonshine

    general = {
        "general.name": "Moonshine Tiny",
        "general.basename": "moonshine",
        "general.size_label": "27M",
        "general.author": "Useful Sensors",
        "general.organization": "UsefulSensors",
        "general.license": "mit",
        "general.license.name": "MIT License",
        "general.license.link": "https://opensource.org/license/mit",
        "general.repo_url": "https://huggingface.co/UsefulSensors/moonshine-tiny",
        "general.source.url": "https://github.com/moonshine-ai/moonshine",
        "general.description": f"Moonshine v1 tiny, English, converted from the weights in {PACKAGE}",
        "general.file_type": int(LlamaFileType.MOSTLY_Q8_0),
        "general.languages": ["en"],
    }
    types = [
        TokenType.UNKNOWN if i == UNKNOWN
        else TokenType.CONTROL if i < FIRST_BYTE or i >= FIRST_ADDED
        else TokenType.BYTE if i < FIRST_PIECE
        else TokenType.NORMAL
        for i in range(len(tokens))
    ]  # fmt: skip
    tokenizer = {
        "tokenizer.ggml.model": "bpe",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.byte_fallback": True,
        "tokenizer.ggml.unknown_token_id": UNKNOWN,
        "tokenizer.ggml.bos_token_id": BOS,
        "tokenizer.ggml.eos_token_id": EOS,
        "tokenizer.ggml.padding_token_id": EOS,
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [int(type) for type in types],
    }
    return moonshine.keys(config(), general, "moonshine-tiny", tokenizer, head_multiple=8)
