"""Bytes on each device: the compiler's shardings of a function's values, read from compiled parts of the function.

A piece is what lies between two scans, or the body of one, run forward with a value of every shape for a result. Loops
stay loops, so that this takes seconds for a model that takes a pod. Values of the same shape are taken to be laid out
alike, cotangents as what they belong to.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from jaxckpt import _compat
from jaxckpt.core import primitives, surgery
from jaxckpt.core.constants import WHOLE_ELEMENTS
from jaxckpt.core.graph import Body, Graph, Op, aval_bytes
from jaxckpt.core.leaves import is_number
from jaxckpt.memory.report import abstract, output_shardings
from jaxckpt.memory.targets import Target
from jaxckpt.planner.collectives import NOTHING, Sent

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Shards:
    """How arrays lie over devices.

    Attributes:
      devices: how many there are.
      fractions: shape -> share of an array of that shape that one device holds.
      sent: what operations wait for other devices.
    """

    devices: int = 1
    fractions: Mapping[Shape, float] | None = None
    sent: Sent = NOTHING

    def fraction(self, shape: Shape) -> float:
        """Returns the share of an array that one device holds."""
        if self.fractions is None:
            return 1.0
        if shape in self.fractions:
            return self.fractions[shape]
        return 1.0 if math.prod(shape) <= WHOLE_ELEMENTS else 1 / self.devices

    def applied(self, graph: Graph) -> Graph:
        """Returns the graph with the bytes of every value per device."""
        if self.fractions is None:
            return graph
        told = _told(graph)
        values = tuple(
            replace(v, bytes=math.ceil(v.bytes * told.get(v.index, self.fraction(v.shape)))) for v in graph.values
        )
        return replace(graph, values=values)


def _told(graph: Graph) -> dict[int, float]:
    """Returns value -> share that one device holds, of values that the program lays out itself, and of what has as many
    elements and is computed from these alone. So a weight that is gathered before it is used is whole on every device,
    although the argument of the same shape is not.
    """
    found: dict[int, float] = {}
    for op in graph.walk():
        if op.bodies or len(op.outputs) != 1:
            continue
        made = graph.values[op.outputs[0]]
        facts = primitives.of(op.primitive)
        layout = op.params.get("sharding") if facts.lays_out else None
        if isinstance(layout, NamedSharding) and PartitionSpec.UNCONSTRAINED not in layout.spec:
            found[made.index] = math.prod(layout.shard_shape(made.shape)) / max(math.prod(made.shape), 1)
        elif facts.fused and len(op.inputs) == 1 and op.inputs[0] in found:
            given = graph.values[op.inputs[0]]
            if math.prod(given.shape) == math.prod(made.shape):
                found[made.index] = found[given.index]
    return found


WHOLE = Shards()
"""On one device."""


def read(graph: Graph, args: Sequence[Any], leaves: Sequence[Any], target: Target) -> Shards:
    """Returns how the values of a graph lie over the target's devices.

    Args:
      graph: the function as traced.
      args: the step's arguments, with their shardings.
      leaves: the function's argument leaves.
      target: of several devices.
    """
    layout: dict[Shape, Sharding] = {}
    for leaf in [*jax.tree.leaves(args), *leaves]:
        sharding = getattr(abstract(leaf, target), "sharding", None)
        if sharding is not None:
            layout.setdefault(tuple(leaf.shape), sharding)
    _Reader(graph, target, layout).body(graph.body)
    fractions = {
        shape: math.prod(sharding.shard_shape(shape)) / max(math.prod(shape), 1) for shape, sharding in layout.items()
    }
    return Shards(len(target.devices), fractions)


class _Reader:
    """Goes through a program piece by piece; `layout` (shape -> sharding) grows with each.

    One value of each shape is asked for: with every value for a result a piece would not fit the devices.
    """

    def __init__(self, graph: Graph, target: Target, layout: dict[Shape, Sharding]) -> None:
        self.graph, self.target, self.layout = graph, target, layout

    def body(self, body: Body) -> None:
        """Reads the layouts of the values of a body."""
        start = 0
        for place, op in enumerate([*body.ops, None]):
            if op is not None and op.primitive != "scan":
                continue
            self._stretch(body, body.ops[start:place])
            if op is not None:
                self._scan(op)
            start = place + 1

    def _stretch(self, body: Body, ops: Sequence[Op]) -> None:
        asked: dict[Shape, Any] = {}
        # What the program says of a layout comes first, then results that are in memory.
        for op in sorted(
            ops, key=lambda op: (not primitives.of(op.primitive).lays_out, primitives.of(op.primitive).fused)
        ):
            for var, index in zip(op.equation.outvars, op.outputs):
                shape = self.graph.values[index].shape
                self._take(shape, self._explicit(var))
                if (
                    shape not in self.layout
                    and math.prod(shape) > WHOLE_ELEMENTS
                    and not isinstance(var, _compat.DropVar)
                ):
                    asked.setdefault(shape, var)
        if not asked:
            return
        eqns = surgery.unaliased([op.equation for op in ops], body.values)
        given = surgery.used(eqns)
        jaxpr = surgery.stretch(eqns, given, list(asked.values()), body.jaxpr)
        structs = [
            jax.ShapeDtypeStruct(
                var.aval.shape,
                var.aval.dtype,
                sharding=self._explicit(var) or self.layout.get(tuple(var.aval.shape)),
            )
            for var in given
        ]
        found = output_shardings(lambda *xs: surgery.evaluate(jaxpr, *xs), *structs, target=self.target)
        self.layout.update(zip(asked, found))

    def _scan(self, op: Op) -> None:
        body = op.bodies[0]
        consts, carries = _compat.num_scan_consts_carry(dict(op.params))
        for index in body.inputs[consts + carries :]:
            row = self.graph.values[index].shape
            self._take(row, _row(self.layout.get((op.params["length"], *row))))
        self.body(body)
        for outer in op.outputs[carries:]:
            shape = self.graph.values[outer].shape
            self._take(shape, _stacked(self.layout.get(shape[1:])))

    def _explicit(self, var: Any) -> Sharding | None:
        """Returns the layout that is part of a variable's type, over the target's devices; None where there is none."""
        sharding = _compat.explicit_sharding(var.aval)
        if sharding is None:
            return None
        struct = jax.ShapeDtypeStruct(var.aval.shape, var.aval.dtype, sharding=sharding)
        return abstract(struct, self.target).sharding  # type: ignore[no-any-return]

    def _take(self, shape: Shape, sharding: Sharding | None) -> None:
        if sharding is not None:
            self.layout.setdefault(shape, sharding)


def _row(sharding: Sharding | None) -> Sharding | None:
    """Returns the layout of one row of an array."""
    if not isinstance(sharding, NamedSharding):
        return None
    return NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[1:]))


def _stacked(sharding: Sharding | None) -> Sharding | None:
    """Returns the layout of rows that are stacked."""
    if not isinstance(sharding, NamedSharding):
        return None
    return NamedSharding(sharding.mesh, PartitionSpec(None, *sharding.spec))


def device_bytes(args: Any) -> int:
    """Returns the bytes of arguments on one device."""
    total = 0
    for leaf in jax.tree.leaves(args):
        if is_number(leaf):
            leaf = jax.typeof(leaf)
        sharding, shape = _layout(leaf), getattr(leaf, "shape", None)
        if shape is None:
            continue
        if sharding is not None:
            leaf = jax.ShapeDtypeStruct(sharding.shard_shape(tuple(shape)), leaf.dtype)
        total += aval_bytes(leaf)
    return total


def laid_out(args: tuple[Any, ...], given: Sequence[Any]) -> tuple[Any, ...]:
    """Returns a step's arguments, those that lie nowhere in particular as shapes with the shardings that the step lays
    them out by.

    Args:
      args: of the step.
      given: for each of their leaves its sharding, or None; empty where the step says nothing.
    """
    leaves, tree = jax.tree.flatten(args)
    several = [None if each is None or each.num_devices == 1 else each for each in given]
    if len(several) != len(leaves) or not any(several):
        return args
    placed = [
        leaf
        if where is None or _layout(leaf) is not None or not hasattr(leaf, "dtype")
        else jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where)
        for leaf, where in zip(leaves, several)
    ]
    return jax.tree.unflatten(tree, placed)  # type: ignore[no-any-return]


def is_sharded(args: Any) -> bool:
    """Returns whether an argument lies over several devices."""
    return any(_layout(leaf) is not None for leaf in jax.tree.leaves(args))


def _layout(leaf: Any) -> Any:
    """Returns the sharding of a leaf that lies over several devices, else None.

    Within jax.shard_map a leaf is what one device has: its type names a mesh with manual axes, over which nothing lies.
    """
    sharding = getattr(leaf, "sharding", None)
    if sharding is None or sharding.num_devices == 1:
        return None
    kinds = getattr(getattr(sharding, "mesh", None), "axis_types", ())
    return None if jax.sharding.AxisType.Manual in kinds else sharding
