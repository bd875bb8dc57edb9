"""The command line: parses, calls, prints. It knows nothing of models or audio.

Everything heavy is imported after the arguments are parsed, so that `--help` answers at once.
"""

from __future__ import annotations

import gc
import json
import re
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from typer.core import TyperCommand, TyperGroup

from . import __version__
from .console import Console, Interrupts, OutputError, ReaderGoneError, discard_stdout, explain, prepare_streams
from .errors import TranscribeError, UsageError
from .options import Device, DType, LoadOptions, Request, Task, Timestamps

if TYPE_CHECKING:
    from .cluster import Cluster
    from .pipeline import Transcriber

INTERRUPTED = 130
Format = Literal["txt", "srt", "vtt", "tsv", "json", "jsonl", "all"]
WeightType = Literal[  # those of convert/presets.py
    "f32", "f16", "bf16", "q8_0", "q6_k", "q5_k_m", "q5_1", "q5_0", "q4_k_m", "q4_1", "q4_0"
]
Debug = Annotated[bool, typer.Option("--debug", help="Show tracebacks.")]
BadArguments: Any = typer.BadParameter.__mro__[1]  # the class of all that typer raises while parsing


class DefaultCommand(TyperGroup):
    """A group whose hidden command needs no name: what names no other command goes to it."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if not args or args[0] not in self.commands or self.commands[args[0]].hidden:
            hidden = next(name for name, command in self.commands.items() if command.hidden)
            args = [hidden, *args]
        return super().parse_args(ctx, args)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, command, rest = super().resolve_command(ctx, args)
        return (None if command is not None and command.hidden else name), command, rest


class UnnamedCommand(TyperCommand):
    """A command whose usage has no second word, nor the space before it."""

    def format_usage(self, ctx: Any, formatter: Any) -> None:
        formatter.write_usage(ctx.command_path.rstrip(), " ".join(self.collect_usage_pieces(ctx)))


app = typer.Typer(
    cls=DefaultCommand,
    add_completion=False,
    rich_markup_mode=None,  # drawing help with rich takes longer than everything else together
    context_settings={
        "help_option_names": ["-h", "--help"],
        "token_normalize_func": lambda name: name.replace("_", "-"),  # --output_dir is --output-dir
    },
)


def _show_version(wanted: bool) -> None:
    if wanted:
        from . import kernels

        typer.echo(f"transcribe {__version__} ({kernels.path()} kernels)")
        raise typer.Exit


def parse_size(text: str) -> int:
    """Bytes from "500M", "2G", "1.5 GiB" (powers of 1024) or a number. Raises `UsageError` for others."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    if match is None or not (size := int(float(match[1]) * 1024 ** " KMGT".index(match[2].upper() or " "))):
        raise UsageError(f"--memory-limit {text!r}: no size; write 500M, 2G or a number of bytes")
    return size


def parse_batch_size(text: str) -> int | None:
    """1 to 16, None for "auto". Raises `UsageError` for others."""
    if text == "auto":
        return None
    if not text.isascii() or not text.isdigit() or not 1 <= int(text) <= 16:
        raise UsageError(f"--batch-size {text!r}: write a number from 1 to 16, or auto")
    return int(text)


def parse_shard(text: str) -> tuple[int, int]:
    """(2, 4) from "2/4": the second of four parts. Raises `UsageError` for others."""
    match = re.fullmatch(r"([0-9]{1,6})/([0-9]{1,6})", text.strip())
    if match is None or not 1 <= int(match[1]) <= int(match[2]):
        raise UsageError(f"--shard {text!r}: write I/N, from 1/N to N/N: 2/4 is the second of four parts")
    return int(match[1]), int(match[2])


