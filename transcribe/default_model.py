"""Turn the small English model that a Python package carries into a GGUF file.

`moonshine-voice` 0.0.49 (MIT) ships Moonshine v1 tiny, 27 million parameters, as two ONNX Runtime files with
uint8 matrices, one scale and one zero point a matrix. `build` writes it as Q8_0 in transcribe.cpp's dialect,
so it runs here and in ggml engines alike. The package is never imported: only its files are read.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from .errors import ModelError

PACKAGE = "moonshine-voice==0.0.49"
INSTALL = "install it with: pip install 'transcribe[default-model]', or name another model with --model"

SHA256 = {
    "encoder_model.ort": "94e90a4654fc45cdfedb77c4c08e1739f48862998e58fada384b25118134f221",
    "decoder_model_merged.ort": "cf524c4862d36e9e5ab032eddc73637efd822d70e868ac575cf1a46e1e4708a0",
    "tokenizer.bin": "6884b35fd6377d4c4d32336a0bc152f36b64d1e45b6503683cdc238250a8472d",
}

HIDDEN, LAYERS, HEADS, FFN, VOCABULARY, POSITIONS = 288, 6, 8, 1152, 32768, 194
UNKNOWN, BOS, EOS, FIRST_BYTE, FIRST_PIECE, FIRST_ADDED = 0, 1, 2, 3, 259, 32000
Q8_0_BLOCK, Q8_0_MAX = 32, 127

# Names in the file and in transformers, in the order transcribe.cpp's converter writes them: q, k and v of an
# attention lie end to end.
ENCODER = {
    "enc.conv.0.weight": "conv1.weight",
    "enc.conv.1.weight": "conv2.weight",
    "enc.conv.1.bias": "conv2.bias",
    "enc.conv.2.weight": "conv3.weight",
    "enc.conv.2.bias": "conv3.bias",
    "enc.conv.norm.weight": "groupnorm.weight",
    "enc.conv.norm.bias": "groupnorm.bias",
    "enc.final_norm.weight": "layer_norm.weight",
}
MLP = {
    "ffn.fc1.weight": "mlp.fc1.weight",
    "ffn.fc1.bias": "mlp.fc1.bias",
    "ffn.fc2.weight": "mlp.fc2.weight",
    "ffn.fc2.bias": "mlp.fc2.bias",
}
ENCODER_LAYER = {
    "norm_attn.weight": "input_layernorm.weight",
    **{f"attn.{part}.weight": f"self_attn.{part[0]}_proj.weight" for part in ("q", "k", "v", "out")},
    "norm_ffn.weight": "post_attention_layernorm.weight",
    **MLP,
}
DECODER = {"dec.token_embd.weight": "embed_tokens.weight", "dec.final_norm.weight": "norm.weight"}
DECODER_LAYER = {
    "norm_self.weight": "input_layernorm.weight",
    **{f"self_attn.{part}.weight": f"self_attn.{part[0]}_proj.weight" for part in ("q", "k", "v", "out")},
    "norm_cross.weight": "post_attention_layernorm.weight",
    **{f"cross_attn.{part}.weight": f"encoder_attn.{part[0]}_proj.weight" for part in ("q", "k", "v", "out")},
    "norm_ffn.weight": "final_layernorm.weight",
    **MLP,
}


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
    files = read_assets(assets_directory())
    weights = read_weights(files)
    tokens = read_tokens(files["tokenizer.bin"])
    destination.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(prefix=destination.name, suffix=".part", dir=destination.parent)
    os.close(handle)
    try:
        write_gguf(Path(temporary), weights, tokens)
        os.chmod(temporary, 0o644)
        os.replace(temporary, destination)
    except BaseException:
        os.unlink(temporary)
        raise
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


def tensors(weights: dict[str, np.ndarray | Affine]) -> Iterator[tuple[str, np.ndarray | Affine]]:
    """The weights under their names in the GGUF file, in its order."""
    for top, layer, ours, theirs in (
        (ENCODER, ENCODER_LAYER, "enc.blocks", "model.encoder"),
        (DECODER, DECODER_LAYER, "dec.blocks", "model.decoder"),
    ):
        for name, source in top.items():
            yield name, weights[f"{theirs}.{source}"]
        for i in range(LAYERS):
            for name, source in layer.items():
                yield f"{ours}.{i}.{name}", weights[f"{theirs}.layers.{i}.{source}"]


def write_gguf(path: Path, weights: dict[str, np.ndarray | Affine], tokens: list[str]) -> None:
    """Write the keys and tensors that transcribe.cpp's loader reads for the architecture "moonshine"."""
    from gguf import GGMLQuantizationType, GGUFWriter, LlamaFileType, TokenType

    writer = GGUFWriter(path, "moonshine")
    _add_keys(writer, {
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
        "stt.variant": "moonshine-tiny",
        "stt.capability.lang_detect": False,
        "stt.capability.translate": False,
        "stt.capability.timestamps": False,
        "tokenizer.ggml.model": "bpe",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.byte_fallback": True,
        "tokenizer.ggml.unknown_token_id": UNKNOWN,
        "tokenizer.ggml.bos_token_id": BOS,
        "tokenizer.ggml.eos_token_id": EOS,
        "tokenizer.ggml.padding_token_id": EOS,
        "tokenizer.ggml.add_bos_token": True,
        **_dimensions("encoder", activation="gelu"),
        **_dimensions("decoder", activation="silu"),
        "stt.moonshine.decoder.vocab_size": VOCABULARY,
        "stt.moonshine.decoder.max_position_embeddings": POSITIONS,
        "stt.moonshine.decoder.tie_word_embeddings": True,
        "stt.moonshine.partial_rotary_factor": 0.9,
        "stt.moonshine.rope_theta": 10000.0,
        "stt.moonshine.attention_bias": False,
        "stt.moonshine.pad_head_dim_to_multiple_of": 8,
        "stt.moonshine.conv_stem.channels": [HIDDEN, 2 * HIDDEN, HIDDEN],
        "stt.moonshine.conv_stem.kernel_sizes": [127, 7, 3],
        "stt.moonshine.conv_stem.strides": [64, 3, 2],
        "stt.moonshine.conv_stem.groupnorm_num_groups": 1,
        "stt.moonshine.conv_stem.groupnorm_eps": 1e-5,
        "stt.moonshine.decoder_start_token_id": BOS,
        "stt.moonshine.bos_token_id": BOS,
        "stt.moonshine.eos_token_id": EOS,
        "stt.moonshine.pad_token_id": EOS,
        "stt.frontend.type": "raw",
        "stt.frontend.sample_rate": 16000,
        "stt.frontend.num_mels": 1,
        # Long arrays come last, so that the short keys can be read without them.
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [
            int(
                TokenType.UNKNOWN if i == UNKNOWN
                else TokenType.CONTROL if i < FIRST_BYTE or i >= FIRST_ADDED
                else TokenType.BYTE if i < FIRST_PIECE
                else TokenType.NORMAL
            )
            for i in range(len(tokens))
        ],
    })
    for name, value in tensors(weights):
        if isinstance(value, Affine):
            writer.add_tensor(name, pack_q8_0(value), raw_dtype=GGMLQuantizationType.Q8_0)
        else:
            writer.add_tensor(name, value)
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
    finally:
        writer.close()


def _dimensions(side: str, activation: str) -> dict[str, Any]:
    keys = {"n_layers": LAYERS, "d_model": HIDDEN, "n_heads": HEADS, "n_kv_heads": HEADS, "ffn_dim": FFN,
            "activation": activation}
    return {f"stt.moonshine.{side}.{key}": value for key, value in keys.items()}


def _add_keys(writer: Any, keys: dict[str, Any]) -> None:
    """Add each key with the GGUF type of its Python value: int is uint32, float is float32."""
    add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string,
           list: writer.add_array}
    for key, value in keys.items():
        add[type(value)](key, value)
