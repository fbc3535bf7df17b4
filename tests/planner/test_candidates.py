"""What the analysis says of a stretch against what JAX does with it: bytes kept and matmuls run again."""

import jax
import jax.numpy as jnp
import pytest

import jaxckpt
from jaxckpt import Target
from jaxckpt.core.emit import Named
from jaxckpt.core.graph import trace
from jaxckpt.core.lift import count_flops
from jaxckpt.core.plan import Loop, Plan, Region
from jaxckpt.models import gpt, moe, resnet
from jaxckpt.planner import inside
from jaxckpt.planner.candidates import candidates_of
from jaxckpt.planner.context import Context
from jaxckpt.planner.scans import loop_candidates_of
from jaxckpt.schedules import Mixed, Nested

CPU = Target("cpu")


def mlp(ws, x):
    for w in ws:
        x = jax.nn.gelu(x @ w)
    return jnp.sum(x**2)


def flash(w, x):
    """A function with a derivative of its own, which keeps what it likes."""

    @jax.custom_vjp
    def mix(a):
        return jnp.sin(a) * 2

    mix.defvjp(lambda a: (jnp.sin(a) * 2, (jnp.cos(a),)), lambda res, ct: (2 * res[0] * ct,))
    return jnp.sum(mix(x @ w) @ w)


def branches(w, x):
    x = jax.lax.cond(x[0, 0] > 0, lambda: jnp.sin(x @ w), lambda: x @ w)
    return jnp.sum(jax.lax.sort(x, dimension=0) @ w)


def programs():
    x = jnp.ones((64, 32))
    square = jnp.ones((32, 32)) / 32
    yield "mlp", mlp, ([square] * 3, x)
    yield "own derivative", flash, (square, x)
    yield "branches", branches, (square, x)
    for name, model, sizes in (("gpt", gpt.small, {"layers": 1}), ("moe", moe.small, {}), ("resnet", resnet.small, {})):
        fun, args = model(**sizes)
        yield name, lambda *a, fun=fun: jax.tree.leaves(fun(*a))[0], args


def whole(fun, args, target=CPU):
    graph = trace(fun, *args)
    count = len(jax.tree.leaves(args[0]))
    active = inside.whole(graph, range(count) if graph.values[0].kind == "argument" else _first(graph, count)).active
    outputs = [index for index in graph.body.outputs if index is not None]
    return graph, candidates_of(Named(graph, graph.body), 0, len(graph.ops), outputs, active, Context(target))


def _first(graph, count):
    return [value.index for value in graph.values if value.kind == "argument"][:count]


def attention(w, x):
    scores = jax.nn.softmax((x @ w) @ x.T / 8)
    return jnp.sum((scores @ x) ** 2)


def test_the_fastest_candidate_keeps_scores_and_not_what_a_softmax_makes_of_them():
    """To write the exponentials takes longer than to compute them again where they are used. JAX's own step keeps
    them.
    """
    args = jnp.ones((64, 64)), jnp.ones((512, 64))
    graph, found = whole(attention, args, Target("cuda:h100"))
    fastest = min(found.candidates, key=lambda candidate: candidate.seconds)
    kept = {graph.values[index].primitive for index in fastest.how}
    assert "dot_general" in kept and not kept & {"exp", "div", "sub"}
    assert fastest.kept <= found.residual_bytes
    again = Plan((Region(0, len(graph.ops), fastest.how),), graph.fingerprint).apply(attention)
    matmuls = [str(jax.make_jaxpr(jax.grad(fun))(*args)).count("dot_general[") for fun in (attention, again)]
    assert matmuls[0] == matmuls[1]  # and no matmul runs again


