"""The comparison with other libraries: the same models, memory that falls, recomputation that is counted.

Peers that are not installed are skipped; PyTorch's rows are left to the benchmark.
"""

from __future__ import annotations

import functools
import json
import pathlib
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.peers import __main__ as main
from benchmarks.peers import count, report, rows, tasks
from benchmarks.peers.frameworks import PACKAGES
from benchmarks.peers.rows import Row
from benchmarks.peers.variants import lines_written

ROOT = pathlib.Path(__file__).parents[2]
MODULES = {"linen": "flax", "nnx": "flax", "equinox": "equinox", "haiku": "haiku", "keras": "keras"}
SMALL = {
    "chain": functools.partial(tasks.chain, layers=4, rows=512, width=8),
    "LSTM": functools.partial(tasks.lstm, steps=16, batch=64, width=8),
    "GPT": functools.partial(tasks.gpt, layers=2, batch=2, tokens=32, width=16),
    "ResNet": functools.partial(tasks.resnet, batch=4, pixels=8, width=4, stages=(1, 1)),
}
CHECKPOINTS = [
    ("jax", "chain", "jax.checkpoint, nothing"),
    ("jax", "LSTM", "jax.checkpoint, nothing"),
    ("jaxckpt", "chain", "jaxckpt.checkpoint"),
    ("jaxckpt", "chain", "jaxckpt.checkpoint_sequential, sqrt"),
    ("jaxckpt", "chain", "jaxckpt.plan, peak of jax.checkpoint"),
    ("jaxckpt", "LSTM", "jaxckpt.scan, sqrt"),
    ("jaxckpt", "LSTM", "jaxckpt.scan, Slots(6)"),
    ("linen", "chain", "nn.remat"),
    ("linen", "LSTM", "nn.remat"),
    ("nnx", "chain", "nnx.remat"),
    ("nnx", "LSTM", "nnx.remat"),
    ("equinox", "chain", "eqx.filter_checkpoint"),
    ("equinox", "LSTM", "equinox's checkpointed scan, 6"),
    ("haiku", "chain", "hk.remat"),
    ("keras", "chain", "keras.RematScope, full"),
]


@functools.cache
def built(name: str, task: str, variant: str):
    if name in MODULES:
        pytest.importorskip(MODULES[name])
    module = rows.framework(name)
    return module.build(SMALL[task](), module.VARIANTS[variant])


@pytest.mark.once
@pytest.mark.parametrize(("name", "task", "variant"), CHECKPOINTS)
def test_a_checkpoint_takes_less_memory_and_more_matmuls_for_the_same_gradient(name, task, variant):
    plain, made = built(name, task, "plain"), built(name, task, variant)
    assert made.bytes < 0.9 * plain.bytes
    assert made.matmuls > plain.matmuls > 0
    np.testing.assert_allclose((made.loss, made.norm), (plain.loss, plain.norm), rtol=1e-4)


@pytest.mark.once
@pytest.mark.parametrize("task", sorted(SMALL))
def test_a_policy_that_saves_matmuls_runs_none_again(task):
    assert built("jax", task, "jax.checkpoint, dots").matmuls == built("jax", task, "plain").matmuls


@pytest.mark.once
@pytest.mark.parametrize("name", sorted(set(MODULES) - {"haiku", "keras"}))
def test_the_models_of_all_frameworks_are_one_model(name):
    other, mine = built(name, "chain", "plain"), built("jax", "chain", "plain")
    assert other.matmuls == mine.matmuls == mine.compiled_matmuls == 6 * 4
    np.testing.assert_allclose((other.loss, other.norm), (mine.loss, mine.norm), rtol=1e-5)


def test_matmuls_are_counted_as_they_run():
    x = jnp.eye(3)
    body = lambda carry: (carry[0] + 1, carry[1] @ x)
    loop = lambda x, n: jax.lax.while_loop(lambda carry: carry[0] < n, body, (0, x))[1]
    scanned = lambda x: jax.lax.scan(lambda c, n: (loop(c, n), c), x, jnp.arange(4))
    either = lambda x, n: jax.lax.cond(n > 0, lambda: x @ x @ x, lambda: x @ x)
    assert [count.executed(loop, x, n) for n in (0, 1, 7)] == [0, 1, 7]
    assert count.executed(scanned, x) == 0 + 1 + 2 + 3
    assert [count.executed(jax.jit(either), x, n) for n in (0, 1)] == [1, 2]
    assert count.executed(lambda x: jax.lax.scan(lambda c, _: (c @ c @ c, None), x, None, 5)[0] @ x, x) == 11


