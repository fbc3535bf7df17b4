"""What becomes of the carries between a scan's segments."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxckpt
from jaxckpt import OFFLOAD, RECOMPUTE, SAVE, ArgumentError, Slots, compress
from tests.helpers import executions

W = jax.random.normal(jax.random.key(0), (32, 32)) / 6
X = jax.random.normal(jax.random.key(1), (16, 32))
WIDE = X.size * 4


def run(w, x, schedule="none", **how):
    def body(c, row):
        h, count = c
        return (jnp.tanh(h @ w + row), count + 1), jnp.sum(h)

    rows = jnp.linspace(0, 1, 12)
    (h, count), ys = jaxckpt.scan(body, (x, 0), rows, schedule=schedule, **how)
    return jnp.sum(h**2) + jnp.sum(ys) + 0 * count


def _floats(report):
    """Returns the bytes that are kept but for the counter's."""
    return sum(r.bytes for r in report.residuals if not r.argument and r.dtype != jnp.int32)


@pytest.mark.parametrize("carry", [compress("bfloat16"), compress("int8") | OFFLOAD], ids=repr)
@pytest.mark.parametrize(("schedule", "kept"), [("every", 12), (4, 3), (5, 2), ((2, 3, 2), 2)], ids=str)
def test_carries_are_kept_in_another_form(carry, schedule, kept):
    found = {a: jaxckpt.residuals(lambda w, x: run(w, x, schedule, carry=a), W, X) for a in (SAVE, carry)}
    shape = jax.eval_shape(
        lambda x: compress(carry.to_json()["parts"][0]["form"] if carry.on_host else carry.form).encode(x), X
    )
    one = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(shape))
    less = _floats(found[SAVE]) - _floats(found[carry])
    assert less == kept * (WIDE - one)
    small = lambda w, x: run(w, x, schedule, carry=carry)
    (got, gradient), (value, exact) = (jax.value_and_grad(f)(W, X) for f in (small, run))
    assert float(got) == pytest.approx(float(value), rel=1e-6)
    difference = float(jnp.max(jnp.abs(gradient - exact)) / jnp.max(jnp.abs(exact)))
    assert 0 < difference < 0.05
    tanh = executions(jax.grad(lambda w: run(w, X, schedule, carry=SAVE)), W)["tanh"]
    assert executions(jax.grad(lambda w: small(w, X)), W)["tanh"] == tanh > 12


@pytest.mark.parametrize("carry", [OFFLOAD, compress("bfloat16"), compress("bfloat16") | OFFLOAD], ids=repr)
@pytest.mark.parametrize("schedule", ["every", 4])
def test_carries_under_vmap_and_hessian(carry, schedule):
    small = lambda w, x: run(w, x, schedule, carry=carry)
    bound = 0.03 if carry.changes else 1e-4
    close = lambda a, b: float(jnp.max(jnp.abs(a - b))) <= bound * float(jnp.max(jnp.abs(b)))
    many = jnp.stack([X, 2 * X])
    batched = lambda f: jax.jit(jax.vmap(jax.grad(f), (None, 0)))(W, many)
    assert close(batched(small), batched(run))
    line = lambda f: lambda t: f(W * t, X)
    assert close(jax.jit(jax.hessian(line(small)))(1.0), jax.hessian(line(run))(1.0))
    if carry.on_host:
        return  # up to jax 0.12, JAX itself cannot differentiate what jax.checkpoint offloads in reverse twice
    assert close(jax.grad(jax.grad(line(small)))(1.0), jax.grad(jax.grad(line(run)))(1.0))


def test_what_carries_cannot_be():
    for carry, schedule in ((compress("int8"), Slots(3)), (RECOMPUTE, "sqrt")):
        with pytest.raises(ArgumentError, match="carry must be SAVE"):
            run(W, X, schedule, carry=carry)
    with pytest.raises(ArgumentError, match="and a budget"):
        jaxckpt.scan(lambda c, x: (c, None), X, None, 4, budget="1MiB", carry=compress("int8"))
    with pytest.raises(ArgumentError, match=r"None with schedule='every' and carry=compress"):
        run(W, X, "every", carry=compress("int8"), policy="dots")
    np.testing.assert_allclose(run(W, X, "none", carry=compress("int8")), run(W, X))
