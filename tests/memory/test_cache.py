import json
import logging
import os
import pathlib
import subprocess
import sys
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxckpt
from jaxckpt.memory import cache
from jaxckpt.memory.report import measure

X = jax.ShapeDtypeStruct((256, 256), jnp.float32)
TARGETS = ["cpu", pytest.param("cuda:h100", marks=pytest.mark.cuda), pytest.param("tpu:v5e:2x2", marks=pytest.mark.tpu)]


def loss(x):
    for _ in range(6):
        x = jnp.sin(x @ x)
    return jnp.sum(x)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv(cache.FOLDER, str(tmp_path / "answers"))
    return tmp_path / "answers"


@pytest.mark.parametrize("target", TARGETS)
def test_the_same_program_is_compiled_once_and_its_report_is_whole(folder, compiles, target):
    first = measure(jax.grad(loss), X, target=target)
    again = measure(jax.grad(loss), X, target=target)
    assert len(compiles) == 1
    assert again == first
    np.testing.assert_array_equal(again.timeline().live_bytes, first.timeline().live_bytes)
    assert again.largest(3) == first.largest(3)


def test_names_decide_and_lines_and_callers_do_not(folder, compiles):
    def named(name):
        def function(x):
            with jax.named_scope(name):
                return jnp.sum(jnp.sin(x @ x) @ x)

        return function

    def elsewhere(name):
        return measure(named(name), X, target="cpu")

    reports = [measure(named("one"), X, target="cpu"), elsewhere("two"), elsewhere("one")]
    for name, report in zip(("one", "two", "one"), reports):
        assert any(f"/{name}/" in buffer.operation for buffer in report.largest(5))
    assert len(compiles) == 2


@pytest.fixture
def platform_folder(tmp_path, monkeypatch):
    """The folder that Linux and macOS name for caches."""
    monkeypatch.delenv(cache.FOLDER, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    return tmp_path / ("Library/Caches" if sys.platform == "darwin" else ".cache") / "jaxckpt"


def test_by_default_results_are_in_the_platform_s_folder(platform_folder, compiles):
    first = measure(loss, X, target="cpu")
    assert measure(loss, X, target="cpu") == first
    assert len(compiles) == 1 and len(list(platform_folder.iterdir())) == 1


def test_off_stores_nothing(platform_folder, monkeypatch, compiles):
    monkeypatch.setenv(cache.FOLDER, cache.OFF)
    measure(loss, X, target="cpu")
    measure(loss, X, target="cpu")
    monkeypatch.delenv(cache.FOLDER)
    measure(loss, X, target="cpu", cache=False)
    measure(loss, X, target="cpu", cache="off")
    assert len(compiles) == 4 and not pathlib.Path("off").exists() and not platform_folder.exists()


def chain(ws, x):
    for w in ws:
        x = jnp.tanh(x @ w)
    return jnp.sum(x)


CHAIN = [jax.ShapeDtypeStruct((64, 64), jnp.float32)] * 8, jax.ShapeDtypeStruct((2048, 64), jnp.float32)


@pytest.mark.parametrize(
    "ask",
    [
        lambda folder: measure(loss, X, target="cpu", cache=folder),
        lambda folder: jaxckpt.compare({"none": loss}, X, target="cpu", cache=folder),
        lambda folder: jaxckpt.plan(chain, *CHAIN, budget="60%", target="cpu", cache=folder),
        lambda folder: jaxckpt.frontier(
            chain, *CHAIN, budgets=["60%"], others={"all": jax.checkpoint(chain)}, target="cpu", cache=folder
        ),
        lambda folder: jaxckpt.autocheckpoint(chain, budget="60%", target="cpu", cache=folder).plan(*CHAIN),
    ],
)
def test_an_argument_names_the_folder(tmp_path, folder, compiler_runs, ask):
    ask(tmp_path / "mine")
    count = len(compiler_runs)
    assert count == len(list((tmp_path / "mine").glob("*.report"))) > 0 and not folder.exists()
    ask(str(tmp_path / "mine"))
    assert len(compiler_runs) == count


@pytest.mark.parametrize("wrong", ["", 5, object()])
def test_what_can_be_no_folder_is_refused(wrong):
    with pytest.raises(jaxckpt.ArgumentError, match="^cache must be a folder"):
        measure(loss, X, target="cpu", cache=wrong)


def test_a_full_folder_loses_what_was_not_used_for_longest(folder, monkeypatch):
    answer = cache.Answer({"peak_bytes": 1}, os.urandom(10_000))
    for age, name in enumerate("abc"):
        cache.store(folder / f"{name}.report", answer)
        os.utime(folder / f"{name}.report", (age, age))
    (folder / "not mine.txt").write_text("x" * 10**6)
    assert cache.load(folder / "a.report", ["peak_bytes"]) == answer  # used now
    monkeypatch.setattr(cache, "CACHE_BYTES", 35_000)
    cache.store(folder / "d.report", answer)
    assert {path.name for path in folder.iterdir()} == {"a.report", "c.report", "d.report", "not mine.txt"}
    monkeypatch.setattr(cache, "CACHE_BYTES", 5_000)
    cache.store(folder / "e.report", answer)
    assert {path.name for path in folder.iterdir()} == {"e.report", "not mine.txt"}, "what was just made stays"


def test_whatever_decides_the_answer_is_asked_for_anew(folder, compiles, monkeypatch):
    measure(loss, X, target="cpu")
    measure(jax.grad(loss), X, target="cpu")
    measure(loss, jax.ShapeDtypeStruct((128, 128), jnp.float32), target="cpu")
    measure(jax.jit(lambda x: x + 1, donate_argnums=0), X, target="cpu")
    measure(jax.jit(lambda x: x + 1), X, target="cpu")
    measure(loss, X, target="cpu", compiler_options={"xla_backend_optimization_level": 1})
    measure(jax.jit(loss, compiler_options={"xla_backend_optimization_level": 1}), X, target="cpu")
    measure(jax.jit(loss, compiler_options={"xla_backend_optimization_level": 2}), X, target="cpu")
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "--xla_tpu_enable_nothing=true")
    measure(loss, X, target="cpu")
    jax.config.update("jax_optimization_level", "O1")
    try:
        measure(loss, X, target="cpu")
    finally:
        jax.config.update("jax_optimization_level", "UNKNOWN")
    monkeypatch.setattr(cache, "_version", lambda package: "999")
    measure(loss, X, target="cpu")
    assert len(compiles) == len(list(folder.iterdir())) == 11