@pytest.mark.parametrize(("name", "fun", "args"), [pytest.param(*each, id=each[0]) for each in programs()])
def test_every_candidate_keeps_the_bytes_that_it_says(name, fun, args):
    graph, found = whole(fun, args)
    assert len(found.candidates) > 1
    for candidate in found.candidates[:: max(1, len(found.candidates) // 4)]:
        plan = Plan((Region(0, len(graph.ops), candidate.how),), graph.fingerprint)
        kept = jaxckpt.residuals(plan.apply(fun), *args).kept_bytes
        # JAX keeps on top what it computes at once from arguments alone (shapes' constants, indices, keys).
        assert candidate.kept <= kept <= candidate.kept * 1.02 + 4096


def test_more_bytes_are_fewer_seconds_and_the_dearest_candidate_runs_no_matmul_again():
    args = ([jnp.ones((32, 32))] * 3, jnp.ones((64, 32)))
    graph, found = whole(mlp, args)
    assert [c.kept for c in found.candidates] == sorted({c.kept for c in found.candidates})
    assert [c.time for c in found.candidates] == sorted({c.time for c in found.candidates}, reverse=True)
    matmul = 2 * 64 * 32 * 32
    plain = count_flops(jax.grad(mlp), *args)

    def again(candidate):
        plan = Plan((Region(0, len(graph.ops), candidate.how),), graph.fingerprint)
        return count_flops(jax.grad(plan.apply(mlp)), *args) - plain

    assert again(found.candidates[-1]) < matmul
    assert again(found.candidates[0]) >= 3 * matmul


def test_values_that_only_the_derivative_computes_cannot_be_kept():
    graph, found = whole(flash, (jnp.ones((32, 32)), jnp.ones((64, 32))))
    cosines = {op.outputs[0] for op in graph.walk() if op.primitive == "cos"}
    assert not any(cosines & set(candidate.how) for candidate in found.candidates)


def test_gradients_of_arguments_that_nobody_asks_for_need_nothing():
    def fun(w, x):
        return jnp.sum(jnp.sin(x @ w) * 3)

    graph = trace(fun, jnp.ones((32, 32)), jnp.ones((64, 32)))
    weights, data = (value.index for value in graph.values if value.kind == "argument")
    outputs = [index for index in graph.body.outputs if index is not None]

    def least(differentiated):
        active = inside.whole(graph, differentiated).active
        return (
            candidates_of(Named(graph, graph.body), 0, len(graph.ops), outputs, active, Context(CPU)).candidates[0].work
        )

    assert least([weights, data]) > least([weights])


# ---------------------------------------------------------------------------------------------------------------- scans


def layers(ws, x):
    return jnp.sum(jax.lax.scan(lambda c, w: (jnp.tanh(jnp.sin(c @ w) @ w), None), x, ws)[0] ** 2)


SCAN_ARGS = (jnp.ones((12, 32, 32)) / 32, jnp.ones((64, 32)))


def scanned():
    graph = trace(layers, *SCAN_ARGS)
    place = next(i for i, op in enumerate(graph.ops) if op.primitive == "scan")
    weights = next(value.index for value in graph.values if value.kind == "argument")
    found = loop_candidates_of(graph, graph.ops[place], inside.whole(graph, [weights]).active, Context(CPU))
    return graph, place, found


def test_every_way_to_run_a_scan_keeps_the_bytes_that_it_says():
    graph, place, found = scanned()
    assert any(isinstance(choice.schedule, Nested) and choice.schedule.inner for choice in found.candidates)
    assert any(isinstance(choice.schedule, Mixed) for choice in found.candidates)
    weights = SCAN_ARGS[0].nbytes  # other views of an argument may be counted as residuals, which costs no memory
    carry = SCAN_ARGS[1].nbytes
    for choice in found.candidates:
        loops = () if choice.schedule is None else (Loop(place, choice.schedule),)
        plan = Plan((), graph.fingerprint, loops=loops)
        kept = jaxckpt.residuals(lambda *args, plan=plan: plan.apply(layers)(*args), *SCAN_ARGS).kept_bytes
        assert choice.bytes <= kept <= choice.bytes + 2 * weights + 2 * carry


def test_the_fastest_way_runs_no_matmul_again_and_the_leanest_runs_them_all():
    graph, place, found = scanned()
    matmul, plain = 2 * 64 * 32 * 32, count_flops(jax.grad(layers), *SCAN_ARGS)

    def again(choice):
        loops = () if choice.schedule is None else (Loop(place, choice.schedule),)
        return count_flops(jax.grad(Plan((), graph.fingerprint, loops=loops).apply(layers)), *SCAN_ARGS) - plain

    ordered = sorted(found.candidates, key=lambda c: c.time.effort)
    assert again(ordered[0]) < matmul
    assert again(min(found.candidates, key=lambda c: c.bytes)) >= 24 * matmul


def test_to_leave_a_head_to_jax_writes_nothing_that_is_not_there():
    """The compiler keeps the logits, which a matmul has written, and computes the exponentials again where they are
    used.
    """

    def head(w, x):
        return jnp.sum(jax.nn.logsumexp(x @ w, axis=-1))

    args = jnp.ones((64, 4096)), jnp.ones((512, 64))
    _, found = whole(head, args, Target("cuda:h100"))
    logits = 512 * 4096 * 4
    assert logits <= found.left_bytes <= 1.01 * logits
    assert found.left_time.seconds < 0.05 * logits / Target("cuda:h100").bandwidth
    assert found.residual_time.seconds > 0.5 * logits / Target("cuda:h100").bandwidth


def in_a_cond(w, x):
    one, other = lambda x: jnp.tanh(jnp.tanh(x @ w) @ w), lambda x: jnp.sin(x @ w)
    return jnp.sum(jnp.sin(jax.lax.cond(x[0, 0] > 0, one, other, x)))


def in_a_switch_in_a_cond(w, x):
    inner = lambda x: jax.lax.switch(1, [lambda x: jnp.tanh(x @ w), lambda x: jnp.tanh(jnp.sin(x @ w) @ w)], x)
    return jnp.sum(jax.lax.cond(x[0, 0] > 0, inner, jnp.cos, x) ** 2)


def in_a_short_loop(w, x):
    return jnp.sum(jax.lax.fori_loop(0, 3, lambda i, x: jnp.tanh(jnp.sin(x @ w) @ w), x) ** 2)


INSIDE = {"cond": in_a_cond, "switch in a cond": in_a_switch_in_a_cond, "loop": in_a_short_loop}


@pytest.mark.parametrize("fun", INSIDE.values(), ids=INSIDE)
def test_what_branches_and_short_loops_hold_can_be_kept(fun):
    """Each candidate says what JAX does: bytes kept, matmuls run again. The fastest one runs none again."""
    args = jnp.ones((64, 64)) / 64, jnp.ones((512, 64))
    graph, found = whole(fun, args)
    plain = count_flops(jax.grad(fun), *args)
    matmul = 2 * 512 * 64 * 64
    assert len(found.candidates) >= 3
    again = []
    for candidate in found.candidates:
        planned = Plan((Region(0, len(graph.ops), candidate.how),), graph.fingerprint).apply(fun)
        kept = jaxckpt.residuals(planned, *args).residuals
        assert sum(each.bytes for each in kept if not each.argument) == pytest.approx(candidate.kept, rel=0.02, abs=64)
        again.append(count_flops(jax.grad(planned), *args) - plain)
        for got, want in zip(jax.grad(planned)(*args), jax.grad(fun)(*args)):
            assert jnp.allclose(got, want, rtol=1e-5)
    assert again[0] >= matmul > again[-1]
    assert [c.kept for c in found.candidates] == sorted(c.kept for c in found.candidates)
