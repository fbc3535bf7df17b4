"""The pages for people who train: their code runs from top to bottom, and prints what they show."""

from __future__ import annotations

import importlib.util
import json
import os
import pathlib
import re
import socket
import subprocess
import sys

import pytest

from tests.pages import notebooks
from tests.pages.blocks import Block, blocks_of, differences, run

ROOT = pathlib.Path(__file__).parents[2]
HOWTO = ROOT / "docs" / "howto"
PAINS = ROOT / "docs" / "pains.md"
NEEDS = {"haiku": "haiku", "keras": "keras"}
"""Pages whose framework the extra `test` does not install."""
OWN = {"devices", "hosts", "keras"}
"""Pages that need a process of their own: more devices, several processes, or a variable of the environment."""
PAGES = sorted(page.stem for page in HOWTO.glob("*.md") if page.stem != "index")

pytestmark = pytest.mark.usefixtures("shared_answers")


@pytest.mark.parametrize("name", [name for name in PAGES if name not in OWN])
def test_the_pages_code_runs_and_prints_what_it_shows(name, tmp_path, monkeypatch):
    _need(name)
    monkeypatch.chdir(tmp_path)
    assert run(HOWTO / f"{name}.md")


@pytest.mark.cuda
def test_the_ten_pains_have_answers_that_measure(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert len(re.findall(r"^## \d+\. ", PAINS.read_text(), re.MULTILINE)) == 10
    assert run(PAINS)["plan"].regions


def test_the_page_for_those_who_come_from_elsewhere_runs():
    run(ROOT / "docs" / "coming_from.md")


@pytest.mark.parametrize("name", sorted(OWN - {"hosts"}))
def test_the_pages_code_runs_in_a_process_of_its_own(name, tmp_path):
    _need(name)
    program = f"import pathlib; from tests.pages.blocks import run; run(pathlib.Path({str(HOWTO / name)!r} + '.md'))"
    _python(tmp_path, "-c", program)


def test_two_processes_load_one_plan_and_train_alike(tmp_path):
    files = {re.match(r"# (\w+\.py)\n", block.code)[1]: block.code for block in blocks_of(HOWTO / "hosts.md")}
    assert set(files) == {"plan_ahead.py", "job.py", "train.py"}
    for name, code in files.items():
        (tmp_path / name).write_text(code)
    planned = _python(tmp_path, "plan_ahead.py")
    before, after = (float(figure) for figure in re.findall(r"([\d.]+) MiB", planned))
    assert after <= 0.7 * before
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    started = [_start(tmp_path, "train.py", str(process), port) for process in range(2)]
    try:
        shown = [process.communicate(timeout=300) for process in started]
    finally:
        for process in started:
            process.kill()
    assert [process.returncode for process in started] == [0, 0], [errors[-2000:] for _, errors in shown]
    found = [re.search(r"process (\d) of 2: (\d+) regions, loss ([\d.]+)", out) for out, _ in shown]
    assert [match[1] for match in found] == ["0", "1"] and int(found[0][2]) > 0
    assert found[0].groups()[1:] == found[1].groups()[1:]


@pytest.mark.parametrize("page", notebooks.PAGES, ids=lambda page: page.stem)
def test_a_notebook_runs_and_prints_what_is_stored(page):
    notebook = json.loads(page.read_text())
    cells, slack = notebooks.code_cells(notebook), notebooks.slack(notebook)
    assert len(cells) >= 4 and any(notebooks.stored(cell) for cell in cells)
    for cell, text in zip(cells, notebooks.printed(page), strict=True):
        assert differences(text, notebooks.stored(cell), slack) == [], text


def test_a_notebook_whose_stored_output_is_stale_is_found(tmp_path):
    page = tmp_path / "page.ipynb"
    cell = {"cell_type": "code", "metadata": {}, "source": ["print(6 * 7, 'MiB')"], "outputs": [], "execution_count": 1}
    page.write_text(json.dumps({"cells": [cell], "metadata": {}, "nbformat": 4, "nbformat_minor": 5}))
    assert differences(next(notebooks.printed(page)), notebooks.stored(cell))
    notebooks.store(page)
    (cell,) = notebooks.code_cells(json.loads(page.read_text()))
    assert notebooks.stored(cell) == "42 MiB\n" == next(notebooks.printed(page))


def test_every_page_has_code():
    assert {"linen", "nnx", "training", *OWN} <= set(PAGES)
    assert all(blocks_of(HOWTO / f"{name}.md") for name in PAGES)


def test_a_page_that_raises_or_prints_other_words_fails(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("```python\nx = 2\n```\n\n```python\nprint(x, 'bytes')\n```\n\n```text\n2 bytes\n```\n")
    assert [block.shown for block in blocks_of(page)] == [None, "2 bytes\n"]
    assert run(page)["x"] == 2
    for shown in ("2 Bytes", "3 bytes", "2 bytes\nmore"):
        page.write_text(f"```python\nprint(2, 'bytes')\n```\n\n```text\n{shown}\n```\n")
        with pytest.raises(AssertionError):
            run(page)
    page.write_text("```python\nassert False\n```\n")
    with pytest.raises(AssertionError):
        run(page)


def test_numbers_may_differ_by_the_slack_and_words_not_at_all():
    assert differences("12.0 MiB kept\n", "12.4 MiB kept  \n\n") == []
    assert differences("12.0 MiB kept", "13.0 MiB kept") and differences("12.0 MiB", "12.0 KiB")
    assert Block("", None).shown is None and differences("1,000", "1,001") == []


def _need(name: str) -> None:
    package = NEEDS.get(name)
    if package and importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed: docs/howto/{name}.md is not run")


def _start(folder: pathlib.Path, *command: str) -> subprocess.Popen:
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join([str(ROOT), str(folder)])}
    pipe = subprocess.PIPE
    return subprocess.Popen(
        [sys.executable, *command], cwd=folder, env=environment, stdout=pipe, stderr=pipe, text=True
    )


def _python(folder: pathlib.Path, *command: str) -> str:
    """Runs Python in a folder, and returns what it prints."""
    process = _start(folder, *command)
    out, errors = process.communicate(timeout=500)
    assert process.returncode == 0, errors[-3000:]
    return out