def test_names_that_change_places_make_another_program(folder, compiles):
    def named(first, second):
        def function(x):
            with jax.named_scope(first):
                y = jnp.sin(x @ x)
            with jax.named_scope(second):
                return jnp.sin(y @ y)

        return function

    for names in (("one", "two"), ("two", "one")):
        report = measure(named(*names), X, target="cpu")
        known = measure(named(*names), X, target="cpu", cache=False)
        assert [b.operation for b in report.largest(3)] == [b.operation for b in known.largest(3)]


@pytest.mark.tpu
def test_the_order_of_a_mesh_s_devices_decides_too(folder, compiles):
    devices = np.array(jaxckpt.Target("tpu:v5e:2x2").devices)
    for order in ([0, 1, 2, 3], [0, 2, 1, 3], [0, 1, 2, 3]):
        sharding = NamedSharding(Mesh(devices[order], ("x",)), P("x"))
        measure(loss, jax.ShapeDtypeStruct((256, 256), jnp.float32, sharding=sharding), target="tpu:v5e:2x2")
    assert len(compiles) == 2


def figures_edited(**changes):
    """Edits the figures of an entry and leaves the rest, the digest too, as it is."""

    def edit(content):
        digest, head, dump = content.split(b"\n", 2)
        stored = json.loads(head)
        return b"\n".join([digest, json.dumps(stored | {"figures": stored["figures"] | changes}).encode(), dump])

    return edit


