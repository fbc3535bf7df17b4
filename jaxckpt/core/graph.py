"""Trace: function and arguments -> Graph, an immutable view of the jaxpr.

Calls are written out (a plan cuts across them), so a graph is a flat list of operations, in program order; what stays
nested is what runs another number of times, or under rules of its own: loops, branches, nested checkpoints, functions
with custom derivatives, shard_map. `Graph.walk` goes through all of them. Where nothing is cut (a `Policy` decides on
single values) calls may stay calls: their results are then the values that are computed inside.

`checkpoint_name` (`jaxckpt.tag`) makes no operation: it labels the value that it is given.
"""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import jax
import numpy as np

from jaxckpt import _compat
from jaxckpt.core import intervals, primitives, reads
from jaxckpt.core.argument_names import named_leaves
from jaxckpt.core.flops import size as _size
from jaxckpt.core.inline import Calls, called, inline
from jaxckpt.core.primitives import Holds, Result
from jaxckpt.core.reads import INTERNAL
from jaxckpt.core.rules import Rule, opened, tags_of
from jaxckpt.core.surgery import placed_programs


@dataclass(frozen=True, eq=False)
class Value:
    """One array of the program.

    Attributes:
      index: position in `Graph.values`; stable for the same program.
      shape, dtype: as of one execution.
      bytes: of one execution.
      tags: names that the program gives to it, in order.
      kind: "argument", "constant" (closed over), "input" (of a loop's, branch's or call's body) or "intermediate".
      label: what to call it in a report: a tag, an argument's path, or the operation and index.
      primitive: the operation that makes it, "" if none does.
      params: that operation's parameters.
      flops: FLOPs of that operation's one execution.
      repeats: how often it is computed in one run of the program (the product of the lengths of the loops around it).
      addressable: whether an action can be given to it. Values inside functions with custom derivatives, and inside
        while loops, are not.
      equation: the equation of the jaxpr that makes it, or None.
      within: the scopes of the calls that the equation stands in, where calls are not written out.
      interval: of integers, the least and the greatest that it can hold, as far as the program shows: see
        `jaxckpt.core.intervals`. None for others.
    """

    index: int
    shape: tuple[int, ...]
    dtype: Any
    bytes: int
    tags: tuple[str, ...] = ()
    kind: str = "intermediate"
    label: str = ""
    primitive: str = ""
    params: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}), repr=False)
    flops: int = 0
    repeats: int = 1
    addressable: bool = True
    equation: Any = field(default=None, repr=False)
    within: str = field(default="", repr=False)
    interval: tuple[int, int] | None = field(default=None, repr=False)

    @functools.cached_property
    def source(self) -> str:
        """ "file.py:12 (function)" of the operation that makes it, "" for arguments and constants."""
        return "" if self.equation is None else _compat.source_line(self.equation)

    @property
    def scope(self) -> str:
        """The scopes that it was traced in, joined by "/": flax modules and `jax.named_scope`."""
        return "" if self.equation is None else "/".join(filter(None, [self.within, _compat.name_stack(self.equation)]))

    @property
    def kept_bytes(self) -> int:
        """Bytes that are kept if it is kept: inside a loop, those of all iterations."""
        return self.bytes * self.repeats


@dataclass(frozen=True, eq=False)
class Op:
    """One operation of the program.

    Attributes:
      index: its place in the program's order, bodies included.
      primitive: the name of JAX's primitive.
      inputs, outputs: indices of values; literals have none.
      flops: FLOPs of one execution, with its bodies: for a scan, its body's times its length; for a cond, those of its
        most expensive branch; for a while loop, those of one iteration, because the number of iterations is unknown
        (but see `jaxckpt.core.turns`).
      bytes: moved in one execution: operands and results, nothing fused.
      repeats: how often it runs in one run of the program.
      bodies: the programs that it holds.
      equation: the equation of the jaxpr that it is.
    """

    index: int
    primitive: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    params: Mapping[str, Any] = field(repr=False)
    flops: int = 0
    bytes: int = 0
    repeats: int = 1
    bodies: tuple[Body, ...] = field(default=(), repr=False)
    equation: Any = field(default=None, repr=False)

    @functools.cached_property
    def source(self) -> str:
        """ "file.py:12 (function)" of the user's code that made it."""
        return _compat.source_line(self.equation)

    @property
    def scope(self) -> str:
        """The scopes that it was traced in, joined by "/": flax modules and `jax.named_scope`."""
        return _compat.name_stack(self.equation)