@app.command(hidden=True, cls=UnnamedCommand)
def transcribe(
    inputs: Annotated[list[str], typer.Argument(metavar="AUDIO|DIR|-", help="Recordings, folders, - for stdin.")],
    model: Annotated[
        str | None,
        typer.Option("--model", "-m", help="A model file, folder or name.  [default: moonshine-tiny, English]"),
    ] = None,
    language: Annotated[
        str | None, typer.Option("--language", "-l", help="Code or English name of what is spoken, or auto.")
    ] = None,
    task: Annotated[Task, typer.Option("--task", help="Write what is said, or its translation.")] = "transcribe",
    output_dir: Annotated[
        str | None, typer.Option("--output-dir", "-o", help="Write files there, named after the recordings.")
    ] = None,
    output_format: Annotated[
        Format, typer.Option("--output-format", "-f", help="all stands for txt, srt, vtt, tsv and json.")
    ] = "txt",
    prompt: Annotated[
        str | None, typer.Option("--prompt", "--initial-prompt", help="Words or context to expect.")
    ] = None,
    timestamps: Annotated[Timestamps, typer.Option("--timestamps", help="Which times to give.")] = "segment",
    beam_size: Annotated[int, typer.Option("--beam-size", min=1, help="1 is greedy.")] = 1,
    temperature: Annotated[float, typer.Option("--temperature", min=0.0, help="0 samples nothing.")] = 0.0,
    top_p: Annotated[
        float, typer.Option("--top-p", min=0.0, max=1.0, help="With a temperature: the share of likely tokens.")
    ] = 1.0,
    seed: Annotated[int | None, typer.Option("--seed", help="With a temperature: repeats what is drawn.")] = None,
    max_tokens: Annotated[int | None, typer.Option("--max-tokens", min=1, help="Limit for one window.")] = None,
    batch_size: Annotated[
        str | None,
        typer.Option(
            "--batch-size", metavar="N|auto",
            help="Windows decoded together; auto: as memory allows.  [default: auto for several recordings, 1 for one]",
        ),
    ] = None,
    recursive: Annotated[bool, typer.Option("--recursive", help="Folders with their subfolders.")] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Also do again what has outputs newer than the recording.")
    ] = False,
    shard: Annotated[
        str | None,
        typer.Option("--shard", metavar="I/N", help="Do the I-th of N parts, for N runs into one output folder."),
    ] = None,
    device: Annotated[Device, typer.Option("--device", help="Where to compute.")] = "auto",
    dtype: Annotated[DType, typer.Option("--dtype", help="What to compute in.")] = "auto",
    threads: Annotated[int | None, typer.Option("--threads", min=1, help="CPU threads.")] = None,
    no_mmap: Annotated[bool, typer.Option("--no-mmap", help="Read the weights, do not map the file.")] = False,
    no_alias: Annotated[bool, typer.Option("--no-alias", help="Copy fused weights, do not alias.")] = False,
    no_recycle: Annotated[bool, typer.Option("--no-recycle", help="Keep every intermediate result.")] = False,
    memory_limit: Annotated[
        str | None,
        typer.Option("--memory-limit", metavar="SIZE", help="Over a bare torch: 500M, 2G, or bytes."),
    ] = None,
    ray: Annotated[
        str | None,
        typer.Option(
            "--ray", metavar="ADDRESS", help="Transcribe on a Ray cluster: host:port, auto, or local to start one."
        ),
    ] = None,
    stats: Annotated[
        str | None,
        typer.Option("--stats", metavar="FILE", help="Write times and counts, one JSON line a file."),
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Only errors on stderr.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Say how the model was loaded.")] = False,
    debug: Debug = False,
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit."),
    ] = False,
) -> int:
    """Speech to text on your own machine.

    \b
    One recording goes to stdout; several, one line each: path, tab, text.
    With --output-dir, each goes to files; what is there and newer is skipped.

    \b
    Also: transcribe inspect MODEL      describe a model file
          transcribe convert SRC DST    write it as GGUF, in another type
          transcribe models             list what can be run

    \b
    Exit codes: 0 done, 1 a file failed or is partial, 2 usage, 3 model,
    4 nothing to do, 130 interrupted.
    """
    from . import batch, worklist, writers

    if ray is not None and worklist.STDIN in inputs:
        raise UsageError("--ray: standard input cannot go to a cluster; name files or folders")
    limit = parse_size(memory_limit) if memory_limit is not None else None
    formats = writers.formats(output_format, timestamps)
    request = Request(language, task, prompt, timestamps, beam_size, temperature, max_tokens, top_p, seed)
    together = parse_batch_size(batch_size) if batch_size is not None else 1

    console = Console(quiet)
    part = parse_shard(shard) if shard is not None else None
    plan = worklist.plan(inputs, formats, output_dir, recursive, overwrite, part)
    if not plan.items and not plan.skipped:
        for note in plan.notes:
            (console.inform if plan.found else console.error)(note)
        return batch.OK if plan.found else batch.NOTHING_TO_DO  # a job array may be longer than the list
    if stats is not None:
        worklist.check_writable(Path(stats).parent)
    if batch_size is None and len(plan.items) > 1:
        together = None
    options = LoadOptions(device, dtype, threads, not no_mmap, not no_alias, not no_recycle, limit, together)
    engine = _load(model, options, request, console, verbose, ray) if plan.needs_model else None
    return batch.run(plan, engine, request, console, stats, debug)


