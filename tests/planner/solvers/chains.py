"""Chains to hold solvers against: random small ones, whose every solution can be tried, and deep ones, as the planner
meets them.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
from hypothesis import strategies as st

from jaxckpt.planner.chain import Candidate, Carried, Chain, Segment

MiB = 1 << 20


def random_chain(seed, length, candidates=3, wide=2):
    """Small numbers; values that skip stages or are used more than once; segments of up to `wide` stages."""
    rng = np.random.default_rng(seed)
    time, output, gradient = rng.uniform(1, 9, length), rng.integers(1, 20, length), rng.integers(0, 12, length)
    segments = {}
    for start, stop in itertools.combinations(range(length + 1), 2):
        inside = slice(start, stop)
        forward = float(time[inside].sum())
        chosen = ()
        if stop - start <= wide:
            kept = np.sort(rng.integers(0, 25 * (stop - start), candidates))
            share = np.sort(rng.uniform(0, 1, candidates))[::-1]
            chosen = tuple(Candidate(int(k), float(forward * s), int(rng.integers(5, 40))) for k, s in zip(kept, share))
        segments[start, stop] = Segment(
            forward, int(output[stop - 1] + rng.integers(0, 15)), int(gradient[inside].sum()), chosen
        )
    carried = [Carried(int(output[i]), i, (i + 1,)) for i in range(length - 1)]
    for made in range(length - 1):  # some skip stages, some are used more than once
        uses = tuple(int(u) for u in range(made + 1, length) if rng.random() < 0.3)
        if uses:
            carried.append(Carried(int(rng.integers(1, 9)), made, uses))
    return Chain(length, segments, tuple(carried))


def with_inputs_kept_otherwise(chain):
    """Returns a chain whose segments have a candidate more, which keeps a third of what goes into them alone in its
    place: it may keep less than nothing.
    """
    segments = {}
    for (start, stop), segment in chain.segments.items():
        taken = [v.bytes for v in chain.carried if v.made < start <= v.uses[0] and v.uses[-1] < stop]
        more = [
            replace(
                each, kept=each.kept - sum(taken) + sum(taken) // 3, work=each.work + sum(taken), time=each.time + 0.5
            )
            for each in segment.candidates[:1]
            if taken
        ]
        segments[start, stop] = replace(segment, candidates=(*segment.candidates, *more))
    return replace(chain, segments=segments)


@st.composite
def chains(draw, longest=5):
    """Chains of up to `longest` stages, with zeros and ties of every kind; in half of them the stages repeat, as layers
    do.
    """
    length = draw(st.sampled_from([each for each in (1, 2, 3, 3, 4, 4, 4, 5) if each <= longest]))
    period = draw(st.sampled_from([length, length, 1, 2]))
    small, sizes = st.integers(0, 6), st.integers(0, 12)
    stages = [
        {
            "time": draw(st.integers(0, 8)) / 8,
            "work": draw(sizes),
            "gradient": draw(sizes),
            "output": draw(small),
            "candidates": draw(st.lists(st.tuples(sizes, st.integers(0, 8), small), min_size=1, max_size=3)),
        }
        for _ in range(min(period, length))
    ]
    stages = [stages[i % period] for i in range(length)]
    joint = draw(st.lists(st.tuples(sizes, st.integers(0, 16), small), max_size=2))
    segments = {}
    for start, stop in itertools.combinations(range(length + 1), 2):
        inside = stages[start:stop]
        candidates = {1: inside[0]["candidates"], 2: joint}.get(stop - start, [])
        segments[start, stop] = Segment(
            sum(each["time"] for each in inside),
            inside[-1]["work"],
            sum(each["gradient"] for each in inside),
            tuple(Candidate(kept, time / 8, work) for kept, time, work in candidates),
        )
    carried = [Carried(stages[i]["output"], i, (i + 1,)) for i in range(length - 1)]
    for made in range(length - 2):
        uses = draw(st.lists(st.integers(made + 1, length - 1), max_size=3, unique=True))
        carried += [Carried(draw(small), made, tuple(sorted(uses)))] if uses else []
    return Chain(length, segments, tuple(carried))


def deep_chain(length, *, period, candidates=20, wide=4, seed=0):
    """A chain of `length` stages of tens of MiB, every `period` of them alike (all different where `period` is
    `length`), between an embedding and a head; every stage uses a value that the first one makes."""
    rng = np.random.default_rng(seed)
    kinds = [0, *(1 + i % period for i in range(length - 2)), period + 1]
    time = rng.uniform(1e-3, 9e-3, period + 2)
    inner = rng.integers(50 * MiB, 200 * MiB, period + 2)
    gradient = rng.integers(5 * MiB, 30 * MiB, period + 2)
    output = 12 * MiB
    known = {}
    segments = {}
    for start, stop in itertools.combinations(range(length + 1), 2):
        inside = tuple(kinds[start:stop])
        forward = sum(float(time[kind]) for kind in inside)
        if stop - start <= wide and inside not in known:
            full = sum(int(inner[kind]) for kind in inside) + output * (stop - start - 1)
            share = np.sort(rng.uniform(0, 1, candidates))
            share[0], share[-1] = 0, 1
            known[inside] = tuple(
                Candidate(int(full * s), forward * float((1 - s) ** 1.7), int(full * (1 - s) * 0.8) + 10 * MiB)
                for s in share
            )
        segments[start, stop] = Segment(
            forward, 2 * output, sum(int(gradient[kind]) for kind in inside), known.get(inside, ())
        )
    carried = [Carried(output, i, (i + 1,)) for i in range(length - 1)]
    return Chain(length, segments, (*carried, Carried(4 * MiB, 0, tuple(range(1, length - 1)))))
