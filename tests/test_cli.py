import io
import json
import os
import signal
import subprocess
import sys
import time
from types import ModuleType, SimpleNamespace

import pytest
import standin

from transcribe import cli
from transcribe.errors import AudioError, ModelError, UsageError
from transcribe.options import LoadOptions, Request
from transcribe.transcript import Segment, Transcript


class Transcriber:
    """Stands in for the real one: says the file's name; `loaded` holds what it was loaded with and asked."""

    loaded: list
    model = SimpleNamespace(notes=["gate+up: 6 aliased"])

    @classmethod
    def load(cls, path, options):
        if str(path).endswith("broken.gguf"):
            raise ModelError(f"{path}: truncated")
        cls.loaded.append((path, options))
        return cls()

    def check(self, request):
        if request.task == "translate":
            raise UsageError("--task translate: this model only transcribes")
        self.checked = request

    def transcribe_all(self, sources, request, progress=None):
        assert request == self.checked
        for number, audio in enumerate(sources):
            self.loaded.append(request)
            yield number, self.one(audio if isinstance(audio, str) else audio.read().decode())

    def one(self, audio):
        if "bad" in audio:
            return AudioError(f"{audio}: no audio stream")
        text = f"words of {os.path.basename(audio)}"
        return Transcript(text, "en", 2.0, [Segment(0, 0.0, 2.0, text)], truncated="partial" in audio)


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """The current folder holds recordings and a model; the pipeline is the stand-in."""
    monkeypatch.chdir(tmp_path)
    for name in ("a.wav", "b.wav", "bad.wav", "partial.wav", "m.gguf", "broken.gguf"):
        (tmp_path / name).write_bytes(b"x")
    (tmp_path / "empty").mkdir()
    module = ModuleType("transcribe.pipeline")
    Transcriber.loaded = []
    module.Transcriber = Transcriber
    monkeypatch.setitem(sys.modules, "transcribe.pipeline", module)
    weights = ModuleType("transcribe.weights")
    weights.open_checkpoint = lambda path: SimpleNamespace(architecture="moonshine")
    monkeypatch.setitem(sys.modules, "transcribe.weights", weights)
    return Transcriber


def run(*arguments: str) -> int:
    return cli.main(["--model", "m.gguf", *arguments])


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["a.wav"], 0),
        (["a.wav", "b.wav", "-o", "out", "-f", "all"], 0),
        (["a.wav", "bad.wav"], 1),
        (["bad.wav"], 1),
        (["missing.wav"], 1),
        (["partial.wav"], 1),
        ([], 2),
        (["--no-such-option", "a.wav"], 2),
        (["--task", "sing", "a.wav"], 2),
        (["--task", "translate", "a.wav"], 2),
        (["--beam-size", "0", "a.wav"], 2),
        (["--batch-size", "17", "a.wav"], 2),
        (["--batch-size", "few", "a.wav"], 2),
        (["--batch-size", "auto", "a.wav"], 0),
        (["--memory-limit", "lots", "a.wav"], 2),
        (["-f", "srt", "--timestamps", "none", "a.wav"], 2),
        (["-f", "srt", "a.wav", "b.wav"], 2),
        (["--shard", "0/4", "-o", "out", "a.wav"], 2),
        (["--shard", "5/4", "-o", "out", "a.wav"], 2),
        (["--shard", "x", "-o", "out", "a.wav"], 2),
        (["--shard", "1/4", "a.wav"], 2),
        (["--shard", "2/2", "-o", "out", "a.wav", "b.wav"], 0),
        (["-f", "all", "a.wav"], 2),
        (["-o", "a.wav/out", "b.wav"], 2),
        (["--stats", "nowhere/at/a.wav/x", "--stats", "a.wav/x", "b.wav"], 2),
        (["--model", "broken.gguf", "a.wav"], 3),
        (["--model", "no-such-model", "a.wav"], 3),
        (["empty"], 4),
    ],
)
def test_exit_codes_and_one_line_reasons(fake, capsys, arguments, code):
    assert run(*arguments) == code
    err = capsys.readouterr().err
    assert "Traceback" not in err
    assert all(line.startswith("transcribe: ") for line in err.splitlines())
    if code in (2, 3, 4):
        assert err.count("\n") == 1
        assert not any(isinstance(event, Request) for event in fake.loaded), "audio was touched"


def test_an_unwritable_output_folder_is_found_before_the_model_is_loaded(fake, capsys):
    assert run("-o", "a.wav/out", "b.wav") == 2
    assert fake.loaded == []
    assert "a.wav/out: cannot write into this output folder" in capsys.readouterr().err


def test_nothing_is_loaded_for_what_is_missing_or_done(fake):
    assert run("missing.wav") == 1
    assert fake.loaded == []
    run("a.wav", "-o", "out")
    fake.loaded.clear()
    assert run("a.wav", "-o", "out") == 0
    assert fake.loaded == []


