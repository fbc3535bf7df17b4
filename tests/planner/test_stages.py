"""Where the chain is cut, and which stretches are equal."""

import itertools

import jax
import jax.numpy as jnp

from jaxckpt.core.graph import trace
from jaxckpt.models import gpt
from jaxckpt.planner import stages
from jaxckpt.planner.inside import whole


def cut(fun, args):
    graph = trace(fun, *args)
    return graph, stages.cuts(graph)


def test_a_transformer_is_cut_where_only_the_residual_stream_is_live():
    fun, args = gpt.small(layers=6)
    graph, places = cut(fun, args)
    live = stages.crossing(graph)
    stream = 8 * 128 * 128 * 4
    inner = [live[place] for place in places[2:-1]]
    assert len(places) - 1 == 2 * 6 + 2
    assert inner.count(stream) >= 2 * 6 - 1


def test_equal_blocks_have_equal_digests_and_others_have_not():
    fun, args = gpt.small(layers=6)
    graph, places = cut(fun, args)
    last, active = (
        stages.last_uses(graph),
        whole(graph, [v.index for v in graph.values if v.kind == "argument"]).active,
    )
    texts = [
        stages.digest(graph, stages.stretch(graph, a, b, last), active, {}) for a, b in itertools.pairwise(places[2:-1])
    ]
    assert len(set(texts)) == 2
    other, args = gpt.small(layers=6, batch=4)
    graph2, places2 = cut(other, args)
    part = stages.stretch(graph2, places2[3], places2[4], stages.last_uses(graph2))
    assert stages.digest(graph2, part, active, {}) not in texts


def test_a_scan_is_a_stage_of_its_own():
    def fun(ws, x):
        x = jnp.tanh(x @ ws[0])
        x, _ = jax.lax.scan(lambda c, w: (jnp.tanh(c @ w), None), x, ws)
        return jnp.sum(jnp.tanh(x @ ws[1]))

    graph, places = cut(fun, (jnp.ones((5, 8, 8)), jnp.ones((4, 8))))
    place = next(i for i, op in enumerate(graph.ops) if op.primitive == "scan")
    assert place in places and place + 1 in places


def test_more_stages_than_can_be_planned_for_are_joined_in_equal_pairs():
    def fun(ws, x):
        for w in ws:
            x = jnp.tanh(x @ w)
        return jnp.sum(x)

    graph, places = cut(fun, ([jnp.ones((8, 8))] * 100, jnp.ones((4, 8))))
    assert len(places) - 1 >= 99
    last, active = stages.last_uses(graph), frozenset[int]()
    joined = stages.join(
        graph, places, lambda a, b: stages.digest(graph, stages.stretch(graph, a, b, last), active, {}), most=30
    )
    assert len(joined) - 1 <= 30 and joined[0] == 0 and joined[-1] == len(graph.ops)
    assert set(joined) <= set(places)


def test_a_function_of_no_dear_operation_is_one_stage():
    graph, places = cut(lambda x: jnp.sum(jnp.sin(x)), (jnp.ones(8),))
    assert places == [0, len(graph.ops)]


def test_blocks_begin_where_the_first_one_does():
    """Of the places in a block where only the residual stream is live, its first: behind the embedding."""

    def fun(ws, table, ids):
        x = table[ids]
        for w in ws:
            x = jax.lax.cond(w[0, 0] > 0, lambda x, w=w: jnp.tanh(x @ w), jnp.sin, x)
            x = x + 0.1 * jnp.tanh(x) * x
        return jnp.sum(x)

    graph = trace(fun, [jnp.ones((8, 8))] * 5, jnp.ones((16, 8)), jnp.zeros(4, int))
    blocks = stages.repeats(graph)
    first = next(place for place, op in enumerate(graph.ops) if op.primitive == "gather") + 1
    assert blocks[0] == first and len(blocks) == 6


def test_operations_whose_programs_are_wired_otherwise_are_not_equal():
    def fun(x, y, first):
        one = lambda u, v: jnp.sin(u @ u.T) @ u + v
        other = lambda u, v: jnp.sin(v @ v.T) @ v + u
        for chosen in (one, one if first else other):
            x = jax.lax.cond(x[0, 0] > 0, chosen, lambda u, v: u * v, x, y)
        return x

    texts = []
    for first in (True, False):
        graph = trace(lambda x, y, first=first: fun(x, y, first), jnp.ones((4, 8)), jnp.ones((4, 8)))
        conds = [place for place, op in enumerate(graph.ops) if op.primitive == "cond"]
        last = stages.last_uses(graph)
        texts.append({stages.digest(graph, stages.stretch(graph, p, p + 1, last), (), {}) for p in conds})
    assert [len(each) for each in texts] == [1, 2]


def layers(w, x, count):
    for _ in range(count):
        x = jnp.tanh(x @ w)
    return x


@jax.jit
def jitted(w, x):
    return jnp.sin(layers(w, x, 2))


def in_a_loop(w, x):
    x = x @ w
    for _ in range(3):
        x = jitted(w, x) * 2
    return jnp.sum(layers(w, x, 3) ** 2)


def nested(w, x):
    def both(x):
        return layers(w, layers(w, x, 2) + 1, 2)

    return jnp.sum(both(x)) + jnp.sum(x @ w)


def one_of_most(w, x):
    return jnp.sum(layers(w, layers(w, x, 5), 2))


def matmuls_of_calls(fun):
    graph = trace(fun, jnp.ones((4, 4)), jnp.ones((2, 4)))
    dots = lambda ops: sum(op.primitive == "dot_general" for op in ops)
    look = lambda way: [(dots(graph.ops[start:stop]), graph.ops[stop - 1].primitive) for start, stop in way]
    return list(map(look, stages.calls(graph)))


def test_calls_end_where_the_function_returns_in_loops_and_under_jit_too():
    assert matmuls_of_calls(in_a_loop)[0] == [(2, "sin")] * 3 + [(3, "tanh")]
    assert matmuls_of_calls(nested)[0] == [(2, "tanh")] * 2, "calls in the one that runs most"
    assert matmuls_of_calls(one_of_most)[0] == [(5, "tanh"), (2, "tanh")], "which has no calls in it"
    assert matmuls_of_calls(lambda w, x: jnp.sum(jnp.tanh(layers(w, x, 1) @ w))) == [], "one call alone"


def towers(w, x):
    def unit(x):
        return jnp.tanh(x @ w)

    def tower(x):
        return jnp.sin(unit(unit(x)))

    return jnp.sum(tower(x) * tower(2 * x))


def test_calls_are_found_at_each_depth_and_of_functions_with_one_matmul():
    """People checkpoint whole towers, or each layer of them."""
    assert matmuls_of_calls(towers) == [[(2, "sin")] * 2, [(1, "tanh")] * 4]
    assert matmuls_of_calls(lambda w, x: jnp.sum(layers(w, x, 4))) == [[(1, "tanh")] * 4], "iterations of its loop"
    alone = lambda w, x: jnp.sum(jnp.tanh(jnp.matmul(jnp.tanh(jnp.matmul(x, w)), w)))
    assert matmuls_of_calls(alone) == [], "a call that does nothing else has nothing to run again"


def test_calls_are_not_looked_for_where_most_is_in_blocks_that_repeat():
    graph = trace(in_a_loop, jnp.ones((4, 4)), jnp.ones((2, 4)))
    assert stages.calls(graph, [0, len(graph.ops)]) == []
