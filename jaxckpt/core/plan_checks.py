"""What a plan may hold: whether its regions, loops and actions fit the graph that it is for."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from jaxckpt._errors import PlanMismatchError
from jaxckpt.actions import Action
from jaxckpt.core import primitives
from jaxckpt.core.graph import Body, Graph, Op, inputs_of
from jaxckpt.core.loops import carries_of, check_loop
from jaxckpt.core.regions import Address, Loop, Region, every_region


def body_at(address: Address, graph: Graph) -> Body:
    """Returns the body that something lies in."""
    body = graph.body
    for depth, (index, place) in enumerate(address):
        op = next((op for op in body.ops if op.index == index), None)
        if op is None or not primitives.of(op.primitive).entered or place >= len(op.bodies):
            there = "there is no such operation" if op is None else f"it is {op.primitive}, of {len(op.bodies)} bodies"
            raise PlanMismatchError(
                "A region's body must be one of a loop, a branch, a checkpoint, a jax.shard_map or a call; got body "
                f"{place} of operation {index} (step {depth + 1} of {address}): {there}. Plan anew."
            )
        body = op.bodies[place]
    return body


def scan_of(loop: Loop, graph: Graph) -> Op:
    """Returns the operation that a loop is of."""
    ops = body_at(loop.body, graph).ops
    if loop.op >= len(ops):
        check_loop(loop, None)
    return ops[loop.op]


def check_regions(regions: tuple[Region, ...], graph: Graph) -> None:
    """Raises where a region does not lie in the graph, or keeps what it does not make."""
    for region in every_region(regions):
        ops = body_at(region.body, graph).ops
        if region.stop > len(ops):
            raise PlanMismatchError(
                f"A region must lie within {'the function' if not region.body else 'its body'}'s operations, of "
                f"which there are {len(ops)}; "
                f"got {region.start}..{region.stop}. Plan anew."
            )
        where = f"the region {region.start}..{region.stop}"
        made = [*_made(ops[region.start : region.stop], graph)]
        if not region.body and (region.start, region.stop) == (0, len(ops)):
            made += [index for index in graph.body.inputs if graph.values[index].tags]
        elif not region.regions:
            saved = {index for index, action in region.actions.items() if action.saves}
            made += [index for index in inputs_of(ops[region.start : region.stop]) if index not in saved]
        _check_actions(region.actions, made, graph, where)


def check_loops(loops: tuple[Loop, ...], graph: Graph) -> None:
    """Raises where a loop is of no scan, is one of several for it, or keeps what its body does not make."""
    if len({(loop.body, loop.op) for loop in loops}) != len(loops):
        raise PlanMismatchError("A scan is run in one way; got several for the same one. Plan anew.")
    for loop in loops:
        op = scan_of(loop, graph)
        check_loop(loop, op)
        for actions in loop.schedule.all_actions():
            _check_actions(actions, _made_in(op.bodies[0], graph), graph, f"the scan at {loop.op}")
        for index in loop.schedule.carry_actions():
            if index not in carries_of(op):
                raise PlanMismatchError(
                    f"An action at the start of a segment must be for a carry; got value {index} of the scan at "
                    f"{loop.op}. Plan anew."
                )


def _check_actions(actions: Mapping[int, Action], values: Iterable[int], graph: Graph, where: str) -> None:
    """Raises where an action is for none of these values, or for one that cannot be kept."""
    made = set(values) if actions else set()
    for index in actions:
        if index not in made or not graph.values[index].addressable:
            what = "it is made elsewhere" if index not in made else "it is inside a function that JAX takes as a whole"
            raise PlanMismatchError(
                f"An action must be for a value that {where} makes and that can be kept; got value {index} of "
                f"{len(graph.values)}: {what if index < len(graph.values) else 'there is none'}. Plan anew."
            )


def _made(ops: Iterable[Op], graph: Graph) -> Iterator[int]:
    """Yields the values that operations make, those in their bodies included."""
    for op in ops:
        yield from op.outputs
        for body in op.bodies:
            yield from _made_in(body, graph)


def _made_in(body: Body, graph: Graph) -> Iterator[int]:
    """Yields the values that a body makes, and those that it is handed."""
    yield from (index for index in body.inputs if graph.values[index].kind == "input")
    yield from _made(body.ops, graph)
