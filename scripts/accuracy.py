"""Word error rate of a model on recordings with transcripts.

    python scripts/accuracy.py [--model M] clip.wav ...

The transcript of clip.wav is clip.txt beside it. Words are compared in lower case and without punctuation.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path

import jiwer

import transcribe


def words(text: str) -> str:
    """Lower case, no punctuation: what is left is words and apostrophes."""
    return " ".join(re.sub(r"[^\w\s']", " ", text.lower()).split())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("clips", nargs="+", type=Path)
    parser.add_argument("--model", help="path or name; the default model if not given")
    args = parser.parse_args()
    model = transcribe.load_model(args.model)
    references, hypotheses = [], []
    for clip in args.clips:
        references.append(words(clip.with_suffix(".txt").read_text()))
        hypotheses.append(words(model.transcribe(clip).text))
        result = jiwer.process_words(references[-1], hypotheses[-1])
        print(f"{clip.name}: {100 * result.wer:.1f} % of {len(references[-1].split())} words")
        print(f"  said  {references[-1]}\n  heard {hypotheses[-1]}")
    total = jiwer.process_words(references, hypotheses)
    count = sum(len(reference.split()) for reference in references)
    errors = total.substitutions + total.deletions + total.insertions
    print(f"all: {errors} errors in {count} words, {100 * total.wer:.2f} %")


if __name__ == "__main__":
    main()
