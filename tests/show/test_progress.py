"""Progress: a bar in a terminal after two seconds; elsewhere lines, of long work alone if nobody asked for them."""

import itertools
import os
import pty
import re
import subprocess
import sys
import threading
import time

import jax.numpy as jnp
import pytest

import jaxckpt
from jaxckpt.core import shown
from jaxckpt.show import progress

ARGS = [jnp.eye(8)] * 4, jnp.ones((64, 8))


def loss(ws, x):
    for w in ws:
        x = jnp.tanh(x @ w)
    return jnp.mean(x)


CALLS = {
    "plan": lambda **how: jaxckpt.plan(loss, *ARGS, budget="90%", target="cpu", **how),
    "frontier": lambda **how: jaxckpt.frontier(loss, *ARGS, budgets=["90%"], target="cpu", **how),
    "compare": lambda **how: jaxckpt.compare({"none": loss}, *ARGS, target="cpu", **how),
    "measure": lambda **how: jaxckpt.measure(loss, *ARGS, target="cpu", **how),
    "autocheckpoint": lambda **how: jaxckpt.autocheckpoint(loss, budget="90%", target="cpu", **how).plan(*ARGS),
}


@pytest.mark.parametrize("name", CALLS)
def test_nothing_is_printed_unless_asked_for(name, capfd):
    CALLS[name](**({"progress": False} if name == "measure" else {}))
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("name", CALLS)
def test_true_prints_lines_where_there_is_no_terminal(name, capfd):
    CALLS[name](progress=True)
    out, err = capfd.readouterr()
    assert out == "" and re.search(r"^jaxckpt: (compiling|analysing)", err, re.MULTILINE)
    lines = err.splitlines()
    assert all(line.startswith("jaxckpt: ") for line in lines)
    assert all(line != after for line, after in itertools.pairwise(lines))


@pytest.mark.parametrize("name", CALLS)
def test_a_function_is_told_and_says_what_for_which_target(name, capfd):
    told = []
    CALLS[name](progress=lambda done, total, what: told.append((done, total, what)))
    assert told and all(0 <= done <= total for done, total, _ in told)
    if name not in ("compare", "frontier"):
        assert any(what.endswith(" for cpu") for _, _, what in told)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("name", CALLS)
def test_bad_progress_is_named(name):
    with pytest.raises(jaxckpt.ArgumentError, match="progress must be a function of .*, True, False or None; got 3"):
        CALLS[name](progress=3)
    with pytest.raises(jaxckpt.ArgumentError, match="progress must be a function of .done, total, what., True"):
        CALLS[name](progress=lambda done, total: None)


def test_what_is_called_within_shows_no_bar_of_its_own(monkeypatch):
    begun = []

    def bar(title, wanted):
        begun.append((title, wanted))
        return progress.progress_bar(title, wanted)

    monkeypatch.setattr(shown, "_bars", [bar])
    CALLS["compare"]()
    CALLS["frontier"]()
    assert begun == [("tracing the variants", False), ("analysing the function", False)]
    begun.clear()
    with shown.telling(lambda done, total, what: None, "mine"):
        CALLS["measure"]()
    assert begun == []


def test_a_line_is_repeated_while_the_same_work_goes_on(monkeypatch, capsys):
    monkeypatch.setattr(progress, "QUIET", 0.02)
    with progress.progress_bar("analysing", True) as report:
        report(0, 1, "compiling for tpu:v5e:2x2")
        time.sleep(0.5)
    lines = capsys.readouterr().err.splitlines()
    assert lines[:2] == ["jaxckpt: analysing", "jaxckpt: compiling for tpu:v5e:2x2"]
    assert len(lines) >= 3 and set(lines[2:]) <= {f"jaxckpt: compiling for tpu:v5e:2x2, {s} s" for s in (0, 1)}


def test_a_long_call_says_that_it_goes_on_where_there_is_no_terminal(monkeypatch, capsys):
    monkeypatch.delenv("PYTEST_CURRENT_TEST")
    with progress.progress_bar("analysing", False) as report:
        report(0, 2, "compiling plan 1 for cuda:h100")
    assert capsys.readouterr() == ("", "")  # of what is short nothing
    monkeypatch.setattr(progress, "QUIET", 0.05)
    with progress.progress_bar("analysing", False) as report:
        report(0, 2, "compiling plan 1 for cuda:h100")
        time.sleep(0.5)
    out, err = capsys.readouterr()
    lines = err.splitlines()
    assert out == "" and lines
    assert set(lines) <= {f"jaxckpt: compiling plan 1 for cuda:h100, {s} s" for s in (0, 1)}


@pytest.mark.parametrize("wanted", [True, False])
def test_a_process_without_standard_error_is_not_stopped(monkeypatch, capsys, wanted):
    monkeypatch.delenv("PYTEST_CURRENT_TEST")
    monkeypatch.setattr(progress, "QUIET", 0.02)
    monkeypatch.setattr(sys, "stderr", None)
    with progress.progress_bar("analysing", wanted) as report:
        report(0, 1, "compiling")
        time.sleep(0.2)
    assert capsys.readouterr().out == ""


def test_what_ends_before_the_delay_is_never_shown():
    done = []
    with progress._started(lambda: done.append("start"), lambda: done.append("stop"), 5.0):
        pass
    assert done == [] and not any(isinstance(thread, threading.Timer) for thread in threading.enumerate())
    with progress._started(lambda: done.append("start"), lambda: done.append("stop"), 0.01):
        time.sleep(0.3)
    assert done == ["start", "stop"]
    with pytest.raises(KeyboardInterrupt), progress._started(lambda: None, lambda: done.append("stop"), 0.0):
        raise KeyboardInterrupt
    assert done == ["start", "stop", "stop"]


PROGRAM = """
import sys, time
import jaxckpt
from jaxckpt.core.shown import telling
from jaxckpt.show import progress
progress.DELAY = 0.5
with telling({wanted}, "analysing") as report:
    if report:
        report(1, 3, "compiling plan 2 for cuda:h100")
    time.sleep({seconds})
print("the result")
"""


def in_terminal(wanted, seconds):
    """Returns (standard output, what a terminal gets on standard error)."""
    ours, theirs = pty.openpty()
    environment = {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}
    environment |= {"TERM": "xterm", "COLUMNS": "100", "JAX_PLATFORMS": "cpu"}
    program = PROGRAM.format(wanted=wanted, seconds=seconds)
    with subprocess.Popen(
        [sys.executable, "-c", program], env=environment, stdout=subprocess.PIPE, stderr=theirs, text=True
    ) as process:
        os.close(theirs)
        told = b""
        while True:
            try:
                part = os.read(ours, 4096)
            except OSError:  # the other end is closed
                break
            if not part:
                break
            told += part
        out = process.stdout.read()
    os.close(ours)
    assert process.returncode == 0, told
    return out, told.decode()


def test_a_terminal_gets_a_bar_whose_time_goes_on_and_that_disappears():
    out, told = in_terminal(None, 3.0)
    assert out == "the result\n"
    assert "compiling plan 2 for cuda:h100" in told and "1/3" in told
    assert len(set(re.findall(r"\d:\d\d:\d\d", told))) >= 2  # the main thread slept
    assert told.rstrip("\r\n").endswith("\x1b[2K") and "\x1b[?25h" in told  # the line is erased, the cursor is back


@pytest.mark.parametrize(("wanted", "seconds"), [(None, 0.0), (False, 1.0)])
def test_a_terminal_gets_nothing_of_what_is_short_or_silent(wanted, seconds):
    assert in_terminal(wanted, seconds) == ("the result\n", "")
