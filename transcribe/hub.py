"""A model's name -> where its files are: a path, the cached default model, a Hugging Face repository."""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from pathlib import Path

from .console import Console
from .errors import ModelError

DEFAULT_NAME = "moonshine-tiny"
DEFAULT_FILE = "moonshine-tiny-q8_0.gguf"
DEFAULT_PACKAGE = "moonshine_voice"

# What a model is made of; everything else in a repository (other frameworks' weights, images) stays there.
PATTERNS = ["*.json", "*.safetensors", "*.gguf", "*.model", "*.txt", "*.jinja"]


def resolve(path_or_name: str | os.PathLike[str] | None = None) -> Path:
    """The file or directory of a model.

    A path that exists wins. None or "moonshine-tiny" is the default model, made on first use from the package
    that carries it. A name like org/repo comes from the local Hugging Face cache, or is downloaded into it.
    Raises `ModelError`, one line that says what was looked for.
    """
    if path_or_name is None:
        return _default_model()
    if Path(path_or_name).exists():
        return Path(path_or_name)
    name = os.fspath(path_or_name)
    if name == DEFAULT_NAME:
        return _default_model()
    if re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", name) and Path(name).suffix not in (
        ".gguf",
        ".safetensors",
        ".nemo",
    ):
        return _repository(name)
    raise ModelError(
        f"{name}: no such model: not a file or folder, not {DEFAULT_NAME}, not a Hugging Face name (org/repo)"
    )


def cache_dir() -> Path:
    """Where models we make are kept: `TRANSCRIBE_CACHE`, or `transcribe` in the user's cache directory."""
    if chosen := os.environ.get("TRANSCRIBE_CACHE"):
        return Path(chosen).expanduser()
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "transcribe"
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local") / "transcribe"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "transcribe"


def default_path() -> Path:
    """Where the default model is, or will be once made."""
    return cache_dir() / DEFAULT_FILE


def can_make_default() -> bool:
    """Whether the package that carries the default model is installed."""
    return importlib.util.find_spec(DEFAULT_PACKAGE) is not None


def _default_model() -> Path:
    path = default_path()
    if path.is_file():
        return path
    if not can_make_default():
        raise ModelError(
            f"the default model is not installed ({path} is missing): "
            "pip install 'transcribe[default-model]', or name a model with --model"
        )
    from .default_model import build

    Console().error(f"converting the default model once into {path}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return build(path)
    except OSError as error:
        raise ModelError(
            f"{path}: cannot write the default model: {error.strerror or error}; "
            "set TRANSCRIBE_CACHE to a folder that can be written"
        ) from error


def _repository(name: str) -> Path:
    """A snapshot of a Hugging Face repository: the cached one without asking the network, else a download."""
    from huggingface_hub import snapshot_download

    try:
        cached = Path(snapshot_download(name, allow_patterns=PATTERNS, local_files_only=True))
        if not any((cached.parent.parent / "blobs").glob("*.incomplete")):
            return cached
    except Exception:  # not in the cache: whatever the reason, the download below says more
        pass
    Console().error(f"downloading {name} into the Hugging Face cache")
    try:
        return Path(snapshot_download(name, allow_patterns=PATTERNS))
    except Exception as error:  # the client raises its own, requests', httpx' and OSError alike
        reason = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise ModelError(f"{name}: no such path, and it cannot be downloaded: {reason}") from error
