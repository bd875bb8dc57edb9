"""Speak the pocket models' vocabulary with espeak-ng: one FLAC file a rendering, one index of where each word lies.

    python scripts/speak_vocabulary.py [tests/data/vocabulary]

espeak-ng is needed here only: what it says is in the repository. The same version makes the same bytes.
"""

from __future__ import annotations

import argparse
import io
import json
import subprocess
from pathlib import Path

import numpy as np
import numpy.typing as npt
import soundfile
import torch
import torchaudio

RATE = 16000
WORDS = """
    zero one two three four five six seven eight nine ten eleven twelve
    red orange yellow green blue black white
    cat dog horse mouse lion tiger rabbit elephant monkey snake
""".split()  # noqa: SIM905
# name: espeak-ng's voice, words a minute, pitch (0 to 99)
RENDERINGS = {
    "us-slow": ("en-us", 130, 45),
    "us-fast": ("en-us", 190, 55),
    "gb-slow": ("en-gb", 135, 35),
    "gb-fast": ("en-gb", 185, 50),
    "rp": ("en-gb-x-rp", 160, 60),
    "woman": ("en-us+f3", 160, 50),
    "scotland": ("en-gb-scotland", 150, 40),
    "held-out": ("en-us+m3", 165, 60),  # never trained on
}
QUIET = 0.01  # of the loudest sample: what is softer at either end is cut off
MARGIN = 160  # samples (10 ms) kept around a word
BITS = 10  # a sample: half of what FLAC must carry at 16, and noise 56 dB under the loudest sample

Samples = npt.NDArray[np.float32]


def speak(word: str, voice: str, speed: int, pitch: int) -> Samples:
    """One word at 16 kHz, without the silence around it, its loudest sample at 0.5."""
    command = ["espeak-ng", "-v", voice, "-s", str(speed), "-p", str(pitch), "--stdout", word]
    spoken = subprocess.run(command, check=True, capture_output=True).stdout
    samples, rate = soundfile.read(io.BytesIO(spoken), dtype="float32")
    samples = torchaudio.functional.resample(torch.from_numpy(samples), rate, RATE).numpy()
    loud = np.flatnonzero(np.abs(samples) > QUIET * np.abs(samples).max())
    samples = samples[max(0, loud[0] - MARGIN) : loud[-1] + MARGIN]
    return samples * np.float32(0.5 / np.abs(samples).max())


def write_clips(folder: Path, words: list[str], clips: dict[str, dict[str, Samples]]) -> None:
    """Clips by rendering and word as tests read them."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, spoken in clips.items():
        step = 2 ** (16 - BITS)
        coarse = (np.concatenate([spoken[word] for word in words]) * (2**15 / step)).round().astype(np.int16) * step
        soundfile.write(folder / f"{name}.flac", coarse.astype(np.int16), RATE, subtype="PCM_16")
    lengths = {name: [len(spoken[word]) for word in words] for name, spoken in clips.items()}
    index = {"rate": RATE, "words": words, "samples": lengths}
    (folder / "index.json").write_text(json.dumps(index).replace("], ", "],\n  ").replace("{", "{\n  ", 1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, default=Path("tests/data/vocabulary"))
    folder = parser.parse_args().folder
    clips = {
        name: {word: speak(word, voice, speed, pitch) for word in WORDS}
        for name, (voice, speed, pitch) in RENDERINGS.items()
    }
    write_clips(folder, WORDS, clips)
    size = sum(file.stat().st_size for file in folder.iterdir())
    seconds = sum(len(clip) for spoken in clips.values() for clip in spoken.values()) / RATE
    print(f"{len(WORDS)} words, {len(RENDERINGS)} renderings, {seconds:.0f} s, {size / 1e3:.0f} kB in {folder}")


if __name__ == "__main__":
    main()
