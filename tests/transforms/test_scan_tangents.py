"""Results of a scan with slots have tangents where lax.scan's have some, and carries on the host stay there under every
transformation.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxckpt._errors import ForwardModeError
from jaxckpt.actions import OFFLOAD, SAVE
from jaxckpt.schedules import Slots
from jaxckpt.transforms.checkpoint import checkpoint
from jaxckpt.transforms.scan import scan
from tests.helpers import assert_trees_close

FAST = {"xla_backend_optimization_level": "0"}
XS = jnp.linspace(0.1, 0.9, 9)


def step(carry: Any, x: Any) -> Any:
    """Of four carries only the first depends on what is differentiated; of five results, the first."""
    moved, fixed, count, _ = carry
    following = jnp.sin(moved) * fixed, fixed * 0.9 + x, count + 1, jnp.floor(moved)
    return following, (moved, fixed, jnp.sign(moved), lax.stop_gradient(moved), x * 1.0)


def until_large(value: Any) -> Any:
    return lax.while_loop(lambda v: jnp.min(v) < 10.0, lambda v: v + 1, value)


def loss(start: Any, run: Callable) -> Any:
    """Gives every result that has no tangent to a loop, or to Python: neither can be differentiated in reverse."""
    (moved, fixed, _, rounded), (first, *others) = run(step, (start, jnp.float32(1), 0, jnp.float32(0)), XS)
    outside = jax.pure_callback(lambda v: np.asarray(v), jax.ShapeDtypeStruct((9,), "float32"), others[0])
    return moved * until_large(fixed) * until_large(rounded) + first.sum() * sum(
        until_large(part).sum() for part in [outside, *others]
    )


@pytest.mark.parametrize(
    "transform",
    [
        jax.grad,
        lambda f: jax.grad(jax.jit(f)),
        lambda f: jax.grad(jax.checkpoint(f)),
        lambda f: lambda h: jax.vmap(jax.grad(f))(jnp.stack([h, 2 * h])),
        lambda f: jax.grad(lambda h: jax.vmap(f)(jnp.stack([h, 2 * h])).sum()),
        jax.hessian,
    ],
    ids=["grad", "grad of jit", "in a checkpoint", "vmap of grad", "grad of vmap", "hessian"],
)
@pytest.mark.parametrize("unroll", [1, 4])
def test_results_that_do_not_depend_on_what_is_differentiated_have_no_tangent(transform: Callable, unroll: int) -> None:
    run = functools.partial(scan, schedule=Slots(2), unroll=unroll)
    values = [
        jax.jit(transform(functools.partial(loss, run=r)), compiler_options=FAST)(jnp.float32(0.5))
        for r in (run, lax.scan)
    ]
    assert_trees_close(*values, rtol=1e-4)


def test_where_nothing_is_differentiated_nothing_has_a_tangent() -> None:
    def whole(w: Any) -> Any:
        last, ys = scan(lambda c, x: (jnp.sin(c) + x, c), jnp.float32(0.2), XS, schedule=Slots(2))
        return w * until_large(last) + until_large(ys).sum()

    assert float(jax.grad(whole)(2.0)) >= 10


def recurrence(schedule: Any, carry: Any = SAVE, unroll: int = 1) -> Callable:
    rng = np.random.default_rng(0)
    weights, xs = (jnp.asarray(rng.normal(size=shape) * 0.4, jnp.float32) for shape in ((3, 3), (11, 3)))

    def fun(h: Any) -> Any:
        body = lambda c, x: (jnp.tanh(c @ weights + x * h), jnp.sin(c))
        last, ys = scan(body, h, xs, schedule=schedule, carry=carry, unroll=unroll)
        return jnp.sum(last**2) + jnp.sum(ys * xs)

    return fun


H = jnp.asarray([0.3, -0.2, 0.5])
BATCH = jnp.stack([H, 2 * H])


@pytest.mark.parametrize(
    ("transform", "at"),
    [
        pytest.param(lambda f: jax.vmap(jax.grad(f)), BATCH, id="vmap of grad"),
        pytest.param(lambda f: jax.grad(lambda b: jax.vmap(f)(b).sum()), BATCH, id="grad of vmap"),
        pytest.param(lambda f: jax.grad(lambda b: jax.vmap(f, 1)(b).sum()), BATCH.T, id="grad of vmap over columns"),
        pytest.param(jax.hessian, H, id="hessian"),
    ],
)
@pytest.mark.parametrize("unroll", [1, 3])
def test_slots_on_the_host_can_be_batched_and_differentiated_forward(transform: Callable, at: Any, unroll: int) -> None:
    away = transform(recurrence(Slots(3), OFFLOAD, unroll))
    assert "<host>" in str(jax.make_jaxpr(away)(at))
    expected = jax.jit(transform(recurrence("none")), compiler_options=FAST)(at)
    assert_trees_close(jax.jit(away, compiler_options=FAST)(at), expected, rtol=1e-4, atol=1e-5)


@jax.custom_vjp
def ruled(x: Any, w: Any) -> Any:
    """A function with a rule of its own, for reverse mode alone."""
    return jnp.tanh(x @ w)


def _ruled_backward(kept: Any, cotangent: Any) -> Any:
    x, w, y = kept
    inner = cotangent * (1 - y * y)
    return inner @ w.T, jnp.outer(x, inner)


def _ruled_forward(x: Any, w: Any) -> Any:
    y = jnp.tanh(x @ w)  # a call of `ruled` here has no derivative in forward mode, in lax.scan either
    return y, (x, w, y)


ruled.defvjp(_ruled_forward, _ruled_backward)


@pytest.mark.parametrize(
    "schedule", [Slots(1), Slots(3), Slots(2, run_length=2), Slots(2, host=3)], ids=["one", "three", "runs", "host"]
)
@pytest.mark.parametrize("policy", [None, "everything"])
def test_forward_over_reverse_goes_through_rules_in_the_body(schedule: Any, policy: Any) -> None:
    weights = jnp.eye(3) * 0.7 + 0.1

    def fun(h: Any, run: Any = lax.scan, rule: Any = ruled) -> Any:
        return jnp.sum(jnp.sin(run(lambda c, _: (rule(c, weights), None), h, None, 7)[0]))

    slots = functools.partial(fun, run=functools.partial(scan, schedule=schedule, policy=policy))
    plain = functools.partial(fun, rule=lambda x, w: jnp.tanh(x @ w))
    for both in (jax.hessian, jax.grad):
        found = jax.jit(both(slots), compiler_options=FAST)(H)
        assert_trees_close(found, jax.jit(both(plain), compiler_options=FAST)(H), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("carry", [SAVE, OFFLOAD])
def test_a_second_reverse_is_an_error_that_says_what_can(carry: Any) -> None:
    fun = recurrence(Slots(3), carry)
    with pytest.raises(ForwardModeError, match="in reverse more than once"):
        jax.grad(lambda h: jax.grad(fun)(h).sum())(H)


@pytest.mark.parametrize(
    ("schedule", "length"), [("none", 9), ("sqrt", 1), (4, 3), ("log", 1), (Slots(3), 1), ("sqrt", 0)]
)
def test_offloading_does_nothing_where_no_carries_are_kept(schedule: Any, length: int) -> None:
    def fun(h: Any, **options: Any) -> Any:
        return scan(lambda c, x: (jnp.sin(c) * x, None), h, XS[:length], schedule=schedule, **options)[0].sum()

    assert_trees_close(*(jax.grad(functools.partial(fun, carry=carry))(H) for carry in (OFFLOAD, SAVE)))
    moved = "<host>" in str(jax.make_jaxpr(jax.grad(functools.partial(fun, carry=OFFLOAD)))(H))
    assert moved == isinstance(schedule, Slots)  # the first slot has the first carry


@pytest.mark.parametrize("batch", [3, 5])
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit, jax.checkpoint, lambda f: checkpoint(f, policy="dots")])
def test_slots_in_a_program_that_is_batched_before_it_is_differentiated(wrap, batch):
    """The batch may be as large as the scan is long: then wrong axes are no error of shapes."""

    def fun(x, schedule):
        def body(c, t):
            return jnp.sin(c * 0.7 + t), c * t

        last, ys = scan(body, x, jnp.arange(5.0), schedule=schedule)
        return jnp.sum(last) + jnp.sum(ys**2 * jnp.arange(5.0)[:, None])

    x = jnp.arange(batch * 2.0).reshape(batch, 2) / 10
    expected = jax.vmap(jax.grad(lambda x: fun(x, "none")))(x)
    assert_trees_close(jax.grad(lambda x: jnp.sum(jax.vmap(wrap(lambda x: fun(x, Slots(2))))(x)))(x), expected)


@pytest.mark.parametrize("unroll", [1, 4])
def test_what_no_cotangent_comes_to_has_none_though_its_derivative_is_infinite(unroll: int) -> None:
    """A carry that nothing is made of has the derivative 0, and none of 0 * inf. Nor have the constants and xs that go
    into it alone.
    """

    def loss(w: Any, huge: Any, rows: Any, run: Callable) -> Any:
        def body(carry: Any, x: Any) -> Any:
            used, idle, last = carry
            return (jnp.tanh(used * w), jnp.sqrt(huge - huge) + idle + jnp.sqrt(x - x), used + last * 0), jnp.log(idle)

        (used, _, _), _ = run(body, (w, huge, w), rows)
        return used

    at = jnp.float32(0.5), jnp.float32(2.0), jnp.ones(9)
    grads = [
        jax.grad(functools.partial(loss, run=run), (0, 1, 2))(*at)
        for run in (functools.partial(scan, schedule=Slots(2), unroll=unroll), lax.scan)
    ]
    assert np.isfinite(grads[1][0]) and not np.any(grads[1][1]) and not np.any(grads[1][2])
    assert_trees_close(*grads)