@dataclass(frozen=True, eq=False)
class Body:
    """A list of operations in order, with what goes in and what comes out (indices of values).

    Attributes:
      ops: the operations.
      inputs, outputs: values; None for an output that is a literal.
      jaxpr: what it is a view of, as it stands in the equation's parameters.
      values: variable of the jaxpr -> index of the value.
      param: name of the equation's parameter that it stands in, and its place there if that is a tuple.
    """

    ops: tuple[Op, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int | None, ...]
    jaxpr: Any = field(repr=False)
    values: Mapping[Any, int] = field(repr=False)
    param: tuple[str, int | None] = ("", None)

    @functools.cached_property
    def views(self) -> frozenset[int]:
        """The places of the operations that show a part of what goes in, such as one block's weights of stacked ones.

        They compute nothing, and a region reads what they show rather than the whole: its gradients are those of the
        part. So they lie outside of regions, wherever they are written.
        """
        given = {self.values[var] for var in (*self.jaxpr.constvars, *self.jaxpr.invars)}
        shown: set[int] = set()
        found = set()
        for place, op in enumerate(self.ops):
            facts = primitives.of(op.primitive)
            sources = {*given, *shown} if facts.shows else shown if facts.result is Result.RESHAPED else ()
            if op.inputs and len(op.equation.invars) == 1 and op.inputs[0] in sources:
                shown.update(op.outputs)
                found.add(place)
        return frozenset(found)

    @property
    def results(self) -> list[int]:
        """The values that come out and that its operations make, but for views, each once."""
        made = {index for place, op in enumerate(self.ops) if place not in self.views for index in op.outputs}
        return [index for index in dict.fromkeys(self.outputs) if index is not None and index in made]


@dataclass(frozen=True, eq=False)
class Graph:
    """A traced function: all values, and the operations in order.

    Attributes:
      values: every value, by index.
      body: the operations of the function itself.
      jaxpr: the closed jaxpr that this is a view of.
      in_tree, out_tree: the structure of `(args, kwargs)` and of the result.
      calls: the function's own calls, which are written out in it.
    """

    values: tuple[Value, ...]
    body: Body
    jaxpr: Any = field(repr=False)
    in_tree: Any = field(repr=False)
    out_tree: Any = field(repr=False)
    calls: Calls = field(default_factory=Calls, repr=False)

    @property
    def ops(self) -> tuple[Op, ...]:
        """The operations of the function itself; see `walk` for those inside loops."""
        return self.body.ops

    def walk(self) -> Iterator[Op]:
        """Yields every operation, those of bodies after the one that holds them."""
        yield from walk(self.body)

    def at(self, address: Sequence[tuple[int, int]]) -> Body:
        """Returns the body at an address: the function's own for (), else the one in so many operations, the outermost
        first.

        Args:
          address: pairs (`Op.index`, the body's place in `Op.bodies`).

        Raises:
          LookupError: there is no such operation, or no such body of it.
        """
        body = self.body
        for index, place in address:
            op = next((op for op in body.ops if op.index == index), None)
            if op is None or place >= len(op.bodies):
                raise LookupError(f"there is no body {place} of an operation {index} there")
            body = op.bodies[place]
        return body

    def facts(self, op: Op) -> primitives.Primitive:
        """Returns what is known of an operation: of its primitive, or of a reshape where it only adds or drops axes of
        one element. XLA makes that of it.
        """
        return primitives.of("reshape" if self.reshapes_units(op) else op.primitive)

    def reshapes_units(self, op: Op) -> bool:
        """Whether an operation only adds or drops axes of one element, as the gradient of `x[None]` does by a sum."""
        if not primitives.of(op.primitive).over_units or not op.inputs or not op.outputs:
            return False
        before, after = self.values[op.inputs[0]], self.values[op.outputs[0]]
        longer = [[size for size in value.shape if size != 1] for value in (before, after)]
        return longer[0] == longer[1] and before.dtype == after.dtype

    @property
    def flops(self) -> int:
        """FLOPs of one run."""
        return sum(op.flops for op in self.ops)

    @property
    def tags(self) -> tuple[str, ...]:
        """The tags that an action can be given by, sorted."""
        return tuple(sorted({tag for value in self.values if value.addressable for tag in value.tags}))

    @functools.cached_property
    def backward(self) -> frozenset[int]:
        """The operations (`Op.index`) of backward passes, as far as the scopes say that JAX traces them in. What is
        computed again is none.
        """
        found: set[int] = set()

        def look(body: Body, backward: bool) -> None:
            for op in body.ops:
                scope = op.scope
                again = "rematted_computation" in scope
                here = not again and (backward or "transpose(" in scope)
                if here:
                    found.add(op.index)
                for inner in op.bodies:
                    look(inner, here)

        look(self.body, False)
        return frozenset(found)

    @functools.cached_property
    def fingerprint(self) -> str:
        """A digest of operations, shapes, types and wiring: equal for equal programs, in any process."""
        digest = hashlib.sha256()
        for value in self.values:
            digest.update(f"{value.shape}{value.dtype}{value.kind}{value.primitive};".encode())
        for op in self.walk():
            digest.update(f"{op.primitive}{op.inputs}{op.outputs}{op.repeats}{parameters_text(op)};".encode())
            for body in op.bodies:
                digest.update(f"{body.inputs}{body.outputs};".encode())
        digest.update(f"{self.body.outputs}".encode())
        return digest.hexdigest()[:16]


