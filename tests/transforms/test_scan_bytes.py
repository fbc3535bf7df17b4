"""The random scans of the other files keep the bytes of their schedules: carries, the steps that are left over, and no
more.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from jaxckpt.schedules import Nested, schedule_of
from jaxckpt.transforms.scan import scan
from tests.helpers import kept_bytes
from tests.transforms.test_scan import PROGRAMS, Program
from tests.transforms.test_scan_random import SCHEDULES, Random


def size(tree: Any) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def most(options: dict[str, Any], length: int, carry: int, rows: int, plain: int) -> int:
    """Returns the bytes that a scan may keep.

    Args:
      options: of the scan: a schedule and what goes with it.
      length: iterations.
      carry: bytes of a carry.
      rows: bytes of all xs; what is no argument is kept, and segments want a copy.
      plain: bytes that `lax.scan` keeps.
    """
    each = -(-plain // max(length, 1))  # of an iteration that is not checkpointed
    nest: Any = schedule_of(length, options["schedule"])
    if not isinstance(nest, Nested):
        runs = -(-length // options.get("unroll", 1))
        return min(nest.count, max(runs, 1)) * carry + rows + carry
    named = each * length if nest.remat and options.get("policy") is not None else 0
    return nest.kept * carry + (0 if nest.remat else nest.rest * each) + rows + carry + named


def kept(results: Callable[[Callable[..., Any], Any], Any], run: Callable[..., Any], moving: Any) -> int:
    """Returns the bytes that differentiating a scan's results keeps beside arguments."""
    return kept_bytes(lambda moving: [jnp.float32(0), *results(run, moving)], moving)  # some results have no floats


def of_program(number: int) -> tuple[int, int, int]:
    """Returns the bytes that a program of the 500 cases keeps, may keep, and keeps with `lax.scan`."""
    program = Program.draw(number)
    options = {"schedule": program.schedule, "unroll": program.unroll, "policy": program.policy}
    operands, tokens = program.operands(0), jnp.zeros((program.length, 2), jnp.int32)
    results = lambda run, operands: program.loss(run, operands, tokens)[1]
    plain = kept(results, lax.scan, operands)
    others = [jnp.int32(0), jax.random.key(0), jnp.zeros(4, program.dtype)]
    carry = size((operands[1], [x for x, part in zip(others, ("counter", "key", "unmoved")) if part in program.parts]))
    rows = size((operands[2], tokens if "tokens" in program.parts else None))
    found = kept(results, functools.partial(scan, **options), operands)
    return found, most(options, program.length, carry, rows, plain), plain


def of_random(number: int) -> tuple[int, int, int]:
    """Returns the bytes that a random scan keeps, may keep, and keeps with `lax.scan`."""
    case = Random(number)
    plain = kept(case.results, lax.scan, case.moving)
    found = kept(case.results, functools.partial(scan, **case.options), case.moving)
    if "budget" in case.options:
        return found, case.options["budget"], plain
    return found, most(case.options, case.length, size(case.init), size(case.xs), plain), plain


@pytest.mark.parametrize("first", range(0, PROGRAMS, 14))
def test_the_programs_of_the_500_cases_keep_what_their_schedules_say(first: int) -> None:
    found = {number: of_program(number) for number in range(first, first + 14)}
    assert {number: figures for number, figures in found.items() if figures[0] > figures[1]} == {}
    # It is a bound that a scan without a schedule breaks.
    assert sum(bound < plain for _, bound, plain in found.values()) >= 6
    assert sum(kept for kept, _, _ in found.values()) < 0.5 * sum(plain for _, _, plain in found.values())


def test_random_scans_keep_what_their_schedules_or_budgets_say() -> None:
    found = {number: of_random(number) for number in range(2 * len(SCHEDULES))}
    assert {number: figures for number, figures in found.items() if figures[0] > figures[1]} == {}
    assert sum(bound < plain for _, bound, plain in found.values()) >= len(SCHEDULES) / 2
