"""What is called wrongly is an error of the tree, which names the argument, the rule and what came."""

from __future__ import annotations

import functools
import re
from dataclasses import replace
from typing import NamedTuple

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxckpt
import jaxckpt.flax
from jaxckpt import ArgumentError, InfeasibleBudgetError, NotDifferentiableError, Policy, policies
from tests.helpers import gradient_executions, kept_bytes

WS, X = [jnp.eye(16) * 0.5] * 4, jnp.ones((64, 16))


def loss(ws, x):
    for w in ws:
        x = jnp.tanh(x @ w)
    return jnp.sum(x)


def row(carry, x):
    return carry, x


PLAN = {"budget": "1GiB", "target": "cpu", "verify": False}


def step_of(loss):
    def step(ws, momentum, x):
        value, grads = jax.value_and_grad(loss)(ws, x)
        momentum = jax.tree.map(lambda m, g: 0.9 * m + g, momentum, grads)
        return jax.tree.map(lambda w, m: w - 0.1 * m, ws, momentum), momentum, value

    return step


def jitted_step_of(loss):
    return jax.jit(step_of(loss))


def step_of_one(loss):
    return jax.jit(lambda state: jax.value_and_grad(loss)(*state))


NO_MAKER = "step must be a function that takes the loss and returns the training step.*not step=step_of.loss."


@pytest.mark.parametrize("maker", [step_of, jitted_step_of, step_of_one])
def test_a_step_in_place_of_its_maker_is_told(maker):
    for call in (
        lambda: jaxckpt.plan(loss, WS, WS, X, **PLAN, step=maker(loss)),
        lambda: jaxckpt.compare({"a": loss}, WS, WS, X, target="cpu", step=maker(loss)),
    ):
        with pytest.raises(ArgumentError, match=NO_MAKER):
            call()


@pytest.mark.parametrize("maker", [step_of, jitted_step_of])
def test_the_arguments_of_the_loss_in_place_of_those_of_the_step_are_told(maker):
    rule = r"args must be the arguments of the training step that `step` makes, \(ws, momentum, x\); got 2 arguments"
    for call in (
        lambda: jaxckpt.plan(loss, WS, X, **PLAN, step=maker),
        lambda: jaxckpt.frontier(loss, WS, X, budgets=("50%",), target="cpu", step=maker),
        lambda: jaxckpt.compare({"a": loss}, WS, X, target="cpu", step=maker),
    ):
        with pytest.raises(ArgumentError, match=rule):
            call()


