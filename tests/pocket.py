"""The pocket models' vocabulary, and sentences joined from it: speech whose text and times are known exactly."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jiwer
import numpy as np
import numpy.typing as npt
import soundfile

Samples = npt.NDArray[np.float32]
DATA = Path(__file__).parent / "data"
RATE = 16000
HELD_OUT = "held-out"  # the rendering no pocket model is trained on
GAPS = (0.1, 0.7)  # seconds between words, unless a test asks for others
SEED = 100_000  # of tests; no training sentence has a seed below a million


@dataclass(frozen=True)
class Sentence:
    """`samples` float32 [n] at 16 kHz; `words` and, in samples, where each `spans` [start, stop)."""

    samples: Samples
    words: list[str]
    spans: list[tuple[int, int]]

    @property
    def text(self) -> str:
        return " ".join(self.words)

    @property
    def seconds(self) -> float:
        return len(self.samples) / RATE


@dataclass(frozen=True)
class Vocabulary:
    """`clips[rendering][word]`: one word as that voice says it, at that speed, without silence around it."""

    words: list[str]
    clips: dict[str, dict[str, Samples]]

    @property
    def trained(self) -> list[str]:
        """The renderings that pocket models are trained on."""
        return [name for name in self.clips if name != HELD_OUT]

    def sentence(
        self, seed: int, seconds: float, gaps: tuple[float, float] = GAPS, renderings: Sequence[str] | None = None
    ) -> Sentence:
        """Random words with random gaps, as many as fit `seconds` (one at least); level and noise vary a little.

        Each word is in any of `renderings`, all those of `trained` by default. The same seed gives the same samples.
        """
        random = np.random.default_rng(seed)
        names = list(renderings or self.trained)
        samples = np.zeros(round(seconds * RATE), np.float32)
        words: list[str] = []
        spans: list[tuple[int, int]] = []
        at = round(random.uniform(0.05, 0.3) * RATE)
        while True:
            word = self.words[random.integers(len(self.words))]
            clip = self.clips[names[random.integers(len(names))]][word]
            if at + len(clip) > len(samples) and words:
                break
            if at + len(clip) > len(samples):  # not even one fits where it should be: it decides the length
                samples = np.zeros(at + len(clip), np.float32)
            samples[at : at + len(clip)] = clip * np.float32(random.uniform(0.6, 1.2))
            words.append(word)
            spans.append((at, at + len(clip)))
            at += len(clip) + round(random.uniform(*gaps) * RATE)
        samples *= np.float32(random.uniform(0.3, 1.2))
        samples += noise(random, len(samples), random.uniform(-80, -50))
        return Sentence(samples, words, spans)


def sentences(
    vocabulary: Vocabulary, count: int, shortest: float = 1.0, longest: float = 25.0, seed: int = SEED, **how: Any
) -> list[Sentence]:
    """Sentences of evenly spread lengths, in seconds, from seeds that follow each other."""
    seconds = np.linspace(shortest, longest, count)
    return [vocabulary.sentence(seed + index, length, **how) for index, length in enumerate(seconds)]


def error_rate(model: Any, spoken: Sequence[Sentence]) -> float:
    """The word error rate of a loaded model."""
    heard = [model.transcribe(sentence.samples, rate=RATE).text for sentence in spoken]
    return float(jiwer.wer([sentence.text for sentence in spoken], heard))


def noise(random: np.random.Generator, count: int, decibels: float) -> Samples:
    """White noise, float32 [count]; 0 dB is a root mean square of 1."""
    return random.standard_normal(count, np.float32) * np.float32(10 ** (decibels / 20))


def read_vocabulary(folder: Path = DATA / "vocabulary") -> Vocabulary:
    index = json.loads((folder / "index.json").read_text())
    words = index["words"]
    clips = {}
    for name, lengths in index["samples"].items():
        samples, _ = soundfile.read(folder / f"{name}.flac", dtype="float32")
        clips[name] = dict(zip(words, np.split(samples, np.cumsum(lengths)[:-1]), strict=True))
    return Vocabulary(words, clips)
