"""Write a Citrinet of the published shape with random weights, to measure memory and speed with.

    python scripts/random_citrinet.py citrinet-256.nemo [--width 256] [--gamma 1.0]

The shape is that of NeMo's citrinet configuration. What such a model writes is noise.
"""

from __future__ import annotations

import argparse
import string
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from pocket_families.citrinet import Network, block, new_tokenizer, save_archive

PIECES = 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--gamma", type=float, default=1.0, help="what kernels are multiplied by")
    args = parser.parse_args()
    torch.manual_seed(0)
    kernels = [5, *range(11, 22, 2), *range(13, 26, 2), *range(25, 40, 2), 41]
    blocks = [
        block(640 if index == 22 else args.width, _odd(kernel * args.gamma), 1 if index in (0, 22) else 5,
              2 if index in (1, 7, 14) else 1)
        for index, kernel in enumerate(kernels)
    ]  # fmt: skip
    words = [a + b + c for a in string.ascii_lowercase for b in string.ascii_lowercase for c in "aeiou"]
    network = Network(blocks, PIECES)
    for parameter in network.parameters():
        if parameter.dim() > 1:  # so that what it hears decides what it writes
            torch.nn.init.kaiming_normal_(parameter, nonlinearity="relu")
    save_archive(args.file, network, blocks, new_tokenizer(words, PIECES))
    print(f"{args.file}: {args.file.stat().st_size / 2**20:.1f} MiB")


def _odd(kernel: float) -> int:
    return int(kernel) + (int(kernel) % 2 == 0)


if __name__ == "__main__":
    main()
