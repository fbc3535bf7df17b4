"""Policies: selectors, presets, strictness, text, the bridge from JAX's own, and that decisions fall on the traced
graph.
"""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import jaxckpt
from jaxckpt import (
    OFFLOAD,
    RECOMPUTE,
    SAVE,
    ArgumentError,
    Policy,
    UnmatchedTagError,
    intensity_above,
    larger_than,
    op,
    policies,
    tag,
    where,
)
from tests.helpers import kept_shapes

X, UP, DOWN = jnp.ones((2, 5, 8)), jnp.ones((8, 32)), jnp.ones((32, 8))


def mlp(x, up, down):
    up = tag(x @ up, "mlp_up")
    act = tag(jax.nn.gelu(up), "mlp_act")
    scores = tag(jnp.einsum("bqd,bkd->bqk", x, x), "scores")
    mixed = tag(jnp.einsum("bqk,bkd->bqd", jax.nn.softmax(scores), x), "mixed")
    return tag(act @ down, "mlp_down") + mixed


GRAPH = jaxckpt.trace(mlp, X, UP, DOWN)


def picked(selector):
    values = [v for v in GRAPH.values if v.kind == "intermediate" and policies.selector(selector).picks(v)]
    return {v.tags[0] if v.tags else v.primitive for v in values}


def decided(policy):
    return {GRAPH.values[i].label: action for i, action in policy.decide(GRAPH).items()}


@pytest.mark.parametrize(
    ("selector", "values"),
    [
        ("mlp_*", {"mlp_up", "mlp_act", "mlp_down"}),
        ("mlp_[ud]*", {"mlp_up", "mlp_down"}),
        (op("dot_*") & "mlp_*", {"mlp_up", "mlp_down"}),
        (op("dot_general"), {"mlp_up", "mlp_down", "scores", "mixed"}),
        (op("dot_general") & ~policies.tagged("mlp_*"), {"scores", "mixed"}),
        ("scores" | op("reduce_max"), {"scores", "reduce_max"}),
        ("mlp_up" & larger_than("1KiB"), {"mlp_up"}),
        ("mlp_up" & larger_than(2 * 5 * 32 * 4), set()),
        (intensity_above(15), {"mlp_down"}),
        (intensity_above(4 - 1e-6) & op("dot_general"), {"mlp_up", "mlp_down", "scores"}),
        (where(lambda v: v.shape == (2, 5, 5) and "scores" in v.tags), {"scores"}),
    ],
    ids=lambda value: value if isinstance(value, str) else str(value) if isinstance(value, policies.Selector) else "",
)
def test_selectors(selector, values):
    assert picked(selector) == values


def test_the_first_rule_that_picks_counts():
    policy = Policy({"mlp_up": RECOMPUTE, "mlp_*": SAVE, op("dot_general"): OFFLOAD})
    assert decided(policy) == {"mlp_act": SAVE, "mlp_down": SAVE, "scores": OFFLOAD, "mixed": OFFLOAD}
    swapped = Policy([("mlp_*", SAVE), ("mlp_up", RECOMPUTE)])
    assert decided(swapped) == {"mlp_up": SAVE, "mlp_act": SAVE, "mlp_down": SAVE}


@pytest.mark.parametrize(
    ("name", "labels"),
    [
        ("nothing", set()),
        ("dots", {"mlp_up", "mlp_down", "scores", "mixed"}),
        ("dots_no_batch", {"mlp_up", "mlp_down"}),
        ("hybrid", set()),
    ],
)
def test_presets_keep(name, labels):
    assert set(decided(policies.PRESETS[name])) == labels


def test_everything_keeps_every_intermediate():
    assert set(policies.everything.decide(GRAPH)) == {
        v.index for v in GRAPH.values if v.kind == "intermediate" and v.addressable
    }


def test_hybrid_keeps_long_contractions_and_not_attention_scores():
    wide = jaxckpt.trace(mlp, jnp.ones((2, 5, 64)), jnp.ones((64, 512)), jnp.ones((512, 64)))
    assert {wide.values[i].label for i in policies.hybrid.decide(wide)} == {"mlp_down"}


@pytest.mark.parametrize("batched", [False, True], ids=["plain", "vmapped"])
@pytest.mark.parametrize("remat3", [False, True], ids=["remat2", "remat3"])
def test_a_policy_keeps_exactly_what_it_names_whatever_is_around_it(batched, remat3):
    if not hasattr(jax.config, "jax_remat3"):
        pytest.skip("this jax has no jax_remat3")
    old = jax.config.jax_remat3
    jax.config.update("jax_remat3", remat3)
    try:
        for policy, shapes in [
            (Policy({"mlp_up": SAVE}), [(2, 5, 32)]),
            (Policy({"scores": SAVE, "mlp_act": SAVE}), [(2, 5, 5), (2, 5, 32)]),
            ("dots_no_batch", [(2, 5, 32)]),  # mlp_down is kept, but no derivative needs it
            ("nothing", []),
        ]:
            fun = jaxckpt.checkpoint(mlp, policy=policy)
            args = (X, UP, DOWN)
            if batched:
                fun, args = jax.vmap(fun, in_axes=(0, None, None)), (jnp.stack([X] * 3), UP, DOWN)
                shapes = [(3, *shape) for shape in shapes]
            assert sorted(kept_shapes(fun, *args).elements()) == sorted(shapes), policy
    finally:
        jax.config.update("jax_remat3", old)


