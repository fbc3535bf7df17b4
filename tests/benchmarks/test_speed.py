"""What a policy costs before anything is compiled, on unrolled GPTs; one of 48 layers has some 5,000 operations."""

import functools
import time

import jax

import jaxckpt
from benchmarks.models import gpt
from jaxckpt.core.emit import emit
from jaxckpt.policies import dots


def test_trace_and_emit_of_a_deep_gpt_take_less_than_five_seconds():
    loss, args = gpt.deep()
    start = time.process_time()
    graph = jaxckpt.trace(loss, *args)
    emit(graph, dots.regions(graph))
    assert time.process_time() - start < 5
    assert sum(1 for _ in graph.walk()) > 4000


def test_a_policy_adds_at_most_a_quarter_to_the_lowering_of_a_gradient():
    """The least of several turns each, in turns: whatever else the machine does only adds to a time."""
    loss, args = gpt.deep(layers=12)
    own = functools.partial(jax.checkpoint, policy=jax.checkpoint_policies.dots_saveable)
    ours = functools.partial(jaxckpt.checkpoint, policy="dots")

    def lower(wrap):
        jax.clear_caches()
        fun = wrap(loss)
        start = time.process_time()
        jax.jit(jax.grad(fun)).lower(*args)
        return time.process_time() - start

    lower(own), lower(ours)
    times = [(lower(ours), lower(own)) for _ in range(7)]
    with_policy, without = map(min, zip(*times))
    assert with_policy / without <= 1.25, times
