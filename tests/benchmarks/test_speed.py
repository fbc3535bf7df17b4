"""What a policy costs before anything is compiled, on unrolled GPTs; one of 48 layers has some 5,000 operations."""

import functools
import time

import jax

import jaxckpt
from jaxckpt.core.emit import emit
from jaxckpt.models import gpt
from jaxckpt.policies import dots
from tests.helpers import time_ratio


def test_trace_and_emit_of_a_deep_gpt_take_less_than_five_seconds():
    loss, args = gpt.deep()
    start = time.process_time()
    graph = jaxckpt.trace(loss, *args)
    emit(graph, dots.regions(graph))
    assert time.process_time() - start < 5
    assert sum(1 for _ in graph.walk()) > 4000


def test_a_policy_adds_at_most_a_quarter_to_the_lowering_of_a_gradient():
    loss, args = gpt.deep(layers=12)
    own = functools.partial(jax.checkpoint, policy=jax.checkpoint_policies.dots_saveable)
    ours = functools.partial(jaxckpt.checkpoint, policy="dots")

    def lower(wrap):
        jax.clear_caches()
        jax.jit(jax.grad(wrap(loss))).lower(*args)

    ratio, ratios = time_ratio(lambda: lower(ours), lambda: lower(own), turns=9)
    assert ratio <= 1.25, ratios
