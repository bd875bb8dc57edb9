"""The Qwen3-ASR pocket model, committed as transformers has it, in the other layouts it is read from."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import numpy as np
from safetensors.numpy import load_file, save_file

from transcribe.convert import convert

Tensors = dict[str, np.ndarray]


def authors_tensors(model: Path) -> Tensors:
    tensors = load_file(model / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.language_model.embed_tokens.weight"].copy()
    renames = {
        "model.language_model.": "model.", "model.audio_tower.": "audio_tower.",
        "model.multi_modal_projector.linear_": "audio_tower.proj",
    }  # fmt: skip
    renamed = {}
    for name, value in tensors.items():
        prefix = next((prefix for prefix in renames if name.startswith(prefix)), "")
        renamed["thinker." + renames.get(prefix, "") + name.removeprefix(prefix)] = value
    return renamed


def authors_files(model: Path) -> dict[str, bytes]:
    """Configuration and tokenizer as the authors publish them."""
    config = json.loads((model / "config.json").read_text())
    text = config["text_config"]
    text["rope_theta"] = text.pop("rope_parameters")["rope_theta"]
    thinker = {"audio_config": config["audio_config"], "text_config": text, "audio_token_id": config["audio_token_id"]}
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    added = {token["id"]: token for token in tokenizer["added_tokens"]}
    merges = [" ".join(merge) for merge in tokenizer["model"]["merges"]]
    return {
        "config.json": json.dumps({"model_type": "qwen3_asr", "thinker_config": thinker}).encode(),
        "generation_config.json": (model / "generation_config.json").read_bytes(),
        "vocab.json": json.dumps(tokenizer["model"]["vocab"]).encode(),
        "merges.txt": "\n".join(["#version: 0.2", *merges, ""]).encode(),
        "tokenizer_config.json": json.dumps({"added_tokens_decoder": added, "eos_token": "<|im_end|>"}).encode(),
    }


def write_authors(model: Path, folder: Path) -> Path:
    for name, data in authors_files(model).items():
        (folder / name).write_bytes(data)
    save_file(authors_tensors(model), folder / "model.safetensors")
    return folder


def write_transcribe_cpp(model: Path, folder: Path) -> Path:
    return convert(model, folder / "model.gguf", "f16").path


def write_audio_cpp(model: Path, folder: Path) -> Path:
    """The authors' names and files, inside one GGUF."""
    files, tensors = authors_files(model), authors_tensors(model)
    writer = gguf.GGUFWriter(folder / "model.gguf", "audiocpp")
    writer.add_string("audiocpp.model_spec.family", "qwen3_asr")
    writer.add_array("audiocpp.embedded_files.names", list(files))
    offsets = [0, *np.cumsum([len(data) for data in files.values()]).tolist()]
    shapes = [size for value in tensors.values() for size in value.shape]
    arrays = {
        "embedded_files.offsets": (offsets, gguf.GGUFValueType.UINT64),
        "embedded_files.data": (list(b"".join(files.values())), gguf.GGUFValueType.UINT8),
        "tensor_ranks": ([value.ndim for value in tensors.values()], gguf.GGUFValueType.INT32),
        "tensor_shapes": (shapes, gguf.GGUFValueType.INT64),
    }
    for key, (values, kind) in arrays.items():
        writer.add_key_value(f"audiocpp.{key}", values, gguf.GGUFValueType.ARRAY, kind)
    writer.add_array("audiocpp.tensor_names", list(tensors))
    for index, (name, value) in enumerate(tensors.items()):
        writer.add_tensor(name if len(name) < 64 else f"_audiocpp.{index}", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return folder / "model.gguf"
