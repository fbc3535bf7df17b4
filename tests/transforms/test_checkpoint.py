"""checkpoint: with no policy it is jax.checkpoint; with a Policy, values and gradients stay, what is kept is what is
named.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import chex
import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st
from jax import lax

import jaxckpt
from jaxckpt import OFFLOAD, SAVE, ArgumentError, EffectsError, Policy, op, policies, tag
from tests import strategies
from tests.helpers import assert_trees_close, executions, gradient_executions, kept_bytes, kept_shapes

X, W = jnp.linspace(-1.0, 1.0, 32).reshape(4, 8), jnp.sin(jnp.arange(64.0)).reshape(8, 8)
POLICIES = [
    None,
    "nothing",
    "everything",
    "dots",
    "dots_no_batch",
    "hybrid",
    Policy({"up": SAVE}),
    Policy({"up": "recompute"}, default=SAVE),
]


def layer(x, w):
    return jnp.sin(jnp.sin(tag(x @ w, "up")) @ w)


def both(fun):
    return jax.jit(jax.value_and_grad(lambda *args: jnp.sum(fun(*args) ** 2), argnums=(0, 1)))


@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_values_and_gradients_stay(policy):
    assert_trees_close(both(jaxckpt.checkpoint(layer, policy=policy))(X, W), both(layer)(X, W))


def spectral(x, w):
    """A layer of complex values, which JAX's own policies cannot keep."""
    z = tag(jnp.fft.fft(x @ w), "spectrum")
    return jnp.abs(jnp.sin(z) * jnp.exp(0.1j * z) @ (w + 1j))


@pytest.mark.parametrize("inside", ["plain", "scan", "vmap"])
@pytest.mark.parametrize(
    "policy", [*POLICIES[:6], Policy(default=SAVE, rules={"spectrum": SAVE}), Policy({"spectrum": OFFLOAD})], ids=str
)
def test_values_and_gradients_of_complex_layers_stay(policy, inside):
    def fun(wrap):
        def call(x, w):
            if inside == "plain":
                return wrap(spectral)(x, w)
            if inside == "vmap":
                return jax.vmap(lambda row: wrap(spectral)(row[None], w))(x)
            return lax.scan(lambda x, _: (jnp.tanh(wrap(spectral)(x, w)), None), x, None, length=3)[0]

        return both(call)

    assert_trees_close(
        fun(functools.partial(jaxckpt.checkpoint, policy=policy))(X, W), fun(lambda f: f)(X, W), rtol=1e-4, atol=1e-4
    )


def test_a_complex_value_is_kept_as_its_two_parts():
    runs = lambda policy: gradient_executions(
        lambda x, w: jnp.sum(jaxckpt.checkpoint(spectral, policy=policy)(x, w)), X, W
    )["fft"]
    assert runs("nothing") == 3, "forward, again, and transposed"
    assert runs(Policy({"spectrum": SAVE})) == 2
    kept = kept_shapes(jaxckpt.checkpoint(spectral, policy=Policy({"spectrum": SAVE})), X, W)
    assert kept == {X.shape: 2}
    assert kept_bytes(jaxckpt.checkpoint(spectral, policy=Policy({"spectrum": SAVE})), X, W) == 2 * 4 * X.size


@pytest.mark.parametrize("preset", ["nothing", "everything"])
def test_a_policy_that_keeps_nothing_or_everything_is_jaxs_own(preset):
    own = {"nothing": None, "everything": jax.checkpoint_policies.everything_saveable}[preset]
    text = lambda wrap, policy: (
        jax.jit(jax.grad(lambda x, w: wrap(layer, policy=policy)(x, w).sum())).lower(X, W).as_text()
    )
    assert text(jaxckpt.checkpoint, preset) == text(jax.checkpoint, own)


@pytest.mark.parametrize(
    "options",
    [{}, {"prevent_cse": False}, {"policy": jax.checkpoint_policies.dots_saveable}],
    ids=["plain", "no cse", "dots"],
)
def test_without_a_policy_of_ours_it_lowers_to_the_program_of_jax_checkpoint(options):
    text = lambda wrap: jax.jit(jax.grad(lambda x, w: wrap(layer, **options)(x, w).sum())).lower(X, W).as_text()
    assert text(jaxckpt.checkpoint) == text(jax.checkpoint)