def test_a_shard_without_a_part_succeeds_and_loads_nothing(fake, capsys):
    assert run("--shard", "3/3", "-o", "out", "a.wav", "b.wav") == 0
    assert fake.loaded == []
    assert capsys.readouterr().err == "transcribe: shard 3/3: nothing to do, there are 2 recordings in all\n"


def test_stdout_carries_the_transcript_and_nothing_else(fake, capsys):
    run("a.wav", "--verbose")
    out, err = capsys.readouterr()
    assert out == "words of a.wav\n"
    assert err == "transcribe: gate+up: 6 aliased\n"


def test_one_recording_can_be_any_format_on_stdout(fake, capsys):
    run("a.wav", "-f", "vtt")
    assert capsys.readouterr().out.startswith("WEBVTT\n")
    run("a.wav", "-f", "json")
    assert json.loads(capsys.readouterr().out)["text"] == "words of a.wav"


def test_with_an_output_folder_stdout_is_empty(fake, capsys, tmp_path):
    run("a.wav", "-o", "out", "-f", "all")
    assert capsys.readouterr().out == ""
    assert sorted(os.listdir(tmp_path / "out")) == ["a.json", "a.srt", "a.tsv", "a.txt", "a.vtt", "manifest.jsonl"]


def test_quiet_leaves_errors_only(fake, capsys):
    run("a.wav", "bad.wav", "--quiet", "-o", "out")
    assert capsys.readouterr().err == "transcribe: bad.wav: no audio stream\n"


def test_every_option_reaches_where_it_belongs_in_both_spellings(fake):
    given = (
        "--language da --prompt Hej --timestamps word --beam-size 4 --temperature 0.5 --max-tokens 9 "
        "--batch-size 3 --device cpu --dtype bfloat16 --threads 2 --no-mmap --no-alias --no-recycle "
        "--memory-limit 1.5G"
    )
    options = LoadOptions("cpu", "bfloat16", 2, False, False, False, 3 * 2**29, 3)
    request = Request("da", "transcribe", "Hej", "word", 4, 0.5, 9)
    whisper = given.replace("--prompt", "--initial-prompt").split()
    whisper = [word.replace("-", "_").replace("__", "--", 1) for word in whisper]
    assert "--beam_size" in whisper
    for arguments in (given.split(), whisper):
        fake.loaded.clear()
        assert run(*arguments, "a.wav") == 0
        assert [fake.loaded[0][1], fake.loaded[1]] == [options, request]
    assert run("--output_dir", "out_1", "--output_format", "srt", "a.wav") == 0
    assert sorted(os.listdir("out_1")) == ["a.srt", "manifest.jsonl"]


def test_several_recordings_are_decoded_together_as_memory_allows_and_one_is_not(fake):
    both = ["a.wav", "b.wav"]
    for arguments, together in ((["a.wav"], 1), (both, None), ([*both, "--batch-size", "2"], 2)):
        fake.loaded.clear()
        assert run(*arguments) == 0
        assert fake.loaded[0][1].batch_size == together


@pytest.mark.parametrize(
    ("text", "size"),
    [("500M", 500 * 2**20), ("2g", 2**31), ("1GiB", 2**30), ("64 kB", 2**16), ("4096", 4096)],
)
def test_memory_sizes(text, size):
    assert cli.parse_size(text) == size


@pytest.mark.parametrize("text", ["", "0", "-1", "2X", "G", "1e9", "nan"])
def test_what_is_no_size(text):
    with pytest.raises(UsageError, match="500M, 2G"):
        cli.parse_size(text)


def test_a_dash_is_stdin_and_after_two_dashes_anything_is_a_file(fake, capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"piped")))
    assert run("-") == 0
    (tmp_path / "--debug").write_bytes(b"x")
    assert run("--", "--debug") == 0
    assert capsys.readouterr().out == "words of piped\nwords of --debug\n"


def test_a_file_named_like_a_command_is_given_with_its_folder(fake, capsys, tmp_path):
    (tmp_path / "inspect").write_bytes(b"x")
    assert run("./inspect") == 0
    (tmp_path / "transcribe").write_bytes(b"x")
    assert cli.main(["transcribe", "-m", "m.gguf"]) == 0
    assert capsys.readouterr().out == "words of inspect\nwords of transcribe\n"


def test_an_unexpected_failure_is_one_line_and_debug_shows_more(fake, capsys, monkeypatch):
    def fail(*_):
        raise ZeroDivisionError("oops")

    monkeypatch.setattr(Transcriber, "check", fail)
    assert run("a.wav") == 1
    line = "transcribe: internal error: ZeroDivisionError: oops (run with --debug)\n"
    assert capsys.readouterr().err == line
    assert run("a.wav", "--debug") == 1
    err = capsys.readouterr().err
    assert "Traceback" in err
    assert err.endswith(line)


def test_stats_that_cannot_be_written_fail_the_run(fake, capsys, monkeypatch, tmp_path):
    (tmp_path / "stats").mkdir()
    assert run("a.wav", "--stats", "stats") == 1
    out, err = capsys.readouterr()
    assert out == "words of a.wav\n"
    assert err == "transcribe: stats: cannot write: Is a directory\n"


