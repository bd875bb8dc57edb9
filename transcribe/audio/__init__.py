"""Audio in: any container, any codec, any rate, as blocks of 16 kHz mono."""

from .array import open_array
from .decode import open_audio
from .stream import RATE, AudioStream

__all__ = ["RATE", "AudioStream", "open_array", "open_audio"]