@pytest.mark.parametrize(
    ("policy", "kept", "again"),
    [
        (None, 0, 2),
        ("nothing", 0, 2),
        ("dots", 2, 0),
        ("dots_no_batch", 2, 0),
        (Policy({"up": SAVE}), 1, 1),
        ("hybrid", 0, 2),
    ],
    ids=str,
)
def test_what_is_kept_and_how_many_matmuls_run_again(policy, kept, again):
    inner = jaxckpt.checkpoint(layer, policy=policy)
    fun = lambda x, w: jnp.sum(inner(x, w) ** 2)
    assert kept_shapes(fun, X, W)[(4, 8)] == kept + 1  # and the layer's own result, for the square
    plain = gradient_executions(lambda x, w: jnp.sum(layer(x, w) ** 2), X, W)["dot_general"]
    assert gradient_executions(fun, X, W)["dot_general"] == plain + again


def test_one_checkpoint_around_a_function_of_many_outputs_and_structures():
    def fun(tree, key, count, *, bias):
        x = tree["x"]
        noise = jax.random.normal(key, x.shape)
        y = jnp.sin(x + noise) * bias
        return {"y": y, "none": None, "count": count + 1, "key": key, "pair": (y.sum(), [jnp.cos(y)])}

    args = ({"x": X, "none": None}, jax.random.key(3), jnp.int32(4))
    for policy in POLICIES[1:6]:
        wrapped = jaxckpt.checkpoint(fun, policy=policy)
        out, reference = wrapped(*args, bias=2.0), fun(*args, bias=2.0)
        assert jax.tree.structure(out) == jax.tree.structure(reference)
        assert out["none"] is None
        assert int(out["count"]) == 5
        assert jax.random.key_data(out["key"]).tolist() == jax.random.key_data(reference["key"]).tolist()
        loss = lambda f, x: f({"x": x, "none": None}, *args[1:], bias=2.0)["pair"][1][0].sum()
        assert_trees_close(jax.grad(functools.partial(loss, wrapped))(X), jax.grad(functools.partial(loss, fun))(X))


@pytest.mark.parametrize("policy", [None, "nothing", "dots"])
def test_outputs_that_nobody_differentiates_cost_no_recomputation(policy):
    def two(x, w):
        return jnp.sin(x @ w), jnp.sin(jnp.sin(x @ (w * 2)) @ w)

    wrapped = jaxckpt.checkpoint(two, policy=policy)
    one = lambda f: lambda x, w: f(x, w)[0].sum()
    cost = executions(jax.jit(jax.grad(one(wrapped))), X, W)
    assert (
        cost["dot_general"]
        <= executions(jax.jit(jax.grad(one(lambda x, w: (jnp.sin(x @ w), 0)))), X, W)["dot_general"] + 1 + 2
    )


def test_static_arguments():
    calls = []

    def fun(x, mode, w, flag):
        calls.append((mode, flag))
        return jnp.sin(x @ w) if mode == "sin" and flag else x @ w

    for policy in (None, "nothing", "dots"):
        wrapped = jaxckpt.checkpoint(fun, policy=policy, static_argnums=(1, -1))
        for mode in ("sin", "id"):
            assert_trees_close(wrapped(X, mode, W, True), fun(X, mode, W, True))
    calls.clear()
    wrapped = jaxckpt.checkpoint(lambda *args: fun(*args), policy="dots", static_argnums=(1, 3))
    for _ in range(3):
        wrapped(X, "sin", W, True)
    assert calls == [("sin", True)]  # traced once


@pytest.mark.parametrize("policy", [None, "dots"])
@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        (2, "static_argnums must be within the 2 positional arguments of the call; got 2"),
        (-3, "static_argnums must be within the 2 positional arguments of the call; got -3"),
        ("x", "static_argnums must be an int or a sequence of ints; got 'x'"),
        ([0.5], "static_argnums must be an int or a sequence of ints; got [0.5]"),
        (True, "static_argnums must be an int or a sequence of ints; got True"),
        (b"\x01", "static_argnums must be an int or a sequence of ints; got b"),
    ],
)
def test_static_argument_numbers_that_are_none(policy, numbers, message):
    with pytest.raises(ArgumentError) as caught:
        jaxckpt.checkpoint(layer, policy=policy, static_argnums=numbers)(X, W)
    assert message in str(caught.value)


