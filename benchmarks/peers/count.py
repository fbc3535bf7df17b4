"""How many matmuls and convolutions a function on JAX executes."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend.core import Literal

from jaxckpt import _compat
from jaxckpt.core import surgery

COUNTED = ("dot_general", "conv_general_dilated")


def executed(fun: Callable[..., Any], *args: Any) -> int:
    """Returns the matmuls and convolutions that `fun(*args)` executes.

    They are counted in the jaxpr, in which JAX has placed the recomputation. A scan counts as often as it iterates. If
    the number depends on values, as in a while loop, that part of the jaxpr runs equation by equation, and what runs is
    counted.

    >>> import jax.numpy as jnp
    >>> x = jnp.eye(3)
    >>> executed(lambda x: jax.lax.fori_loop(0, 5, lambda i, y: y @ x, x) @ x, x)
    6
    >>> executed(lambda x, n: jax.lax.while_loop(lambda c: c[0] < n, lambda c: (c[0] + 1, c[1] @ x), (0, x)), x, 4)
    4
    """
    closed = jax.make_jaxpr(fun)(*args)
    count = known(closed)
    if count is not None:
        return count
    run = _Run()
    run.program(closed, jax.tree.leaves(args))
    return run.count


def compiled(text: str) -> int | None:
    """Returns the matmuls and convolutions in the text of a compiled program; None if there are loops or calls of
    libraries in it.
    """
    if re.search(r"\bwhile\(|\bcustom-call\(", text):
        return None
    return len(re.findall(r" (?:dot|convolution)\(", text))


def known(jaxpr: Any) -> int | None:
    """Returns the number in a jaxpr; None if it depends on values."""
    counts = [_known(eqn) for eqn in _compat.open_jaxpr(jaxpr).eqns]
    return None if None in counts else sum(counts)


def _known(eqn: Any) -> int | None:
    name = _compat.primitive_name(eqn)
    if name in COUNTED:
        return 1
    counts = [known(each) for each in _compat.held_jaxprs(eqn)]
    if not any(count != 0 for count in counts):
        return 0
    if None in counts or name == "while":
        return None
    if name == "cond":
        return counts[0] if len(set(counts)) == 1 else None
    return sum(counts) * (_compat.equation_params(eqn)["length"] if name == "scan" else 1)


class _Run:
    """Runs a jaxpr, and counts."""

    def __init__(self) -> None:
        self.count = 0

    def program(self, jaxpr: Any, operands: Sequence[Any]) -> list[Any]:
        opened = _compat.open_jaxpr(jaxpr)
        values = dict(zip(opened.constvars, _compat.jaxpr_consts(jaxpr), strict=True))
        values |= zip(opened.invars, operands, strict=True)
        read = lambda atom: atom.val if isinstance(atom, Literal) else values[atom]
        for eqn in opened.eqns:
            count, inputs = _known(eqn), [read(atom) for atom in eqn.invars]
            if count is None:
                results = self.equation(eqn, inputs)
            else:
                self.count += count
                results = surgery.run(eqn, opened.debug_info, inputs)
            values |= zip(eqn.outvars, results, strict=True)
        return [read(atom) for atom in opened.outvars]

    def equation(self, eqn: Any, inputs: list[Any]) -> list[Any]:
        name, params = _compat.primitive_name(eqn), _compat.equation_params(eqn)
        if name == "while":
            return self.loop(params, inputs)
        if name == "scan":
            return self.scan(params, inputs)
        if name == "cond":
            return self.program(params["branches"][int(inputs[0])], inputs[1:])
        (inner,) = _compat.held_jaxprs(eqn)
        return self.program(inner, inputs)

    def loop(self, params: dict[str, Any], inputs: list[Any]) -> list[Any]:
        first, second = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
        asked, constants, carry = inputs[:first], inputs[first:second], inputs[second:]
        while self.program(params["cond_jaxpr"], [*asked, *carry])[0]:
            carry = self.program(params["body_jaxpr"], [*constants, *carry])
        return carry

    def scan(self, params: dict[str, Any], inputs: list[Any]) -> list[Any]:
        consts, carried = _compat.num_scan_consts_carry(params)
        constants, carry, xs = inputs[:consts], inputs[consts:][:carried], inputs[consts + carried :]
        order, rows = range(params["length"]), []
        for i in reversed(order) if params["reverse"] else order:
            out = self.program(params["jaxpr"], [*constants, *carry, *(x[i] for x in xs)])
            carry = out[:carried]
            rows.append(out[carried:])
        rows = rows[::-1] if params["reverse"] else rows
        return [*carry, *(jax.numpy.stack(column) for column in zip(*rows, strict=True))]
