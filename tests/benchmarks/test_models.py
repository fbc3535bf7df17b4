"""The benchmark models: on shapes alone or on real data, and `checkpoint` really round every run of blocks."""

from __future__ import annotations

import doctest
import functools
import importlib.util
import itertools
import re
import sys
from pathlib import Path

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxckpt.models import chain, common, data, gpt, lstm, moe, resnet, unet

GPT = {"layers": 3, "width": 32, "heads": 2, "batch": 2, "tokens": 32, "vocabulary": 300, "dtype": jnp.float32}
RESNET = {"stages": (2, 1), "width": 8, "batch": 8, "pixels": 16, "classes": 10, "dtype": jnp.float32}
UNET = {"width": 8, "factors": (1, 2), "depth": 1, "batch": 4, "pixels": 16, "dtype": jnp.float32}
MOE = {
    "layers": 3,
    "width": 16,
    "heads": 2,
    "batch": 2,
    "tokens": 16,
    "vocabulary": 300,
    "experts": 4,
    "dtype": jnp.float32,
}

# Every factory, small enough for a test: (factory, sizes, blocks).
MODELS = {
    "gpt.small": (gpt.small, GPT, 3),
    "gpt.gpt2": (gpt.gpt2, GPT | {"tied": True}, 3),
    "gpt.gpt2_scan": (gpt.gpt2_scan, GPT | {"dropout": 0.1}, 3),
    "gpt.deep": (gpt.deep, GPT | {"layers": 2, "dropout": 0.1}, 2),
    "gpt.deep_scan": (gpt.deep_scan, GPT, 3),
    "resnet.resnet50": (resnet.resnet50, RESNET, 3),
    "resnet.small": (resnet.small, RESNET, 3),
    "unet.unet": (unet.unet, UNET, 5),
    "unet.small": (unet.small, UNET, 5),
    "lstm.lstm": (lstm.lstm, {"steps": 22, "width": 16, "batch": 4}, 22),
    "lstm.small": (lstm.small, {"steps": 22, "width": 16, "batch": 4}, 22),
    "moe.moe": (moe.moe, MOE, 3),
    "moe.small": (moe.small, MOE, 3),
    "chain.chain": (chain.chain, {"layers": 7, "width": 16, "batch": 32}, 7),
    "chain.wide": (chain.wide, {"layers": 3, "width": 64, "batch": 8}, 3),
}
SCANNED = {"gpt.gpt2_scan", "gpt.deep_scan", "lstm.lstm", "lstm.small"}
# One factory for each distinct program; the others differ from these in their default sizes only.
DISTINCT = [
    "gpt.gpt2",
    "gpt.deep",
    "gpt.gpt2_scan",
    "resnet.small",
    "unet.small",
    "lstm.small",
    "moe.small",
    "chain.chain",
]

every_model = pytest.mark.parametrize("name", MODELS)
distinct_model = pytest.mark.parametrize("name", DISTINCT)


def make(name, checkpoint=None, segment_size=1, **more):
    factory, sizes, _ = MODELS[name]
    return factory(checkpoint, segment_size, **sizes, **more)


def equations(jaxpr):
    """Yields every equation of a jaxpr and of those within it."""
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in jax.tree.leaves(list(eqn.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
            if hasattr(inner, "eqns"):
                yield from equations(getattr(inner, "jaxpr", inner))


def count(fun, args, primitives):
    return sum(eqn.primitive.name in primitives for eqn in equations(jax.make_jaxpr(fun)(*args).jaxpr))


def nbytes(tree):
    sizes = [x.size * x.dtype.itemsize for x in jax.tree.leaves(tree) if hasattr(x.dtype, "itemsize")]
    return sum(sizes)


def residual_bytes(loss, args):
    """Returns the bytes that the backward pass holds: what the forward pass keeps, parameters among it."""

    def residuals(params, *rest):
        return jax.tree.leaves(jax.vjp(lambda params: loss(params, *rest), params)[1])

    return nbytes(jax.eval_shape(residuals, *args))


# These programs run for milliseconds: optimising them would take longer than all else here.
jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


@functools.cache
def real_args(name):
    """Returns the args of `real=True`, made once."""
    return make(name, real=True)[1]


@functools.cache
def plain(name):
    """Returns the value and gradient without checkpointing, compiled once; takes `real_args(name)`."""
    return jit(jax.value_and_grad(make(name)[0]))


def assert_close(actual, expected):
    """Asserts equality but for the order of sums: 1e-5 of each leaf's largest entry."""
    chex.assert_trees_all_equal_shapes_and_dtypes(actual, expected)
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5 * float(np.max(np.abs(b), initial=1e-3)))


@every_model
def test_args_are_shapes_alone_unless_real_and_then_of_the_same_shapes(name):
    _, shapes = make(name)
    leaves = jax.tree.leaves(shapes)
    assert leaves
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves)
    # Only arrays can come out of this, and nothing is compiled for it.
    real = jax.eval_shape(lambda: make(name, real=True)[1])
    chex.assert_trees_all_equal_shapes_and_dtypes(shapes, real)