def test_a_compiled_program_with_loops_is_not_counted():
    x = jnp.ones((64, 64))
    text = lambda fun: jax.jit(fun).lower(x).compile().as_text()
    assert count.compiled(text(lambda x: x @ jnp.tanh(x @ x))) == 2
    assert count.compiled(text(lambda x: jax.lax.fori_loop(0, 9, lambda i, y: y @ x, x))) is None


def test_lines_are_those_that_the_plain_source_does_not_have():
    def plain(fun):
        """Two lines."""
        x = fun
        return x

    def made(fun, more):
        """Four lines, of which two are new."""
        fun = abs(fun)
        if more:
            x = fun
        return x

    assert lines_written(plain, plain) == []
    assert lines_written(made, plain) == ["fun = abs(fun)", "if more:"]
    assert lines_written(functools.partial(made, more=True), plain) == lines_written(made, plain)


@pytest.mark.parametrize("name", ["jax", "jaxckpt"])
def test_each_variant_has_lines_for_what_it_can_do(name):
    module = rows.framework(name)
    for variant_name, variant in module.VARIANTS.items():
        for loop in (False, True):
            if variant.maker(loop) is not None and variant_name != "plain":
                assert lines_written(variant.maker(loop), module.VARIANTS["plain"].maker(loop))


def test_the_readme_has_the_table_of_the_results():
    saved = json.loads((ROOT / "benchmarks/results/peers.json").read_text())["results"]
    assert report.short(report.ordered(saved)) in (ROOT / "README.md").read_text()
    assert rows.disagreements(report.ordered(saved)) == []


ROW = Row("jax", "chain", "plain", bytes=100, share=1.0, matmuls=6, time=1.0, loss=2.0, norm=3.0)


def test_models_that_differ_are_found():
    same = replace(ROW, framework="torch", norm=3.0001)
    assert rows.disagreements([ROW, same]) == []
    assert "off by" in rows.disagreements([ROW, replace(ROW, framework="torch", loss=2.5)])[0]
    assert "7 matmuls for 6" in rows.disagreements([ROW, replace(ROW, framework="torch", matmuls=7)])[0]
    assert rows.disagreements([ROW, replace(ROW, variant="checkpoint", matmuls=7)]) == []


def test_a_variant_that_fails_is_a_row_with_its_error(monkeypatch):
    module = rows.framework("jax")

    def fails(task, variant):
        raise ValueError("out of luck")

    monkeypatch.setattr(module, "build", fails)
    found = list(rows.rows_of("jax", SMALL["chain"]()))
    assert len(found) == len(module.VARIANTS)
    assert {row.error for row in found} == {"ValueError: out of luck"}


def test_a_process_that_ends_early_is_a_row_for_each_model_that_it_has_not_finished(monkeypatch):
    def child(*arguments):
        yield vars(ROW) | {"lines": ["one line"]}
        yield ["chain"]
        yield vars(ROW) | {"task": "GPT", "lines": []}
        raise RuntimeError("the process ended with -9")

    monkeypatch.setattr(main, "child", child)
    found = list(main.measure("jax", ["chain", "GPT", "LSTM"]))
    assert found[0] == replace(ROW, lines=("one line",))
    assert [(row.task, row.error) for row in found[2:]] == [
        (task, "the process ended with -9") for task in ("GPT", "LSTM")
    ]


def test_the_report_names_errors_and_frameworks_that_are_not_installed():
    failed = replace(ROW, framework="keras", error="ValueError: out of luck")
    data = {
        "rows": [vars(ROW) | {"lines": []}, vars(failed) | {"lines": []}],
        "versions": {"jax": "1.2"},
        "resident": {"jax, chain, plain": 110},
        "absent": {"haiku": "dm-haiku"},
    }
    text = report.text("What?\n\nHow each own.\n\nAbout.", data)
    assert "- keras, plain (chain): ValueError: out of luck" in text
    assert "Not installed, so left out: haiku (dm-haiku)." in text
    assert "+10%" in text
    assert set(report.COLOURS) == set(PACKAGES)