@pytest.mark.parametrize("policy", [None, "nothing", "everything", "dots"])
def test_static_arguments_that_cannot_be_hashed_select_the_program_at_each_call(policy):
    wrapped = jaxckpt.checkpoint(lambda x, opts: x * opts["by"], policy=policy, static_argnums=1)
    assert [float(jax.grad(wrapped)(1.0, {"by": by})) for by in (2.0, 3.0, 2.0)] == [2.0, 3.0, 2.0]


@pytest.mark.parametrize(("tagged", "again"), [("result", 5), ("inside", 0)])
def test_a_loop_runs_again_for_what_its_derivative_reads_unless_that_is_tagged_inside(tagged, again):
    def step(c, _):
        h = c @ c
        c = jnp.sin(tag(h, "h") if tagged == "inside" else h)
        return c, c

    def fun(x):
        ys = lax.scan(step, x, None, length=5)[1]
        return jnp.sum(jnp.sin(tag(ys, "h") if tagged == "result" else ys))

    x = jnp.linspace(-1.0, 1.0, 64).reshape(8, 8)
    ours = jaxckpt.checkpoint(fun, policy=Policy({"h": SAVE}))
    assert kept_shapes(ours, x) == {(5, 8, 8): 1}
    assert executions(jax.grad(ours), x)["dot_general"] == executions(jax.grad(fun), x)["dot_general"] + again
    assert_trees_close(jax.grad(ours)(x), jax.grad(fun)(x))


class Options(NamedTuple):
    by: Any


@dataclasses.dataclass(frozen=True)
class Config:
    by: Any


@pytest.mark.parametrize("policy", [None, "nothing", "everything", "dots"])
@pytest.mark.parametrize(
    "values",
    [
        (1, True, 1.0, 1 + 0j),
        (0.0, -0.0),
        ((1, 2), (True, 2)),
        ("1", 1),
        (Options(1), Options(1.0), Options((0.0,)), Options((-0.0,))),
        (Config(1), Config(True), Config(Options(0.0)), Config(Options(-0.0))),
    ],
    ids=["ones", "zeros", "tuples", "text", "named tuples", "dataclasses"],
)
def test_static_arguments_of_equal_values_and_other_types_are_other_programs(policy, values):
    wrapped = jaxckpt.checkpoint(lambda mode, x: (x, seen.append(repr(mode)))[0], policy=policy, static_argnums=0)
    seen: list[str] = []
    for value in values * 2:
        wrapped(value, X)
    assert seen == [repr(value) for value in values]  # each traced once
    nan: list[float] = []
    once = jaxckpt.checkpoint(lambda mode, x: (x, nan.append(mode))[0], policy=policy, static_argnums=0)
    for _ in range(3):
        once(float("nan"), X)
    assert len(nan) == 1


@pytest.mark.parametrize("policy", [None, "nothing", "dots"])
def test_static_arguments_by_name(policy):
    calls = []

    def fun(x, mode, *, scale=1.0):
        calls.append((mode, scale))
        return jnp.sin(x @ W) * scale if mode == "sin" else x

    wrapped = jaxckpt.checkpoint(fun, policy=policy, static_argnames=("mode", "scale"))
    for _ in range(2):
        assert_trees_close(wrapped(X, "sin", scale=2.0), jnp.sin(X @ W) * 2.0)
        assert_trees_close(wrapped(X, mode="id"), X)
    assert calls == [("sin", 2.0), ("id", 1.0)]  # each traced once, whichever way it is passed
    with pytest.raises(ArgumentError, match="static_argnames must be a string or a sequence of strings; got 3"):
        jaxckpt.checkpoint(fun, policy=policy, static_argnames=3)


@pytest.mark.parametrize("policy", [None, "nothing", "everything", "dots", Policy({op("tanh"): SAVE})], ids=str)
def test_prevent_cse_by_argument_is_jaxs(policy):
    fun = lambda p, x: jnp.tanh(x @ p["w"]) @ p["w"]
    lowered = lambda f, **how: jax.jit(jax.grad(lambda p, x: jnp.sum(f(fun, **how)(p, x)))).lower({"w": W}, X).as_text()
    barrier = "optimization_barrier"
    for prevent_cse in ((True, False), (False, False), ({"w": True}, False), [False, True]):
        ours = lowered(jaxckpt.checkpoint, policy=policy, prevent_cse=prevent_cse)
        theirs = lowered(jax.checkpoint, prevent_cse=prevent_cse)
        assert (barrier in ours) == (
            barrier in theirs or policy in ("everything", "dots") or isinstance(policy, Policy)
        )
    for wrong in ("yes", 1, (1, 0), None):
        with pytest.raises(ArgumentError, match="prevent_cse must be a bool, or a sequence"):
            jaxckpt.checkpoint(fun, policy=policy, prevent_cse=wrong)


