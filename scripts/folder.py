"""Measure a folder of recordings: how much sooner it is done with windows decoded together, and whether memory stays.

    python scripts/folder.py make FOLDER --count 200 --seconds 1 30 speech.wav ...
    python scripts/folder.py speed FOLDER --model M [--batch-size 1 auto] [--runs 3] [--max-tokens N]
    python scripts/folder.py memory FOLDER --model M [--count 2000] [--batch-size auto]

`make` cuts the given recordings, joined, into clips of random lengths at random places; the same arguments make the
same clips. `speed` times whole commands, loading included, the batch sizes in turns, and compares what they write byte
by byte: exit status 1 if it differs. Its medians are seconds, with the best run in brackets. A model of random weights
repeats itself; the loop guard is off, so that with `--max-tokens` every window has that many tokens. `memory`
transcribes as many recordings as asked for in one process, the folder's over and over, and prints the anonymous memory
after every hundred (Linux: RssAnon of /proc/self/status).
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import subprocess
import sys
import tempfile
import time
import wave
from pathlib import Path

from memory import MIB, resident
from speed import TO_THE_END

import transcribe
from transcribe.options import Request

RATE = 16000


def make(folder: Path, sources: list[Path], count: int, seconds: tuple[float, float]) -> None:
    import numpy as np

    from transcribe.audio import open_audio

    pieces = []
    for source in sources:
        with open_audio(source) as stream:
            pieces += [block.copy() for block in stream.blocks()]
    speech = (np.clip(np.concatenate(pieces), -1, 1) * 32767).astype("<i2")
    speech = np.tile(speech, int(seconds[1] * RATE / len(speech)) + 2)
    random = np.random.default_rng(0)
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(count):
        length = int(random.uniform(*seconds) * RATE)
        at = int(random.integers(len(speech) - length))
        with wave.open(str(folder / f"{number:05}.wav"), "wb") as out:
            out.setparams((1, 2, RATE, 0, "NONE", ""))
            out.writeframes(speech[at : at + length].tobytes())


def recordings(folder: Path) -> list[Path]:
    found = sorted(folder.glob("*.wav"))
    if not found:
        sys.exit(f"{folder}: no .wav files")
    return found


def speed(folder: Path, batch_sizes: list[str], runs: int, options: list[str]) -> int:
    length = 0.0
    for path in recordings(folder):
        with wave.open(str(path)) as file:
            length += file.getnframes() / file.getframerate()
    took: dict[str, list[float]] = {size: [] for size in batch_sizes}
    written: dict[str, dict[str, bytes]] = {}
    for run, size in itertools.product(range(runs), batch_sizes):
        with tempfile.TemporaryDirectory() as out:
            command = [sys.executable, *TO_THE_END, str(folder), "--output-dir", out, "--batch-size", size, "--quiet"]
            began = time.perf_counter()
            done = subprocess.run([*command, *options])
            took[size].append(time.perf_counter() - began)
            written[size] = {path.name: path.read_bytes() for path in Path(out).glob("*.txt")}
        if done.returncode not in (0, 1) or len(written[size]) < len(recordings(folder)):  # 1: cut off by --max-tokens
            sys.exit(f"batch size {size}: {len(written[size])} transcripts, exit status {done.returncode}")
        print(f"run {run + 1}, batch size {size}: {took[size][-1]:.1f} s", file=sys.stderr, flush=True)
    first = statistics.median(took[batch_sizes[0]])
    print(f"{len(recordings(folder))} recordings, {length:.0f} s of audio, {runs} runs of each in turns\n")
    print("| batch size | seconds | audio seconds a second | times the first |\n|---|---|---|---|")
    for size, figures in took.items():
        middle = statistics.median(figures)
        print(f"| {size} | {middle:.1f} ({min(figures):.1f}) | {length / middle:.1f} | {first / middle:.2f} |")
    same = all(texts == written[batch_sizes[0]] for texts in written.values())
    print(f"\ntexts: {'identical' if same else 'they differ'}")
    return 0 if same else 1


def memory(folder: Path, model: str | None, batch_size: str, count: int, max_tokens: int | None) -> int:
    together = None if batch_size == "auto" else int(batch_size)
    transcriber = transcribe.load_model(model, device="cpu", batch_size=together)
    sources = itertools.islice(itertools.cycle(recordings(folder)), count)
    print("| recordings | anonymous MiB |\n|---|---|")
    seen = []
    for done, (_, outcome) in enumerate(transcriber.transcribe_all(sources, Request(max_tokens=max_tokens)), 1):
        if isinstance(outcome, Exception):
            raise outcome
        if done % 100 == 0:
            seen.append(resident()["anonymous"])
            print(f"| {done} | {seen[-1] / MIB:.1f} |", flush=True)
    print(f"\nafter the first hundred: {min(seen) / MIB:.1f} to {max(seen) / MIB:.1f} MiB")
    return 0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    making, timing, watching = (commands.add_parser(name) for name in ("make", "speed", "memory"))
    for command in (making, timing, watching):
        command.add_argument("folder", type=Path)
    making.add_argument("sources", type=Path, nargs="+")
    making.add_argument("--count", type=int, default=200)
    making.add_argument("--seconds", type=float, nargs=2, default=(1.0, 30.0), metavar=("LEAST", "MOST"))
    for command in (timing, watching):
        command.add_argument("--model", help="path or name; the default model if not given")
        command.add_argument("--max-tokens", type=int, help="for each window")
    timing.add_argument("--batch-size", nargs="+", default=["1", "auto"])
    timing.add_argument("--runs", type=int, default=3)
    watching.add_argument("--batch-size", default="auto")
    watching.add_argument("--count", type=int, default=2000)
    return parser.parse_args()


def main() -> int:
    args = arguments()
    if args.command == "make":
        make(args.folder, args.sources, args.count, args.seconds)
        return 0
    if args.command == "memory":
        return memory(args.folder, args.model, args.batch_size, args.count, args.max_tokens)
    options = ["--model", args.model] if args.model else []
    options += ["--max-tokens", str(args.max_tokens)] if args.max_tokens else []
    return speed(args.folder, args.batch_size, args.runs, options)


if __name__ == "__main__":
    sys.exit(main())