def test_an_error_in_the_maker_of_a_step_is_its_own():
    def broken(loss):
        raise TypeError("mine")

    with pytest.raises(TypeError, match="mine"):
        jaxckpt.plan(loss, WS, X, **PLAN, step=broken)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: jaxckpt.plan(loss, WS, X, **PLAN, step=lambda fun: 3),
            "step must be a function that takes the loss and returns the training step.*no function but int: 3",
        ),
        (lambda: jaxckpt.plan(loss, **PLAN), "args must be the arguments of the step"),
        (lambda: jaxckpt.plan(loss, X, **PLAN), r"args must be the arguments of the function, \(ws, x\); got 1 arg"),
        (
            lambda: jaxckpt.plan(loss, WS, X, X, **PLAN),
            "args must be the arguments of the function.* got 3 arguments",
        ),
        (lambda: jaxckpt.plan(loss, WS, X, **PLAN, actions="save"), "actions must be a sequence of actions"),
        (lambda: jaxckpt.plan(loss, WS, X, **PLAN).apply(3), "fun must be a function, the one that the plan"),
        (lambda: jaxckpt.frontier(loss, WS, X, budgets=(), target="cpu"), "budgets must be at least one budget"),
        (lambda: jaxckpt.checkpoint_sequential(jnp.sin), "layers must be a sequence of functions"),
        (lambda: jaxckpt.checkpoint(loss, WS, X), "fun must be the only .* got 2 more.*checkpoint.fun.[(][*]args[)]"),
        (
            lambda: jaxckpt.flax.checkpoint(loss, WS),
            "target must be the only argument by .*checkpoint.target.[(][*]args",
        ),
        (
            lambda: jaxckpt.checkpoint_sequential([jnp.sin], 4, X),
            "layers must be the only .*segment_size=...[)][(]x[)]",
        ),
        (lambda: jaxckpt.verify(loss, WS, X), "reference must be a function"),
        (lambda: jaxckpt.count_flops(3, X), "fun must be a function; got 3"),
        (lambda: jaxckpt.checkpoint(loss, static_argnames="mode"), "static_argnames must be names of arguments of fun"),
        (lambda: Policy({}, strict="no"), "strict must be a bool; got 'no'"),
        (lambda: jaxckpt.autocheckpoint(loss, budget="50%", path=3), "path must be the path of a folder; got 3"),
        (lambda: jaxckpt.residuals(3, X), "fun must be a function; got 3"),
        (lambda: jaxckpt.trace(3, X), "fun must be a function; got 3"),
        (lambda: jaxckpt.frontier(3, X), "fun must be a function; got 3"),
        (lambda: jaxckpt.compare({"a": 3}, X), r"variants\['a'\] must be a function; got 3"),
        (lambda: jaxckpt.verify(3, loss, WS, X), "fun must be a function"),
        (lambda: jaxckpt.verify(loss, loss, WS, X, seed="a"), "seed must be a whole number; got 'a'"),
        (lambda: jaxckpt.tag({"a": X, "b": "s"}, "name"), "x must be a pytree of arrays; got 's'"),
        (lambda: jaxckpt.scan(3, 0.0, X), r"f must be a function \(carry, x\) -> \(carry, y\); got 3"),
        (lambda: jaxckpt.scan(row, 0.0, X, unroll="a"), "unroll must be a bool, or a whole number .* got 'a'"),
        (lambda: jaxckpt.scan(row, 0.0, X, unroll=-1), "unroll must be a bool, or a whole number .* got -1"),
        (lambda: jaxckpt.scan(row, 0.0, None, length=-1), "length must be an int of at least 0, or None; got -1"),
        (lambda: jaxckpt.scan(row, 0.0, None, length=2.5), "length must be an int of at least 0, or None; got 2.5"),
        (lambda: jaxckpt.scan(row, 0.0, (X, 2.0)), "xs must be a pytree of arrays with one row an iteration.* got 2.0"),
        (lambda: jaxckpt.scan(row, 0.0, jnp.ones(())), "xs must be a pytree of arrays with one row an iteration"),
        (
            lambda: jaxckpt.measure(loss, WS, X, target="cpu", compiler_options={"xla_zzz": 1}),
            "compiler_options must be options of XLA.* got {'xla_zzz': 1}.*has no such option",
        ),
        (
            lambda: jaxckpt.measure(loss, WS, X, target="cpu", compiler_options={"xla_cpu_enable_fast_math": "zz"}),
            "compiler_options must be options of XLA.* got {'xla_cpu_enable_fast_math': 'zz'}.*not a valid bool",
        ),
        (lambda: jaxckpt.measure(loss, WS, X, compiler_options=3), "compiler_options must be a mapping"),
        (lambda: jaxckpt.measure(loss, WS, X, generate_code="no"), "generate_code must be True or False; got 'no'"),
        (lambda: jaxckpt.checkpoint(loss, prevent_cse=""), "prevent_cse must be a bool, or a sequence"),
        (
            lambda: jaxckpt.checkpoint(loss, policy=lambda value: True),
            r"policy must be a function of \(primitive, \*av",
        ),
        (
            lambda: jaxckpt.scan(row, 0.0, X, policy=lambda prim, *avals: True),
            "policy must be a function of .primitive",
        ),
        (lambda: jaxckpt.flax.checkpoint(nn.Dense, prevent_cse=[]), r"prevent_cse must be True or False; got \[\]"),
        (lambda: jaxckpt.flax.scan_layers(nn.Dense, 3, names=False), 'names must be a path with one "{}".* got False'),
        (lambda: jaxckpt.frontier(loss, WS, X, budgets=("90%", "0%"), target="cpu"), r"budgets\[1\] must be a share"),
        (lambda: jaxckpt.plan(loss, WS, X, **PLAN, actions={"save", "recompute"}), "actions must be a sequence"),
        (lambda: jaxckpt.autocheckpoint(loss, budget="50%", path=""), "path must be the path of a folder; got ''"),
        (lambda: jaxckpt.autocheckpoint(loss, budget="50%", path="a\0b"), "path must be the path of a folder"),
        (lambda: jaxckpt.autocheckpoint(loss, budget="50%", cache=3), "cache must be a folder.* got 3"),
        (lambda: jaxckpt.autocheckpoint(loss, budget="50%", verify="no"), "verify must be True or False; got 'no'"),
        (lambda: jaxckpt.Plan((), "0").save(None), "path must be the path of a file; got None"),
        (
            lambda: jax.grad(lambda x: jaxckpt.measure(loss, WS, x, target="cpu").peak_bytes * 1.0)(X),
            r"float32\[64,16\]",
        ),
    ],
)
def test_an_argument_that_breaks_a_rule_is_named(call, message):
    with pytest.raises(ArgumentError, match=message):
        call()


