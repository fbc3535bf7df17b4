"""Random policies, as the text of Python expressions."""

from __future__ import annotations

import random
from collections.abc import Sequence

from tests.fuzz.builder import TAGS


def policy_text(rng: random.Random, tags: Sequence[str]) -> str:
    """Returns a policy as Python. `tags`: of the program, of which a strict policy names some."""
    if rng.random() < 0.25:
        return repr(rng.choice(("nothing", "everything", "dots", "dots_no_batch", "hybrid")))
    strict = bool(tags) and rng.random() < 0.5
    pairs = [
        f"({_selector(rng, tags if strict else TAGS)}, {rng.choice(('SAVE', 'SAVE', 'SAVE', 'RECOMPUTE'))})"
        for _ in range(rng.randint(1, 3))
    ]
    options = [", default=SAVE"] if rng.random() < 0.25 else []
    return f"Policy([{', '.join(pairs)}]{''.join(options)}{'' if strict else ', strict=False'})"


def _selector(rng: random.Random, tags: Sequence[str], depth: int = 0) -> str:
    chance = rng.random()
    if depth < 2 and chance < 0.25:
        parts = (_selector(rng, tags, depth + 1), _selector(rng, tags, depth + 1))
        if all(part.startswith("'") for part in parts):  # two strings have no &
            return f"(op('*') & {parts[0]})"
        return f"({parts[0]} {rng.choice('&|')} {parts[1]})"
    if depth < 2 and chance < 0.35:
        inner = _selector(rng, tags, depth + 1)
        return f"~{inner}" if not inner.startswith("'") else f"~(op('*') & {inner})"
    if chance < 0.6 and tags:
        name = rng.choice(tags)
        return repr(rng.choice((name, name[:1] + "*", "*" + name[-1:], "?" * len(name))))
    return rng.choice(
        (
            "op('dot_general')", "op('conv*')", "op('sin')", "op('tanh')", "op('reduce_*')", "op('scan')", "op('custom_*')", "op('mul')",
            "op('cumsum')", "op('s*')", "op('*')", "op('cond')", "op('random_*')", "larger_than('16B')", "larger_than('64B')",
            "larger_than('1KiB')",
            "intensity_above(0.1)", "intensity_above(1)", "intensity_above(4)", "where(lambda v: v.bytes % 3 == 1)",
            "where(lambda v: len(v.shape) == 2)",
            "where(lambda v: v.repeats > 1)", "where(lambda v: v.dtype == jnp.float32)", "where(lambda v: v.dtype "
            "== jnp.int32)",
        )
    )  # fmt: skip
