"""Train a family's pocket model on the spoken vocabulary: minutes on one core, a checkpoint of under 2 MB.

    python scripts/train_pocket.py qwen3_asr tests/data/pocket-qwen3-asr
    python scripts/train_pocket.py qwen3_asr tests/data/pocket-qwen3-asr --evaluate
    python scripts/train_pocket.py citrinet tests/data/pocket-citrinet

The reference implementation does the training: a module of `pocket_families/` builds a tiny model of its classes, with
the real prompt and the real kind of tokenizer, and has a loss for joined sentences. Sentences grow as the model
learns: short ones until most words are right, then longer and longer ones; and there are three stages: the whole
model, its decoder, the whole model.
"""

from __future__ import annotations

import argparse
import importlib
import math
import sys
import tempfile
import time
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jiwer
import numpy as np
import torch
import torch.distributed
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from pocket import HELD_OUT, RATE, Sentence, Vocabulary, noise, read_vocabulary

GOOD = 0.92  # of the words right, on the average of
STEPS = 8  # steps: sentences grow
NOTHING = 0.06  # of the samples: silence or noise, whose transcript is empty
PROMPTED = 0.1  # of the samples have a context in their prompt, which is not to be repeated
REPEATING = 0.3  # of the joined sentences have few different words: only counting finds the place in those
GROUPS = 20  # of few words
FIRST_SEED = 1_000_000  # of training sentences; those that tests use are far below
UNSEEN = 200_000  # the first seed of the sentences of the evaluation
REPORT = 20.0  # seconds
SAVE = 100  # steps


@dataclass(frozen=True)
class Stage:
    """`shortest` and `longest` seconds: how long the sentences of the first and of the last steps may be.

    With `pieces`, so many short sentences are encoded once, and the decoder alone learns on what is joined from them:
    the encoder, most of the work, has little to learn from long sentences, the decoder all of its counting.
    """

    steps: int
    rate: float
    shortest: float
    longest: float
    pieces: int = 0


STAGES = (Stage(1000, 2e-3, 3, 13), Stage(1000, 2e-3, 6, 29, pieces=1600), Stage(200, 5e-4, 29, 29))


def spoken(vocabulary: Vocabulary, random: np.random.Generator, seconds: float) -> Sentence:
    """A sentence of this length, or silence, or noise."""
    if random.random() < NOTHING:
        decibels = random.uniform(-90, -30) if random.random() < 0.7 else -200.0
        return Sentence(noise(random, round(seconds * RATE), decibels), [], [])
    least = random.uniform(0.08, 0.3)
    gaps = (least, least + random.uniform(0.0, 0.6))
    return vocabulary.sentence(int(random.integers(FIRST_SEED, 2**60)), seconds, gaps)


def batch(family: Any, random: np.random.Generator, top: float, pieces: Sequence[Sequence[Any]]) -> list[Sentence]:
    """Sentences of about the same length, at most `top` seconds: spoken, or joined from encoded pieces."""
    seconds = top if random.random() < 0.3 else random.uniform(1.0, top)
    amount = (60 + 140 * top / 29) if pieces else (20 + 44 * top / 29)  # seconds of audio
    sentences = []
    for _ in range(min(max(4, int(amount / seconds)), 32)):
        length = seconds * random.uniform(0.8, 1.0)
        if not pieces:
            sentences.append(spoken(family.vocabulary, random, length))
            continue
        group = pieces[0 if random.random() > REPEATING else int(random.integers(1, len(pieces)))]
        joined: list[Any] = []
        while not joined or sum(len(piece.samples) for piece in joined) < length * RATE - 2 * RATE:
            joined.append(group[int(random.integers(len(group)))])
        sentences.append(family.joined(joined))
    return sentences


def encode_pieces(family: Any, random: np.random.Generator, count: int) -> list[list[Any]]:
    """Encoded sentences of 1 to 5 s in groups to join them from: half of any words, the others of a few words each."""
    groups = []
    for index in range(GROUPS + 1 if count else 0):
        vocabulary = family.vocabulary
        if index:
            words = random.choice(vocabulary.words, random.integers(3, 9), replace=False).tolist()
            vocabulary = Vocabulary(words, vocabulary.clips)
        size = count // (2 * GROUPS if index else 2)
        groups.append([family.encoded(spoken(vocabulary, random, float(random.integers(1, 6)))) for _ in range(size)])
    return groups


def contexts(vocabulary: Vocabulary, random: np.random.Generator, count: int) -> list[str]:
    """The system turn of each sample: mostly empty, else some words."""
    some = [random.choice(vocabulary.words, random.integers(1, 10)) for _ in range(count)]
    return [" ".join(words) if random.random() < PROMPTED else "" for words in some]


def train(rank: int, processes: int, meeting: str, family: Any, stages: Sequence[Stage], folder: Path) -> None:
    """Each process takes its share of a batch, and gradients are averaged.

    Threads would wait for each other in every operation, which on a busy machine costs more than they bring.
    """
    torch.set_num_threads(1)
    store = torch.distributed.FileStore(meeting, processes)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=processes)
    for stage in stages:
        if rank == 0:
            print(f"{stage}", flush=True)
        run(family, stage, folder if rank == 0 else None, rank, processes)


