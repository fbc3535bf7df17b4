"""Solvers go by names; unknown ones are told what there is."""

import pytest

from jaxckpt import _errors
from jaxckpt.planner.chain import Chain, Span
from jaxckpt.planner.solvers import SOLVERS, solver
from jaxckpt.planner.solvers.milp import STAGES, milp
from jaxckpt.planner.solvers.optimal import Table, optimal
from tests.planner.solvers.chains import random_chain


def test_the_names():
    assert set(SOLVERS) == {"chain", "milp", "greedy", "sqrt", "exhaustive"}
    assert solver("chain") is optimal


@pytest.mark.parametrize(
    ("name", "hint"), [("chian", "Did you mean 'chain'?"), ("xyz", "There are 'chain', 'milp'"), (3, "There are")]
)
def test_an_unknown_name_is_told_the_nearest(name, hint):
    with pytest.raises(_errors.ArgumentError) as error:
        solver(name)
    assert f"solver must be the name of a solver; got {name!r}." in str(error.value)
    assert hint in str(error.value)


def test_the_integer_programme_refuses_long_chains():
    with pytest.raises(_errors.ArgumentError, match=rf"at most {STAGES} stages.*got {STAGES + 1}.*Use 'chain'"):
        milp(random_chain(0, STAGES + 1), 10**6)


def test_a_stage_without_options_is_named():
    chain = Chain(1, {(0, 1): Span(1.0, 1, 1, ())})
    with pytest.raises(_errors.ArgumentError, match="chain must be .* option; got 'none for stage 0'"):
        Table(chain)
