"""Peak memory of a model against the length of the recording and of the prompt, for every switch.

    python scripts/memory.py clip.wav [--model M] [--seconds 30 300 1200] [--prompts 0 898 1795]
                             [--switches default no-recycle no-alias no-mmap] [--json FILE]

The clip is repeated to each length and transcribed in a fresh process, which first imports torch and notes what that
takes. Anonymous memory is what the process owns; the file-backed part is the mapped model and libraries, which the
system shares and may drop. Linux only: the figures are RssAnon and RssFile of /proc/self/status, read every 2 ms.
Predicted is what the plans of the longest window say before the run. A slope is the least squares fit of anonymous
memory over lengths. Switches must not change a word: transcripts are compared by hash, and the exit status is 1 if
they differ. With `--warm`, what is reported is over a process that has loaded the model and transcribed a second of
the clip: loading is not the peak of a small model's figures then.
"""

from __future__ import annotations

import argparse
import hashlib
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
SWITCHES = {"default": {}, "no-recycle": {"recycle": False}, "no-alias": {"alias": False}, "no-mmap": {"mmap": False}}
CONTEXT = "The meeting was about the harbour, the new pier, and who would pay for either of them. "


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


def measure(
    clip: Path, model: str | None, options: dict[str, Any], request: dict[str, Any], warm: bool
) -> dict[str, Any]:
    """In the fresh process: transcribe one file and report."""
    import transcribe  # its settings for threads come before torch

    import torch  # isort: skip

    from transcribe.engine import heap

    torch.zeros(1)
    bare = resident()
    loaded = None
    if warm:
        loaded = transcribe.load_model(model, device="cpu", threads=2, **options)
        loaded.transcribe(first_second(clip), rate=16000, **request)
        heap.trim()
        bare = resident()
    with Peak() as watch:
        loaded = loaded or transcribe.load_model(model, device="cpu", threads=2, **options)
        began = time.perf_counter()
        transcript = loaded.transcribe(clip, **request)
    return {
        "anonymous": watch.peak["anonymous"] - bare["anonymous"],
        "file": watch.peak["file"] - bare["file"],
        "predicted": transcript.stats["peak_bytes"],
        "took": time.perf_counter() - began,
        "windows": transcript.stats["windows"],
        "tokens": transcript.stats["tokens"],
        "hash": hashlib.sha256(transcript.text.encode()).hexdigest()[:12],
        "notes": loaded.model.notes,
    }


def first_second(clip: Path) -> Any:
    from transcribe.audio import open_audio

    with open_audio(clip) as stream:
        return next(iter(stream.blocks()))[:16000].copy()


def tile(clip: Path, seconds: float, path: Path) -> None:
    """The clip repeated to a length: 16-bit mono, written piece by piece."""
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


def slope(points: list[tuple[float, float]]) -> float:
    """Least squares: MiB of anonymous memory for each unit of length."""
    count = len(points)
    mean_x, mean_y = sum(x for x, _ in points) / count, sum(y for _, y in points) / count
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    return sum((x - mean_x) * (y - mean_y) for x, y in points) / spread / MIB if spread else 0.0


def table(rows: list[dict[str, Any]], key: str, unit: str) -> str:
    """Markdown: a line for each length, for each switch its anonymous peak and what was predicted."""
    switches = list(dict.fromkeys(row["switch"] for row in rows))
    lines = [f"| {unit} | " + " | ".join(f"{s}: MiB (predicted)" for s in switches) + " | file-backed MiB |"]
    lines.append("|---" * (len(switches) + 2) + "|")
    for length in dict.fromkeys(row[key] for row in rows):
        here = {row["switch"]: row for row in rows if row[key] == length}
        cells = [f"{here[s]['anonymous'] / MIB:.1f} ({here[s]['predicted'] / MIB:.1f})" for s in switches]
        lines.append(f"| {length:g} | " + " | ".join(cells) + f" | {here[switches[0]]['file'] / MIB:.0f} |")
    fits = [slope([(row[key], row["anonymous"]) for row in rows if row["switch"] == s]) for s in switches]
    lines.append(f"| slope, MiB for each of {unit} | " + " | ".join(f"{fit:.3f}" for fit in fits) + " | |")
    return "\n".join(lines)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("clip", type=Path)
    parser.add_argument("--model", help="path or name; the default model if not given")
    parser.add_argument("--seconds", nargs="+", type=float, default=[30, 1200], help="lengths of the recording")
    parser.add_argument("--prompts", nargs="+", type=int, default=[], help="characters, at the first length")
    parser.add_argument("--switches", nargs="+", choices=SWITCHES, default=["default"])
    parser.add_argument("--warm", action="store_true", help="report what comes above the loaded model")
    parser.add_argument("--max-tokens", type=int, help="for each window")
    parser.add_argument("--json", type=Path, help="every figure of every run")
    parser.add_argument("--point", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    args = arguments()
    if args.point:
        print(json.dumps(measure(args.clip, args.model, **json.loads(args.point))))
        return
    points = [(seconds, 0) for seconds in args.seconds] + [(args.seconds[0], length) for length in args.prompts]
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "clip.wav"
        for seconds, characters in points:
            tile(args.clip, seconds, path)
            prompt = (CONTEXT * (characters // len(CONTEXT) + 1))[:characters] or None
            for switch in args.switches:
                request = {"prompt": prompt, "max_tokens": args.max_tokens}
                point = {"options": SWITCHES[switch], "request": request, "warm": args.warm}
                command = [sys.executable, __file__, "--point", json.dumps(point), str(path)]
                command += ["--model", args.model] if args.model else []
                run = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
                row = {"seconds": seconds, "characters": characters, "switch": switch, **json.loads(run.stdout)}
                rows.append(row)
                print(f"{seconds:g} s, {characters} characters, {switch}: {row['anonymous'] / MIB:.1f} MiB, "
                      f"{row['took']:.1f} s, text {row['hash']}", file=sys.stderr, flush=True)  # fmt: skip

    lengths = len(args.seconds) * len(args.switches)
    by_length, by_prompt = rows[:lengths], rows[lengths:]
    print(table(by_length, "seconds", "seconds of audio"))
    if by_prompt:
        print("\n" + table(by_prompt, "characters", "characters of prompt"))
    for switch in args.switches:
        row = next(row for row in rows if row["switch"] == switch)
        print(f"\n{switch}: {'; '.join(row['notes'])}")
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")
    differing = [p for p in points if len({r["hash"] for r in rows if (r["seconds"], r["characters"]) == p}) > 1]
    for seconds, characters in differing:
        print(f"the text differs between switches at {seconds:g} s, {characters} characters", file=sys.stderr)
    sys.exit(1 if differing else 0)


if __name__ == "__main__":
    main()