def test_real_args_are_arrays_of_parameters_that_differ_and_of_real_data():
    params, inputs, targets = real_args("gpt.small")
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves((params, inputs, targets)))
    kernels = [block["mlp"]["up"]["kernel"] for block in params["blocks"]]
    assert all(np.abs(a - b).max() > 0.01 for a, b in itertools.pairwise(kernels))
    np.testing.assert_array_equal(inputs, data.text_batch(*inputs.shape, GPT["vocabulary"])[0])


@every_model
def test_loss_of_shapes_is_a_float32_scalar(name):
    loss, args = make(name)
    out = jax.eval_shape(loss, *args)
    assert out.shape == ()
    assert out.dtype == jnp.float32


def parameters(args):
    return sum(leaf.size for leaf in jax.tree.leaves(args[0]))


def test_full_sizes_have_the_parameters_of_the_papers():
    # A GPT block has 12 h^2 weights and 13 h biases and scales (Radford et al.).
    block, rest = 12 * 768**2 + 13 * 768, 2 * 32000 * 768 + 1024 * 768 + 2 * 768
    assert parameters(gpt.gpt2()[1]) == parameters(gpt.gpt2_scan()[1]) == 12 * block + rest
    assert parameters(gpt.deep()[1]) == parameters(gpt.deep_scan()[1]) == 48 * block + rest
    assert parameters(gpt.gpt2(tied=True)[1]) == 12 * block + rest - 32000 * 768
    # As in every published count of ResNet-50.
    assert parameters(resnet.resnet50()[1]) == 25_557_032
    assert parameters(chain.chain()[1]) == 100 * (1024**2 + 1024) + 1024 * 10 + 10
    # Hidden to gates with bias, the input's look-up, the head.
    assert parameters(lstm.lstm()[1]) == (1024 + 1) * 4096 + 256 * 4096 + 1024 * 256 + 256


def test_activations_dominate_the_chain_and_are_small_in_wide():
    def activations(loss, args):
        # The bytes of every layer's output, of which a plain backward pass needs each once.
        return len(args[0]["layers"]) * nbytes(args[1])

    model = chain.chain()
    assert activations(*model) > 7 * nbytes(model[1][0])
    model = chain.wide()
    assert activations(*model) < 0.01 * nbytes(model[1][0])


@every_model
def test_checkpoint_makes_the_backward_pass_compute_matrix_products_again(name):
    (loss, args), (checkpointed, _) = make(name), make(name, jax.checkpoint)
    products = {"dot_general", "conv_general_dilated"}
    assert count(jax.grad(checkpointed), args, products) > count(jax.grad(loss), args, products)
    assert count(checkpointed, args, products) == count(loss, args, products)


@every_model
def test_checkpoint_keeps_fewer_bytes(name):
    (loss, args), (checkpointed, _) = make(name), make(name, jax.checkpoint)
    kept, params = residual_bytes(checkpointed, args), nbytes(args[0])
    if name == "chain.wide":
        # That is its point: next to nothing is there to save.
        assert residual_bytes(loss, args) < 1.2 * params
    else:
        assert kept - params < 0.7 * (residual_bytes(loss, args) - params)


def test_chain_checkpointed_keeps_its_layers_inputs_and_nothing_else():
    loss, args = make("chain.chain", jax.checkpoint)
    params, x, labels = args
    head = x.shape[0] * 10 * 4
    kept = residual_bytes(loss, args) - nbytes(params)
    # Seven inputs of layers and the head's, and what the head and the loss keep: a few arrays of its ten classes.
    assert 0 <= kept - 8 * nbytes(x) <= 6 * head + nbytes(labels)


