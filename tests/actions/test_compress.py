"""`jaxckpt.compress`: values in fewer bits, within the errors that it states."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxckpt
from benchmarks import actions
from jaxckpt import RECOMPUTE, SAVE, ArgumentError, ForwardModeError, Policy, Target, compress, tag
from jaxckpt.actions import KINDS, action_from
from jaxckpt.actions import given as admitted
from jaxckpt.actions.compress import FORMS
from jaxckpt.core.graph import Value
from tests.helpers import assert_trees_close, executions

KEY = jax.random.key(3)
FLOATS = [form for form in FORMS if form != "bits"]
W = jax.random.normal(jax.random.key(0), (32, 256)) / 6
X = jax.random.normal(jax.random.key(1), (64, 32))


def value(shape: tuple[int, ...], dtype: Any) -> Value:
    return Value(0, shape, jnp.dtype(dtype), int(np.prod(shape)) * jnp.dtype(dtype).itemsize)


def restored(action: Any, x: jax.Array) -> jax.Array:
    stored = action.encode(x)
    assert sum(leaf.nbytes for leaf in jax.tree.leaves(stored)) == action.device_bytes(value(x.shape, x.dtype))
    return action.decode(stored, jax.ShapeDtypeStruct(x.shape, x.dtype))


def loss(w, x):
    for _ in range(3):
        x = jnp.sin(tag(jnp.tanh(x @ w), "hidden")) @ w.T + x
    return jnp.sum(x**2)


CASES = {
    "form": st.sampled_from(FLOATS),
    "shape": st.lists(st.integers(1, 9), max_size=2).flatmap(
        lambda outer: st.integers(1, 300).map(lambda last: (*outer, last))
    ),
    "block": st.sampled_from([1, 3, 32, 128, 1000]),
    "scale": st.sampled_from([1e-30, 1e-3, 1.0, 1e4, 1e30]),
    "seed": st.integers(0, 99),
}


@pytest.mark.parametrize("count", [20, 60])
def test_what_is_restored_is_within_the_error(count):
    @given(**CASES)
    @settings(max_examples=count, deadline=None, derandomize=True)
    def check(form, shape, block, scale, seed):
        x = jax.random.normal(jax.random.key(seed), shape) * scale
        action = compress(form, **({} if FORMS[form].most is None else {"block": block}))
        got = np.asarray(restored(action, x), np.float64)
        x = np.asarray(x, np.float64)
        *outer, last = shape
        blocks = -(-last // block)
        padded = np.pad(np.abs(x), [(0, 0)] * len(outer) + [(0, blocks * block - last)]).reshape(*outer, blocks, block)
        largest = np.repeat(padded.max(-1), block, -1)[..., :last]
        uniform = largest if FORMS[form].uniform else np.maximum(np.abs(x), 2.0**-14 * largest)
        nothing = (FORMS[form].most or 0) * float(
            jnp.finfo(jnp.float32).tiny
        )  # of a block that small no scale is a float32
        assert (np.abs(got - x) <= 1.001 * action.error(jnp.float32) * uniform + nothing).all()

    check()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
@pytest.mark.parametrize("form", FLOATS)
def test_every_float_comes_back_in_its_own_dtype_or_is_saved(form, dtype):
    with jax.enable_x64(dtype == "float64"):
        x = jnp.linspace(-3, 5, 260, dtype=dtype).reshape(2, 130)
        wider = jnp.dtype(dtype).itemsize * 8 > FORMS[form].bits
        assert admitted(compress(form), value(x.shape, dtype)) == (compress(form) if wider else SAVE)
        got = restored(compress(form), x) if wider else x
        assert got.dtype == x.dtype and float(jnp.max(jnp.abs(got - x))) <= 5.01 * compress(form).error(dtype)


@pytest.mark.parametrize("form", FLOATS)
def test_infinities_and_nan_stay_visible_and_harm_no_neighbour(form):
    x = jnp.concatenate([jnp.linspace(-1, 1, 61), jnp.array([jnp.inf, -jnp.inf, jnp.nan])])
    got = restored(compress(form), x)
    assert jnp.max(jnp.abs(got[:61] - x[:61])) <= 1.001 * compress(form).error(x.dtype)
    keeps = form in ("bfloat16", "float16", "float8_e5m2")
    expected = x[61:] if keeps else jnp.full(3, jnp.nan)
    np.testing.assert_array_equal(got[61:], expected)


@pytest.mark.parametrize("form", FLOATS)
@pytest.mark.parametrize("x", [jnp.zeros((3, 40)), jnp.full((2, 7), 1e-45), jnp.full((2, 130), 3e38)], ids=str)
def test_zeros_and_the_ends_of_the_range(form, x):
    got = restored(compress(form), x)
    assert jnp.all(jnp.isfinite(got)) and jnp.allclose(got, x, rtol=0.1, atol=1e-37)


@pytest.mark.parametrize("keyed", [False, True], ids=["nearest", "random"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_finite_numbers_stay_finite_up_to_the_dtypes_largest(dtype, keyed):
    with jax.enable_x64(dtype == "float64"):
        most = float(jnp.finfo(dtype).max)
        x = jnp.array([[most, -most, 0.999 * most, -0.999 * most, most / 2, 1.0, 0.0, -3.0]] * 8, dtype)
        for form in FLOATS:
            if FORMS[form].bits >= 8 * x.dtype.itemsize:
                continue
            got = np.asarray(restored(compress(form, key=jax.random.key(0) if keyed else None), x), np.float64)
            assert np.isfinite(got).all() and (np.sign(got[:, :5]) == np.sign(np.asarray(x[:, :5], np.float64))).all()
            beyond = dtype == "float64" and form == "bfloat16"  # its range ends before
            assert np.abs(got[:, 0]).min() >= (float(jnp.finfo(form).max) if beyond else 0.75 * most)


@pytest.mark.parametrize("key", [None, jax.random.key(0)], ids=["nearest", "random"])
def test_the_gradients_of_masked_attention_are_finite(key):
    y, mask = jnp.ones((2, 4)), jnp.array([[True] * 4, [False] * 4])

    def attended(y):
        scores = tag(jnp.where(mask, y, jnp.finfo(y.dtype).min), "scores")
        return jnp.sum(jax.nn.softmax(scores) * y)

    kept = jaxckpt.checkpoint(attended, policy=Policy({"scores": compress("bfloat16", key=key)}))
    assert_trees_close(jax.grad(kept)(y), jax.grad(attended)(y), rtol=0.02, atol=0.02)


@pytest.mark.parametrize("shape", [(1,), (8,), (9,), (3, 5), (2, 3, 64)])
def test_booleans_take_a_bit_and_are_exact(shape):
    x = jax.random.bernoulli(jax.random.key(0), 0.4, shape)
    np.testing.assert_array_equal(restored(compress("bits"), x), x)
    assert compress("bits").error(bool) == 0


@pytest.mark.parametrize(
    "kind",
    [
        value((), "float32"),
        value((0, 4), "float32"),
        value((8,), "int32"),
        value((8,), "complex64"),
        value((8,), "bool"),
    ],
    ids=lambda kind: f"{kind.dtype}{kind.shape}",
)
def test_what_no_float_form_makes_smaller_is_saved(kind):
    assert {admitted(compress(form), kind) for form in FLOATS} == {SAVE}
    assert admitted(compress("bits"), kind) == (compress("bits") if kind.dtype == bool else SAVE)


@pytest.mark.parametrize("form", FLOATS)
def test_a_policy_keeps_that_form_and_the_forward_pass_is_exact(form):
    saved, small = (jaxckpt.checkpoint(loss, policy=Policy({"hidden": a})) for a in (SAVE, compress(form)))
    whole, less = (jaxckpt.residuals(f, W, X).kept_bytes for f in (saved, small))
    one = value((64, 256), "float32")
    assert whole - less == 3 * (one.bytes - compress(form).device_bytes(one))
    (got, gradient), (expected, exact) = (jax.value_and_grad(f)(W, X) for f in (small, loss))
    assert got == expected
    difference = float(jnp.max(jnp.abs(gradient - exact)) / jnp.max(jnp.abs(exact)))
    assert 0 < difference < 8 * compress(form).error(X.dtype)
    for policy, tanh in ((Policy({"hidden": compress(form)}), 3), (Policy(default=RECOMPUTE), 6)):
        assert executions(jax.grad(jaxckpt.checkpoint(loss, policy=policy)), W, X)["tanh"] == tanh


def test_a_mask_in_a_scan_is_kept_as_bits():
    def dropped(w, x, key):
        def body(x, key):
            mask = tag(jax.random.bernoulli(key, 0.5, x.shape), "mask")
            return jnp.where(mask, jnp.tanh(x @ w @ w.T), 0), None

        return jnp.sum(jax.lax.scan(jaxckpt.checkpoint(body, policy=policy), x, jax.random.split(key, 5))[0])

    kept, gradients = [], []
    for action in (SAVE, compress("bits")):
        policy = Policy({"mask": action})
        found = jaxckpt.residuals(dropped, W, X, jax.random.key(0)).residuals
        kept.append(sum(each.bytes for each in found if each.name == "mask"))
        gradients.append(jax.grad(dropped)(W, X, jax.random.key(0)))
    assert kept == [5 * 64 * 32, 5 * 64 * 32 // 8]
    assert_trees_close(*gradients, rtol=1e-3, atol=1e-3)


def test_under_vmap_jit_and_in_branches():
    small = jaxckpt.checkpoint(loss, policy=Policy({"hidden": compress("int8")}))
    many = jnp.stack([X, 2 * X])
    each = jax.vmap(jax.jit(jax.grad(small)), (None, 0))(W, many)
    for got, x in zip(each, many):
        exact = jax.grad(loss)(W, x)
        assert float(jnp.max(jnp.abs(got - exact)) / jnp.max(jnp.abs(exact))) < 0.03
    either = lambda w, x: jax.lax.cond(jnp.sum(x) > 1e9, lambda x: jnp.sum(x), functools.partial(small, w), x)
    np.testing.assert_allclose(jax.grad(either)(W, X), jax.grad(small)(W, X), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("form", FLOATS)
def test_a_second_derivative_is_right_or_an_error(form):
    small = jaxckpt.checkpoint(loss, policy=Policy({"hidden": compress(form)}))
    reverse = lambda f: jax.grad(lambda w: jnp.sum(jax.grad(f)(w, X) ** 2))(W)
    forward = lambda f: jax.jvp(jax.grad(f), (W, X), (W, X))[1]
    for second in (reverse, forward):
        if form == "bfloat16":
            got, exact = second(small), second(loss)
            assert float(jnp.max(jnp.abs(got - exact)) / jnp.max(jnp.abs(exact))) < 0.01
            continue
        with pytest.raises(ForwardModeError, match=r"compress\(.*\) keeps values for one derivative"):
            second(small)


@pytest.mark.parametrize("form", FLOATS)
def test_rounding_at_random_is_right_on_average_and_within_twice_the_error(form):
    x = jax.random.normal(jax.random.key(5), (2, 130)) * jnp.array([[1e-20], [3.0]])
    nearest, whole = compress(form), np.abs(np.asarray(x)).max(-1, keepdims=True)
    roundings = jnp.stack([restored(compress(form, key=jax.random.key(seed)), x) for seed in range(60)])
    errors = np.asarray(roundings, np.float64) - np.asarray(x)
    unit = whole if FORMS[form].uniform else np.abs(np.asarray(x))
    bound = compress(form, key=jax.random.key(0)).error(x.dtype)
    assert np.all(np.abs(errors) <= unit * bound + whole * 2.0**-13 * (FORMS[form].most is not None))
    of_mean, of_nearest = np.abs(errors.mean(0)), np.abs(np.asarray(restored(nearest, x), np.float64) - np.asarray(x))
    assert of_mean.mean() < 0.5 * of_nearest.mean() and np.all(of_mean <= whole * bound / 3)


def test_a_key_draws_other_bits_for_other_values_and_the_same_for_equal_ones():
    action, x = compress("int4", key=jax.random.key(0)), jax.random.normal(jax.random.key(5), (64, 128))
    noise = lambda x: np.asarray(restored(action, x) - x)
    np.testing.assert_array_equal(noise(x), noise(x))
    rolled = np.roll(noise(jnp.roll(x, 1, 0)), -1, 0)  # the same numbers in other places
    assert np.abs(np.corrcoef(noise(x).ravel(), noise(x * 1.0001).ravel())[0, 1]) < 0.1
    assert np.mean(rolled != noise(x)) > 0.2


def test_a_key_in_a_policy_in_a_scan_and_under_vmap():
    action = compress("int8", key=jax.random.key(3))
    block = jaxckpt.checkpoint(loss, policy=Policy({"hidden": action}))
    value, gradient = jax.value_and_grad(block)(W, X)
    expected_value, expected = jax.value_and_grad(loss)(W, X)
    assert value == expected_value and 0 < jnp.linalg.norm(gradient - expected) < 0.02 * jnp.linalg.norm(expected)
    rows = lambda fun: jax.vmap(jax.grad(fun), (None, 0))(W, X[:, None])
    assert jnp.linalg.norm(rows(block) - rows(loss)) < 0.02 * jnp.linalg.norm(rows(loss))
    with pytest.raises(ForwardModeError, match="keeps values for one derivative"):
        half = jaxckpt.checkpoint(loss, policy=Policy({"hidden": compress("bfloat16", key=jax.random.key(3))}))
        jax.grad(lambda w: jnp.sum(jax.grad(half)(w, X) ** 2))(W)


def test_it_is_a_value():
    keyed = compress("int8", key=jax.random.key(7))
    assert keyed == compress("int8", key=jax.random.PRNGKey(7)) != compress("int8", key=jax.random.key(8))
    assert action_from(keyed.to_json()) == keyed and eval(repr(keyed)) == keyed and keyed != compress("int8")
    assert compress("int8") == compress("int8", block=128) != compress("int8", block=64)
    assert compress("int8") != compress("int4") and "compress" in KINDS
    for action in (compress("float8_e4m3fn"), compress("int4", block=32)):
        assert action_from(action.to_json()) == action and eval(repr(action)) == action
    assert compress("int8").to_json() == {"kind": "compress", "form": "int8", "block": 128}


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (lambda: compress("int9"), "form must be one of bfloat16.*got 'int9'. Did you mean 'int8'"),
        (lambda: compress(8), "form must be one of"),  # type: ignore[arg-type]
        (lambda: compress("int8", block=0), "block must be an int of at least 1"),
        (lambda: compress("int8", block=True), "block must be an int of at least 1"),
        (lambda: compress("int8", block=2.5), "block must be an int of at least 1"),  # type: ignore[arg-type]
        (lambda: compress("int8", key=0), "key must be one key"),
        (lambda: compress("int8", key=jax.random.split(jax.random.key(0))), "index one"),
        (lambda: compress("bits", key=jax.random.key(0)), "None for 'bits', which rounds nothing"),
        (lambda: jax.jit(lambda key: compress("int8", key=key))(jax.random.key(0)), "Make it outside"),
        (lambda: action_from("compress"), 'compress with the parameters that it has.*Write compress."int8".'),
        (lambda: Policy({"h": "compress"}), 'Write compress."int8".'),
        (lambda: Policy({"h": "shard"}), "Write shard"),
        (lambda: compress("int8", key=jnp.zeros(3, jnp.uint32)), "key must be one key.*no key of 3 words"),
        (lambda: compress("int8", key=jnp.zeros((), jnp.uint32)), "key must be one key"),
        (lambda: compress("int8", key=jnp.zeros((2, 2), jnp.uint32)), "index one"),
        (lambda: compress("int8", key=("threefry", 1, 2)), "generator 'threefry'"),
        (lambda: compress("int8", key=("threefry2x32", 1)), "no key of 1 words"),
        (lambda: compress("int8", key=("threefry2x32",)), "no key of 0 words"),
        (lambda: compress("int8") | "offload", "each side of . must be an action; got 'offload'. Write OFFLOAD"),
        (lambda: "offload" | compress("int8"), "must be an action; got 'offload'. Write OFFLOAD"),
        *(
            (lambda form=form: compress(form, block=7), f"block must be left out for '{form}', which has no scales")
            for form in ("bfloat16", "bits", "narrow")
        ),
    ],
)
def test_bad_arguments(made, message):
    with pytest.raises(ArgumentError, match=message):
        made()


def test_a_key_is_read_where_something_else_is_traced():
    made = []
    jax.jit(lambda x: made.append(compress("int8", key=KEY)) or x)(1.0)
    assert made == [compress("int8", key=jax.random.key(3))]


def mlp(ws, x, policy, scanned):
    def layer(x, w):
        return x + jax.nn.gelu(tag(x @ w[0], "up")) @ w[1], None

    if scanned:
        x, _ = jax.lax.scan(jaxckpt.checkpoint(layer, policy=policy, prevent_cse=False), x, ws)
    else:
        for w in zip(*ws):
            x, _ = jaxckpt.checkpoint(layer, policy=policy)(x, w)
    return jnp.sum(x.astype(jnp.float32) ** 2)


LAYERS, ROWS, WIDTH = 16, 2048, 1024
UP = value((ROWS, 4 * WIDTH), "bfloat16")
TARGETS = [pytest.param("cuda:h100", marks=pytest.mark.cuda), pytest.param("tpu:v5e:2x2", marks=pytest.mark.tpu)]


def measured(action: Any, target: str, scanned: bool) -> jaxckpt.MemoryReport:
    struct = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    ws = struct(LAYERS, WIDTH, 4 * WIDTH), struct(LAYERS, 4 * WIDTH, WIDTH)
    args = ws if scanned else tuple([struct(*w.shape[1:])] * LAYERS for w in ws), struct(ROWS, WIDTH)
    step = jax.value_and_grad(functools.partial(mlp, policy=Policy({"up": action}), scanned=scanned))
    return jaxckpt.measure(step, *args, target=target, generate_code=False)


@pytest.mark.once
@pytest.mark.parametrize("form", ["bfloat16", "float8_e4m3fn", "int8", "int4"])
@pytest.mark.parametrize("target", TARGETS)
def test_a_scan_keeps_the_bytes_of_the_form_on_the_device(target, form):
    action = admitted(compress(form), UP)
    report = measured(action, target, scanned=True)
    # A TPU holds the scales on the chip. It would pad rows of 32 of them to 128: int4 would take 1.18 times as much.
    assert actions.kept(report) == pytest.approx(LAYERS * action.device_bytes(UP), rel=0.01)


@pytest.mark.once
@pytest.mark.parametrize("target", TARGETS)
def test_masks_take_a_bit_each_on_the_device(target):
    row = actions.measured_masks(compress("bits"), target)
    assert row["kept"] == row["expected_kept"] == 16 * 2048 * 4096 / 8


@pytest.mark.once
@pytest.mark.parametrize("form", ["float8_e4m3fn", "int4"])
@pytest.mark.parametrize("target", TARGETS)
def test_unrolled_layers_need_less_by_what_is_kept_less(target, form):
    """A compiler that is free to would keep the whole value, and encode it right before it is decoded."""
    nothing, saved, small = (
        measured(action, target, scanned=False).peak_bytes for action in (RECOMPUTE, SAVE, compress(form))
    )
    assert saved - small > 0.75 * (saved - nothing) > 0


@pytest.mark.parametrize("form", ["bfloat16", "int8", "int4"])
def test_a_value_that_several_devices_share_is_made_smaller_on_each(form):
    whole = Value(0, (64, 256), np.dtype("float32"), 64 * 256 * 4)
    part = dataclasses.replace(whole, bytes=whole.bytes // 8)
    assert admitted(compress(form), part) == compress(form)
    assert compress(form).device_bytes(part) == compress(form).device_bytes(whole) // 8


@pytest.mark.once
@pytest.mark.parametrize("form", ["bfloat16", "float8_e4m3fn", "int8", "int4"])
@pytest.mark.parametrize("target", [pytest.param("cuda:h100x8", marks=pytest.mark.cuda), TARGETS[1]])
def test_devices_send_nothing_more_to_keep_their_parts_in_another_form(target, form):
    """Rows over some devices and columns over others, as in tensor parallelism."""
    mesh = Target(target).mesh((2, Target(target).count // 2), ("data", "model"))

    def struct(shape: tuple[int, ...], *spec: str | None) -> Any:
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, P(*spec)))

    weights = struct((8, 64, 4096), None, None, "model"), struct((8, 4096, 64), None, "model", None)
    args = weights, struct((1024, 64), "data", None)

    def report(action: Any) -> jaxckpt.MemoryReport:
        step = jax.grad(functools.partial(mlp, policy=Policy({"up": action}), scanned=True))
        return jaxckpt.measure(step, *args, target=target, generate_code=False)

    saved, small = report(SAVE), report(compress(form))
    sent = [sum(each.sent_bytes * each.runs for each in made.collectives) for made in (saved, small)]
    assert 0 < sent[1] <= 1.001 * sent[0]
    whole = 8 * 1024 * 4096 * 4 / Target(target).count
    assert saved.temp_bytes - small.temp_bytes > 0.3 * whole


@pytest.mark.parametrize("form", ["float8_e4m3fn", "int8"])
def test_a_value_saved_beside_a_compressed_one_is_the_forward_passes_own(form):
    def fun(x, w, scale):
        hidden = tag(jnp.tanh(x), "hidden")
        row = tag(jnp.argmax(hidden @ w, -1), "row")
        y = tag(hidden @ w, "y")
        return jnp.sum(jnp.sin(y * scale)) + jnp.sum(jnp.take_along_axis(y * scale, row[:, None], 1))

    x, w = (jax.random.normal(jax.random.key(i), shape) for i, shape in enumerate([(64, 128), (128, 256)]))
    args = x, w, jnp.ones((64, 256))
    kept = jaxckpt.checkpoint(fun, policy=Policy({"hidden": compress(form), "row": SAVE, "y": SAVE}))
    exact = jax.grad(fun, (0, 1, 2))(*args)
    got = jax.grad(kept, (0, 1, 2))(*args)
    np.testing.assert_allclose(got[2], exact[2], rtol=1e-5, atol=1e-5)  # it is made of what is saved alone
    assert all(np.isfinite(leaf).all() for leaf in got)
    saved = jaxckpt.checkpoint(fun, policy=Policy({"hidden": SAVE, "row": SAVE, "y": SAVE}))
    matmuls = [executions(jax.grad(f, (0, 1, 2)), *args)["dot_general"] for f in (kept, saved)]
    assert matmuls[0] == matmuls[1]


@pytest.mark.parametrize("form", ["float16", "float8_e4m3fn", "float8_e5m2", "int8", "int4"])
def test_tiny_numbers_do_not_vanish(form):
    x = jnp.full((1, 128), 1e-33, jnp.float32)
    action = compress(form)
    back = action.decode(action.encode(x), jax.typeof(x))
    assert float(jnp.max(jnp.abs(back - x))) <= action.error(x.dtype) * 1e-33


EXTREMES = {
    "maximum": lambda x: jnp.maximum(x, 0),
    "minimum": lambda x: jnp.minimum(x, x[::-1]),
    "clip": lambda x: jnp.clip(x, -0.5, 0.5),
    "max": lambda x: jnp.max(x, -1),
    "min": lambda x: jnp.min(x, 0),
    "scatter-max": lambda x: jnp.zeros((8, 4)).at[:, jnp.arange(16) // 4].max(x),
    "scatter-min": lambda x: jnp.zeros((8, 4)).at[:, jnp.arange(16) // 4].min(x),
}


@pytest.mark.parametrize("name", EXTREMES)
def test_the_gradient_of_an_extreme_finds_it_among_the_operands(name):
    """Its derivative asks which operand equals the result. None equals a rounded one: gradients were zero or NaN."""

    def loss(w, x):
        return jnp.sum(jnp.sin(tag(EXTREMES[name](x @ w), "extreme")))

    def scanned(w, x):
        return jax.lax.scan(lambda c, x: (c + loss(w, x), None), 0.0, jnp.stack([x, 2 * x]))[0]

    w, x = (jax.random.normal(jax.random.key(i), shape) for i, shape in enumerate([(16, 16), (8, 16)]))
    policy, other = (Policy({"extreme": compress(form)}) for form in ("int8", "bfloat16"))
    kept = [jaxckpt.checkpoint(loss, policy=policy), other.plan(jaxckpt.trace(scanned, w, x)).apply(scanned)]
    for fun, exact in zip(kept, (loss, scanned)):
        got, expected = (np.asarray(jax.grad(f)(w, x)) for f in (fun, exact))
        assert 0 < np.linalg.norm(got - expected) < 0.05 * np.linalg.norm(expected)  # rounded, and no more


WITHIN = {
    "here": lambda op, h: op(h),
    "jit": lambda op, h: jax.jit(op)(h),
    "branch": lambda op, h: jax.lax.cond(h[0, 0] > -9, op, lambda h: 2 * op(h), h),
    "checkpoint": lambda op, h: jax.checkpoint(op)(h),
    "scan": lambda op, h: jax.lax.map(lambda i: jnp.sin(op(i * h)), jnp.arange(1.0, 3.0)),
}


@pytest.mark.parametrize("within", WITHIN)
@pytest.mark.parametrize("name", ["maximum", "clip", "max", "scatter-max"])
def test_an_exact_extreme_of_a_rounded_operand_is_looked_for_among_exact_ones(name, within):
    """An operand that comes back rounded is equal to no maximum that was kept exactly: gradients were zero or NaN."""

    def loss(w, x):
        return jnp.sum(jnp.sin(WITHIN[within](EXTREMES[name], tag(jnp.sin(x @ w), "h"))))

    w, x = 0.05 * jax.random.normal(jax.random.key(0), (16, 16)), jax.random.normal(jax.random.key(1), (8, 16))
    rest_saved = Policy({"h": compress("int8")}, default="save")
    exact = jax.grad(loss)(w, x)
    again = jax.grad(jaxckpt.checkpoint(loss, policy=Policy({"h": compress("int8")})))(w, x)
    allowed = np.linalg.norm(again - exact) + 0.02 * np.linalg.norm(exact)
    for fun in (jaxckpt.checkpoint(loss, policy=rest_saved), rest_saved.plan(jaxckpt.trace(loss, w, x)).apply(loss)):
        assert np.linalg.norm(jax.grad(fun)(w, x) - exact) <= allowed


def test_a_file_with_a_block_for_a_form_without_scales_is_read():
    stored = {"kind": "compress", "form": "bfloat16", "block": 64}
    assert jaxckpt.actions.action_from(stored) == compress("bfloat16")
    assert "block" not in compress("bfloat16").to_json() and "block" in compress("int8").to_json()


@pytest.mark.parametrize("form", FLOATS)
def test_in_a_checkpoint_in_a_checkpoint_numbers_come_back_finite(form):
    """JAX reduces the precision of floats that the inner one keeps and the outer one reads; a form need not be a float
    as it thinks.
    """
    policy = Policy({"t*": compress(form)}, strict=False)
    inner = jaxckpt.checkpoint(lambda x: jnp.sin(tag(x * 1.5, "t1")), policy=policy)
    both = jaxckpt.checkpoint(lambda x: jnp.sum(inner(tag(jnp.tanh(x), "t2"))), policy=policy)
    x = jnp.linspace(0.1, 1, 15).reshape(3, 5)
    expected = jax.grad(lambda x: jnp.sum(jnp.sin(1.5 * jnp.tanh(x))))(x)
    for got in (jax.grad(both)(x), jax.jit(jax.grad(both))(x)):
        assert np.linalg.norm(got - expected) <= 3 * compress(form).error(x.dtype) * np.linalg.norm(expected)