def test_jaxs_own_dots_no_batch_loses_everything_under_vmap_and_ours_does_not():
    batched = lambda wrap: jax.vmap(wrap(lambda x, w: jnp.sin(jnp.sin(x @ w))), in_axes=(0, 0))
    args = (jnp.ones((3, 4, 8)), jnp.ones((3, 8, 8)))
    own = functools.partial(jax.checkpoint, policy=jax.checkpoint_policies.dots_with_no_batch_dims_saveable)
    ours = functools.partial(jaxckpt.checkpoint, policy="dots_no_batch")
    assert sum(kept_shapes(batched(own), *args).values()) == 0
    assert list(kept_shapes(batched(ours), *args).elements()) == [(3, 4, 8)]


@pytest.mark.parametrize("strict", [True, False])
def test_a_glob_that_matches_nothing(strict):
    policy = Policy({"mlp_upp": SAVE}, strict=strict)
    fun = jaxckpt.checkpoint(mlp, policy=policy)
    if not strict:
        assert not kept_shapes(fun, X, UP, DOWN)
        return
    with pytest.raises(UnmatchedTagError) as caught:
        fun(X, UP, DOWN)
    assert "'mlp_upp' matches no tag" in str(caught.value)
    assert "Did you mean 'mlp_up'" in str(caught.value)
    assert "strict=False" in str(caught.value)


def test_an_unmatched_glob_inside_a_combination_is_found_and_all_tags_are_named():
    with pytest.raises(UnmatchedTagError, match="There are 'mixed', 'mlp_act', 'mlp_down', 'mlp_up', 'scores'"):
        Policy({op("dot_general") & ~policies.tagged("zzz"): SAVE}).decide(GRAPH)


def test_a_tag_that_jax_cannot_keep_is_an_error_that_says_why():
    f = jax.custom_vjp(lambda x: tag(jnp.sin(x), "inside"))
    f.defvjp(lambda x: (jnp.sin(x), x), lambda x, g: (g * jnp.cos(x),))
    with pytest.raises(UnmatchedTagError, match="custom derivative"):
        jaxckpt.checkpoint(f, policy=Policy({"inside": SAVE}))(X)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: Policy({"a": "sove"}),
            "action must be an action, one of recompute, save, offload, compress, shard; got 'sove'. Did you mean 'save'",
        ),
        (lambda: Policy({3: SAVE}), "selector must be a tag glob"),
        (
            lambda: Policy("dots"),
            "or pairs, from selector to action; got 'dots'. A preset has a name alone: policy='dots'",
        ),
        (
            lambda: policies.policy_of("dots_saveable"),
            "JAX's policy is no text: jax.checkpoint_policies.dots_saveable",
        ),
        (lambda: policies.policy_of(["up"]), "To keep what is tagged so: Policy({'up': 'save', ...})"),
        (lambda: jaxckpt.compare(jnp.sum, jnp.ones(3)), "Give each function a name: compare({'plain': loss"),
        (lambda: Policy({"a": SAVE}, default="kept"), "default must be an action"),
        (lambda: larger_than("big"), "larger_than's size must be a number of bytes"),
        (lambda: intensity_above(-1), "flops_per_byte must be a number of at least 0; got -1"),
        (lambda: where("x"), "predicate must be a function"),
        (lambda: policies.policy_of("dot"), "policy must be a preset's name; got 'dot'. Did you mean 'dots'"),
        (
            lambda: policies.policy_of(3),
            "policy must be None, a Policy, a preset's name, or one of jax.checkpoint_policies; got 3",
        ),
        (lambda: jaxckpt.checkpoint(mlp, policy="doots"), "Did you mean 'dots'"),
        (lambda: policies.parse("=save"), "policy must be a preset's name or rules such as"),
        (lambda: policies.parse("intensity_above(much)=save"), "intensity_above must be a number; got 'much'"),
    ],
)
def test_what_is_no_policy_is_said_to_be_none(make, message):
    with pytest.raises(ArgumentError) as caught:
        make()
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("text", "policy"),
    [
        ("dots", {"mlp_up", "mlp_down", "scores", "mixed"}),
        ("mlp_*=save", {"mlp_up", "mlp_act", "mlp_down"}),
        ("mlp_act=recompute,mlp_*=save", {"mlp_up", "mlp_down"}),
        ("op(dot_general) & ~mlp_* = save", {"scores", "mixed"}),
        ("larger_than(1KiB)&mlp_*=offload, scores=save", {"mlp_up", "mlp_act", "scores"}),
        ("intensity_above(15)=save", {"mlp_down"}),
    ],
)
def test_policies_from_text(text, policy):
    assert set(decided(policies.parse(text))) == policy