@pytest.mark.parametrize("segment_size", [1, 2, "sqrt", 100])
@distinct_model
def test_each_run_of_segment_size_blocks_is_checkpointed_once(name, segment_size):
    blocks = MODELS[name][2]
    length = common.segment_length(segment_size, blocks)
    called = []

    def transform(run):
        called.append(run)
        return jax.checkpoint(run)

    loss, args = make(name, transform, segment_size)
    regions = count(loss, args, {"checkpoint", "remat", "remat2"})
    # In a scan all whole runs are one region; the steps left over are another.
    expected = len(range(0, blocks, length)) if name not in SCANNED else 1 + (blocks > length and blocks % length > 0)
    assert regions == expected
    assert len(called) <= max(2, expected), "runs of the same blocks must be one function"
    if name.startswith(("gpt", "moe", "chain", "lstm")):
        assert len(called) <= 2


# 2 leaves a shorter run at the end of most; the LSTM's 22 steps come in one, in equal and in unequal runs.
@pytest.mark.parametrize(
    ("name", "segment_size"),
    [(name, 2) for name in DISTINCT if name != "resnet.small"] + [("lstm.small", k) for k in (1, 4, 22)],
)
def test_gradients_with_checkpoint_equal_those_without(name, segment_size):
    loss, args = make(name, jax.checkpoint, segment_size)[0], real_args(name)
    expected = plain(name)(*args)
    assert np.isfinite(expected[0])
    assert_close(jit(jax.value_and_grad(loss))(*args), expected)


def test_lstm_in_sqrt_segments_keeps_a_state_a_segment():
    # 64 steps in 8 segments: 8 states kept, of 64.
    sizes = {"steps": 64, "width": 64, "batch": 32}
    kept = {}
    for segment_size in (1, "sqrt"):
        loss, args = lstm.lstm(jax.checkpoint, segment_size, **sizes)
        kept[segment_size] = residual_bytes(loss, args) - nbytes(args[0])
    state, tokens = 2 * 32 * 64 * 4, 2 * 64 * 32 * 4
    assert 64 * state <= kept[1] <= 66 * state + 3 * tokens
    assert 8 * state <= kept["sqrt"] <= 10 * state + 3 * tokens


@pytest.mark.parametrize("name", ["gpt.gpt2", "resnet.small", "unet.small", "lstm.small", "moe.small", "chain.chain"])
def test_loss_falls_on_real_data(name):
    step, (params, *rest) = plain(name), real_args(name)
    optimizer = optax.adam(1e-2)

    @jit
    def update(grads, state, params):
        updates, state = optimizer.update(grads, state)
        return optax.apply_updates(params, updates), state

    state, losses = optimizer.init(params), []
    for _ in range(8):
        value, grads = step(params, *rest)
        params, state = update(grads, state, params)
        losses.append(float(value))
    assert np.all(np.isfinite(losses))
    assert losses[-1] < 0.97 * losses[0], losses


@distinct_model
def test_tags_are_those_that_the_file_lists(name):
    loss, args = make(name)
    found = {e.params["name"] for e in equations(jax.make_jaxpr(loss)(*args).jaxpr) if e.primitive.name == "name"}
    text = sys.modules[MODELS[name][0].__module__].__doc__.partition("Tags within a block")[2]
    listed = set(re.findall(r"\w+", re.sub(r"\(.*?\)", "", text, flags=re.DOTALL)))
    assert found == listed


def test_a_policy_on_tags_keeps_what_it_names():
    policy = jax.checkpoint_policies.save_only_these_names("mlp_up")
    loss, args = make("gpt.gpt2", jax.checkpoint)
    named, _ = make("gpt.gpt2", functools.partial(jax.checkpoint, policy=policy))
    more = residual_bytes(named, args) - residual_bytes(loss, args)
    batch, tokens, width, layers = (GPT[key] for key in ("batch", "tokens", "width", "layers"))
    # With the value itself kept, the bias that went into it is no longer needed.
    assert more == layers * (batch * tokens - 1) * 4 * width * 4


def test_scanned_gpt_is_the_unrolled_one():
    (loss, _), (params, *batch) = make("gpt.small"), real_args("gpt.small")
    scanned, (like, *_) = make("gpt.deep_scan")
    stacked = params | {"blocks": jax.tree.map(lambda *leaves: jnp.stack(leaves), *params["blocks"])}
    chex.assert_trees_all_equal_shapes_and_dtypes(stacked, like)
    np.testing.assert_allclose(jax.jit(scanned)(stacked, *batch), jax.jit(loss)(params, *batch), rtol=1e-5)


