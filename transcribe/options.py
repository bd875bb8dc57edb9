"""What a caller may ask for: how a model is loaded, and how a recording is transcribed."""

from dataclasses import dataclass
from typing import Literal

Device = Literal["auto", "cpu", "cuda", "mps"]
DType = Literal["auto", "float32", "bfloat16", "float16"]
Task = Literal["transcribe", "translate"]
Timestamps = Literal["none", "segment", "word"]


@dataclass(frozen=True)
class LoadOptions:
    """How a model is loaded. `memory_limit` is in bytes, over what `import torch` takes.

    `batch_size` is how many windows are decoded together, None for as many as memory allows. More than one share the
    cost of reading the weights, and each has keys and values of its own.
    """

    device: Device = "auto"
    dtype: DType = "auto"
    threads: int | None = None
    mmap: bool = True
    alias: bool = True
    recycle: bool = True
    memory_limit: int | None = None
    batch_size: int | None = 1


@dataclass(frozen=True)
class Request:
    """How a recording is transcribed. What the family cannot do is refused, never ignored.

    `language` is a code, an English name, or None or "auto" for the model's own choice. `max_tokens` bounds one
    window; None leaves it to the family's token budget. `top_p` and `seed` are for a temperature above 0: tokens are
    drawn from the likeliest that make up `top_p`, and the same seed draws the same ones.
    """

    language: str | None = None
    task: Task = "transcribe"
    prompt: str | None = None
    timestamps: Timestamps = "segment"
    beam_size: int = 1
    temperature: float = 0.0
    max_tokens: int | None = None
    top_p: float = 1.0
    seed: int | None = None
