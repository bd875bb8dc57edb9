"""Time a model on recordings: model time without start-up, its parts, and the real-time factor.

    python scripts/speed.py [--model M] [--threads N] [--runs N] clip.wav ...

Each clip is transcribed once to warm up and then `--runs` times, clips taking turns so that a busy moment of the
machine does not fall on one of them. Printed are medians, with the smallest in brackets. Model time is encoder and
decoder; wall time adds decoding of the file and voice activity.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path

import transcribe


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("clips", nargs="+", type=Path)
    parser.add_argument("--model", help="path or name; the default model if not given")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--runs", type=int, default=9)
    parser.add_argument("--dtype", default="auto")
    args = parser.parse_args()

    began = time.perf_counter()
    model = transcribe.load_model(args.model, threads=args.threads, device="cpu", dtype=args.dtype)
    loaded = time.perf_counter() - began
    print(f"{model.name}: {args.threads} threads, loaded in {loaded:.2f} s; {model.model.notes[-1]}")

    runs: dict[Path, list[dict[str, float]]] = {clip: [] for clip in args.clips}
    for turn in range(args.runs + 1):
        for clip in args.clips:
            stats = model.transcribe(clip).stats
            if turn:
                runs[clip].append(stats)

    print("| clip | audio s | model s | encode s | decode s | ms a token | wall s | real-time factor |")
    print("|---|---|---|---|---|---|---|---|")
    for clip, rows in runs.items():
        audio, tokens = rows[0]["audio_seconds"], rows[0]["tokens"]
        model_s, encode, decode, wall = (
            _both([row[key] for row in rows]) for key in ("model_seconds", "encode_s", "decode_s", "wall_seconds")
        )
        token = 1000 * statistics.median(row["decode_s"] for row in rows) / max(1, tokens)
        factor = statistics.median(row["model_seconds"] for row in rows) / audio
        print(f"| {clip.name} | {audio:.2f} | {model_s} | {encode} | {decode} | {token:.2f} | {wall} | {factor:.3f} |")


def _both(values: list[float]) -> str:
    return f"{statistics.median(values):.3f} ({min(values):.3f})"


if __name__ == "__main__":
    main()
