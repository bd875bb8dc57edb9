"""The command line in a process of its own, with a stand-in for the model: exit codes, signals and disks are real.

`python standin.py ARGUMENTS` is `transcribe ARGUMENTS`. A recording is a text file, which says what is in it. "noise"
cannot be decoded; one with "slow" in its name takes half a minute, and if it is "stubborn" also to be interrupted.
Each takes STANDIN_SECONDS.
"""

import os
import subprocess
import sys
import time
from types import ModuleType, SimpleNamespace


def start(folder, *arguments: str, preexec_fn=None, **environment: str) -> subprocess.Popen:
    """A run in `folder`."""
    return subprocess.Popen(
        [sys.executable, __file__, *arguments],
        cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={**os.environ, **environment},
        preexec_fn=preexec_fn,
    )  # fmt: skip


def run(folder, *arguments: str, **options) -> tuple[int, str, str]:
    """The exit code, stdout and stderr of a run to its end."""
    process = start(folder, *arguments, **options)
    out, err = process.communicate(timeout=60)
    return process.returncode, out.decode(), err.decode()


class Transcriber:
    model = SimpleNamespace(notes=[])

    @classmethod
    def load(cls, path, options):
        return cls()

    def check(self, request):
        pass

    def transcribe_all(self, sources, request, progress=None):
        for number, source in enumerate(sources):
            try:
                yield number, self.transcript(source)
            except Exception as error:
                yield number, error

    def transcript(self, source):
        from transcribe.errors import AudioError
        from transcribe.transcript import Segment, Transcript

        with open(source, encoding="utf-8") as file:
            text = file.read()
        if text == "noise":
            raise AudioError(f"{source}: no audio stream")
        try:
            if "slow" in source:
                print("working", file=sys.stderr, flush=True)
                time.sleep(30)
            time.sleep(float(os.environ.get("STANDIN_SECONDS", 0)))
        finally:
            if "stubborn" in source:
                time.sleep(30)
        return Transcript(text, "da", 1.0, [Segment(0, 0.0, 1.0, text)], model="standin")


if __name__ == "__main__":
    pipeline, weights = ModuleType("transcribe.pipeline"), ModuleType("transcribe.weights")
    pipeline.Transcriber = Transcriber  # type: ignore[attr-defined]
    weights.open_checkpoint = lambda path: SimpleNamespace(architecture="moonshine")  # type: ignore[attr-defined]
    sys.modules.update({pipeline.__name__: pipeline, weights.__name__: weights})
    from transcribe.cli import main

    sys.exit(main(["--model", ".", *sys.argv[1:]]))