def test_a_default_from_text():
    assert policies.parse("scores=recompute,*=save").default is SAVE


def test_policies_print_compare_and_hash():
    one = Policy({"a": SAVE, op("b"): OFFLOAD}, default=SAVE, strict=False)
    assert repr(one) == "Policy({'a': SAVE, op('b'): OFFLOAD}, default=SAVE, strict=False)"
    assert one == one
    assert one != policies.dots
    assert len({one, one, policies.dots, policies.dots}) == 2


@pytest.mark.parametrize(
    ("own", "labels"),
    [
        (jax.checkpoint_policies.dots_saveable, {"mlp_up", "mlp_down", "scores", "mixed"}),
        (jax.checkpoint_policies.dots_with_no_batch_dims_saveable, {"mlp_up", "mlp_down"}),
        (jax.checkpoint_policies.save_only_these_names("scores"), {"scores"}),
        (jax.checkpoint_policies.save_any_names_but_these("scores"), {"mlp_up", "mlp_act", "mlp_down", "mixed"}),
        (jax.checkpoint_policies.nothing_saveable, set()),
        (
            jax.checkpoint_policies.save_and_offload_only_these_names(
                names_which_can_be_saved=["scores"],
                names_which_can_be_offloaded=["mixed"],
                offload_src="device",
                offload_dst="pinned_host",
            ),
            {"scores", "mixed"},
        ),
    ],
    ids=["dots", "dots_no_batch", "names", "names but", "nothing", "offload"],
)
def test_jaxs_own_policies_as_ours(own, labels):
    policy = policies.from_jax(own)
    assert set(decided(policy)) == labels
    if "mixed" in labels and "scores" in labels and len(labels) == 2:
        assert decided(policy)["mixed"] is OFFLOAD


def test_tags_in_a_loop_are_kept_for_every_iteration():
    def stack(x, ws):
        return lax.scan(lambda c, w: (c + tag(jnp.sin(tag(c @ w, "inner")), "outer"), None), x, ws)[0]

    args = (jnp.ones((3, 4)), jnp.ones((5, 4, 4)))
    keep = lambda **rules: kept_shapes(jaxckpt.checkpoint(stack, policy=Policy(rules)), *args)
    assert not keep()
    assert keep(inner="save") == {(5, 3, 4): 1}
    assert keep(outer="save") == {(5, 3, 4): 1}  # the carries are added up from it, without the sine


def test_a_tagged_carry_is_kept_although_the_loop_makes_it():
    def stack(x, ws):
        return lax.scan(lambda c, w: (jnp.sin(tag(c, "carry") @ w), None), x, ws)[0]

    args = (jnp.ones((3, 4)), jnp.ones((5, 4, 4)))
    assert kept_shapes(jaxckpt.checkpoint(stack, policy=Policy({"carry": SAVE})), *args) == {(5, 3, 4): 1}


def test_tags_in_branches_and_nested_checkpoints_and_calls():
    def fun(x):
        y = lax.cond(x[0] > 0, lambda x: tag(jnp.sin(x), "branch") ** 2, lambda x: x, x)
        z = jax.checkpoint(lambda y: jnp.sin(tag(jnp.sin(y), "nested")))(y)
        return jax.jit(lambda z: tag(jnp.sin(z), "called") ** 2)(z)

    x = jnp.ones(7)
    for name in ("branch", "nested", "called"):
        kept = kept_shapes(jaxckpt.checkpoint(fun, policy=Policy({name: SAVE})), x)
        assert kept[(7,)] == 1, name
    assert not kept_shapes(jaxckpt.checkpoint(fun), x)[(7,)]


@pytest.mark.parametrize(
    "make", [lambda: op(None), lambda: op(""), lambda: policies.tagged(3), lambda: intensity_above(float("nan"))]
)
def test_a_selector_of_nothing_is_refused_at_once(make):
    with pytest.raises(ArgumentError, match="must be a"):
        make()


def test_an_action_of_another_kind_is_refused_at_once():
    with pytest.raises(
        ArgumentError, match=r"kind must be one of recompute, save, offload, compress, shard; got 'foo'"
    ):
        jaxckpt.Action("foo")


@pytest.mark.parametrize("said", [jnp.ones(3), jnp.ones((2, 1))])
def test_a_predicate_says_true_or_false(said):
    policy = Policy({where(lambda value: said): SAVE})
    with pytest.raises(ArgumentError, match="predicate must be a function of a Value that returns True or False"):
        jax.grad(jaxckpt.checkpoint(lambda x: jnp.sin(jnp.sin(x)), policy=policy))(1.0)


def test_an_error_of_a_predicate_says_of_which_value():
    policy = jaxckpt.Policy({jaxckpt.where(lambda value: value.shape[-1] > 2): "save"})
    with pytest.raises(IndexError) as raised:
        jax.eval_shape(jaxckpt.checkpoint(lambda x: jnp.sin(x.sum()), policy=policy), jnp.ones(3))
    assert any("a policy's `where`, for" in note and "float32()" in note for note in raised.value.__notes__)
