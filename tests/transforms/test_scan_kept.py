"""Values that a policy keeps in a run of `Slots` are computed once, also where a derivative reads the result of its own
operation.
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

from jaxckpt.actions import SAVE
from jaxckpt.policies import Policy, op
from jaxckpt.schedules import Slots
from jaxckpt.transforms.checkpoint import tag
from jaxckpt.transforms.scan import scan
from tests.helpers import assert_trees_close, gradient_executions

WEIGHTS = jnp.asarray(np.random.default_rng(0).uniform(0.1, 0.3, size=(4, 4)), jnp.float32)
STARTS = jnp.asarray(np.random.default_rng(1).uniform(0.5, 1.0, size=(3, 2, 4)), jnp.float32)
STEPS = 8
FAST = {"xla_backend_optimization_level": "0"}


@jax.custom_jvp
def own(x: Any) -> Any:
    return jnp.exp(x) * 2


@own.defjvp
def _own_tangent(primals: Any, tangents: Any) -> Any:
    y = own(*primals)
    return y, tangents[0] * y


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def softmax(x: Any, axis: int) -> Any:
    powers = jnp.exp(x - x.max(axis, keepdims=True))
    return powers / powers.sum(axis, keepdims=True)


@softmax.defjvp
def _softmax_tangent(axis: int, primals: Any, tangents: Any) -> Any:
    y = softmax(primals[0], axis)
    return y, y * (tangents[0] - (y * tangents[0]).sum(axis, keepdims=True))


def loss(weights: Any, starts: Any, function: Callable, run: Callable, batched: bool) -> Any:
    def one(start: Any) -> Any:
        return run(lambda c, _: (function(c @ weights) @ weights, None), start, length=STEPS)[0].sum()

    return jax.vmap(one)(starts).sum() if batched else one(starts[0])


def runs(function: Callable, policy: Any, batched: bool = False) -> dict[str, int]:
    run = functools.partial(scan, schedule=Slots(2), unroll=4, policy=policy)
    return gradient_executions(
        functools.partial(loss, starts=STARTS, function=function, run=run, batched=batched), WEIGHTS
    )


FUNCTIONS: dict[str, tuple[Callable, Any, str]] = {
    "tanh": (jnp.tanh, Policy({op("tanh"): SAVE}), "tanh"),
    "exp": (jnp.exp, Policy({op("exp"): SAVE}), "exp"),
    "logistic": (jax.nn.sigmoid, Policy({op("logistic"): SAVE}), "logistic"),
    "sqrt": (jnp.sqrt, Policy({op("sqrt"): SAVE}), "sqrt"),
    "a tagged tanh": (lambda x: tag(jnp.tanh(x), "kept"), Policy({"kept": SAVE}), "tanh"),
    "a function of the user's": (lambda x: tag(own(x), "kept"), Policy({"kept": SAVE}), "exp"),
    "a softmax": (lambda x: tag(softmax(x, -1), "kept"), Policy({"kept": SAVE}), "exp"),
}


@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_kept_result_that_its_own_derivative_reads_is_not_computed_again(name: str, batched: bool) -> None:
    function, policy, primitive = FUNCTIONS[name]
    kept, dropped = runs(function, policy, batched), runs(function, "nothing", batched)
    # With all matmuls kept nothing but elementwise work is done again, so that is how few matmuls there can be.
    fewest = runs(jnp.square, "dots", batched)["dot_general"]
    assert kept["dot_general"] == fewest < dropped["dot_general"]
    assert kept[primitive] < dropped[primitive]


@pytest.mark.parametrize(
    ("name", "batched"),
    [("tanh", False), ("a tagged tanh", True), ("a function of the user's", False), ("a softmax", True)],
)
def test_gradients_through_kept_results_are_those_of_lax_scan(name: str, batched: bool) -> None:
    function, policy, _ = FUNCTIONS[name]
    run = functools.partial(scan, schedule=Slots(2), unroll=4, policy=policy)

    def both(run: Callable) -> Any:
        first = jax.grad(functools.partial(loss, starts=STARTS, function=function, run=run, batched=batched))
        if batched:
            return jax.jit(first, compiler_options=FAST)(WEIGHTS)
        return jax.jit(lambda w: jax.jvp(first, (w,), (jnp.ones_like(w),)), compiler_options=FAST)(WEIGHTS)

    assert_trees_close(both(run), both(lax.scan), rtol=1e-3, atol=1e-4)