def test_a_function_with_side_effects_runs_forward_and_is_refused_where_it_is_differentiated():
    seen = []

    def fun(x):
        jax.experimental.io_callback(lambda v: seen.append(float(v)), None, x[0, 0], ordered=True)
        return jnp.tanh(x @ W)

    wrapped = jaxckpt.checkpoint(fun, policy=Policy([(op("tanh"), SAVE)]))
    for forward in (wrapped, jax.jit(wrapped)):
        assert_trees_close(forward(X), jnp.tanh(X @ W))
    jax.effects_barrier()
    assert len(seen) == 2
    with pytest.raises(EffectsError, match="must have no side effects to be checkpointed and differentiated"):
        jax.grad(lambda x: jnp.sum(wrapped(x)))(X)


@pytest.mark.parametrize("policy", [Policy({"*": SAVE}), Policy([(op("*"), SAVE)]), "dots"], ids=str)
@pytest.mark.parametrize("place", ["alone", "scan", "jit", "used", "checkpoint", "call"])
def test_a_kept_value_may_feed_a_print_alone(place, policy):
    def body(x):
        shown = tag(jnp.sin(x), "shown")
        jax.debug.callback(lambda v: None, shown)
        return jnp.cos(x) * 2 + (shown if place == "used" else 0)

    def made_inside(wrapper):
        def inner(x):
            shown = wrapper(lambda x: tag(jnp.sin(jnp.sin(x)), "shown"))(x)
            jax.debug.callback(lambda v: None, shown)
            return jnp.cos(x) * 2

        return inner

    fun = {
        "alone": body,
        "used": body,
        "checkpoint": made_inside(jax.checkpoint),
        "call": made_inside(jax.jit),
        "scan": lambda x: jax.lax.scan(lambda c, _: (body(c), None), x, length=3)[0],
        "jit": jax.jit(lambda x: jax.jit(body)(jax.jit(body)(x))),
    }[place]
    wrapped = jaxckpt.checkpoint(fun, policy=policy)
    for compiled in (False, True):
        gradient = jax.grad(lambda x: jnp.sum(wrapped(x)))
        assert_trees_close((jax.jit(gradient) if compiled else gradient)(X), jax.grad(lambda x: jnp.sum(fun(x)))(X))


def test_a_print_may_read_what_a_rule_hands_on_as_it_is():
    @jax.custom_jvp
    def same(x):
        return x

    same.defjvp(lambda primals, tangents: (primals[0], tangents[0] * 0.5))

    def fun(x):
        softened = jax.nn.log_softmax(x)
        rows = jax.lax.scan(lambda c, row: (c, (row, c)), softened, softened, length=4)[1][1]
        shown = same(rows)
        jax.debug.callback(lambda v: None, shown)
        return shown

    x = jnp.arange(16.0).reshape(4, 4)
    wrapped = jaxckpt.checkpoint(fun, policy=Policy([(~op("mul"), SAVE)]))
    assert_trees_close(jax.grad(lambda x: jnp.sum(wrapped(x) ** 2))(x), jax.grad(lambda x: jnp.sum(fun(x) ** 2))(x))


def test_equal_policies_are_one_policy():
    make = [
        lambda: Policy({"a": SAVE}),
        lambda: Policy(
            [(op("dot*") & jaxckpt.larger_than("1KiB") | ~jaxckpt.intensity_above(3), "offload")], strict=False
        ),
        lambda: Policy([(jaxckpt.where(len), SAVE)], default=SAVE),
    ]
    for each in make:
        assert each() == each()
        assert hash(each()) == hash(each())
    assert len({each() for each in make * 2}) == 3
    assert Policy({"a": SAVE}) != Policy({"b": SAVE})
    traced = []

    def one(x):
        traced.append(1)
        return tag(jnp.sin(x @ W), "a") @ W

    x = X
    for _ in range(6):
        x = jaxckpt.checkpoint(one, policy=Policy({"a": SAVE}))(x)
    assert len(traced) == 1


def test_what_is_no_function_is_said_to_be_none():
    with pytest.raises(ArgumentError, match=r"fun must be a function; got 3. Use @checkpoint"):
        jaxckpt.checkpoint(3)