ENTRIES = {
    "plan": lambda fun: jaxckpt.plan(fun, WS, X, budget="90%", target="cpu"),
    "frontier": lambda fun: jaxckpt.frontier(fun, WS, X, budgets=("90%",), target="cpu"),
    "compare": lambda fun: jaxckpt.compare({"a": fun}, WS, X, target="cpu"),
    "autocheckpoint": lambda fun: jaxckpt.autocheckpoint(fun, budget="90%", target="cpu")(WS, X),
}


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize(
    ("fun", "kinds"),
    [
        (lambda ws, x: (loss(ws, x), x), r"float32\[\], float32\[64, 16\]"),
        (lambda ws, x: x @ ws[0], r"float32\[64, 16\]"),
        (lambda ws, x: jnp.argmax(loss(ws, x)), r"int32\[\]"),
    ],
    ids=["aux", "vector", "integer"],
)
def test_a_loss_that_is_no_scalar_is_told_of_has_aux(entry, fun, kinds):
    message = rf"must return one floating-point scalar.* returns {kinds}.*jax.value_and_grad, has_aux=True"
    with pytest.raises(NotDifferentiableError, match=message):
        ENTRIES[entry](fun)


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize(
    "broken",
    [lambda ws, x: x @ WS[0] @ x, lambda ws, x: loss(ws), lambda ws, x: len(loss)],
    ids=["shapes", "arguments", "types"],
)
def test_a_function_that_fails_by_itself_fails_with_its_own_error(entry, broken):
    with pytest.raises(TypeError) as error:
        ENTRIES[entry](broken)
    assert error.type is TypeError, error.value


def test_a_loss_of_what_jax_has_no_type_for_is_told():
    with pytest.raises(NotDifferentiableError, match="nothing to differentiate"):
        ENTRIES["plan"](lambda ws, x: "a string")


