"""Time a model on recordings, alone or against another engine: the whole, its parts, the real-time factor.

    python scripts/speed.py [--model M] [--threads N] [--runs N] [--max-tokens N] clip.wav ...
    python scripts/speed.py [...] --against "engine --threads 2 -m model.gguf {audio}" clip.wav ...

Alone, the model is loaded once; each clip is transcribed once to warm up and then `--runs` times, clips taking turns
so that a busy moment of the machine does not fall on one of them. Wall time adds decoding of the file and voice
activity to the model's time.

Against another engine, whole commands are timed, loading included: ours and theirs in turns, each run a fresh process,
the files that they name read once before. What theirs prints about its parts is found by `--against-figure`. The first
command that fails, or writes no transcript, ends the comparison with exit status 1.

Printed are medians, the best run in brackets. The real-time factor is the model's time over the length of the audio.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from operator import truediv
from pathlib import Path
from typing import Any, NamedTuple

import psutil

import transcribe

FIGURES = {
    "wall": "wall time, s",
    "model": "model, s",
    "factor": "real-time factor",
    "encode": "encoder, ms a second of audio",
    "prefill": "prefill, tokens a second",
    "decode": "decoder, ms a token",
}
PARTS = ("encode", "prefill", "decode", "model")
PLAIN = ["-m", "transcribe"]
TO_THE_END = ["-c", "import sys, transcribe.cli as cli\nfrom transcribe.engine import decoding\n"
                    "decoding.LOOP_TOKENS = sys.maxsize\nsys.exit(cli.main())"]  # fmt: skip
"""How Python runs our command line; the second lets a model repeat itself."""


class RunError(Exception):
    """A command that cannot be timed; says why."""


class Part(NamedTuple):
    """What one part of the work took: milliseconds, and tokens where it is counted in tokens."""

    milliseconds: float
    tokens: float = 1.0


@dataclass(frozen=True)
class Run:
    """One transcription: its figures by the names of `FIGURES`, and the processors that others kept busy meanwhile."""

    clip: str
    engine: str
    text: str
    others: float
    figures: dict[str, float]


def figures(wall: float, seconds: float, parts: Mapping[str, Part]) -> dict[str, float]:
    """The figures that `parts` allow, for `seconds` of audio."""
    found = {"wall": wall}
    if model := parts.get("model"):
        found |= {"model": model.milliseconds / 1000, "factor": model.milliseconds / 1000 / seconds}
    if encode := parts.get("encode"):
        found["encode"] = encode.milliseconds / seconds
    if prefill := parts.get("prefill"):
        found["prefill"] = 1000 * prefill.tokens / prefill.milliseconds
    if decode := parts.get("decode"):
        found["decode"] = decode.milliseconds / max(1.0, decode.tokens)
    return found


def our_parts(stats: Mapping[str, float], truncated: bool) -> dict[str, Part]:
    """The parts in a transcript's `stats`.

    A token is a step of the decoder. Where there is a prefill, it makes each window's first; an answer that is not
    cut short takes one more step, to say that it ends.
    """
    steps = stats["tokens"] - stats["windows"] * ("prefill_s" in stats) + stats["windows"] * (not truncated)
    counts = {"prefill": stats.get("prefill_tokens", 0.0), "decode": steps}
    parts = {"model": Part(1000 * stats["model_seconds"])}
    for name in ("encode", "prefill", "decode"):
        if (took := stats.get(f"{name}_s")) is not None:
            parts[name] = Part(1000 * took, counts.get(name, 1.0))
    return parts


def their_parts(output: str, patterns: list[tuple[str, re.Pattern[str]]]) -> dict[str, Part]:
    """The parts that the patterns find in another engine's output. Raises `RunError` where one finds nothing."""
    parts: dict[str, Part] = {}
    for name, pattern in patterns:
        matches = list(pattern.finditer(output))
        if not matches:
            raise RunError(f"nothing in its output is like {pattern.pattern!r}, which was to give {name}")
        tokens = sum(float(match[2] or 0) if pattern.groups > 1 else 1.0 for match in matches)
        before = parts.get(name, Part(0.0, 0.0))
        parts[name] = Part(before.milliseconds + sum(float(m[1]) for m in matches), before.tokens + tokens)
    return parts


def busy() -> float:
    """Seconds of processor time spent so far by everything but this process and its children."""
    all_, own = psutil.cpu_times(), os.times()
    working = sum(getattr(all_, kind, 0.0) for kind in ("user", "nice", "system", "irq", "softirq", "steal"))
    return working - sum(own[:4])