def trace(fun: Callable[..., Any], *args: Any, **kwargs: Any) -> Graph:
    """Returns the graph of a function of pytrees of arrays; `jaxckpt.core.lift.trace` takes other functions too."""
    closed, in_tree, out_tree, paths = _traced(fun, args, kwargs)
    return graph_of(closed, in_tree=in_tree, out_tree=out_tree, paths=paths, rules=True)


def trace_with_calls(fun: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Graph:
    """Returns the graph of `fun(*args, **kwargs)` in which calls stay calls: see `Graph`."""
    closed, in_tree, out_tree, paths = _traced(fun, args, kwargs)
    calls = Calls()
    return replace(_Builder(keep_calls=True).build(opened(closed, calls), in_tree, out_tree, paths), calls=calls)


def _traced(
    fun: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[Any, Any, Any, list[str]]:
    """Returns the closed jaxpr of a call, the structures of arguments and result, and the arguments' paths."""
    flat, in_tree = jax.tree.flatten((args, kwargs))
    paths = sorted(args[0]) if getattr(fun, "by_label", False) else [name for name, _ in named_leaves(args, kwargs)]
    out_tree: list[Any] = []

    def flat_fun(*leaves: Any) -> list[Any]:
        args, kwargs = jax.tree.unflatten(in_tree, leaves)
        out, tree = jax.tree.flatten(fun(*args, **kwargs))
        out_tree.append(tree)
        return out

    closed = jax.make_jaxpr(flat_fun)(*flat)
    return closed, in_tree, out_tree[-1], paths


def graph_of(
    closed: Any, *, in_tree: Any = None, out_tree: Any = None, paths: list[str] | None = None, rules: bool = False
) -> Graph:
    """Returns the graph of a closed jaxpr, calls written out; with `rules` those of `jax.custom_vjp` opened: see
    `jaxckpt.core.rules`.
    """
    calls = Calls()
    program = inline(closed, calls)
    return replace(
        _Builder().build(opened(program, calls) if rules else program, in_tree, out_tree, paths), calls=calls
    )


# ---------------------------------------------------------------------------------------------------------- the builder


class _Builder:
    """Numbers values and operations while it goes through a jaxpr once.

    `keep_calls`: the results of calls are the values that are computed in them.
    """

    def __init__(self, keep_calls: bool = False) -> None:
        self.keep_calls = keep_calls
        self.values: list[dict[str, Any]] = []
        self.op_count = 0

    def build(self, closed: Any, in_tree: Any, out_tree: Any, paths: list[str] | None) -> Graph:
        _compat.check_primitives()
        jaxpr = _compat.open_jaxpr(closed)
        values: dict[Any, int] = {}
        for var in jaxpr.constvars:
            values[var] = self._value(var.aval, kind="constant", label="closed-over constant")
        for i, var in enumerate(jaxpr.invars):
            values[var] = self._value(var.aval, kind="argument", label=paths[i] if paths else f"argument {i}")
        body = self._body(jaxpr, values, _Place(), ("", None))
        frozen = tuple(self._freeze(i, raw) for i, raw in enumerate(self.values))
        return Graph(frozen, body, closed, in_tree, out_tree)

    def _freeze(self, index: int, raw: dict[str, Any]) -> Value:
        tags = tuple(raw.pop("tags"))
        label = raw.pop("label") or (tags[0] if tags else f"{raw['primitive'] or raw['kind']} {index}")
        return Value(index=index, tags=tags, label=label, **raw)

    def _value(self, aval: Any, **facts: Any) -> int:
        shape = tuple(getattr(aval, "shape", ()))
        raw: dict[str, Any] = {
            "shape": shape,
            "dtype": getattr(aval, "dtype", None),
            "bytes": aval_bytes(aval),
            "tags": [],
            "label": "",
            "interval": intervals.of_dtype(getattr(aval, "dtype", None)),
        }
        raw |= {"primitive": "", **facts}
        raw.setdefault("kind", "intermediate")
        self.values.append(raw)
        return len(self.values) - 1

    def _body(self, jaxpr: Any, values: dict[Any, int], place: _Place, param: tuple[str, int | None]) -> Body:
        inputs = tuple(values[var] for var in jaxpr.invars)
        ops = []
        for eqn in jaxpr.eqns:
            name = _compat.equation_name(eqn)
            if name is not None and not isinstance(eqn.invars[0], _compat.Literal):
                index = values[eqn.outvars[0]] = values[eqn.invars[0]]
                tags = self.values[index]["tags"]
                if name not in tags and not name.startswith(INTERNAL):
                    tags.append(name)
                continue
            ops.append(self._op(eqn, values, place))
        outputs = tuple(None if isinstance(var, _compat.Literal) else values[var] for var in jaxpr.outvars)
        return Body(tuple(ops), inputs, outputs, jaxpr, MappingProxyType(values), param)

    def _op(self, eqn: Any, values: dict[Any, int], place: _Place) -> Op:
        index = self.op_count
        self.op_count += 1
        rule = Rule.of(eqn)
        primitive = _compat.primitive_name(eqn) if rule is None else rule.primitive
        params = _compat.equation_params(eqn)
        operands = [None if isinstance(var, _compat.Literal) else values[var] for var in eqn.invars]
        inputs = tuple(operand for operand in operands if operand is not None)
        call = reads.is_call(eqn) or (self.keep_calls and called(eqn) is not None)
        inside = place.inside(eqn, params, primitive, call)
        ranges = self._ranges(eqn.invars, operands)
        given = operands if call or primitives.of(primitive).passes_operands else None
        known = ranges if given is not None or primitives.of(primitive).holds is Holds.RULE else None
        bodies = tuple(
            self._inner(where, jaxpr, given, known, inside) for where, jaxpr in placed_programs(primitive, params)
        )
        flops = _op_flops(primitive, params, eqn, bodies)
        facts = {"repeats": place.repeats, "equation": eqn}
        made = {**facts, "primitive": primitive, "params": params, "flops": flops, "within": place.scope}
        results: Sequence[int | None] = bodies[0].outputs if call else [None] * len(eqn.outvars)
        if bodies:
            returned = [self._ranges(_compat.open_jaxpr(body.jaxpr).outvars, body.outputs) for body in bodies]
            within = intervals.of_programs_results(primitive, ranges, eqn, returned)
        else:
            within = intervals.of_results(primitive, ranges, eqn, params)
        outputs = tuple(
            self._value(var.aval, addressable=place.addressable, interval=interval, **made)
            if result is None
            else result
            for var, result, interval in zip(eqn.outvars, results, within)
        )
        values.update(zip(eqn.outvars, outputs))
        if rule is not None:
            self._label(rule, operands, outputs, bodies[0])
        moved = sum(self.values[i]["bytes"] for i in inputs + outputs)
        return Op(index, primitive, inputs, outputs, MappingProxyType(params), flops, moved, bodies=bodies, **facts)

    def _ranges(self, atoms: Sequence[Any], values: Sequence[int | None]) -> list[intervals.Range | None]:
        """Returns the intervals of values; of an atom that is none, a literal, that of its number."""
        return [
            intervals.of_literal(atom.val) if value is None else self.values[value]["interval"]
            for atom, value in zip(atoms, values)
        ]

    def _label(self, rule: Rule, operands: Sequence[int | None], outputs: Sequence[int], forward: Body) -> None:
        """Gives the values of an opened rule their tags, and its residuals, and what is dear, the operations that make
        them.
        """
        for kind, place, tag in tags_of(rule):
            index = operands[place] if kind == "in" else outputs[place]
            if (
                index is not None
                and self.values[index]["kind"] == "intermediate"
                and tag not in self.values[index]["tags"]
            ):
                self.values[index]["tags"].append(tag)
        if rule.hidden and forward.inputs:
            self.values[forward.inputs[0]]["tags"].extend(rule.hidden)
        for place, (index, inner) in enumerate(zip(outputs, forward.outputs)):
            made = {} if inner is None else self.values[inner]
            primitive = made.get("primitive")
            if primitive and (place >= rule.results or primitives.of(primitive).dear):
                self.values[index] |= {name: made[name] for name in ("primitive", "params", "flops", "interval")}

    def _inner(
        self,
        where: tuple[str, int | None],
        jaxpr: Any,
        operands: Sequence[int | None] | None,
        ranges: Sequence[intervals.Range | None] | None,
        inside: _Place,
    ) -> Body:
        """Returns a program that an equation holds.

        Args:
          where, jaxpr: its place in the parameters, and itself.
          operands: the values that its inputs are, None for a literal; None if its inputs are values of their own.
          ranges: their intervals; None where its inputs are not the operands.
          inside: the place of its operations.
        """
        opened = _compat.open_jaxpr(jaxpr)
        facts = {"repeats": inside.repeats, "addressable": inside.addressable}
        values: dict[Any, int] = {
            var: self._value(var.aval, kind="constant", label="constant of a body", **facts) for var in opened.constvars
        }
        count = len(opened.invars)
        given = operands if operands is not None and len(operands) == count else [None] * count
        known = ranges if ranges is not None and len(ranges) == count else [None] * count
        for var, operand, interval in zip(opened.invars, given, known):
            if operand is None:
                interval = intervals.within(getattr(var.aval, "dtype", None), interval)
                operand = self._value(var.aval, kind="input", interval=interval, **facts)
            values[var] = operand
        return self._body(opened, values, inside, where)


@dataclass(frozen=True)
class _Place:
    """Where operations stand: how often they run, whether actions can be given to their results, the scopes of the
    calls around them.
    """

    repeats: int = 1
    addressable: bool = True
    scope: str = ""

    def inside(self, eqn: Any, params: Mapping[str, Any], primitive: str, call: bool) -> _Place:
        """Returns the place of the operations inside an equation."""
        scope = "/".join(filter(None, [self.scope, _compat.name_stack(eqn)])) if call else self.scope
        facts = primitives.of(primitive)
        times = 1 if facts.opaque else _whole(facts.runs(params))
        return _Place(self.repeats * times, self.addressable and (call or not facts.opaque), scope)


def inputs_of(ops: Sequence[Op]) -> list[int]:
    """Returns the values that operations read and do not make, each once."""
    made = {index for op in ops for index in op.outputs}
    return [index for index in dict.fromkeys(i for op in ops for i in op.inputs) if index not in made]


def constants_and_carries(op: Op, body: Body) -> tuple[int, int]:
    """Returns how many of the inputs of an operation's body stay the same in all iterations, and how many after these
    are carried: its first results are their next values. (0, 0) where the body is not that of a loop.
    """
    if op.primitive == "scan":
        return _compat.num_scan_consts_carry(op.params)
    if op.primitive == "while" and body.param[0] == "body_jaxpr":
        return op.params["body_nconsts"], len(body.outputs)
    return 0, 0


def _op_flops(primitive: str, params: dict[str, Any], eqn: Any, bodies: tuple[Body, ...]) -> int:
    if bodies:
        return _whole(primitives.altogether(primitive, params, [sum(op.flops for op in body.ops) for body in bodies]))
    return primitives.flops(primitive, [var.aval for var in eqn.invars], [var.aval for var in eqn.outvars], params)


def _whole(number: Any) -> Any:
    """Returns a mean, rounded; an int, or the symbolic dimension of `jax.export`, as it is."""
    return round(number) if isinstance(number, float) else number


def aval_bytes(aval: Any) -> int:
    """Returns the bytes of an abstract value; typed keys count as the words that they are made of."""
    dtype = getattr(aval, "dtype", None)
    return 0 if dtype is None else (_size(aval) * _bits(dtype) + 7) // 8


@functools.cache
def _bits(dtype: Any) -> int:
    """Returns the bits of one element."""
    if jax.numpy.issubdtype(dtype, jax.dtypes.extended):
        key = jax.eval_shape(
            lambda: jax.random.key_data(jax.random.key(0, impl=_compat.key_implementation(dtype).name))
        )
        return 8 * int(np.prod(key.shape)) * int(key.dtype.itemsize)
    bits = jax.numpy.finfo(dtype).bits if jax.numpy.issubdtype(dtype, np.inexact) else None
    if bits is None and jax.numpy.issubdtype(dtype, np.integer):
        bits = jax.numpy.iinfo(dtype).bits
    if bits is not None and jax.numpy.issubdtype(dtype, np.complexfloating):
        bits *= 2
    return 8 if bits is None else int(bits)


def walk(body: Body) -> Iterator[Op]:
    """Yields every operation of a body, those of inner bodies after the one that holds them."""
    for op in body.ops:
        yield op
        for inner in op.bodies:
            yield from walk(inner)


_ADDRESS = re.compile(r"0x[0-9a-f]+|id=\d+")


def parameters_text(op: Op) -> str:
    """Returns an operation's parameters as text that is the same in every process; of one with a custom rule also the
    name of the user's function.

    The programs of custom rules are not in it: two rules for functions of one name and one program have one text.
    """
    params = {name: stable(param) for name, param in sorted(op.params.items())}
    if "sharding" in params and not primitives.of(op.primitive).lays_out:
        # How arguments lie over automatic axes is no part of a program, but JAX writes their mesh into some operations.
        axes = getattr(getattr(op.params["sharding"], "mesh", None), "axis_types", ())
        if jax.sharding.AxisType.Explicit not in axes:
            params["sharding"] = "None"
    if primitives.of(op.primitive).holds is primitives.Holds.RULE:
        params["rule"] = _compat.jaxpr_title(op.params["call_jaxpr"])
    return str(params)


def _stable_sharding(sharding: jax.sharding.NamedSharding) -> str:
    """Returns a sharding as text that is the same for a mesh of devices, for one of devices that are not here, of which
    some have no kinds of memory, and for one without devices.
    """
    text = repr(sharding).replace("AbstractMesh(", "Mesh(")
    return text if sharding.memory_kind is not None else f"{text[:-1]}, memory_kind=device)"


def stable(param: Any) -> str:
    """Returns an operation's parameter as text that is the same in every process."""
    if _compat.is_jaxpr(param):
        return "jaxpr"
    if isinstance(param, (tuple, list)):
        return "(" + ",".join(stable(item) for item in param) + ")"
    if isinstance(param, (set, frozenset)):  # whose order is another one in each process
        return "{" + ",".join(sorted(stable(item) for item in param)) + "}"
    if isinstance(param, jax.sharding.AbstractMesh) or (callable(param) and not isinstance(param, type)):
        return "function"  # a mesh of devices can be called; a plan for a mesh without devices is one for it, too
    if isinstance(param, jax.sharding.NamedSharding):
        return _stable_sharding(param)
    if isinstance(param, (np.ndarray, jax.Array)):
        return f"{param.shape}{param.dtype}"
    return _ADDRESS.sub("", repr(param))
