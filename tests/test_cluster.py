"""Handing out, without Ray; and, run by `make cluster`, a real one on this machine."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pocket
import psutil
import pytest
import soundfile

from transcribe import cli, cluster
from transcribe.cluster import DEATHS, GROUP, Handout
from transcribe.errors import AudioError, TranscribeError
from transcribe.options import LoadOptions, Request

MODEL = pocket.DATA / "pocket-qwen3-asr"
COMMAND = [sys.executable, "-m", "transcribe", "-m", str(MODEL), "--dtype", "float32"]


# Handing out


def test_groups_hold_every_file_once_and_shrink_to_one():
    handout = Handout(map(str, range(1000)), workers=3)
    groups = []
    while handout:
        groups.append(handout.take())
    assert [index for group in groups for index in group] == list(range(1000))
    assert all(path == str(index) for group in groups for index, path in group.items())
    sizes = [len(group) for group in groups]
    assert sizes == sorted(sizes, reverse=True)
    assert (sizes[0], sizes[-1]) == (GROUP, 1)
    assert handout.take() == {}


def test_a_few_files_are_spread_over_the_workers():
    assert len(Handout(["a", "b", "c", "d"], workers=8).take()) == 1


def test_no_more_paths_are_read_ahead_than_are_needed():
    read = []
    handout = Handout((str(read.append(index)) for index in range(10_000)), workers=2)
    handout.take()
    assert len(read) == 2 * 2 * GROUP


def test_what_a_worker_died_with_goes_out_alone_and_first():
    handout = Handout(map(str, range(100)), workers=1)
    group = handout.take()
    del group[0]  # came back before
    assert handout.lost(group) == {}
    assert [handout.take() for _ in group] == [{index: path} for index, path in group.items()]
    assert next(iter(handout.take())) == GROUP


def test_a_file_that_kills_three_workers_is_given_up():
    handout = Handout(["bad"], workers=1)
    for _ in range(DEATHS - 1):
        assert handout.lost(handout.take()) == {}
    assert handout.lost(handout.take()) == {0: "bad"}
    assert not handout


# The command line


def run(*arguments):
    """The exit code of a command line run in this process."""
    return cli.main([*COMMAND[3:], *map(str, arguments)])


@pytest.fixture
def clip(tmp_path, vocabulary):
    path = tmp_path / "a.wav"
    soundfile.write(path, vocabulary.sentence(pocket.SEED, 2.0).samples, pocket.RATE)
    return path


def test_without_ray_the_option_says_how_to_install_it(clip, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "ray", None)
    assert run(clip, "--ray", "local") == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert "pip install 'transcribe[ray]'" in err


def test_standard_input_cannot_go_to_a_cluster(clip, capsys):
    assert run(clip, "-", "--ray", "local") == 2
    assert "standard input" in capsys.readouterr().err


@pytest.mark.parametrize("address", ["ray://head:10001", "head", ":6379", "head:port"])
def test_an_address_of_another_kind_is_refused(clip, address, capsys):
    assert run(clip, "--ray", address) == 2
    assert "host:port" in capsys.readouterr().err


def test_the_driver_imports_no_torch():
    code = "import sys, transcribe.cli, transcribe.cluster; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


# A cluster


@pytest.fixture(scope="module")
def address():
    """Of a cluster of two nodes with one CPU each."""
    cluster_utils = pytest.importorskip("ray.cluster_utils")
    nodes = cluster_utils.Cluster()
    for _ in range(2):
        nodes.add_node(num_cpus=1, include_dashboard=False)
    yield nodes.address
    nodes.shutdown()


@pytest.fixture
def engine(address):
    return cluster.Cluster(address, MODEL, LoadOptions(dtype="float32"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory, vocabulary):
    """A hundred recordings."""
    path = tmp_path_factory.mktemp("recordings")
    for number, sentence in enumerate(pocket.sentences(vocabulary, 100, 1.0, 4.0)):
        soundfile.write(path / f"{number:03}.wav", sentence.samples, pocket.RATE)
    return path


def written(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("*.tsv")}


def until(condition, seconds=120):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.01)


@pytest.mark.cluster
def test_every_file_is_done_once_though_a_worker_is_killed(address, folder, tmp_path):
    plain, out = tmp_path / "plain", tmp_path / "out"
    subprocess.run([*COMMAND, folder, "-o", plain, "-f", "tsv"], check=True, capture_output=True)
    command = [*COMMAND, folder, "-o", out, "-f", "tsv", "--ray", address]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as driver:
        until(lambda: len(written(out)) > 20)
        actors = [each for each in psutil.Process().children(recursive=True) if each.name().startswith("ray::Actor")]
        assert len(actors) == 2
        actors[0].kill()
        assert len(written(out)) < 100
        stdout, stderr = driver.communicate(timeout=120)
    assert (driver.returncode, stdout) == (0, "")
    done = [json.loads(line)["path"] for line in (out / "manifest.jsonl").read_text().splitlines()]
    assert sorted(done) == sorted(map(str, folder.iterdir()))
    assert stderr.splitlines()[-1].startswith("transcribe: 100 done;")
    assert written(out) == written(plain)


@pytest.mark.cluster
def test_what_goes_wrong_with_a_file_comes_back_with_its_index(engine, folder, tmp_path):
    (tmp_path / "bad.wav").write_bytes(b"no sound")
    sources = [folder / "000.wav", tmp_path / "bad.wav", tmp_path / "elsewhere.wav"]
    assert engine.check(Request()) == Request()
    assert any("gate+up" in note for note in engine.notes)
    outcomes = dict(engine.transcribe_all(sources, Request()))
    assert outcomes[0].text
    assert isinstance(outcomes[1], AudioError)
    assert "bad.wav: not audio" in str(outcomes[1])
    assert isinstance(outcomes[2], AudioError)
    assert "visible on all nodes" in str(outcomes[2])


@pytest.mark.cluster
def test_a_file_that_kills_its_workers_fails_alone(address, folder, monkeypatch):
    class Crashing(cluster.Actor):
        def transcribe(self, group, request):
            if any(path.endswith("003.wav") for path in group.values()):
                os.kill(os.getpid(), signal.SIGSEGV)
            yield from super().transcribe(group, request)

    monkeypatch.setattr(cluster, "Actor", Crashing)
    sources = sorted(folder.iterdir())[:30]
    engine = cluster.Cluster(address, MODEL, LoadOptions(dtype="float32"))
    results = list(engine.transcribe_all(sources, Request()))
    assert sorted(index for index, _ in results) == list(range(30))
    failed = {index: outcome for index, outcome in results if isinstance(outcome, Exception)}
    assert list(failed) == [3]
    assert isinstance(failed[3], TranscribeError)
    assert "3 workers died with this recording in hand" in str(failed[3])


@pytest.mark.cluster
def test_a_model_that_a_worker_cannot_load_ends_the_run_with_3(address, folder, tmp_path):
    broken = shutil.copytree(MODEL, tmp_path / "broken")
    file = broken / "model.safetensors"
    file.write_bytes(file.read_bytes().replace(b"layers.0", b"layers.9"))
    command = [*COMMAND[:3], "-m", broken, folder, "-o", tmp_path / "out", "--ray", address]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (3, "", 1)
    assert "broken" in done.stderr


@pytest.mark.cluster
def test_an_interrupt_ends_a_local_cluster_too(folder, tmp_path):
    out = tmp_path / "out"
    command = [*COMMAND, folder, "-o", out, "--ray", "local"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True) as driver:
        until(lambda: any(out.glob("*.txt")))
        started = psutil.Process(driver.pid).children(recursive=True)
        os.killpg(driver.pid, signal.SIGINT)
        _, stderr = driver.communicate(timeout=30)
    assert driver.returncode == 130
    assert "not done" in stderr.splitlines()[-1]
    assert started
    assert not psutil.wait_procs(started, timeout=5)[1]