@dataclasses.dataclass
class Scaled:
    """An instance that can be called and has no hash, as its class says when two are equal."""

    factor: float

    def __call__(self, x):
        return jnp.sin(x @ x) * self.factor


@pytest.mark.parametrize("policy", [None, "dots", Policy({"*": SAVE}, strict=False)])
def test_instances_without_a_hash(policy):
    x = jnp.eye(4) * 0.3
    grads = [
        jax.grad(lambda x, fun=fun: jaxckpt.checkpoint(fun, policy=policy)(x).sum())(x)
        for fun in (Scaled(2.0), Scaled(3.0))
    ]
    assert jnp.allclose(grads[0], jax.grad(lambda x: Scaled(2.0)(x).sum())(x))
    assert jnp.allclose(3 * grads[0], 2 * grads[1])


def test_decorators_keep_the_name():
    @jaxckpt.checkpoint
    def one(x):
        """Doc."""
        return jnp.sin(x)

    @jaxckpt.checkpoint(policy="dots", prevent_cse=False)
    def two(x):
        """Doc."""
        return jnp.sin(x)

    assert (one.__name__, two.__name__, two.__doc__) == ("one", "two", "Doc.")
    assert_trees_close(two(X), one(X))


@pytest.mark.parametrize("policy", ["dots", "nothing", Policy({"up": SAVE})], ids=str)
def test_forward_mode_higher_orders_vmap_scan_and_closures(policy):
    wrapped = jaxckpt.checkpoint(layer, policy=policy)
    assert_trees_close(jax.jvp(wrapped, (X, W), (X, W)), jax.jvp(layer, (X, W), (X, W)))
    loss = lambda f: lambda w: jnp.sum(f(X, w) ** 2)
    assert_trees_close(jax.hessian(loss(wrapped))(W[:, :]), jax.hessian(loss(layer))(W), rtol=1e-3, atol=1e-3)
    stacked = jnp.stack([W, W * 2, W / 2])
    assert_trees_close(jax.vmap(wrapped, in_axes=(None, 0))(X, stacked), jax.vmap(layer, in_axes=(None, 0))(X, stacked))
    scanned = lambda f: lambda ws: lax.scan(lambda c, w: (f(c, w), None), X, ws)[0].sum()
    assert_trees_close(jax.grad(scanned(wrapped))(stacked), jax.grad(scanned(layer))(stacked))
    closed = lambda f: lambda w: jnp.sum(f(lambda x: layer(x, w))(X))
    assert_trees_close(
        jax.jit(jax.grad(closed(lambda f: jaxckpt.checkpoint(f, policy=policy))))(W), jax.grad(closed(lambda f: f))(W)
    )


def test_a_closure_over_tracers_is_traced_anew_each_time():
    cell = {}

    @functools.partial(jaxckpt.checkpoint, policy="dots")
    def fun(x):
        return jnp.sin(x @ cell["w"])

    def loss(w):
        cell["w"] = w
        return fun(X).sum()

    reference = jax.grad(lambda w: jnp.sin(X @ w).sum())
    for w in (W, 2 * W):
        assert_trees_close(jax.jit(jax.grad(loss))(w), reference(w))
        assert_trees_close(jax.grad(loss)(w), reference(w))


def test_a_layer_used_at_every_depth_is_traced_once():
    count = []

    def f(x, w):
        count.append(1)
        return jnp.sin(x @ w)

    wrapped = jaxckpt.checkpoint(f, policy="dots")
    jax.make_jaxpr(lambda x, w: wrapped(wrapped(wrapped(x, w), w), w))(X, W)
    assert len(count) == 1


def test_the_same_function_in_another_configuration_is_traced_anew():
    wrapped = jaxckpt.checkpoint(lambda x: jnp.sin(x) + np.float64(1), policy="dots")
    assert wrapped(X).dtype == jnp.float32
    with jax.enable_x64(True):
        assert wrapped(jnp.asarray(np.asarray(X, np.float64))).dtype == jnp.float64