@pytest.mark.parametrize("target", ["cpu", pytest.param("cuda:h100", marks=pytest.mark.cuda)])
def test_arguments_over_more_devices_than_the_target_has(target):
    mesh = jax.sharding.AbstractMesh((4,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    layout = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("d"))
    x = jax.ShapeDtypeStruct(X.shape, X.dtype, sharding=layout)
    for call in (jaxckpt.measure, functools.partial(jaxckpt.plan, budget="60%")):
        with pytest.raises(
            ArgumentError, match=f"args must be sharded over the 1 device of the target {target}.*4 dev"
        ):
            call(loss, WS, x, target=target)


@pytest.mark.parametrize("budget", ["60", 60])
def test_a_share_without_its_sign_is_told_of_it(budget):
    with pytest.raises(InfeasibleBudgetError, match="A share of the peak is written '60%'"):
        jaxckpt.plan(loss, WS, X, budget=budget, target="cpu")


def test_a_plan_for_another_program_says_what_may_differ_and_lists_whole_arguments():
    def chain(ws, x, mode):
        for w in ws:
            x = jnp.tanh(x @ w) if mode == "train" else x @ w
        return jnp.sum(x)

    ws = [jnp.eye(16) * 0.5] * 30
    made = jaxckpt.plan(chain, ws, X, "train", budget="1GiB", target="cpu", verify=False)
    with pytest.raises(jaxckpt.PlanMismatchError, match=r"are those of the plan, .*static argument.* evaluation mode"):
        made.apply(chain)(ws, X, "eval")
    with pytest.raises(jaxckpt.PlanMismatchError, match=r"2 arrays \(the plan's: 31\), ws.*: none .* more, .*none"):
        made.apply(chain)(ws[:1], X, "train")
    plan = replace(made, arguments=())  # as of a policy, or of a file from before plans had them
    with pytest.raises(jaxckpt.PlanMismatchError) as caught:
        plan.apply(chain)(ws, X, "eval")
    text = str(caught.value)
    assert "float32[16, 16], 23 more, float32[16, 16]" in text, "the first and the last ones"
    assert "float32[64, 16]. If the plan was made for these, the program itself differs" in text, "the batch comes last"
    assert "static argument" in text and "evaluation mode" in text and "its code was edited" in text
    with pytest.raises(jaxckpt.PlanMismatchError, match=r"came: float32\[16, 16\], float32\[64, 16\]\. If"):
        plan.apply(chain)(ws[:1], X, "train")


@pytest.mark.parametrize(
    "selector", [jaxckpt.op("dot_genral"), ~jaxckpt.op("dot_genral") & jaxckpt.larger_than(1)], ids=str
)
def test_an_op_that_is_no_primitive_of_this_jax_is_an_error_with_the_nearest(selector):
    with pytest.raises(ArgumentError, match=r"op's glob must be .* got 'dot_genral'.*Did you mean 'dot_general'"):
        jax.grad(jaxckpt.checkpoint(loss, policy=Policy({selector: "save"})))(WS, X)
    jax.grad(jaxckpt.checkpoint(loss, policy=Policy({selector: "save"}, strict=False)))(WS, X)


NAMES = [
    "conv_general_dilated",
    "conv*",
    "scan",
    "while",
    "cond",
    "custom_vjp_call",
    "custom_jvp_call",
    "shard_map",
    "fft",
]


@pytest.mark.parametrize("name", [*NAMES, "pallas_call", "scaled_matmul_wrapper", "io_callback", "ragged_dot*", "rem*"])
def test_an_op_that_does_not_occur_picks_nothing(name):
    policy = Policy({jaxckpt.op(name): "save", jaxckpt.op("dot_general"): "save"})
    assert gradient_executions(jaxckpt.checkpoint(loss, policy=policy), WS, X)["dot_general"] == 8 + 3


@pytest.mark.parametrize("preset", jaxckpt.policies.PRESETS)
def test_presets_name_primitives_of_this_jax(preset):
    jax.grad(jaxckpt.checkpoint(loss, policy=preset))(WS, X)


def test_a_prediction_is_called_one():
    with pytest.raises(InfeasibleBudgetError, match="The least budget predicted to fit is"):
        jaxckpt.plan(loss, WS, X, budget=X.nbytes * 2, target="cpu", verify=False)


@pytest.mark.parametrize("policy", ["dots", Policy([(jaxckpt.op("tanh"), "save")])], ids=str)
def test_a_program_that_depends_on_a_value_is_told_of_static_arguments(policy):
    chosen = jaxckpt.checkpoint(lambda x, train: jnp.sin(x) if train else x, policy=policy)
    with pytest.raises(jax.errors.ConcretizationTypeError) as caught:
        jax.grad(chosen)(1.0, True)
    assert any("static_argnums or static_argnames" in note for note in caught.value.__notes__)


@pytest.mark.parametrize("thing", [jnp.float32(1), jnp.ones(2), 2.5, b"x"], ids=["0-d", "1-d", "float", "bytes"])
@pytest.mark.parametrize(
    ("argument", "call"),
    [
        ("actions", lambda thing: jaxckpt.plan(loss, WS, X, **PLAN, actions=thing)),
        ("budget", lambda thing: jaxckpt.frontier(loss, WS, X, target="cpu", verify=False, budgets=thing)),
        ("verify", lambda thing: jaxckpt.frontier(loss, WS, X, target="cpu", budgets=["50%"], verify=thing)),
        ("layers", lambda thing: jaxckpt.checkpoint_sequential(thing)),
        ("static_argnames", lambda thing: jaxckpt.checkpoint(loss, static_argnames=thing)),
        ("shape", lambda thing: jaxckpt.Target("cpu").mesh(thing, ("data",))),
        ("length", lambda thing: jaxckpt.scan(row, X, None, length=thing)),
        ("unroll", lambda thing: jaxckpt.scan(row, X, None, length=3, unroll=thing)),
        ("reverse", lambda thing: jaxckpt.scan(row, X, None, length=3, reverse=thing)),
        ("compiler_options", lambda thing: jaxckpt.measure(loss, WS, X, target="cpu", compiler_options={thing: 1})),
    ],
)
def test_an_array_or_another_thing_where_items_or_a_number_belong_is_told(argument, call, thing):
    if argument == "compiler_options" and isinstance(thing, jax.Array):
        thing = 3  # arrays are no keys
    with pytest.raises(ArgumentError, match=rf"^{argument}\S* must be "):
        call(thing)


@pytest.mark.parametrize(
    ("argument", "call"),
    [
        ("actions", lambda: jaxckpt.Slots(2, None, 3)),
        ("seed", lambda: jaxckpt.verify(loss, loss, WS, X, seed=10**30)),
        ("compiler_options", lambda: jaxckpt.measure(loss, WS, X, target="cpu", compiler_options={"a": object()})),
        ("path", lambda: jaxckpt.plan(loss, WS, X, **PLAN).save("a\0b")),
        ("graph", lambda: jaxckpt.plan(loss, WS, X, **PLAN).check(3)),
        ("policy", lambda: jaxckpt.checkpoint(loss, policy=Policy)),
        ("spec", lambda: jaxckpt.shard("")),
        ("budget", lambda: jaxckpt.plan(loss, WS, X, budget="\u0663GiB", target="cpu")),
    ],
)
def test_what_no_caller_means_is_told(argument, call):
    with pytest.raises(ArgumentError, match=f"^{argument} must be "):
        call()


# ------------------------------------------------------------------------------------- the arguments of a training step


def _tanh_loss(ws, x):
    for w in ws:
        x = jnp.tanh(x @ w)
    return jnp.sum(x**2)


class _State(NamedTuple):
    params: list


def _step_of(loss):
    def step(state, x):
        value, gradients = jax.value_and_grad(loss)(state.params, x)
        return _State(jax.tree.map(lambda w, g: w - 0.1 * g, state.params, gradients)), value

    return jax.jit(step)


_PARAMS, _BATCH = [jnp.ones((64, 64))] * 4, jnp.ones((256, 64))


def _refused(kind, *args, step=_step_of, budget="60%"):
    with pytest.raises(kind) as raised:
        jaxckpt.plan(*args, budget=budget, step=step, target="cpu")
    return " ".join([str(raised.value), *getattr(raised.value, "__notes__", [])])


def test_a_state_in_the_place_of_the_loss_is_shown_in_short_with_the_order():
    said = _refused(ArgumentError, _State(_PARAMS), _tanh_loss, _BATCH)
    assert "fun must be a function; got _State: _State(params=[Array(" in said and len(said) < 400
    assert "The loss comes first: plan(loss, *args, ...)." in said


def test_an_error_in_the_step_says_what_it_was_called_with():
    said = _refused(AttributeError, _tanh_loss, _BATCH, _State(_PARAMS))
    assert "in their order: state=float32[256, 64], x=_State." in said
    said = _refused(AttributeError, _tanh_loss, _PARAMS, _BATCH)
    assert "in their order: state=list, x=float32[256, 64]." in said
    said = _refused(TypeError, _tanh_loss, _BATCH, _PARAMS, step=jax.value_and_grad)
    assert (
        "jaxckpt traced the function with the arguments that came, in their order: ws=float32[256, 64], x=list." in said
    )


def test_a_training_step_in_the_place_of_the_loss_and_a_compiled_step_are_known():
    args = _State(_PARAMS), _BATCH
    said = _refused(NotDifferentiableError, _step_of(_tanh_loss), *args, step=jax.value_and_grad)
    assert (
        "If it is a training step, pass the loss, and what makes the step of it: plan(loss, *args, step=step_of)."
        in said
    )
    said = _refused(ArgumentError, _tanh_loss, *args, step=lambda loss: _step_of(loss).lower(*args).compile())
    assert "The step that it makes is compiled. Return it jitted" in said


def test_the_memory_of_a_device_without_figures_is_refused_before_anything_is_traced():
    def never(*args):
        raise AssertionError("traced")

    assert "does not say how much memory is free" in _refused(ArgumentError, never, *_PARAMS, budget="device")


@pytest.mark.parametrize(
    ("glob", "hint"),
    [
        ("matmul", "JAX calls it 'dot_general'."),
        ("aten.mm", "JAX calls it 'dot_general'."),
        ("Conv2d", "JAX calls it 'conv_general_dilated'."),
        ("dot_genral", "Did you mean 'dot_general'"),
        ("zzzz", "more. Or pass strict=False"),
    ],
)
def test_operations_of_other_libraries_are_called_as_jax_does(glob, hint):
    policy = jaxckpt.Policy({jaxckpt.op(glob): "save"})
    with pytest.raises(ArgumentError) as raised:
        jax.eval_shape(jaxckpt.checkpoint(_tanh_loss, policy=policy), _PARAMS, _BATCH)
    assert hint in str(raised.value) and len(str(raised.value)) < 1000


class Block(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(4)(x)


SCAN = functools.partial(jaxckpt.scan, row, 0.0, jnp.ones(3))
MISCALLS = {
    "no budget": (lambda: jaxckpt.autocheckpoint("4GiB"), TypeError, "'budget'. Write budget='4GiB'"),
    "a typo": (lambda: jaxckpt.plan(loss, WS, X, bugdet="1GiB"), TypeError, "Did you mean 'budget'?"),
    "torch's": (lambda: jaxckpt.checkpoint(loss, use_reentrant=False), TypeError, "one implementation; leave it out"),
    "segments": (lambda: jaxckpt.checkpoint_sequential([jnp.sin], segments=2), TypeError, "segment_size= counts"),
    "slots": (lambda: SCAN(slots=4), TypeError, "schedule=Slots(n)"),
    "slots of a plan": (lambda: jaxckpt.plan(loss, WS, X, budget="1GiB", slots=4), TypeError, "A plan chooses"),
    "slots of a block": (lambda: jaxckpt.checkpoint(loss, slots=4), TypeError, "Slots are of loops"),
    "segments of a scan": (lambda: SCAN(segments=4), TypeError, "every k-th iteration"),
    "segments of a block": (lambda: jaxckpt.checkpoint(loss, segments=4), TypeError, "Segments are of sequences"),
    "a budget of a block": (lambda: jaxckpt.checkpoint(loss, memory_budget=4), TypeError, "is what jaxckpt.plan"),
    "a share of torch's": (lambda: jaxckpt.plan(loss, activation_memory_budget=0.5), TypeError, "Write budget="),
    "an optimizer": (lambda: jaxckpt.plan(loss, WS, X, budget="1GiB", optimizer=1), TypeError, "step=step_of"),
    "by name": (lambda: jaxckpt.plan(loss, ws=WS, x=X, budget="1GiB"), TypeError, "come by position"),
    "no function": (lambda: jaxckpt.plan(budget="60%"), TypeError, "jaxckpt.autocheckpoint(budget=...) is the dec"),
    "two of a sequence": (lambda: jaxckpt.checkpoint_sequential([jnp.sin] * 4)(X, X), ArgumentError, "the only arg"),
    "a state": (lambda: jaxckpt.plan(loss, WS, X, X, budget="60%"), ArgumentError, "step=step_of"),
    "torch's policy": (
        lambda: jaxckpt.checkpoint(loss, policy=lambda ctx, op, *args, **kwargs: True),
        ArgumentError,
        "a policy_fn of PyTorch",
    ),
    "no plan's file": (lambda: jaxckpt.Plan.from_json("import jax"), jaxckpt.PlanMismatchError, "it is something else"),
    "a class": (lambda: jaxckpt.checkpoint(Block), ArgumentError, "jaxckpt.flax.checkpoint"),
    "by position": (lambda: jaxckpt.flax.checkpoint(Block, "dots"), ArgumentError, "Write policy='dots'"),
    "a mapping": (lambda: jaxckpt.checkpoint(loss, policy={"a": "save"}), ArgumentError, "policy=Policy({...})"),
    "an array for a segment's size": (
        lambda: jaxckpt.checkpoint_sequential([jnp.tanh] * 3, segment_size=np.ones(3)),
        ArgumentError,
        "segment_size must be an int",
    ),
    "an array for an action": (lambda: Policy(default=np.ones(3)), ArgumentError, "default must be an action"),
    "an array for a form": (lambda: jaxckpt.compress(np.ones(3)), ArgumentError, "form must be one of"),
    "an array for costs": (
        lambda: jaxckpt.plan(loss, 1.0, budget="100%", costs=np.ones(3)),
        ArgumentError,
        "costs must be one of",
    ),
    "a number of regions": (lambda: jaxckpt.Plan(3, ""), jaxckpt.PlanMismatchError, "regions must each be"),
    "a region's actions": (lambda: jaxckpt.Region(0, 1, None), jaxckpt.PlanMismatchError, "actions must be a mapping"),
    "rules of a model": (lambda: jaxckpt.flax.apply(None, None), ArgumentError, "rules must be a mapping"),
    "an action that begins with a digit": (lambda: Policy(default="8bit"), ArgumentError, "default must be an action"),
    "two that begin with digits": (lambda: Policy({"a": "1 | 2"}), ArgumentError, "must be an action"),
    "an action": (lambda: jaxckpt.checkpoint(loss, policy=jaxckpt.SAVE), ArgumentError, "Policy(default=SAVE)"),
    "a short unit": (lambda: jaxckpt.plan(loss, WS, X, budget="4G"), ArgumentError, "Did you mean '4GiB'?"),
    "a share": (lambda: SCAN(budget="50%"), ArgumentError, "jaxckpt.plan(loss, *args, budget='60%')"),
    "a schedule's class": (lambda: SCAN(schedule=jaxckpt.Slots), ArgumentError, "Slots(n) for n carries"),
    "a schedule's name": (lambda: SCAN(schedule="slots"), ArgumentError, "Slots(n) for n carries"),
    "an int as text": (lambda: SCAN(schedule="10"), ArgumentError, "are an int: 10"),
    "no schedule": (lambda: SCAN(schedule=None), ArgumentError, "'none'"),
    "arguments": (lambda: jaxckpt.Plan((), "x").apply(loss, WS, X), ArgumentError, "plan.apply(fun)(*args)"),
    "a function": (lambda: jaxckpt.Plan((), "x").describe(loss), ArgumentError, "jaxckpt.trace(fun, *args)"),
    "a glob": (
        lambda: jaxckpt.flax.apply(nnx.Dict(blocks=nnx.List([nnx.Linear(2, 2, rngs=nnx.Rngs(0))])), {"block/*": None}),
        ArgumentError,
        "Did you mean 'blocks/*'?",
    ),
}


@pytest.mark.parametrize("name", MISCALLS)
def test_what_people_write_instead_is_told_what_to_write(name):
    call, kind, hint = MISCALLS[name]
    with pytest.raises(kind, match=re.escape(hint)):
        call()


def test_an_error_of_the_users_own_call_stays_as_it_is():
    def call(x):
        return loss(x, use_reentrant=False)

    with pytest.raises(TypeError) as raised:
        jaxckpt.measure(call, WS)
    assert str(raised.value) == "loss() got an unexpected keyword argument 'use_reentrant'"


def test_checkpoints_that_do_nothing_are_told(caplog):
    for size, said in ((4, True), (9, True), (2, False)):
        caplog.clear()
        jaxckpt.checkpoint_sequential([jnp.sin] * 4, segment_size=size)
        assert ("checkpoints nothing" in caplog.text) is said
    caplog.clear()
    jaxckpt.checkpoint_sequential([jnp.sin] * 4, segment_size=4, checkpoint_last=True)
    jaxckpt.checkpoint_sequential([jnp.sin])
    assert not caplog.text


@pytest.mark.parametrize("policy", [None, "dots", Policy({jaxckpt.op("sin"): "save"})])
def test_a_flag_that_is_traced_is_told_with_each_policy(policy):
    layer = jaxckpt.checkpoint(lambda x, train: jnp.sin(x) if train else x, policy=policy)
    with pytest.raises(jax.errors.TracerBoolConversionError) as raised:
        jax.grad(layer)(1.0, jnp.array(True))
    notes = [note for note in raised.value.__notes__ if "static_argnums" in note]
    assert len(notes) == 1


def test_a_loss_of_a_module_with_aux_is_told_the_gradient_of_nnx():
    model = nnx.Sequential(nnx.Linear(4, 4, rngs=nnx.Rngs(0)), nnx.Dropout(0.1, rngs=nnx.Rngs(1)))
    with_aux = lambda model, x: (jnp.mean(model(x) ** 2), x)
    with pytest.raises(NotDifferentiableError, match=r"functools.partial\(nnx.value_and_grad, has_aux=True\)"):
        jaxckpt.plan(with_aux, model, jnp.ones((2, 4)), **PLAN)
    jaxs = functools.partial(jax.value_and_grad, has_aux=True)
    with pytest.raises(TypeError) as raised:
        jaxckpt.plan(with_aux, model, jnp.ones((2, 4)), **PLAN, step=jaxs)
    assert any("nnx.value_and_grad" in note for note in raised.value.__notes__)


def test_a_budget_below_ones_own_checkpoints_is_told_of_them():
    def own(ws, x):
        for w in ws:
            x = jax.checkpoint(lambda x, w: jnp.tanh(jnp.sin(x @ w) @ w))(x, w)
        return jnp.sum(x)

    args = [jnp.ones((16, 16))] * 4, jnp.ones((512, 16))
    with pytest.raises(InfeasibleBudgetError, match="respect_checkpoints=False"):
        jaxckpt.plan(own, *args, budget=70_000, target="cpu")
    with pytest.raises(InfeasibleBudgetError) as raised:
        jaxckpt.plan(own, *args, budget=70_000, target="cpu", respect_checkpoints=False)
    assert "respect_checkpoints" not in str(raised.value)


def test_a_loss_with_more_than_its_value_is_told_of_has_aux():
    """A step of one's own may differentiate it in whatever way; the error that JAX raises names its results alone."""
    step = lambda loss: jax.jit(lambda ws, x: jax.value_and_grad(loss)(ws, x))
    with pytest.raises(TypeError, match="scalar-output") as caught:
        jaxckpt.plan(lambda ws, x: (loss(ws, x), x), WS, X, budget="60%", step=step)
    assert "has_aux=True" in caught.value.__notes__[-1]


@pytest.mark.parametrize("what", ["plan", "measure", "checkpoint"])
def test_modules_that_take_no_arrays_are_told_what_to_be(what):
    call = {
        "plan": lambda fun: jaxckpt.plan(fun, X, budget="50%", target="cpu"),
        "measure": lambda fun: jaxckpt.measure(fun, X),
        "checkpoint": jaxckpt.checkpoint,
    }[what]
    hint = r"jaxckpt\.flax\.checkpoint" if what == "checkpoint" else r"Pass lambda params, x: model\.apply"
    with pytest.raises(ArgumentError, match=f"got an instance of Dense, which has no parameters.*{hint}"):
        call(nn.Dense(4))
    for cls in (nn.Dense, nnx.Linear, eqx.nn.Linear):
        with pytest.raises(ArgumentError, match=rf"fun must be a function.*{cls.__name__}'>"):
            call(cls)
    bound = nn.Dense(16).bind({"params": {"kernel": jnp.eye(16), "bias": jnp.zeros(16)}})
    assert jaxckpt.measure(bound, X).peak_bytes


def test_a_tag_before_its_value_is_told_so():
    with pytest.raises(ArgumentError, match=r"got ArrayImpl\. The value comes first: tag\(value, name\)"):
        jaxckpt.tag("up", X)


@pytest.mark.parametrize("budget", ["0.5", ".5", "1.0"])
def test_a_share_as_a_number_in_a_text_is_told_its_sign(budget):
    with pytest.raises(ArgumentError, match=f"A share is written with %: '{float(budget):.0%}'"):
        jaxckpt.plan(loss, WS, X, budget=budget, target="cpu")


def test_what_a_predicate_may_ask_for_is_said_where_it_asks_for_more():
    policy = Policy({jaxckpt.where(lambda value: value.size > 10): "save"})  # type: ignore[attr-defined]
    with pytest.raises(AttributeError) as caught:
        jax.grad(jaxckpt.checkpoint(loss, policy=policy))(WS, X)
    [note] = [each for each in caught.value.__notes__ if "`where`" in each]
    assert "which has index, shape, dtype, bytes, tags" in note
    for name in policies.HAS:
        seen = Policy({jaxckpt.where(lambda value, name=name: hasattr(value, name)): "save"})
        with_all = Policy({jaxckpt.where(lambda value: True): "save"})
        kept = [kept_bytes(jaxckpt.checkpoint(loss, policy=each), WS, X) for each in (seen, with_all)]
        assert kept[0] == kept[1], name


def test_residuals_takes_leaves_that_are_no_arrays_as_they_are():
    chosen = lambda model, x: loss(model["ws"], x) * (2.0 if model["mode"] == "twice" else 1.0)
    found = jaxckpt.residuals(chosen, {"ws": WS, "mode": "twice"}, X)
    assert found.kept_bytes == jaxckpt.residuals(loss, WS, X).kept_bytes > 0
    names = {"x", *(f"model['ws'][{place}]" for place in range(len(WS)))}
    assert {each.name for each in found.residuals if each.argument} == names