DAMAGES = [
    lambda c: b"",
    lambda c: c[: len(c) // 2],
    lambda c: c[:-1],
    lambda c: b"{}\n",
    lambda c: c[::-1],
    lambda c: b"[" * 10**6,
    lambda c: b"\n" + b"[" * 10**6 + b"\n",
    lambda c: c.replace(b'"figures": {', b'"figures": [{', 1),
    lambda c: bytes([*c[:-9], c[-9] ^ 1, *c[-8:]]),
    figures_edited(peak_bytes=-5),
    figures_edited(peak_bytes=1.5, target=3),
    figures_edited(flops="many"),
]


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_answer_is_said_and_compiled_again(folder, compiles, caplog, damage):
    first = measure(loss, X, target="cpu")
    (file,) = folder.iterdir()
    file.write_bytes(damage(file.read_bytes()))
    with caplog.at_level(logging.WARNING, "jaxckpt"):
        assert measure(loss, X, target="cpu").peak_bytes == first.peak_bytes
    assert len(compiles) == 2 and str(file) in caplog.text
    measure(loss, X, target="cpu")
    assert len(compiles) == 2, "the damaged file is written over"


@pytest.mark.parametrize("kind", ["folder", "pipe", "device", "broken link"])
def test_what_is_no_file_in_an_answers_place_is_said_and_left_alone(folder, compiles, caplog, kind):
    first = measure(loss, X, target="cpu")
    (path,) = folder.iterdir()
    path.unlink()
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/null" if kind == "device" else folder / "no" / "file")
    before = path.lstat()
    with caplog.at_level(logging.WARNING, "jaxckpt"):
        assert measure(loss, X, target="cpu").peak_bytes == first.peak_bytes
    assert len(compiles) == 2 and "cannot store" in caplog.text
    assert (path.lstat().st_mode, path.lstat().st_ino) == (before.st_mode, before.st_ino)


@pytest.mark.parametrize("peak", [-5, float("nan"), [5], {"bytes": 5}, True])
def test_a_figure_that_can_be_none_is_no_answer_also_where_it_was_written_so(folder, compiles, caplog, peak):
    first = measure(loss, X, target="cpu")
    (path,) = folder.iterdir()
    cache.store(path, cache.Answer(first.to_json() | {"peak_bytes": peak}, None))
    with caplog.at_level(logging.WARNING, "jaxckpt"):
        assert measure(loss, X, target="cpu").peak_bytes == first.peak_bytes
    assert len(compiles) == 2 and str(path) in caplog.text


def test_a_file_that_vanishes_is_no_answer(folder, compiles, monkeypatch):
    measure(loss, X, target="cpu")
    read = cache.read_whole
    monkeypatch.setattr(cache, "read_whole", lambda path: path.unlink() or read(path))
    measure(loss, X, target="cpu")
    assert len(compiles) == 2 and len(list(folder.iterdir())) == 1


def test_writers_at_once_leave_one_whole_answer(folder, compiles):
    measure(loss, X, target="cpu")
    (path,) = folder.iterdir()
    answers = [cache.Answer({"peak_bytes": peak}, bytes([peak]) * 10**5) for peak in range(4)]
    threads = [
        threading.Thread(target=lambda answer=answer: [cache.store(path, answer) for _ in range(10)])
        for answer in answers
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert cache.load(path, ["peak_bytes"]) in answers
    assert list(folder.iterdir()) == [path]


@pytest.mark.parametrize("name", ["~no_such_user/answers", "/proc/no/answers", "/dev/null/answers", "x" * 5000])
def test_a_folder_that_can_be_none_is_said_and_costs_nothing_else(monkeypatch, caplog, compiles, name):
    monkeypatch.setenv(cache.FOLDER, name)
    with caplog.at_level(logging.WARNING, "jaxckpt"):
        assert measure(loss, X, target="cpu").peak_bytes > 0
    assert len(compiles) == 1 and any(record.levelname == "WARNING" for record in caplog.records)


def test_a_folder_of_a_name_that_is_too_long_is_said_in_short(caplog, compiles):
    with caplog.at_level(logging.WARNING, "jaxckpt"):
        assert measure(loss, X, target="cpu", cache="x" * 5000).peak_bytes > 0
    assert len(compiles) == 1 and "too long" in caplog.text and len(caplog.text) < 1000


def test_a_folder_that_cannot_be_written_is_said(tmp_path, monkeypatch, caplog):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv(cache.FOLDER, str(tmp_path / "file" / "answers"))
    with caplog.at_level(logging.WARNING, "jaxckpt"):
        assert measure(loss, X, target="cpu").peak_bytes > 0
    assert "cannot store" in caplog.text


PROGRAM = """
import jax, jax.numpy as jnp, jaxckpt
from jaxckpt.memory import report
count = []
for name in ("compiled_for", "_assign"):
    run = lambda *args, compile_=getattr(report, name): (count.append(args), compile_(*args))[1]
    setattr(report, name, run)
def loss(ws, x):
    for w in ws:
        x = jnp.tanh(x @ w)
    return jnp.sum(x)
args = [jnp.zeros((64, 64))] * 16, jnp.ones((4096, 64))
found = jaxckpt.plan(loss, *args, budget="60%", target="cpu")
print(len(count), found.measured_bytes, found.fingerprint)
"""


def test_a_second_process_plans_the_same_without_compiling(folder, tmp_path):
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    runs = [
        subprocess.run(
            [sys.executable, script], env=os.environ, capture_output=True, text=True, check=True
        ).stdout.split()
        for _ in range(2)
    ]
    assert int(runs[0][0]) >= 2 and int(runs[1][0]) == 0
    assert runs[0][1:] == runs[1][1:]
