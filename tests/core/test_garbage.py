"""Garbage is collected seldom while plans are made, and as before afterwards."""

from __future__ import annotations

import gc

import jax.numpy as jnp
import pytest

import jaxckpt
from jaxckpt.core import garbage


@pytest.fixture(autouse=True)
def often():
    before = gc.get_threshold()
    gc.set_threshold(700, 10, 10)
    yield
    gc.set_threshold(*before)


@pytest.mark.parametrize("own", [(0, 5, 5), (200_000, 5, 5), (700, 10, 10)], ids=str)
def test_what_the_program_has_set_comes_back(own):
    gc.set_threshold(*own)
    with pytest.raises(KeyError), garbage.seldom():
        assert gc.get_threshold()[0] == (garbage.SELDOM if own[0] == 700 else own[0])
        with garbage.seldom():
            pass
        assert gc.get_threshold()[0] == (garbage.SELDOM if own[0] == 700 else own[0])
        raise KeyError
    assert gc.get_threshold() == own


def test_a_plan_is_made_so():
    seen = []
    jaxckpt.plan(
        lambda w, x: jnp.sum(jnp.tanh(jnp.tanh(x @ w) @ w)),
        jnp.ones((8, 8)),
        jnp.ones((4, 8)),
        budget=10**6,
        verify=False,
        progress=lambda *_: seen.append(gc.get_threshold()[0]),
    )
    assert garbage.SELDOM in seen and gc.get_threshold() == (700, 10, 10)