def _load(
    model: str | None, options: LoadOptions, request: Request, console: Console, verbose: bool, ray: str | None
) -> Transcriber | Cluster:
    """The model, here or on a cluster, once it is known that it can do what is asked."""
    from . import hub

    path = hub.resolve(model)
    with console.busy(f"loading {path}"), _collecting_later():
        from .models import family_of
        from .weights import open_checkpoint

        family_of(open_checkpoint(path))  # says what is wrong with a file before torch is imported
        engine: Transcriber | Cluster
        if ray is None:
            from .pipeline import Transcriber

            engine = Transcriber.load(str(path), options)
            engine.check(request)
            notes = engine.model.notes
        else:
            from .cluster import Cluster

            engine = Cluster(ray, path, options)
            engine.check(request)
            notes = engine.notes
    for note in notes if verbose else ():
        console.inform(note)
    return engine


@contextmanager
def _collecting_later() -> Iterator[None]:
    """Put off garbage collection: what imports make stays, and looking through it time and again takes 0.4 s."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


@app.command()
def inspect(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A model file, folder or name.")],
    seconds: Annotated[
        float, typer.Option("--seconds", min=0.0, help="Length of audio to predict the peak for.")
    ] = 30.0,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of text.")] = False,
    debug: Debug = False,
) -> int:
    """Describe a model file: family, tensors, types, layout, what is missing, memory needed."""
    from . import hub
    from .inspect import as_text, describe

    report = describe(hub.resolve(model), seconds)
    Console().output(json.dumps(report, ensure_ascii=False, indent=2) + "\n" if as_json else as_text(report))
    return 0


@app.command(context_settings={"token_normalize_func": str})  # q8_0 is no option
def convert(
    source: Annotated[str, typer.Argument(metavar="SRC", help="A model file, folder or name.")],
    destination: Annotated[Path, typer.Argument(metavar="DST.gguf", help="The file to write.")],
    weight_type: Annotated[
        WeightType, typer.Option("--type", "-t", case_sensitive=False, help="What matrices are stored as.")
    ],
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the file if it is there.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Only errors on stderr.")] = False,
    debug: Debug = False,
) -> int:
    """Write any model that can be run as one GGUF file, in transcribe.cpp's dialect or, for Citrinet, audio.cpp's.

    Norms, biases and convolutions keep 16 or 32 bits.
    """
    from . import hub
    from .convert import check_destination
    from .convert import convert as write

    check_destination(destination, overwrite)
    console = Console(quiet)
    with Interrupts(), console.busy(f"writing {destination}"):
        written = write(hub.resolve(source), destination, weight_type, overwrite)
    types = ", ".join(f"{count} {name}" for name, count in written.types.items())
    console.inform(f"{destination}: {written.nbytes / 2**20:.1f} MiB, {sum(written.types.values())} tensors ({types})")
    return 0


@app.command()
def models() -> int:
    """List the families that can be run, and where the default model is."""
    from . import hub
    from .models import SUPPORTED

    path = hub.default_path()
    if path.is_file():
        state = "installed"
    elif hub.can_make_default():
        state = "made on first use"
    else:
        state = "not installed: pip install 'transcribe[default-model]'"
    Console().output(
        f"families: {', '.join(SUPPORTED)}\ndefault model: {hub.DEFAULT_NAME} ({state})\ndefault path: {path}\n"
    )
    return 0


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return its exit code. What goes wrong is one line on stderr."""
    arguments = sys.argv[1:] if arguments is None else arguments
    prepare_streams()
    console = Console(quiet=True)
    try:
        return app(arguments, prog_name="transcribe", standalone_mode=False)
    except (KeyboardInterrupt, typer.Abort):
        console.error("interrupted")
        return INTERRUPTED
    except OutputError as error:
        discard_stdout()
        if not isinstance(error, ReaderGoneError):
            console.error(str(error))
        return error.exit_code
    except Exception as error:
        if "--debug" in arguments:
            traceback.print_exception(error)
        if isinstance(error, BadArguments):
            console.error(f"{error.format_message()} (transcribe --help lists the options)")
            return UsageError.exit_code
        console.error(explain(error))
        return error.exit_code if isinstance(error, TranscribeError) else 1
