"""Some random programs in the suite, and the fuzzer itself: it is the same every time, it finds what is broken, and it
cuts programs down.
"""

from __future__ import annotations

import dataclasses
import itertools

import jax
import pytest

import jaxckpt
from jaxckpt import policies
from jaxckpt.transforms import checkpoint as checkpoints
from tests.fuzz.cases import Failed, Invalid, kind_at, make
from tests.fuzz.checks import check
from tests.fuzz.programs import statements_of
from tests.fuzz.shrink import shrink

SEED = 7


def cases(kind, start, count):
    indices = (index for index in itertools.count() if kind_at(SEED, index) == kind)
    return [make(SEED, index) for index in itertools.islice(indices, start, start + count)]


@pytest.mark.parametrize(
    ("kind", "start", "count"),
    [
        ("checkpoint", 0, 6),
        ("checkpoint", 6, 6),
        ("scan", 0, 6),
        ("scan", 6, 6),
        ("plan", 0, 3),
        ("plan", 3, 3),
        ("auto", 0, 2),
    ],
)
def test_what_is_promised_holds_for_random_programs(kind, start, count):
    for case in cases(kind, start, count):
        try:
            check(case)
        except Invalid as error:
            raise AssertionError(f"JAX refuses the program of {case.command}: {error}\n{case.source()}") from error
        except Exception as error:
            raise AssertionError(f"{case.command}\n{case.source()}") from error


def test_a_program_is_determined_by_its_seed_and_index():
    first = [make(3, index).source() for index in range(12)]
    jax.clear_caches()
    assert [make(3, index).source() for index in range(12)] == first
    assert len(set(first)) == 12


def first_failure(kind, start, count):
    for case in cases(kind, start, count):
        try:
            check(case)
        except Failed as error:
            return case, error.what
    return None, ""


def test_a_policy_that_keeps_what_it_should_drop_is_found(monkeypatch):
    emit = checkpoints.emit

    def too_much(graph, regions, prevent_cse=True):
        every = policies.Policy([(policies.op("*"), "save")]).decide(graph)
        return emit(graph, tuple(dataclasses.replace(region, actions=every) for region in regions), prevent_cse)

    monkeypatch.setattr(checkpoints, "emit", too_much)
    assert first_failure("checkpoint", 0, 12)[1] == "nothing is kept that the policy drops"


def test_a_checkpoint_that_keeps_nothing_of_what_it_should_is_found(monkeypatch):
    emit = checkpoints.emit

    def too_little(graph, regions, prevent_cse=True):
        return emit(graph, tuple(dataclasses.replace(region, actions={}) for region in regions), prevent_cse)

    monkeypatch.setattr(checkpoints, "emit", too_little)
    assert first_failure("checkpoint", 14, 3)[1] == "nothing is computed again that is kept"


def test_wrong_gradients_are_found_and_the_program_is_cut_down(monkeypatch):
    real = jaxckpt.checkpoint
    wrong = lambda fun, **options: lambda *args: jax.tree.map(jax.lax.stop_gradient, real(fun, **options)(*args))
    monkeypatch.setattr(jaxckpt, "checkpoint", wrong)
    case, what = first_failure("checkpoint", 0, 12)
    assert what == "results and gradients under a checkpoint are those without"

    def fails(other):
        try:
            check(other)
        except Failed as error:
            return error.what == what
        except Exception:
            return False
        return False

    small = shrink(case, fails, seconds=10)
    assert fails(small)
    assert len(list(statements_of(small.program.fun))) <= 2 < len(case.program)


def test_jaxckpts_own_errors_are_failures_too(monkeypatch):
    monkeypatch.setattr(jaxckpt, "checkpoint", lambda fun, **options: lambda *args: [][0])
    with pytest.raises(IndexError):
        check(cases("checkpoint", 0, 1)[0])
