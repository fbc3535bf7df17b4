"""Solvers go by names; unknown ones are told what there is."""

import pytest

from jaxckpt import _errors
from jaxckpt.planner.chain import Chain, Segment
from jaxckpt.planner.solvers import SOLVERS, solver
from jaxckpt.planner.solvers.milp import Milp
from jaxckpt.planner.solvers.optimal import Optimal, Table


def test_the_names():
    assert set(SOLVERS) == {"chain", "milp", "greedy", "sqrt", "exhaustive"}
    assert all(solver(name).name == name for name in SOLVERS)
    assert isinstance(solver("chain"), Optimal) and solver("chain") is not solver("chain")


@pytest.mark.parametrize(("name", "hint"), [("chian", "Did you mean 'chain'?"), ("xyz", "There are 'chain', 'milp'")])
def test_an_unknown_name_is_told_the_nearest(name, hint):
    with pytest.raises(_errors.ArgumentError) as error:
        solver(name)
    assert f"solver must be the name of a solver; got {name!r}." in str(error.value)
    assert hint in str(error.value)


@pytest.mark.parametrize("given", [3, None, Milp, lambda chain, limit: ()])
def test_what_is_no_solver_is_told_what_one_is(given):
    with pytest.raises(
        _errors.ArgumentError, match=r"an instance of a subclass of jaxckpt.planner.solvers.Solver; got"
    ):
        solver(given)


def test_an_instance_is_taken_as_it_is():
    milp = Milp()
    assert solver(milp) is milp


@pytest.mark.parametrize("seconds", [0, -1, float("inf"), float("nan"), "3", True, None])
def test_the_integer_programme_is_given_seconds(seconds):
    with pytest.raises(_errors.ArgumentError, match="seconds must be a number of seconds above 0; got"):
        Milp(seconds=seconds)


def test_a_stage_without_candidates_is_named():
    chain = Chain(1, {(0, 1): Segment(1.0, 1, 1, ())})
    with pytest.raises(_errors.ArgumentError, match="chain must be .* candidate; got none for stage 0"):
        Table(chain)
