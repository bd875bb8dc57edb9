import os
import subprocess
import sys
import textwrap
import time

import pytest
from recordings import recordings, written

from transcribe.atomic import write_together, writing_into

DEAD = ".transcribe-0123456789abcdef.tmp"


def test_an_interrupted_write_leaves_no_temporary(tmp_path, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_together({tmp_path / "a.txt": b"x", tmp_path / "b.txt": b"x"})
    assert written(tmp_path) == []


def test_if_one_cannot_be_written_none_is(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(OSError, match="cannot write: ") as caught:
        write_together({tmp_path / "a.txt": b"x", tmp_path / "file/b.txt": b"x"})
    assert caught.value.filename == str(tmp_path / "file/b.txt")
    assert written(tmp_path) == ["file"]


def test_written_files_have_the_usual_permissions(tmp_path):
    write_together({tmp_path / "a.txt": b"x"})
    (tmp_path / "b.txt").write_bytes(b"x")
    assert (tmp_path / "a.txt").stat().st_mode == (tmp_path / "b.txt").stat().st_mode


@pytest.mark.parametrize("complete", [True, False])
def test_what_is_not_complete_is_dated_as_its_recording(tmp_path, complete):
    (source,) = recordings(tmp_path, "a.wav")
    write_together({tmp_path / "a.txt": b"x"}, str(source), complete)
    assert ((tmp_path / "a.txt").stat().st_mtime > source.stat().st_mtime) == complete


def test_a_recording_that_is_gone_meanwhile_has_its_outputs(tmp_path):
    write_together({tmp_path / "a.txt": b"x"}, str(tmp_path / "gone.wav"))
    assert written(tmp_path) == ["a.txt"]


def test_a_kill_at_any_step_leaves_outputs_that_belong_together_or_are_done_again(tmp_path):
    """A child dies at its first, second, ... operation on files, as it replaces what an earlier run wrote."""
    script = """
        import os, pathlib, signal, sys
        from transcribe.atomic import write_together

        os.chdir(sys.argv[1])
        source, targets = pathlib.Path("a.wav"), [pathlib.Path(name) for name in ("a.txt", "a.srt", "a.json")]
        left, finished = 0, False
        while not finished:
            for target in targets:
                target.write_bytes(b"old" * 1000)
            child = os.fork()
            if child == 0:
                def die(event, arguments):
                    global left
                    left -= event.startswith("os.") or event == "open"
                    if left < 0:
                        os.kill(os.getpid(), signal.SIGKILL)
                sys.addaudithook(die)
                write_together({target: b"new" * 1000 for target in targets}, "a.wav")
                os._exit(0)
            finished = os.waitpid(child, 0)[1] == 0
            found = {target.read_bytes() for target in targets}
            assert found <= {b"old" * 1000, b"new" * 1000}, f"torn after {left} steps"
            date = source.stat().st_mtime_ns
            done = all(target.stat().st_mtime_ns > date for target in targets)
            assert len(found) == 1 or not done, f"a mixture taken for done after {left} steps"
            left += 1
        assert found == {b"new" * 1000} and done
        print(left)
    """
    recordings(tmp_path, "a.wav")
    command = [sys.executable, "-c", textwrap.dedent(script), str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert int(result.stdout) > 9, "three files are opened, renamed and dated"


def test_what_a_dead_run_left_is_removed_by_the_first_one_alone(tmp_path):
    recordings(tmp_path, DEAD, f"sub/{DEAD}", "a.txt", ".transcribe", "elsewhere/" + DEAD)
    with writing_into(tmp_path, {tmp_path, tmp_path / "sub", tmp_path / "missing"}):
        assert written(tmp_path) == [".transcribe", "a.txt", f"elsewhere/{DEAD}"]


def test_what_another_run_writes_is_left_alone_for_a_day(tmp_path):
    with writing_into(tmp_path, {tmp_path}):
        recordings(tmp_path, DEAD, ".transcribe-new.tmp")
        os.utime(tmp_path / ".transcribe-new.tmp", (time.time() - 80_000,) * 2)
        with writing_into(tmp_path, {tmp_path}):
            assert written(tmp_path) == [".transcribe-new.tmp"]
    with writing_into(tmp_path, {tmp_path}):
        assert written(tmp_path) == []