def test_models_lists_families_and_where_the_default_is(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("TRANSCRIBE_CACHE", str(tmp_path))
    assert cli.main(["models"]) == 0
    out = capsys.readouterr().out
    assert "families: " in out
    assert "moonshine" in out.splitlines()[0]
    assert f"default path: {tmp_path}/moonshine-tiny-q8_0.gguf" in out
    assert "installed)" not in out
    (tmp_path / "moonshine-tiny-q8_0.gguf").write_bytes(b"x")
    cli.main(["models"])
    assert "moonshine-tiny (installed)" in capsys.readouterr().out


def test_help_says_what_there_is(capsys):
    assert cli.main(["--help"]) == 0
    out = capsys.readouterr().out
    for word in ("--output-dir", "--memory-limit", "transcribe inspect", "transcribe models", "Exit codes"):
        assert word in out


# In a process of its own, where exit codes, signals and imports are real.


def start(folder, *arguments, **environment) -> subprocess.Popen:
    for name in arguments:
        if name.endswith(".wav"):
            (folder / name).write_text("Høns på æg " * 20_000 if "long" in name else "Høns", encoding="utf-8")
    return standin.start(folder, *arguments, **environment)


def wait_until_it_works(process: subprocess.Popen) -> None:
    assert any(b"working" in line for line in iter(process.stderr.readline, b""))


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupt_leaves_whole_files_and_a_summary(tmp_path, number, code):
    process = start(tmp_path, "a.wav", "slow.wav", "c.wav", "-o", "out")
    wait_until_it_works(process)
    process.send_signal(number)
    _, err = process.communicate(timeout=10)
    assert process.returncode == code
    assert sorted(os.listdir(tmp_path / "out")) == ["a.txt", "manifest.jsonl"]
    assert b"transcribe: 1 done, 2 not done" in err
    assert b"Traceback" not in err


def test_a_second_interrupt_ends_at_once(tmp_path):
    process = start(tmp_path, "slow-stubborn.wav")
    wait_until_it_works(process)
    process.send_signal(signal.SIGINT)
    time.sleep(0.3)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=5)
    assert process.returncode == 130


def test_a_reader_that_goes_away_is_no_noise(tmp_path):
    process = start(tmp_path, "long.wav", "b.wav")
    process.stdout.close()
    assert process.stderr.read() == b""
    assert process.wait() == 141


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a device that is always full")
def test_a_full_disk_behind_stdout_is_one_line(tmp_path):
    with open("/dev/full", "wb") as full:
        process = start(tmp_path, "a.wav")
        process.kill()
        process.communicate()
        done = subprocess.run(process.args, cwd=tmp_path, stdout=full, stderr=subprocess.PIPE)
    assert done.returncode == 1
    assert done.stderr == b"transcribe: cannot write to standard output: No space left on device\n"


def test_a_closed_stdout_is_not_success(tmp_path):
    process = start(tmp_path, "a.wav")
    process.kill()
    process.communicate()
    command = ["sh", "-c", 'exec "$@" >&-', "sh", *process.args]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True)
    assert (done.returncode, done.stderr) == (1, b"transcribe: cannot write to standard output: it is closed\n")


def test_letters_the_locale_lacks_do_not_stop_the_output(tmp_path):
    process = start(tmp_path, "æg.wav", "b.wav", PYTHONIOENCODING="ascii", LC_ALL="C")
    out, err = process.communicate()
    assert process.returncode == 0
    assert out.decode() == "æg.wav\tHøns\nb.wav\tHøns\n"
    assert b"2 done" in err


def test_the_command_line_imports_nothing_heavy():
    heavy = ["torch", "numpy", "av", "rich", "gguf", "huggingface_hub", "transcribe.weights"]
    code = f"import sys, transcribe.cli, transcribe.__main__; print([m for m in {heavy} if m in sys.modules])"
    code = code.replace("transcribe.__main__", "transcribe.batch, transcribe.hub, transcribe.writers")
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "[]\n"


def test_the_usage_line_has_single_spaces(capsys):
    assert cli.main(["--help"]) == 0
    assert capsys.readouterr().out.startswith("Usage: transcribe [OPTIONS] {AUDIO")


def test_a_family_we_do_not_know_is_refused_before_torch_is_there(tmp_path):
    import gguf

    writer = gguf.GGUFWriter(tmp_path / "llama.gguf", "llama")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    (tmp_path / "a.wav").write_bytes(b"x")
    code = "import sys; from transcribe import cli; print(cli.main(sys.argv[1:]), 'torch' in sys.modules)"
    command = [sys.executable, "-c", code, "a.wav", "-m", "llama.gguf"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.stdout == "3 False\n"
    assert "llama.gguf: architecture 'llama'; supported families: citrinet, moonshine" in done.stderr


def test_it_runs_as_a_module():
    command = [sys.executable, "-m", "transcribe", "--version"]
    environment = os.environ | {"TRANSCRIBE_KERNELS": "torch"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert (done.returncode, done.stdout) == (0, "transcribe 0.1.0 (torch kernels)\n")
