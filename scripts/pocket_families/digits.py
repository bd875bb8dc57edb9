"""The demonstration model: a Citrinet that reads spoken digits, in voices and noise it was not trained on.

    python scripts/train_pocket.py digits tests/data/digits

The digits are synthesised when training begins, by espeak-ng in many voices, speeds, pitches and sizes of the speaker;
four voices are kept apart. Every sentence has noise of its own, 5 to 40 dB under the speech.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from pocket import GAPS, Samples, Sentence, Vocabulary
from speak_vocabulary import speak, write_clips

from . import citrinet
from .citrinet import block

DIGITS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "oh"]
VOICES = ("en-us", "en-gb", "en-gb-x-rp", "en-gb-scotland", "en-gb-x-gbclan", "en-gb-x-gbcwmd")
VARIANTS = ("m1", "m2", "m4", "m5", "m6", "m7", "f1", "f2", "f4", "f5")
SIZES = (0.87, 1.15)  # all frequencies are multiplied by one of these, as a shorter or longer throat does
HELD_OUT = ("en-us+m3", "en-gb+f3", "en-029+m8", "en-us+klatt2")
QUIETER = (5.0, 40.0)  # decibels from speech to noise


@dataclass(frozen=True)
class Voices(Vocabulary):
    """Digits by many voices, and sentences of them in noise."""

    @property
    def trained(self) -> list[str]:
        return [name for name in self.clips if name.split("/")[0] not in HELD_OUT]

    def sentence(
        self, seed: int, seconds: float, gaps: tuple[float, float] = GAPS, renderings: Sequence[str] | None = None
    ) -> Sentence:
        """One voice a sentence: white noise, or noise that falls off towards high frequencies."""
        random = np.random.default_rng(seed)
        names = list(renderings or self.trained)
        spoken = super().sentence(seed, seconds, gaps, [names[random.integers(len(names))]])
        noise = random.standard_normal(len(spoken.samples)).astype(np.float32)
        if random.random() < 0.5:
            spectrum = np.fft.rfft(noise)
            noise = np.fft.irfft(spectrum / np.sqrt(np.arange(1, len(spectrum) + 1)), len(noise))
        speech = np.sqrt(np.mean([np.mean(spoken.samples[a:b] ** 2) for a, b in spoken.spans]))
        level = speech * 10 ** (-random.uniform(*QUIETER) / 20) / np.sqrt(np.mean(noise**2))
        return Sentence((spoken.samples + noise * level).astype(np.float32), spoken.words, spoken.spans)


def speak_digits() -> Voices:
    """Every voice at three speeds, each with a pitch and, if it is trained on, a size of its own."""
    random = np.random.default_rng(0)
    voices = [f"{voice}+{variant}" for voice in VOICES for variant in random.choice(VARIANTS, 7, replace=False)]
    clips = {}
    for voice in (*VOICES, *voices, *HELD_OUT):
        for speed in (130, 165, 205):
            pitch = int(random.integers(25, 75))
            size = 1.0 if voice in HELD_OUT else random.uniform(*SIZES)
            spoken = {word: speak(word, voice, speed + int(random.integers(-10, 10)), pitch) for word in DIGITS}
            clips[f"{voice}/{speed}"] = {word: faster(clip, size) for word, clip in spoken.items()}
    return Voices(DIGITS, clips)


def faster(clip: Samples, factor: float) -> Samples:
    return np.interp(np.arange(0, len(clip) - 1, factor), np.arange(len(clip)), clip).astype(np.float32)


class Family(citrinet.Family):
    stages = ((2000, 3e-3, 2.0, 9.0), (500, 1e-3, 6.0, 20.0))
    pieces = 44
    blocks = (
        block(96, 5, 1), block(96, 11, 3, 2, 0.1), block(96, 13, 3, 1, 0.1), block(128, 13, 3, 2, 0.1),
        block(128, 15, 3, 1, 0.1), block(160, 15, 3, 2, 0.1), block(160, 17, 3, 1, 0.1), block(160, 19, 3, 1, 0.1),
        block(256, 21, 1),
    )  # fmt: skip
    file = "digits.nemo"

    def __init__(self, vocabulary: Vocabulary) -> None:
        spoken = speak_digits()
        super().__init__(spoken)
        self.held_out = [name for name in spoken.clips if name not in spoken.trained]

    def save(self, folder: Path) -> None:
        """The model, and for tests of it each voice that was kept apart at its middle speed."""
        super().save(folder)
        kept = {voice: self.vocabulary.clips[f"{voice}/165"] for voice in HELD_OUT}
        write_clips(folder, DIGITS, {voice.replace("+", "-"): clips for voice, clips in kept.items()})