def test_attention_looks_back_only():
    size = gpt.Size(width=16, heads=2, tokens=8, dtype=jnp.float32)
    block = gpt.Block(size)
    x = jax.random.normal(jax.random.key(0), (1, 8, 16))
    params, apply = jax.jit(block.init)(common.random_key(1), x), jax.jit(block.apply)
    before, after = apply(params, x), apply(params, x.at[:, 5:].add(1.0))
    np.testing.assert_array_equal(before[:, :5], after[:, :5])
    assert np.all(np.abs(before[:, 5:] - after[:, 5:]).max(-1) > 1e-3)


def test_dropout_draws_by_its_key():
    step, (*args, key) = plain("gpt.deep"), real_args("gpt.deep")
    assert step(*args, key)[0] == step(*args, key)[0]
    assert step(*args, key)[0] != step(*args, jax.random.fold_in(key, 1))[0]


def test_running_statistics_move_once_a_step_with_and_without_checkpoint():
    args = real_args("resnet.small")
    train, _ = make("resnet.small", statistics=True)
    checkpointed, _ = make("resnet.small", jax.checkpoint, 2, statistics=True)
    value, stats = jit(train)(*args)
    (same, again), grads = jit(jax.value_and_grad(checkpointed, has_aux=True))(*args)
    assert_close((same, grads), plain("resnet.small")(*args))
    assert_close((same, again), (value, stats))
    chex.assert_trees_all_equal_shapes_and_dtypes(stats, args[1])
    # The stem's own convolution, and one step of momentum 0.9 from a mean of 0 and a variance of 1.
    images, kernel = args[2], args[0]["stem"]["conv"]["kernel"]
    out = jax.lax.conv_general_dilated(images, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
    assert_close(stats["stem"]["norm"]["mean"], 0.1 * jnp.mean(out, (0, 1, 2)))
    assert_close(stats["stem"]["norm"]["var"], 0.9 + 0.1 * jnp.var(out, (0, 1, 2)))


def test_route_fills_places_in_order_and_drops_what_finds_none():
    experts, tokens, room = 3, 6, 3
    probs = jax.nn.softmax(jax.random.normal(jax.random.key(0), (2, tokens, experts)))
    dispatch, combine = jax.jit(moe.route, static_argnums=1)(probs, room)
    expected = np.zeros((2, tokens, experts, room), np.float32)
    for group in range(2):
        taken = [0] * experts
        order = np.argsort(-np.asarray(probs[group]), axis=-1)
        for choice, token in itertools.product(range(2), range(tokens)):
            expert = order[token, choice]
            gates = np.asarray(probs[group, token])[order[token, :2]]
            if taken[expert] < room:
                expected[group, token, expert, taken[expert]] = gates[choice] / gates.sum()
            taken[expert] += 1
    np.testing.assert_allclose(combine, expected, rtol=1e-6)
    np.testing.assert_array_equal(dispatch, expected > 0)
    assert (expected > 0).sum() < 2 * 2 * tokens, "the case must drop some tokens"


def test_experts_balance_is_one_when_the_load_is_even():
    size = moe.Size(width=8, experts=4, dtype=jnp.float32)
    module = moe.Experts(size)
    x = jnp.tile(jnp.eye(4, 8), (2, 2, 1))
    params = jax.jit(module.init)(common.random_key(0), x)["params"]
    params["router"]["kernel"] = 10.0 * jnp.eye(8, 4)
    apply = jax.jit(module.apply)
    _, balance = apply({"params": params}, x)
    np.testing.assert_allclose(balance, 1.0, rtol=1e-5)
    _, balance = apply({"params": params}, jnp.tile(x[:, :1], (1, 8, 1)))
    assert balance > 3.9


def test_unet_keeps_every_skipped_value_whatever_is_recomputed():
    loss, args = make("unet.unet", jax.checkpoint, 100)
    skips, run = [], jax.make_jaxpr(loss)(*args).jaxpr
    skips = [e.outvars[0].aval for e in equations(run) if e.primitive.name == "name" and e.params["name"] == "skip"]
    assert [skip.shape[1] for skip in skips] == [16, 8]
    by_block, _ = make("unet.unet", jax.checkpoint, 1)
    assert residual_bytes(by_block, args) - residual_bytes(loss, args) >= nbytes(skips)


@pytest.mark.parametrize("segment_size", [0, -1, 2.5, True, "all", None])
@pytest.mark.parametrize("name", ["chain.chain", "lstm.small"])
def test_bad_segment_size_is_named(name, segment_size):
    with pytest.raises(ValueError, match=r"segment_size must be an int of at least 1 or 'sqrt'; got"):
        make(name, jax.checkpoint, segment_size)


def test_bad_sizes_are_named():
    with pytest.raises(ValueError, match=r"heads must divide width, 768; got 7"):
        gpt.gpt2(heads=7)
    with pytest.raises(ValueError, match=r"pixels must be a multiple of 8; got 100"):
        unet.unet(pixels=100)
    with pytest.raises(ValueError, match=r"classes must be at least 10"):
        resnet.resnet50(classes=2)
    with pytest.raises(ValueError, match=r"dropout must be 0"):
        moe.moe(dropout=0.1)
    with pytest.raises(ValueError, match=r"vocabulary must be at least 256"):
        gpt.small(vocabulary=100, real=True)
    with pytest.raises(ValueError, match=r"size must be a multiple of 8"):
        data.digits_batch(1, 12)
    with pytest.raises(ValueError, match=r"tokens must be less than"):
        data.text_batch(1, 10**8)


def test_text_batches_are_stretches_of_the_library_and_the_same_every_time():
    inputs, targets = data.text_batch(4, 50)
    np.testing.assert_array_equal(inputs[:, 1:], targets[:, :-1])
    assert all(bytes(row.tolist()) in data.text() for row in inputs)
    np.testing.assert_array_equal(inputs, data.text_batch(4, 50)[0])
    assert (inputs != data.text_batch(4, 50, step=1)[0]).any()
    assert (inputs != data.text_batch(4, 50, seed=1)[0]).any()


@pytest.mark.parametrize("vocabulary", [256, 1000, 32000])
def test_tokens_stay_within_the_vocabulary_and_decode_to_the_text(vocabulary):
    tokens = data.corpus(vocabulary)
    assert 0 <= tokens.min() <= tokens.max() < vocabulary
    assert (
        data.tokenizer(vocabulary).decode(tokens[:20000])
        == data.text()[: len(data.tokenizer(vocabulary).decode(tokens[:20000]))]
    )
    assert len(data.tokenizer(vocabulary).pieces) <= vocabulary - 256


def test_digits_keep_their_pixels_when_scaled():
    small, labels = data.digits_batch(5)
    large, same = data.digits_batch(5, 32, 3)
    assert small.shape == (5, 8, 8, 1)
    assert large.shape == (5, 32, 32, 3)
    np.testing.assert_array_equal(large[:, 2::4, 1::4, 2], small[..., 0])
    np.testing.assert_array_equal(labels, same)
    assert -1 <= small.min() < small.max() <= 1
    features, same = data.digits_features(5, 100)
    np.testing.assert_array_equal(features[:, :64], small.reshape(5, 64))
    np.testing.assert_array_equal(features[:, 64:], features[:, :36])
    np.testing.assert_array_equal(labels, same)


@pytest.mark.parametrize("file", ["gpt", "resnet", "unet", "lstm", "moe", "chain"])
def test_each_file_loads_by_its_path(file):
    path = Path(gpt.__file__).with_name(f"{file}.py")
    spec = importlib.util.spec_from_file_location(f"loaded_{file}", path)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
        loss, args = (module.small if hasattr(module, "small") else module.chain)(jax.checkpoint)
        assert jax.eval_shape(loss, *args).shape == ()
    finally:
        del sys.modules[spec.name]


@pytest.mark.parametrize("module", [common, data])
def test_examples_in_the_docstrings_hold(module):
    result = doctest.testmod(module)
    assert result.attempted > 0
    assert result.failed == 0


@pytest.mark.cuda
def test_peaks_on_an_h100_stand_in_the_order_of_the_policies():
    # As at full size, where they are 2.7, 3.7, 6.1 and 9.8 GiB; two blocks compile in less time.
    from jaxckpt.memory.report import measure

    policies = jax.checkpoint_policies
    variants = {
        "nothing": jax.checkpoint,
        "dots_no_batch": functools.partial(jax.checkpoint, policy=policies.dots_with_no_batch_dims_saveable),
        "dots": functools.partial(jax.checkpoint, policy=policies.dots_saveable),
        "none": None,
    }
    peaks = {}
    for name, checkpoint in variants.items():
        loss, args = gpt.gpt2(checkpoint, layers=2)
        peaks[name] = measure(jax.value_and_grad(loss), *args, target="cuda:h100", generate_code=False).peak_bytes
    assert peaks["nothing"] < peaks["dots_no_batch"] < peaks["dots"] < peaks["none"], peaks
