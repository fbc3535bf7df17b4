"""Seconds of operations by the cost model of the target's own compiler: `costs="compiler"`.

Each distinct stretch is compiled to the end, its forward and its backward half as one program: of halves by themselves
XLA would write all that passes from one to the other. Every operation is in a scope with its number, and XLA names in
each kernel the operations in it, so the kernel's cycles can be given to them: to those that take time by the roofline,
in proportion; to the kernel's own one if none does. What the compiler puts in of its own, such as copies, is shared
among all. What is learned of an operation holds wherever one of the same parameters and shapes is, first of all in the
same pass, forward or backward: what is fused with it is alike there.

Loops, branches and other operations that hold programs are left out of a stretch, and their programs are stretches of
their own. Operations that only a kernel without an estimate names (a Pallas kernel, a sort) take what the roofline
says; collectives too. Those that no kernel names take nothing: the compiler has done away with them.
"""

from __future__ import annotations

import collections
import os
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax

from jaxckpt.core import primitives, surgery
from jaxckpt.core.graph import Body, Graph, Op, parameters_text
from jaxckpt.core.primitives import Holds
from jaxckpt.memory.cycles import CompiledKernel, compiled_kernels
from jaxckpt.memory.targets import Target

_SCOPE = "jaxckpt_operation"
_NUMBER = re.compile(rf"{_SCOPE}(\d+)\b")


class Cycles:
    """What the compiler said of operations, by what they are: for one target.

    Args:
      target: one whose compiler has a cost model.
      cache: where compilers' results are stored; see `jaxckpt.measure`.
    """

    def __init__(self, target: Target, cache: str | os.PathLike[str] | bool | None) -> None:
        self.target, self.cache = target, cache
        self.known: dict[tuple[str, bool], float] = {}
        self._asked: set[tuple[str, bool]] = set()

    def seconds(self, graph: Graph, op: Op) -> float | None:
        """Returns the seconds of one execution; None where the compiler said nothing of such an operation."""
        if not self.known:
            return None
        text, backward = _key(graph, op)
        return self.known.get((text, backward), self.known.get((text, not backward)))

    def learn(self, graph: Graph, ops: Sequence[Op], body: Body, roofline: Callable[[Op], float]) -> None:
        """Compiles operations of a body, and those of the programs that they hold, unless all of their kinds are known.

        Args:
          graph: what the operations are of; its shapes are those on one device.
          ops: some of the body's operations, in order.
          body: see above.
          roofline: seconds of an operation by the target's rates.
        """
        for op in ops:
            if primitives.of(op.primitive).holds is not Holds.MAPPED:
                for inner in op.bodies:
                    self.learn(graph, inner.ops, inner, roofline)
        alone = [op for op in ops if _runs_alone(op)]
        keys = {op.index: _key(graph, op) for op in alone}
        if self._asked.issuperset(keys.values()):
            return
        run, args = _program(alone, body)
        found = compiled_kernels(run, args, self.target, self.cache)
        self._asked.update(keys.values())
        if found is None:
            return
        seen: dict[tuple[str, bool], list[float]] = collections.defaultdict(list)
        for number, cycles in _shared(found, [roofline(op) for op in alone]).items():
            seen[keys[alone[number].index]].append(cycles / self.target.clock)
        for key, each in seen.items():
            self.known.setdefault(key, sum(each) / len(each))


def _key(graph: Graph, op: Op) -> tuple[str, bool]:
    """Returns what an operation is, as text, and whether it is of a backward pass."""
    ends = [[(graph.values[i].shape, str(graph.values[i].dtype)) for i in some] for some in (op.inputs, op.outputs)]
    return f"{op.primitive} {parameters_text(op)} {ends}", op.index in graph.backward


def _runs_alone(op: Op) -> bool:
    return not (op.bodies or op.equation.effects or primitives.of(op.primitive).collective)


def _program(ops: Sequence[Op], body: Body) -> tuple[Callable[..., list[Any]], list[jax.ShapeDtypeStruct]]:
    """Returns the function that runs operations, each in its scope, and its arguments' shapes. Its results are what
    other operations of the body read of them, and what comes out of the body.
    """
    eqns = surgery.unaliased([op.equation for op in ops], body.values)
    given = surgery.used(eqns)
    own = {op.index for op in ops}
    wanted = {index for op in body.ops if op.index not in own for index in op.inputs}.union(body.outputs)
    results = [var for op in ops for var, index in zip(op.equation.outvars, op.outputs, strict=True) if index in wanted]
    jaxpr = surgery.stretch(eqns, given, results, body.jaxpr)

    def run(*values: Any) -> list[Any]:
        return surgery.evaluate_in_scopes(jaxpr, _SCOPE, *values)

    return run, [jax.ShapeDtypeStruct(var.aval.shape, var.aval.dtype) for var in given]


def _shared(kernels: Iterable[CompiledKernel], weights: Sequence[float]) -> dict[int, float]:
    """Returns number of an operation -> its cycles. None are known of those that only kernels without an estimate name;
    those that no kernel names the compiler has done away with.

    Args:
      kernels: of a program of `_program`.
      weights: of each operation: what it would take by itself.
    """
    cycles: dict[int, float] = dict.fromkeys(range(len(weights)), 0.0)
    estimated: set[int] = set()
    others: set[int] = set()
    rest = 0.0
    for kernel in kernels:
        numbers = list(dict.fromkeys(int(found) for name in kernel.names for found in _NUMBER.findall(name)))
        if kernel.cycles is None:
            others.update(numbers)
        elif not numbers:
            rest += kernel.cycles
        else:
            estimated.update(numbers)
            total = sum(weights[number] for number in numbers)
            for place, number in enumerate(numbers):
                share = weights[number] / total if total else float(place == 0)
                cycles[number] += share * kernel.cycles
    named = sum(cycles.values())
    more = 1 + rest / named if named else 1.0
    return {number: each * more for number, each in cycles.items() if number in estimated or number not in others}
