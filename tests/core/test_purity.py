"""Side effects on Python objects, which a function that is traced apart from its calls would lose, are refused by
name.
"""

import jax
import jax.numpy as jnp
import pytest

import jaxckpt
from jaxckpt import EffectsError
from tests.helpers import assert_trees_close

W, X = jnp.eye(8), jnp.ones((64, 8))


class Cache:
    value = None


cache, history = Cache(), []


def chain(w, x):
    for _ in range(4):
        x = jnp.tanh(x @ w)
    return x


def sets_an_attribute(w, x):
    cache.value = jnp.sum(chain(w, x))
    return cache.value


def appends(w, x):
    history.append(chain(w, x))
    return jnp.sum(history[-1])


def changes_an_argument(w, x):
    x["new"] = chain(w, x["x"])
    return jnp.sum(x["new"])


def takes_a_ref(w, ref):
    return jnp.sum(chain(w, ref[...]))


def works_on_a_ref(w, x):
    ref = jax.new_ref(jnp.zeros(()))
    ref[...] += jnp.sum(chain(w, x))
    return ref[...]


def counter():
    last = None

    def rebinds(w, x):
        nonlocal last
        last = jnp.sum(chain(w, x))
        return last

    return rebinds


WAYS = {
    "plan": lambda fun, *args: jaxckpt.plan(fun, *args, budget="100%", target="cpu"),
    "autocheckpoint": lambda fun, *args: jaxckpt.autocheckpoint(fun, budget="100%")(*args),
    "checkpoint": lambda fun, *args: jaxckpt.checkpoint(fun, policy="dots")(*args),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("fun", "second", "named"),
    [
        (sets_an_attribute, X, r"\(sets_an_attribute\).* cache\.value \(of a Cache\)"),
        (appends, X, r"history\[\d\]"),
        (counter(), X, r"\(rebinds\).* last"),
        (changes_an_argument, {"x": X}, r"its arguments.*args\[1\]\['new'\]"),
        (takes_a_ref, jax.new_ref(X), r"must not take a jax\.Ref.*args\[1\]"),
        (works_on_a_ref, X, r"must not work on jax\.Refs.*test_purity\.py"),
    ],
    ids=["attribute", "list", "nonlocal", "argument", "ref argument", "ref"],
)
def test_what_is_put_aside_is_named(way, fun, second, named):
    cache.value = None
    history.clear()
    with pytest.raises(EffectsError, match=named):
        WAYS[way](fun, W, second)


@pytest.mark.parametrize("way", ["autocheckpoint", "checkpoint"])
def test_what_was_traced_before_may_be_read(way):
    def outer(w, x):
        cache.value = 2 * x  # traced outside, and only read inside
        return WAYS[way](lambda w: jnp.sum(chain(w, cache.value)), w)

    assert_trees_close(jax.jit(jax.grad(outer))(W, X), jax.grad(lambda w: jnp.sum(chain(w, 2 * X)))(W))
    cache.value = None
