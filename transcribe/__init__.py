"""Speech to text with open models on your own machine.

    import transcribe
    model = transcribe.load_model("moonshine-tiny-q8_0.gguf")
    print(model.transcribe("talk.mp3").text)

Importing this package does not import torch; loading a model does.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from .errors import AudioError, ModelError, TranscribeError, UsageError
from .transcript import Segment, Transcript, Word

if TYPE_CHECKING:
    from .pipeline import Transcriber

# Threads that wait for each other spin for some tens of microseconds and then sleep. By default they spin for tens of
# milliseconds, which makes a token take up to 30 times as long where other work wants the processors too. Read when
# torch is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("GOMP_SPINCOUNT", "2000")

__version__ = "0.1.0"
__all__ = [
    "AudioError", "ModelError", "Segment", "TranscribeError", "Transcript", "UsageError", "Word", "load_model",
]


def load_model(path_or_name: str | None = None, **options: Any) -> Transcriber:
    """Load a model from a path or a name; None means the default model.

    `options` are the fields of `transcribe.options.LoadOptions`. Raises `ModelError` when the model cannot be
    found or is not one we can run.
    """
    from .options import LoadOptions
    from .pipeline import Transcriber

    return Transcriber.load(path_or_name, LoadOptions(**options))