@pytest.mark.parametrize("outer", [None, "nothing", Policy({"up": SAVE}), "dots"], ids=str)
@pytest.mark.parametrize("inner", [None, "nothing", Policy({"up": SAVE}), "dots"], ids=str)
def test_nesting(outer, inner):
    def model(wrap_outer, wrap_inner):
        block = wrap_inner(layer)
        return wrap_outer(lambda x, w: block(block(x, w), w))

    nested = model(lambda f: jaxckpt.checkpoint(f, policy=outer), lambda f: jaxckpt.checkpoint(f, policy=inner))
    plain = model(lambda f: f, lambda f: f)
    assert_trees_close(both(nested)(X, W), both(plain)(X, W))
    if outer in (None, "nothing"):
        assert not kept_shapes(nested, X, W)  # what inner regions keep they keep only while they are at work
    elif isinstance(outer, Policy):
        assert kept_shapes(nested, X, W)[(4, 8)] == 2


def test_selective_use_keeps_the_rest_as_it_was():
    def model(wraps):
        def fun(x, w):
            for wrap in wraps:
                x = wrap(layer)(x, w)
            return x.sum()

        return fun

    plain = lambda f: f
    none, two, all_ = (
        kept_bytes(model([w if i < n else plain for i in range(4)]), X, W)
        for n, w in ((0, plain), (2, jaxckpt.checkpoint), (4, jaxckpt.checkpoint))
    )
    assert none > two > all_ > 0


@pytest.mark.parametrize("policy", [None, "nothing", "dots", Policy({"mask": SAVE})], ids=str)
def test_the_recomputation_draws_the_same_random_numbers(policy):
    def dropout(key, x, w):
        mask = tag(jax.random.bernoulli(key, 0.5, x.shape), "mask")
        return jnp.where(mask, jnp.sin(x @ w), 0.0) * jax.random.uniform(key, x.shape)

    key = jax.random.key(5)
    loss = lambda f: lambda w: jnp.sum(f(key, X, w) ** 2)
    wrapped = jaxckpt.checkpoint(dropout, policy=policy)
    assert_trees_close(jax.jit(jax.grad(loss(wrapped)))(W), jax.grad(loss(dropout))(W))
    draws = executions(jax.grad(loss(wrapped)), W)["random_bits"]
    assert draws == (3 if isinstance(policy, Policy) else 4)  # the mask and the noise, and again what is not kept


def test_offloaded_values_leave_the_device_and_come_back():
    wrapped = jaxckpt.checkpoint(layer, policy=Policy({"up": OFFLOAD}))
    fun = lambda x, w: jnp.sum(wrapped(x, w) ** 2)
    moves = executions(jax.grad(fun), X, W)["device_put"]
    assert moves == 2  # there and back
    assert executions(jax.grad(lambda x, w: jnp.sum(jaxckpt.checkpoint(layer)(x, w) ** 2)), X, W)["device_put"] == 0
    spaces = [
        str(leaf.aval.memory_space)
        for leaf in jax.make_jaxpr(lambda x, w: jax.tree.leaves(jax.vjp(fun, x, w)[1]))(X, W).jaxpr.outvars
    ]
    assert sum("Host" in space for space in spaces) == 1


def test_side_effects_are_an_error_that_says_what_to_do():
    from jax.experimental import io_callback

    def noisy(x):
        io_callback(lambda: None, None)
        return jnp.sin(x)

    with pytest.raises(EffectsError, match="must have no side effects") as caught:
        jax.grad(lambda x: jaxckpt.checkpoint(noisy, policy="dots")(x).sum())(X)
    assert "noisy" in str(caught.value)
    assert "Move io_callback" in str(caught.value)


def test_debug_prints_are_let_through(capfd):
    def chatty(x):
        jax.debug.print("seen {}", x.sum())
        return jnp.sin(x)

    jax.block_until_ready(jax.grad(lambda x: jaxckpt.checkpoint(chatty, policy="dots")(x).sum())(X))
    jax.effects_barrier()
    assert "seen" in capfd.readouterr().out


def test_errors_of_the_function_reach_the_user_untouched():
    def broken(x):
        raise KeyError("mine")

    for policy in (None, "dots"):
        with pytest.raises(KeyError, match="mine"):
            jaxckpt.checkpoint(broken, policy=policy)(X)


@pytest.mark.parametrize(("x", "name"), [(X, ""), (X, 3)])
def test_a_tag_needs_a_name(x, name):
    with pytest.raises(ArgumentError, match="name must be a string that is not empty"):
        tag(x, name)


def test_tag_is_the_identity_on_every_leaf():
    tree = {"a": X, "b": [None, W]}
    chex.assert_trees_all_equal(tag(tree, "name"), tree)


PRESETS = st.sampled_from(sorted(policies.PRESETS))