def run_command(command: list[str], statuses: tuple[int, ...]) -> tuple[str, str, float, float]:
    """stdout, stderr, wall seconds, processors busy with other work. Raises `RunError` for any other exit status."""
    before, began = busy(), time.perf_counter()
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace")
    except OSError as error:
        raise RunError(f"{command[0]}: {error.strerror}") from error
    wall = time.perf_counter() - began
    if done.returncode not in statuses:
        raise RunError(f"exit status {done.returncode}: {_last_line(done.stderr or done.stdout)}")
    return done.stdout, done.stderr, wall, max(0.0, busy() - before) / wall


def _last_line(output: str) -> str:
    return (output.strip() or "it says nothing").splitlines()[-1]


def our_run(clip: Path, args: argparse.Namespace) -> tuple[Run, float]:
    """Our command on a clip, and the seconds of audio in it. Cut short counts only where `--max-tokens` asks for it."""
    command = [sys.executable, *(TO_THE_END if args.max_tokens else PLAIN), str(clip), "--output-format", "json"]
    command += ["--quiet", "--device", "cpu", "--threads", str(args.threads), "--dtype", args.dtype]
    command += ["--model", args.model] if args.model else []
    command += ["--max-tokens", str(args.max_tokens)] if args.max_tokens else []
    out, err, wall, others = run_command([*command, *args.options], (0, 1) if args.max_tokens else (0,))
    record = json.loads(out) if out.strip() else {}
    if not record.get("text"):
        raise RunError(f"no transcript: {_last_line(err)}")
    stats = record["stats"]
    parts = our_parts(stats, record["truncated"])
    seconds = stats["audio_seconds"]
    return Run(clip.name, "ours", record["text"], others, figures(wall, seconds, parts)), seconds


def their_run(clip: Path, seconds: float, args: argparse.Namespace) -> Run:
    command = [argument.replace("{audio}", str(clip)) for argument in args.against]
    out, err, wall, others = run_command(command, (0, *args.against_status))
    written = args.against_text.search(out)
    text = written[1].strip() if written else ""
    if not text:
        raise RunError(f"no transcript: {_last_line(err)}")
    parts = their_parts(f"{out}\n{err}", args.against_figure)
    return Run(clip.name, "theirs", text, others, figures(wall, seconds, parts))


def compare(args: argparse.Namespace) -> list[Run]:
    """Ours and theirs in turns. Raises `RunError` for the first command that fails."""
    for name in dict.fromkeys([args.model or "", *args.against]):
        if Path(name).is_file():
            _read(Path(name))
    runs: list[Run] = []
    for _ in range(args.runs):
        for clip in args.clips:
            engine = "ours"
            try:
                ours, seconds = our_run(clip, args)
                engine = "theirs"
                pair = [ours, their_run(clip, seconds, args)]
            except RunError as failure:
                raise RunError(f"{clip.name}, {engine}: {failure}") from failure
            for run in pair:
                print(f"{run.clip}, {run.engine}: {run.figures['wall']:.2f} s, others {run.others:.2f}, "
                      f"{run.text[:60]!r}", file=sys.stderr, flush=True)  # fmt: skip
            runs += pair
    return runs


def _read(path: Path) -> None:
    """Bring a file into the system's cache, so that the first run does not pay for the others."""
    with path.open("rb", buffering=0) as file:
        while file.read(1 << 24):
            pass


def alone(args: argparse.Namespace) -> list[Run]:
    """Our model by itself, loaded once."""
    if args.max_tokens:
        from transcribe.engine import decoding

        decoding.LOOP_TOKENS = sys.maxsize
    began = time.perf_counter()
    model = transcribe.load_model(args.model, threads=args.threads, device="cpu", dtype=args.dtype)
    loaded = time.perf_counter() - began
    print(f"{model.name}: {args.threads} threads, loaded in {loaded:.2f} s; {model.model.notes[-1]}\n")
    runs = []
    for turn in range(args.runs + 1):
        for clip in args.clips:
            before, began = busy(), time.perf_counter()
            transcript = model.transcribe(clip, max_tokens=args.max_tokens)
            wall = time.perf_counter() - began
            parts = our_parts(transcript.stats, transcript.truncated)
            others = max(0.0, busy() - before) / wall
            if turn:
                found = figures(wall, transcript.duration, parts)
                runs.append(Run(clip.name, "ours", transcript.text, others, found))
    return runs