def run(family: Any, stage: Stage, folder: Path | None, rank: int, processes: int) -> None:
    """One stage: AdamW with a short warm-up, then down a cosine to the last step."""
    random = np.random.default_rng(stage.steps + rank)
    pieces = encode_pieces(family, random, stage.pieces)
    random = np.random.default_rng(stage.steps)  # the same in all processes: each takes its own part of a batch
    whole = [*family.model.parameters(), *family.helpers.parameters()]
    parameters = [*family.decoder(), *family.helpers.parameters()] if pieces else whole
    optimiser = torch.optim.AdamW(parameters, lr=stage.rate, betas=(0.9, 0.98), weight_decay=0.01)
    recent: deque[float] = deque(maxlen=STEPS)
    seen: dict[str, list[float]] = defaultdict(list)
    top = stage.shortest
    began = reported = time.perf_counter()
    for step in range(stage.steps):
        sentences = batch(family, random, top, pieces)
        falling = 0.01 + 0.99 * (1 + math.cos(math.pi * step / stage.steps)) / 2
        for group in optimiser.param_groups:
            group["lr"] = stage.rate * min(1, (step + 1) / 50) * falling
        context = contexts(family.vocabulary, random, len(sentences))
        loss, figures = family.loss(sentences[rank::processes], context[rank::processes])
        optimiser.zero_grad()
        loss.backward()
        figures["correct"] = average(parameters, figures["correct"])
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimiser.step()
        recent.append(figures["correct"])
        if len(recent) == STEPS and sum(recent) / STEPS > GOOD:
            top = min(stage.longest, 1.1 * top + 0.3)
            recent.clear()
        for name, value in figures.items():
            seen[name].append(value)
        if folder and time.perf_counter() > reported + REPORT:
            reported = time.perf_counter()
            means = "  ".join(f"{name} {sum(values) / len(values):.3f}" for name, values in seen.items())
            print(f"{reported - began:5.0f} s  step {step + 1}  up to {top:.1f} s  {means}", flush=True)
            seen.clear()
        if folder and ((step + 1) % SAVE == 0 or step + 1 == stage.steps):
            family.save(folder)


def average(parameters: Sequence[nn.Parameter], figure: float) -> float:
    """Average the gradients over all processes, in place, and a figure along with them."""
    grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
    flat = torch.cat([*(grad.flatten() for grad in grads), torch.tensor([figure])])
    torch.distributed.all_reduce(flat)
    flat /= torch.distributed.get_world_size()
    pieces = flat[:-1].split([grad.numel() for grad in grads])
    for parameter, piece in zip(parameters, pieces, strict=True):
        parameter.grad = piece.view_as(parameter)
    return float(flat[-1])


def evaluate(family: Any, count: int, renderings: list[str]) -> None:
    """Word errors on unseen random sentences of 1 to 25 s, by the reference."""
    seconds = np.sort(np.random.default_rng(2).uniform(1.0, 25.0, count))
    errors = words = 0
    for first in range(0, count, 8):
        sentences = [
            family.vocabulary.sentence(UNSEEN + first + index, length, renderings=renderings)
            for index, length in enumerate(seconds[first : first + 8])
        ]
        for sentence, text in zip(sentences, family.transcribe([s.samples for s in sentences]), strict=True):
            result = jiwer.process_words(sentence.text, text)
            wrong = result.substitutions + result.deletions + result.insertions
            errors, words = errors + wrong, words + len(sentence.words)
            if wrong:
                print(f"{sentence.seconds:.1f} s, {wrong} wrong\n  said  {sentence.text}\n  wrote {text}")
    print(f"{count} unseen sentences of 1 to 25 s in {len(renderings)} renderings: "
          f"{errors} errors in {words} words, {100 * errors / words:.2f} %", flush=True)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("family", help="a module of pocket_families/")
    parser.add_argument("folder", type=Path, help="where the checkpoint goes")
    parser.add_argument("--start", type=Path, help="a checkpoint to go on from")
    parser.add_argument("--stages", default="123", help="those to run")
    parser.add_argument("--processes", type=int, default=2, help="that share the work")
    parser.add_argument("--evaluate", action="store_true", help="only measure the checkpoint that is there")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    family = importlib.import_module(f"pocket_families.{args.family}").Family(read_vocabulary())
    if args.evaluate:
        family.load(args.folder)
    else:
        if args.start:
            family.load(args.start)
        count = sum(parameter.numel() for parameter in family.model.parameters())
        print(f"{count} parameters", flush=True)
        with tempfile.NamedTemporaryFile() as meeting:
            offered = [Stage(*stage) for stage in getattr(family, "stages", ())] or STAGES
            stages = [offered[int(number) - 1] for number in args.stages[: len(offered)]]
            how = (args.processes, meeting.name, family, stages, args.folder)
            torch.multiprocessing.start_processes(train, how, nprocs=args.processes, start_method="fork")
        family.load(args.folder)  # as it will be read: rounded
    evaluate(family, 200, family.vocabulary.trained)
    evaluate(family, 200, getattr(family, "held_out", [HELD_OUT]))


if __name__ == "__main__":
    main()