@hypothesis.settings(max_examples=25, deadline=None, derandomize=True)
@hypothesis.given(program=strategies.programs(), preset=PRESETS, outputs=st.integers(1, 2), data=st.data())
def test_random_programs_have_equal_gradients_under_every_policy_and_keep_nothing_unasked(
    program, preset, outputs, data
):
    fun, args = strategies.build(program, outputs)
    total = lambda f: lambda params: sum(jax.tree.leaves(f(params)))
    reference = jax.value_and_grad(total(fun))(*args)
    graph = jaxckpt.trace(fun, *args)
    tags = data.draw(st.sets(st.sampled_from(graph.tags))) if graph.tags else set()
    for policy in (policies.PRESETS[preset], Policy(dict.fromkeys(sorted(tags), SAVE))):
        wrapped = jaxckpt.checkpoint(fun, policy=policy)
        assert_trees_close(jax.value_and_grad(total(wrapped))(*args), reference, rtol=2e-4, atol=2e-5)
        actions = policy.decide(graph)
        allowed = {
            shape if value.repeats == 1 else (value.repeats, *shape)
            for value in (graph.values[i] for i in actions)
            for shape in [value.shape]
        }
        if policy != policies.everything:
            assert set(kept_shapes(wrapped, *args)) <= allowed


def test_a_print_in_a_loop_under_two_checkpoints_may_read_a_value_that_both_keep():
    every = Policy([(op("*"), SAVE)])

    def body(c, _):
        scale = jnp.full((2,), 0.5)
        jax.debug.callback(lambda v: None, scale)
        return jnp.sin(c) * jnp.mean(scale), None

    fun = lambda x: jnp.sum(lax.scan(body, x, None, length=3)[0])
    inner = jaxckpt.checkpoint(fun, policy=every)
    outer = jaxckpt.checkpoint(lambda x: inner(x), policy=every)
    assert_trees_close(jax.grad(outer)(X), jax.grad(fun)(X))


@jax.tree_util.register_pytree_node_class
class Powers:
    """A callable pytree that cannot be hashed, as modules of equinox are."""

    __hash__ = None

    def __init__(self, w):
        self.w = w

    def __call__(self, x, times, mode="plain"):
        for _ in range(times):
            x = jnp.tanh(x @ self.w)
        return jnp.sum(x if mode == "plain" else 2 * x)

    def tree_flatten(self):
        return [self.w], None

    @classmethod
    def tree_unflatten(cls, _, children):
        return cls(*children)


@pytest.mark.parametrize("policy", [None, "nothing", "dots"])
@pytest.mark.parametrize(("numbers", "names"), [(1, "mode"), (-2, "mode"), ((1, 2), ()), ((), ("times", "mode"))])
def test_a_model_has_static_arguments_too(policy, numbers, names):
    model = Powers(W)
    made = jaxckpt.checkpoint(model, policy=policy, static_argnums=numbers, static_argnames=names)
    assert_trees_close(made(X, 3, "double"), model(X, 3, "double"))
    own = jax.grad(
        lambda w: jaxckpt.checkpoint(Powers(w), static_argnums=numbers, static_argnames=names)(X, 3, "double")
    )(W)
    assert_trees_close(own, jax.grad(lambda w: Powers(w)(X, 3, "double"))(W))
    assert executions(jax.grad(lambda x: made(x, 3, "double")), X)["tanh"] == 6


def test_a_model_s_static_arguments_and_barriers_are_checked():
    with pytest.raises(ArgumentError, match="static_argnames must be names of arguments"):
        jaxckpt.checkpoint(Powers(W), static_argnames="how_often")
    with pytest.raises(ArgumentError, match="prevent_cse must be"):
        jaxckpt.checkpoint(Powers(W), prevent_cse=(1,))
    within = jax.grad(lambda x: jaxckpt.checkpoint(Powers(W), prevent_cse=(False,), static_argnums=1)(x, 3))(X)
    assert_trees_close(within, jax.grad(lambda x: Powers(W)(x, 3))(X))


@pytest.mark.parametrize("policy", [None, "dots", Policy({op("sin"): SAVE})])
def test_a_function_is_traced_once_for_equal_static_arguments(policy):
    traced = []

    def fun(x, times):
        traced.append(times)
        return jnp.sin(x) * times

    checkpointed = jaxckpt.checkpoint(fun, policy=policy, static_argnums=1)
    for _ in range(3):
        jax.grad(lambda x: checkpointed(x, 2))(1.0)
    assert traced == [2]
