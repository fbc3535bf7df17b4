"""Files: whole or not at all, with nothing left beside them; what is no file is neither read nor replaced."""

import os
import re
import signal
import stat
import subprocess
import sys
import threading
import time

import pytest

from jaxckpt import ArgumentError
from jaxckpt.core.files import check_writable, read_whole, write_whole

KILLED = """
import os, signal, sys
from jaxckpt.core import files
os.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
files.write_whole(sys.argv[1], "cut" * 1000)
"""
WAITING = """
import os, sys, time
from jaxckpt.core import files
replace = os.replace
def wait(*ends):
    print("ready", flush=True)
    sys.stdin.read()
    replace(*ends)
os.replace = wait
files.write_whole(sys.argv[1], "of the slow writer")
"""


def run(program, path, **settings):
    return subprocess.Popen([sys.executable, "-c", program, path], text=True, **settings)


@pytest.mark.parametrize("name", ["plan.json", "x" * 250, "[a-z]*.json", "é" * 120])
def test_what_a_killed_writer_left_is_gone_after_the_next_write(tmp_path, name):
    path = tmp_path / name
    beside = tmp_path / f".{name[:50]}.original"
    beside.write_text("mine")
    with run(KILLED, path) as writer:
        assert writer.wait() == -signal.SIGKILL
    assert len(os.listdir(tmp_path)) == 2, "the killed writer left its file"
    write_whole(path, "whole")
    assert path.read_text() == "whole"
    assert set(os.listdir(tmp_path)) == {name, beside.name}


def test_the_file_of_a_writer_that_lives_stays(tmp_path):
    path = tmp_path / "plan.json"
    with run(WAITING, path, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as slow:
        assert slow.stdout.readline() == "ready\n"
        write_whole(path, "of the fast writer")
        slow.communicate()
        assert slow.returncode == 0
    assert path.read_text() == "of the slow writer"
    assert os.listdir(tmp_path) == ["plan.json"]


def test_writers_at_once_leave_one_whole_file(tmp_path):
    path = tmp_path / "plan.json"
    contents = [letter * 100_000 for letter in "abcd"]
    failed = []

    def write(content):
        try:
            for _ in range(20):
                write_whole(path, content)
        except OSError as error:
            failed.append(error)

    threads = [threading.Thread(target=write, args=(content,)) for content in contents]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    assert path.read_text() in contents
    assert os.listdir(tmp_path) == ["plan.json"]


def test_a_symbolic_link_stays_and_what_it_points_to_is_written(tmp_path):
    (tmp_path / "there").mkdir()
    for target in (tmp_path / "there" / "old", tmp_path / "there" / "new"):
        link = tmp_path / f"to-{target.name}"
        link.symlink_to(target)
        if target.name == "old":
            target.write_text("old")
        write_whole(link, "content")
        assert link.is_symlink() and target.read_text() == "content" and not target.is_symlink()
    assert sorted(os.listdir(tmp_path / "there")) == ["new", "old"]


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o755])
def test_permissions_stay_and_a_new_file_has_the_usual_ones(tmp_path, mode):
    write_whole(tmp_path / "file", "x")
    umask = os.umask(0)
    os.umask(umask)
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == 0o666 & ~umask
    (tmp_path / "file").chmod(mode)
    write_whole(tmp_path / "file", "y")
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == mode


def special(tmp_path, kind):
    if kind == "device":
        return "/dev/null"
    path = tmp_path / kind
    if kind == "folder":
        path.mkdir()
    else:
        os.mkfifo(path)
    return str(path)


@pytest.mark.parametrize("kind", ["device", "pipe", "folder"])
def test_what_is_no_regular_file_is_refused_and_stays_what_it_is(tmp_path, kind):
    path = special(tmp_path, kind)
    before = os.stat(path)
    (tmp_path / "link").symlink_to(path)
    for name in (path, str(tmp_path / "link")):
        with pytest.raises(ArgumentError, match="path must be a"):
            write_whole(name, "x")
        with pytest.raises(ArgumentError, match="--output must be a"):
            check_writable(name, "--output")
    assert (os.stat(path).st_mode, os.stat(path).st_ino) == (before.st_mode, before.st_ino)


def test_a_pipe_and_a_device_are_not_waited_for(tmp_path):
    start = time.monotonic()
    for path in (special(tmp_path, "pipe"), "/dev/zero"):
        with pytest.raises(ArgumentError, match="path must be a regular file"):
            read_whole(path)
    with pytest.raises(IsADirectoryError):
        read_whole(tmp_path)
    with pytest.raises(FileNotFoundError):
        read_whole(tmp_path / "none")
    assert time.monotonic() - start < 5


def test_errors_name_the_file_that_was_asked_for(tmp_path, monkeypatch):
    with pytest.raises(OSError) as caught:
        write_whole("/proc/plan.json", "x")
    assert "'/proc/plan.json'" in str(caught.value) and ".jaxckpt" not in str(caught.value)

    def full(source, target):
        raise OSError(28, "No space left on device", source, None, target)

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="No space left") as caught:
        write_whole(tmp_path / "plan.json", "x")
    assert caught.value.filename == str(tmp_path / "plan.json") and caught.value.filename2 is None
    assert not os.listdir(tmp_path)


def test_what_can_be_written_is_checked_without_a_trace(tmp_path):
    check_writable(tmp_path / "new")
    (tmp_path / "old").write_text("old")
    check_writable(tmp_path / "old")
    assert os.listdir(tmp_path) == ["old"] and (tmp_path / "old").read_text() == "old"
    for path in ("/proc/x", tmp_path / "old" / "x", tmp_path / "no" / "x", ""):
        with pytest.raises(ArgumentError, match="path must be a file"):
            check_writable(path)


def test_a_folder_is_named_where_a_file_is_read(tmp_path):
    with pytest.raises(IsADirectoryError, match=re.escape(str(tmp_path))):
        read_whole(tmp_path)