def middle_and_best(values: list[float], name: str) -> tuple[float, float]:
    """The median, and the best: the smallest but of a speed."""
    return statistics.median(values), (max if name == "prefill" else min)(values)


def table(runs: list[Run]) -> str:
    """Markdown: a line for each clip and figure; with another engine, theirs and ours over theirs beside it."""
    engines = list(dict.fromkeys(run.engine for run in runs))
    heads = ["clip", "figure", *engines] + (["ours / theirs"] if len(engines) > 1 else [])
    lines = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    for clip in dict.fromkeys(run.clip for run in runs):
        for name, title in FIGURES.items():
            known: dict[str, tuple[float, float]] = {}
            for engine in engines:
                values = [r.figures[name] for r in runs if (r.clip, r.engine) == (clip, engine) and name in r.figures]
                if values:
                    known[engine] = middle_and_best(values, name)
            cells = [_cell(*known[engine]) if engine in known else "" for engine in engines]
            if len(engines) > 1:
                cells.append(_cell(*map(truediv, *known.values())) if len(known) > 1 else "")
            if known:
                lines.append(f"| {clip} | {title} | " + " | ".join(cells) + " |")
    busiest, usual = max(run.others for run in runs), statistics.median(run.others for run in runs)
    return "\n".join([*lines, "", f"Processors busy with other work: {usual:.2f}, at most {busiest:.2f} during a run."])


def _cell(middle: float, best: float) -> str:
    digits = 1 if middle >= 100 else 2 if middle >= 10 else 3
    return f"{middle:.{digits}f} ({best:.{digits}f})"


def figure(text: str) -> tuple[str, re.Pattern[str]]:
    """NAME=REGEX of `--against-figure`."""
    name, _, pattern = text.partition("=")
    if name not in PARTS:
        raise argparse.ArgumentTypeError(f"{text!r}: begin with one of {', '.join(PARTS)} and =")
    found = transcript(pattern)
    if name == "prefill" and found.groups < 2:
        raise argparse.ArgumentTypeError(f"{text!r}: a second group must hold how many tokens it took")
    return name, found


def transcript(pattern: str) -> re.Pattern[str]:
    """A pattern with a group. ^ and $ are the bounds of a line."""
    try:
        found = re.compile(pattern, re.MULTILINE)
    except re.error as error:
        raise argparse.ArgumentTypeError(f"{pattern!r}: {error}") from error
    if not found.groups:
        raise argparse.ArgumentTypeError(f"{pattern!r}: put what is to be read in parentheses")
    return found


def arguments(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("clips", nargs="+", type=Path)
    parser.add_argument("--model", help="path or name; the default model if not given")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--runs", type=int, default=9)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--max-tokens", type=int, help="for each window, and repeating itself does not end it before")
    parser.add_argument("--json", type=Path, help="every figure of every run")
    other = parser.add_argument_group("against another engine")
    other.add_argument("--against", type=shlex.split, metavar="COMMAND", help="its command line; {audio} is the clip")
    other.add_argument("--against-figure", type=figure, action="append", default=[], metavar="NAME=REGEX",
                       help=f"a part ({', '.join(PARTS)}) in what it prints: group 1 milliseconds, group 2 the tokens "
                       "they took; matches are added")  # fmt: skip
    other.add_argument("--against-text", type=transcript, default=r"(\S[\s\S]*)", metavar="REGEX",
                       help="group 1 is the transcript in its stdout; all of it if not given")  # fmt: skip
    other.add_argument("--against-status", type=int, action="append", default=[], metavar="N",
                       help="an exit status that is no failure, besides 0")  # fmt: skip
    other.add_argument("--options", type=shlex.split, default=[], help="more options for our command line")
    args = parser.parse_args(words)
    if args.runs < 1:
        parser.error(f"--runs {args.runs}: at least 1")
    if args.against is None and (args.against_figure or args.against_status or args.options):
        parser.error("--against-figure, --against-status and --options go with --against")
    if args.against is not None and not any("{audio}" in argument for argument in args.against):
        parser.error("--against: {audio} must stand where the clip goes")
    return args


def main() -> None:
    args = arguments()
    try:
        runs = compare(args) if args.against else alone(args)
    except RunError as failure:
        sys.exit(f"speed: {failure}")
    print(table(runs))
    if args.json:
        rows: list[dict[str, Any]] = [asdict(run) for run in runs]
        args.json.write_text(json.dumps(rows, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
