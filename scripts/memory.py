"""Peak memory of a model against the length of the recording: anonymous memory over a bare `import torch`.

    python scripts/memory.py [--model M] [--seconds 30 300 1200] [--switch=--no-recycle] clip.wav

The clip is repeated to each length and transcribed in a fresh process, which first imports torch and notes what that
takes. Anonymous memory is what the process owns; the file-backed part is the mapped model and libraries, which the
system shares and may drop. Linux only: the figures are RssAnon and RssFile of /proc/self/status, read every 2 ms.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
import wave
from pathlib import Path
from typing import Any

MIB = 1 << 20


def resident() -> dict[str, int]:
    """Anonymous and file-backed bytes of this process."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return {kind: 1024 * int(fields[name].split()[0]) for kind, name in (("anonymous", "RssAnon"), ("file", "RssFile"))}


class Peak:
    """The largest figures seen by a thread that looks every 2 ms."""

    def __init__(self) -> None:
        self.peak = resident()
        self.done = threading.Event()
        self.thread = threading.Thread(target=self._watch, daemon=True)

    def _watch(self) -> None:
        while not self.done.wait(0.002):
            for kind, value in resident().items():
                self.peak[kind] = max(self.peak[kind], value)

    def __enter__(self) -> Peak:
        self.thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.done.set()
        self.thread.join()


def measure(model: str | None, clip: Path, options: dict[str, Any]) -> dict[str, Any]:
    """In the fresh process: transcribe one file and report."""
    import torch

    torch.zeros(1)
    bare = resident()
    with Peak() as watch:
        import transcribe

        loaded = transcribe.load_model(model, device="cpu", threads=2, **options)
        began = time.perf_counter()
        transcript = loaded.transcribe(clip)
    return {
        "seconds": transcript.decoded_seconds,
        "anonymous": watch.peak["anonymous"] - bare["anonymous"],
        "file": watch.peak["file"] - bare["file"],
        "predicted": transcript.stats["peak_bytes"],
        "took": time.perf_counter() - began,
        "words": len(transcript.text.split()),
    }


def tile(clip: Path, seconds: float, path: Path) -> None:
    """The clip repeated to a length: 16-bit mono, written block by block."""
    import numpy as np

    from transcribe.audio import open_audio

    with open_audio(clip) as stream:
        samples = np.concatenate([block.copy() for block in stream.blocks()])
    data = (np.clip(samples, -1, 1) * 32767).astype("<i2")
    with wave.open(str(path), "wb") as out:
        out.setnchannels(1)
        out.setsampwidth(2)
        out.setframerate(16000)
        left = int(seconds * 16000)
        while left > 0:
            out.writeframes(data[:left].tobytes())
            left -= len(data)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("clip", type=Path)
    parser.add_argument("--model", help="path or name; the default model if not given")
    parser.add_argument("--seconds", nargs="+", type=float, default=[30, 1200])
    parser.add_argument("--no-alias", action="store_true")
    parser.add_argument("--no-mmap", action="store_true")
    parser.add_argument("--no-recycle", action="store_true")
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    switches = ("alias", "mmap", "recycle")
    if args.measure:
        options = {name: not getattr(args, f"no_{name}") for name in switches}
        print(json.dumps(measure(args.model, args.clip, options)))
        return

    passed = [f"--no-{name}" for name in switches if getattr(args, f"no_{name}")]
    if args.model:
        passed += ["--model", args.model]
    print("| audio s | anonymous MiB | file-backed MiB | predicted activations MiB | words | took s |")
    print("|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        for seconds in args.seconds:
            path = Path(folder) / "clip.wav"
            tile(args.clip, seconds, path)
            command = [sys.executable, __file__, "--measure", *passed, str(path)]
            row = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
            print(f"| {row['seconds']:.0f} | {row['anonymous'] / MIB:.1f} | {row['file'] / MIB:.1f} | "
                  f"{row['predicted'] / MIB:.1f} | {row['words']} | {row['took']:.1f} |", flush=True)


if __name__ == "__main__":
    main()
