"""Every error of the tree is pickled and copied with its text and its figures, and the figures are the text's."""

import copy
import inspect
import pickle
import re

import jax.numpy as jnp
import pytest

import jaxckpt
from jaxckpt import InfeasibleBudgetError, _errors

WS, X = [jnp.ones((64, 64))] * 6, jnp.ones((4096, 64))


def loss(ws, x):
    for w in ws:
        x = jnp.tanh(x @ w)
    return jnp.sum(x)


MADE = {
    _errors.ArgumentError: lambda: _errors.ArgumentError("budget", "positive", [0], "Give more."),
    _errors.DoesNotFitError: lambda: _errors.DoesNotFitError("tpu:v5e:2x2", 2**40, 2**34, "RESOURCE_EXHAUSTED"),
    _errors.InfeasibleBudgetError: lambda: InfeasibleBudgetError("No.", least_bytes=7, budget_bytes=3, stretch="ops"),
}
TREE = [c for c in vars(_errors).values() if inspect.isclass(c) and issubclass(c, Exception)]


def made(kind):
    """Returns an error of a class; where the table has none, with a text for each argument that it must have."""
    own = inspect.signature(kind.__init__).parameters.values() if "__init__" in vars(kind) else ()
    by_name = {p.name: p.name for p in own if p.kind is p.KEYWORD_ONLY and p.default is p.empty}
    by_place = [p.name for p in own if p.kind is p.POSITIONAL_OR_KEYWORD and p.default is p.empty and p.name != "self"]
    error = MADE.get(kind, lambda: kind(*(by_place or ["what it says"]), **by_name))()
    error.add_note("a note")
    return error


def pickled(error):
    return pickle.loads(pickle.dumps(error))


@pytest.mark.parametrize("again", [copy.copy, copy.deepcopy, pickled])
@pytest.mark.parametrize("kind", TREE, ids=lambda kind: kind.__name__)
def test_an_error_is_pickled_and_copied(kind, again):
    error = made(kind)
    other = again(error)
    assert type(other) is kind and str(other) == str(error) != "" and other.args == error.args
    assert vars(other) == vars(error) and other.__notes__ == ["a note"]
    other.add_note("of the copy alone")
    assert error.__notes__ == ["a note"]


def test_an_error_about_what_cannot_be_pickled_is_pickled():
    error = _errors.ArgumentError("policy", "a policy", lambda: None)
    other = pickled(error)
    assert str(other) == str(error) and other.got == repr(error.got) and other.rule == "a policy"
    assert copy.copy(error).got is error.got


def test_an_error_of_a_subclass_with_arguments_of_its_own_is_pickled():
    other = pickled(Stubborn(1, 2, 3))
    assert type(other) is Stubborn and other.sum == 6 and str(other) == "the sum is 6"


class Stubborn(jaxckpt.JaxckptError):
    def __init__(self, a, b, c):
        self.sum = a + b + c
        super().__init__(f"the sum is {self.sum}")


# ---------------------------------------------------------------------------------------------------------- the figures


def bytes_in(error):
    return {int(count) for count in re.findall(r"(\d+) bytes", str(error))}


@pytest.mark.parametrize("verify", [pytest.param(True, marks=pytest.mark.compile), False])
def test_an_infeasible_plan_carries_its_figures(verify):
    limit = X.nbytes * 2
    with pytest.raises(InfeasibleBudgetError) as caught:
        jaxckpt.plan(loss, WS, X, budget=limit, target="cpu", verify=verify)
    error = caught.value
    assert bytes_in(error) == {error.least_bytes, error.budget_bytes} and error.budget_bytes == limit
    assert error.stretch in str(error) and re.search(r"test_errors\.py:\d+", error.stretch)
    fits = jaxckpt.plan(loss, WS, X, budget=error.least_bytes, target="cpu", verify=verify)
    assert (fits.measured_bytes if verify else fits.predicted.peak_bytes) <= error.least_bytes


def test_a_budget_below_the_arguments_carries_theirs():
    with pytest.raises(InfeasibleBudgetError, match="arguments alone") as caught:
        jaxckpt.plan(loss, WS, X, budget=1, target="cpu", verify=False)
    size = sum(w.nbytes for w in WS) + X.nbytes
    assert (caught.value.least_bytes, caught.value.budget_bytes, caught.value.stretch) == (size, 1, None)
    assert size in bytes_in(caught.value)


def test_autocheckpoint_raises_the_same_figures():
    with pytest.raises(InfeasibleBudgetError) as expected:
        jaxckpt.plan(loss, WS, X, budget=X.nbytes * 2, target="cpu", verify=False)
    with pytest.raises(InfeasibleBudgetError) as caught:
        jaxckpt.autocheckpoint(loss, budget=X.nbytes * 2, target="cpu", verify=False)(WS, X)
    assert vars(caught.value) == vars(expected.value) and caught.value.least_bytes is not None


def test_a_frontier_has_the_figures_of_budgets_that_nothing_fits():
    point, fits = jaxckpt.frontier(loss, WS, X, budgets=(X.nbytes * 2, "90%"), target="cpu", verify=False).points
    assert point.plan is None and f"{point.least_bytes} bytes" in point.why and point.stretch in point.why
    assert (fits.least_bytes, fits.stretch) == (None, None) and fits.plan is not None


def test_a_scan_s_error_carries_its_figures():
    scan = lambda budget: jaxckpt.scan(lambda c, x: (jnp.tanh(c + x), c), X[0], X, budget=budget)
    with pytest.raises(InfeasibleBudgetError) as caught:
        scan(1)
    error = caught.value
    assert bytes_in(error) == {error.least_bytes, 1} and (error.budget_bytes, error.stretch) == (1, None)
    scan(error.least_bytes)
    with pytest.raises(InfeasibleBudgetError):
        scan(error.least_bytes - 1)
