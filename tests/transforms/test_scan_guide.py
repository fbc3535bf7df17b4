"""The scan guide's code runs, and the example trains with less resident memory."""

from __future__ import annotations

import json
import pathlib
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

from jaxckpt.schedules import Slots
from tests.helpers import gradient_executions

ROOT = pathlib.Path(__file__).parents[2]
SIZES = ["--steps=2", "--length=6000", "--sequences=16", "--width=64", "--budget=none"]


def test_the_guides_code_runs_and_prints_what_it_says(capsys: pytest.CaptureFixture[str]) -> None:
    text = (ROOT / "docs" / "scan.md").read_text()
    scope: dict = {}
    for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        exec(block, scope)
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == 5 and all(f"    {line}\n" in text for line in printed)
    assert scope["final"].shape == (64,) and scope["same"] and scope["runs"] == 20
    w, x = jnp.eye(4) / 2, jnp.ones((3, 4))
    plain = lambda w: jnp.sum(jax.lax.scan(lambda c, _: (jnp.tanh(c @ w), None), x, None, length=12)[0])
    counted = gradient_executions(scope["steps"], w, x)["dot_general"] - gradient_executions(plain, w)["dot_general"]
    assert jnp.allclose(jax.grad(scope["steps"])(w, x), jax.grad(plain)(w)) and counted == 8, "the head runs again"
    assert abs(scope["root"] ** 2 - 2) < 1e-5 and abs(scope["slope"] - 0.5 / 2**0.5) < 1e-4


def _run(schedule: str) -> tuple[str, int]:
    """The losses that the example prints, and the MiB that training took."""
    command = [sys.executable, str(ROOT / "examples" / "lstm_text.py"), "--schedule", schedule, *SIZES]
    line = subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT).stdout.strip()
    found = re.search(r"loss (\S+ -> \S+) in 2 steps.*, (\d+) MiB of it for training", line)
    assert found, line
    return found[1], int(found[2])


def test_the_example_trains_alike_in_less_resident_memory() -> None:
    (plain, most), (segments, less) = _run("none"), _run("sqrt")
    assert plain == segments
    # lax.scan keeps some 12 arrays of 16 x 64 floats at each of 6,000 steps: 290 MiB and more. What compiling took is
    # in neither figure.
    assert less < most / 2 and less < most - 200, (most, less)


def test_the_example_learns(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    import lstm_text

    monkeypatch.setitem(lstm_text.SCHEDULES, "slots", Slots(6))
    report, sizes = tmp_path / "report.json", "--steps=12 --length=120 --sequences=8 --width=32"
    lstm_text.main([*sizes.split(), "--budget=none", "--schedule=slots", f"--report={report}"])
    losses = json.loads(report.read_text())["losses"]
    assert losses[-1] < losses[0] - 0.5
