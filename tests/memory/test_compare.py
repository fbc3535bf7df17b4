"""compare: the figures are those of measure and count_flops, the front is the front, and what is wrong is said."""

import functools
import json

import jax
import jax.numpy as jnp
import pytest

import jaxckpt
from jaxckpt import ArgumentError, NotDifferentiableError
from jaxckpt.memory.compare import pareto_front
from tests.helpers import chain_in_segments

WS = [jax.ShapeDtypeStruct((64, 64), jnp.float32)] * 12
X = jax.ShapeDtypeStruct((4096, 64), jnp.float32)  # 1 MiB an activation, 16 KiB a matrix


VARIANTS = {
    "none": chain_in_segments(lambda f: f),
    "three": chain_in_segments(jaxckpt.checkpoint, 3),
    "whole": jaxckpt.checkpoint(chain_in_segments(lambda f: f)),
    "dots": chain_in_segments(functools.partial(jaxckpt.checkpoint, policy="dots"), 3),
}


@functools.cache
def comparison(target="cpu"):
    return jaxckpt.compare(VARIANTS, WS, X, target=target)


@pytest.mark.parametrize("target", ["cpu", pytest.param("cuda:h100", marks=pytest.mark.cuda)])
def test_figures_are_those_of_measure_and_count_flops(target):
    table = comparison(target)
    for row in table:
        step = jax.value_and_grad(VARIANTS[row.name])
        if row.name in ("none", "three"):
            assert row.peak_bytes == jaxckpt.measure(step, WS, X, target=target).peak_bytes
        assert row.flops == jaxckpt.count_flops(step, WS, X)
        assert row.recompute == pytest.approx(row.flops / min(r.flops for r in table) - 1)
        assert row.estimate_error == pytest.approx(row.estimate_bytes / row.peak_bytes - 1)


@pytest.mark.parametrize("target", ["cpu", pytest.param("cuda:h100", marks=pytest.mark.cuda)])
def test_segments_save_memory_and_cost_matmuls_and_one_checkpoint_saves_nothing(target):
    table = comparison(target)
    assert table["three"].peak_bytes < 0.75 * table["none"].peak_bytes
    assert table["whole"].peak_bytes > 0.95 * table["none"].peak_bytes
    matmul = 2 * 4096 * 64 * 64
    assert table["three"].recompute_flops == pytest.approx(12 * matmul, rel=0.35)
    assert table["dots"].recompute_flops < 0.5 * matmul
    assert {row.name for row in table.pareto()} >= {"none", "three"} - {"none" if table["dots"].on_front else ""}
    assert not table["whole"].on_front


def test_the_front_is_what_nothing_beats():
    assert pareto_front([(1, 3), (2, 2), (3, 1), (2, 3), (3, 3)]) == [True, True, True, False, False]


def test_a_model_of_parameters_says_that_checkpointing_can_do_little():
    wide = lambda ws, x: chain_in_segments(lambda f: f)(ws, x)
    few = jax.ShapeDtypeStruct((8, 64), jnp.float32)
    table = jaxckpt.compare({"none": wide}, WS, few, target="cpu")
    assert "checkpointing can save at most" in table.advice()
    assert "%" in table.advice()
    assert comparison().advice() == ""


def test_steps_are_timed_on_real_arrays():
    args = jax.tree.map(lambda leaf: jnp.full(leaf.shape, 0.01, leaf.dtype), (WS[:4], X))
    table = jaxckpt.compare({"none": VARIANTS["none"], "three": VARIANTS["three"]}, *args, time=True)
    assert table.timed_on
    assert table["none"].time_ratio == 1.0
    assert table["three"].seconds > 0
    assert 0.5 < table["three"].time_ratio < 4


def test_it_prints_and_goes_to_json_and_files(tmp_path):
    table = comparison()
    text = str(table)
    for name in VARIANTS:
        assert name in text
    values = json.loads(json.dumps(table.to_json()))
    assert [v["name"] for v in values["variants"]] == list(VARIANTS)
    assert values["variants"][1]["peak_bytes"] == table["three"].peak_bytes
    table.plot(tmp_path / "front.png")
    assert (tmp_path / "front.png").read_bytes().startswith(b"\x89PNG")
    table.to_html(tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert all(name in page for name in VARIANTS)
    assert "http://" not in page.replace("http://www.w3.org", "") and "https://" not in page.replace(
        "https://www.w3.org", ""
    )
    assert "three" in table._repr_html_()


def test_progress_is_told():
    seen = []
    jaxckpt.compare({"none": VARIANTS["none"]}, WS[:2], X, target="cpu", progress=lambda *told: seen.append(told))
    done = [d for d, _, _ in seen]
    assert done == sorted(done) and done[-1] == seen[-1][1]


@pytest.mark.parametrize(
    ("variants", "error", "message"),
    [
        ({}, ArgumentError, "variants must be"),
        ([lambda: 0], ArgumentError, "variants must be"),
        ({"a": 3}, ArgumentError, "must be"),
        ({"a": lambda ws, x: jnp.int32(3)}, NotDifferentiableError, "a"),
        ({"a": lambda ws, x: x}, NotDifferentiableError, "a"),
    ],
)
def test_variants_that_are_none(variants, error, message):
    with pytest.raises(error, match=message):
        jaxckpt.compare(variants, WS, X, target="cpu")


def test_an_unknown_row_or_target_is_named():
    with pytest.raises(ArgumentError, match="Did you mean 'three'"):
        comparison()["thre"]
    with pytest.raises(jaxckpt.UnknownTargetError, match="cuda:h100"):
        jaxckpt.compare(VARIANTS, WS, X, target="cuda:h10")


@pytest.mark.tpu
def test_a_variant_that_does_not_fit_is_named_and_the_others_have_their_rows():
    x = jax.ShapeDtypeStruct((2**19, 1024), jnp.float32)  # 2 GiB an activation; a TPU v5e has 16
    ws = [jax.ShapeDtypeStruct((1024, 1024), jnp.float32)] * 12
    table = jaxckpt.compare({"none": VARIANTS["none"], "three": VARIANTS["three"]}, ws, x, target="tpu:v5e:2x2")
    assert [row.name for row in table] == ["three"]
    ((name, why),) = table.left_out
    assert name == "none" and "does not fit the 15.8 GiB of tpu:v5e:2x2" in why
    assert "none does not fit" in str(table)
    assert table.to_json()["left_out"][0]["name"] == "none"
    with pytest.raises(jaxckpt.DoesNotFitError):
        jaxckpt.compare({"none": VARIANTS["none"]}, ws, x, target="tpu:v5e:2x2")
