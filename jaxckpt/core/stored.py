"""Values that are kept in another form or on the host, and what is saved beside them: stored by the forward pass, and
brought back for the backward pass.

The emitter names such a value as it names all that is kept, and puts the action's JSON into the name: a marker. When
the function around it is differentiated (`reads.call_reading_names`), it becomes two programs. The first is the forward
pass, exact; it also returns, encoded, what is marked, and that is what `jax.checkpoint` keeps by name. The second is
the derivative; wherever it would read a marked value, or anything that is computed from one, it starts from what was
decoded. Markers inside of scans, branches and calls are reached through them: what is kept of a scan is stacked by it,
and read by it again.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxckpt import _compat
from jaxckpt._errors import ArgumentError, EffectsError, InWords
from jaxckpt.actions import Action, action_from
from jaxckpt.actions.base import once
from jaxckpt.core import primitives, surgery
from jaxckpt.core.fetch import fetch, start_of_backward
from jaxckpt.core.leaves import is_inexact, is_symbolic
from jaxckpt.core.primitives import Holds
from jaxckpt.core.reach import put_aside
from jaxckpt.core.tie import tie

INTERNAL = "jaxckpt:"
"""Names that begin so are the emitter's, and no tags."""

_MARKER = f"{INTERNAL}@"
StoredValues = dict[str, Any]
"""What is kept of one program: by a marker's name what the action encoded; by the place of an equation among those that
hold markers ("0", "1") what is kept inside of it: of a scan stacked, of branches a list, of a `jax.shard_map` as
`MappedValues`."""

_alone = jax.make_user_context(default_value=None)
"""None, or (a number, text): of the actions that change gradients only the one of that text is used."""
_numbers = itertools.count()


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class MappedValues:
    """What is kept inside of a `jax.shard_map`.

    Attributes:
      values: each array with the parts of the devices along its first axis.
      specs: for each array, the axes of the mesh that its first axis is distributed over.
    """

    values: StoredValues
    specs: tuple[Any, ...] = field(metadata={"static": True})


def marker(name: str, action: Action) -> str:
    """Returns the name that marks a value: an internal name, and the action by which it is kept."""
    text = base64.urlsafe_b64encode(json.dumps(action.to_json()).encode()).decode()
    return f"{_MARKER}{text}@{name}"


def unmarked(name: str) -> str:
    """Returns an internal name, of a marker the one under which the value is kept."""
    return name.removeprefix(_MARKER).partition("@")[2] if name.startswith(_MARKER) else name


def marked(eqn: Any) -> tuple[str, Action] | None:
    """Returns the name under which what an equation marks is kept, and the action; None where it is no marker."""
    name = _compat.equation_name(eqn)
    if name is None or not name.startswith(_MARKER):
        return None
    text, _, plain = name.removeprefix(_MARKER).partition("@")
    return plain, action_from(json.loads(base64.urlsafe_b64decode(text)))


def is_lossy(action: Action, dtype: Any) -> bool:
    """Whether values of a dtype do not come back from an action as they were."""
    return action.error(dtype) > 0


def _marking(jaxpr: Any) -> Iterator[tuple[Any, str, Action, bool]]:
    """Yields the equations of a program that mark something, and of those in it: with the name, the action, and whether
    the value is marked already.
    """
    seen: set[int] = set()

    def look(jaxpr: Any) -> Iterator[tuple[Any, str, Action, bool]]:
        if id(jaxpr) in seen:  # calls share programs
            return
        seen.add(id(jaxpr))
        results: set[Any] = set()  # of markers
        for eqn in jaxpr.eqns:
            mark = marked(eqn)
            if mark is not None:
                value = eqn.invars[0]
                yield eqn, *mark, not isinstance(value, _compat.Literal) and value in results
                results.add(eqn.outvars[0])
            for inner in _compat.held_jaxprs(eqn):
                yield from look(_compat.open_jaxpr(inner))

    return look(jaxpr)


def lossy_actions(jaxpr: Any) -> list[Action]:
    """Returns the actions that change gradients by which a program keeps values, in the order in which it does."""
    marks = _marking(jaxpr)
    return list(dict.fromkeys(action for eqn, _, action, _ in marks if is_lossy(action, eqn.invars[0].aval.dtype)))


def kept_names(jaxpr: Any) -> set[str]:
    """Returns the names under which a program keeps what it marks; what is marked again is kept under its first."""
    return {name for _, name, _, again in _marking(jaxpr) if not again}


def only_lossy(action: Action | None) -> contextlib.AbstractContextManager[Any]:
    """Within this context, of the actions that change gradients only this one is used; what the others are for is saved
    as it is. Nothing is taken from JAX's caches there.
    """
    return _alone((next(_numbers), "" if action is None else repr(action)))  # type: ignore[no-any-return]


def _is_saved(action: Action, dtype: Any) -> bool:
    """Whether a value is saved as it is, as of `only_lossy`."""
    return _alone.value is not None and is_lossy(action, dtype) and repr(action) != _alone.value[1]


def has_markers(jaxpr: Any) -> bool:
    """Whether a program marks anything, where markers are reached.

    Raises:
      ArgumentError: it does so where they are not.
    """
    found = False
    for eqn in jaxpr.eqns:
        if marked(eqn) is not None:
            found = True
        else:
            found |= _holds(eqn)
    return found


def _holds(eqn: Any) -> bool:
    primitive = _compat.primitive_name(eqn)
    facts = primitives.of(primitive)
    if facts.holds is Holds.RULE:
        return False  # those of an inner checkpoint, which has its own derivative
    inside = [has_markers(_compat.open_jaxpr(jaxpr)) for jaxpr in surgery.programs(eqn)]
    if any(inside) and not facts.entered:
        raise ArgumentError(
            "policy",
            f"one that keeps values inside of {primitive} as they are",
            InWords("an action that keeps a value in another form or on the host"),
            "Give SAVE or RECOMPUTE to them, or checkpoint the function inside of it.",
        )
    return any(inside)


def run_storing(closed: Any, args: Sequence[Any], waits: bool = False) -> tuple[list[Any], StoredValues]:
    """Evaluates a closed jaxpr: returns its results, and what is kept of it, encoded and named.

    Args:
      waits: whether the results wait until what goes to the host is there.
    """
    run = _Storing(storing=True)
    results, kept = run.program(closed, None, args)
    return _after(kept, results) if waits else results, _named(kept, run.makers)


def run_with(closed: Any, kept: StoredValues, args: Sequence[Any]) -> list[Any]:
    """Evaluates a closed jaxpr with what was kept, decoded, in place of all that is marked."""
    return _Storing(storing=False).backward(closed, kept, args)


def _named(kept: StoredValues, makers: Mapping[str, Any]) -> StoredValues:
    """Gives what is kept its names, at the lines of the markers: for `jax.checkpoint` these are the values that it
    keeps.
    """
    done: StoredValues = {}
    for key, item in kept.items():
        if key.startswith(INTERNAL):
            with _compat.working_checkpoints(), _compat.at_line_of(makers[key]):
                done[key] = jax.tree.map(functools.partial(jax.ad_checkpoint.checkpoint_name, name=key), item)
        else:
            done[key] = _named_inside(item, makers)
    return done


def _named_inside(item: Any, makers: Mapping[str, Any]) -> Any:
    if isinstance(item, MappedValues):
        return replace(item, values=_named(item.values, makers))
    return [_named(each, makers) for each in item] if isinstance(item, list) else _named(item, makers)


class _Storing:
    """Evaluates programs; with `storing` what is marked is collected, else it is replaced by what was kept."""

    def __init__(self, storing: bool) -> None:
        self.storing = storing
        self.branches = 0  # around what is evaluated
        self.away: set[str] = set()  # names of what goes to the host
        self.makers: dict[str, Any] = {}  # name -> the marker
        self.start: Any = None  # of the backward pass that is evaluated, outside of loops

    def backward(self, closed: Any, kept: StoredValues, args: Sequence[Any]) -> list[Any]:
        """Returns the results of a program, with what was kept for it."""
        leaves, tree = jax.tree.flatten((kept, list(args)))
        there = [place for place, leaf in enumerate(leaves) if _is_on_host(leaf)]
        if there and not _compat.differentiates_loop():  # a loop's iterations are in order
            self.start, held = start_of_backward([leaves[place] for place in there])
            for place, leaf in zip(there, held):
                leaves[place] = leaf
            kept, args = jax.tree.unflatten(tree, leaves)
        return self.program(closed, kept, args)[0]

    def program(self, closed: Any, kept: StoredValues | None, args: Sequence[Any]) -> tuple[list[Any], StoredValues]:
        """Returns the results of a program, and what is kept of it."""
        jaxpr = _compat.open_jaxpr(closed)
        env: dict[Any, Any] = dict(zip(jaxpr.constvars, _compat.jaxpr_consts(closed)))
        env.update(zip(jaxpr.invars, args))
        found: StoredValues = {}
        again: set[Any] = set()  # values that a marker returned
        layouts = _layouts(jaxpr)
        # What the derivative of these reads, and so what is kept of them, has zeros where they say nothing.
        lower = {eqn.outvars[0] for eqn in jaxpr.eqns if primitives.of(_compat.primitive_name(eqn)).lower}
        for special, eqns in _stretches(jaxpr):
            if not special:
                self._plain(jaxpr, eqns, env)
                continue
            (eqn,) = eqns
            mark = marked(eqn)
            if mark is None:
                place = str(sum(not key.startswith(INTERNAL) for key in found))
                inside = None if kept is None else kept[place]
                results, found[place] = self._inside(eqn, inside, [_read(env, atom) for atom in eqn.invars])
                env.update(zip(eqn.outvars, results))
                continue
            name, action = mark
            self.makers[name] = eqn
            value = eqn.invars[0]
            if self.storing and not isinstance(value, _compat.Literal) and value in lower:
                env[value] = jnp.tril(_read(env, value))
            with _compat.at_line_of(eqn):
                if isinstance(value, _compat.Literal):
                    # A number that JAX computed when it traced the program again: it stands in both programs.
                    env[eqn.outvars[0]] = value.val
                elif value in again:
                    # A checkpoint around this one keeps the value already; what this one would keep of it is there
                    # whenever it runs.
                    env[eqn.outvars[0]] = _read(env, value)
                elif not (action.changes or action.on_host) or _is_saved(action, value.aval.dtype):
                    env[eqn.outvars[0]] = found[name] = _read(env, value) if kept is None else kept[name]
                elif self.storing and action.on_host:
                    env[eqn.outvars[0]] = x = _read(env, value)
                    found[name] = _encoded(action, x)
                    self.away.add(name)
                    if not self.branches:
                        found[name] = _in(jax.memory.Space.Host, found[name])
                elif self.storing:
                    # What reads the value waits until it is encoded: else a compiler may keep the value itself until it
                    # encodes it, right before that is decoded.
                    x = _read(env, value)
                    env[eqn.outvars[0]], found[name] = _together(x, _encoded(action, x))
                else:
                    assert kept is not None, "the forward pass kept what is marked"
                    there = self._fetched(kept[name]) if action.on_host else kept[name]
                    restored = _checked(action, _decoded(action, _unfolded(there), value.aval), value.aval)
                    if value in layouts:
                        (restored,) = surgery.run(layouts[value], jaxpr.debug_info, [restored])
                    env[eqn.outvars[0]] = restored
            again.add(eqn.outvars[0])
        return [_read(env, atom) for atom in jaxpr.outvars], found

    def _plain(self, jaxpr: Any, eqns: list[Any], env: dict[Any, Any]) -> None:
        inputs = surgery.used(eqns)
        results = [var for eqn in eqns for var in eqn.outvars if not isinstance(var, _compat.DropVar)]
        found = surgery.evaluate(surgery.stretch(eqns, inputs, results, jaxpr), *(env[var] for var in inputs))
        env.update(zip(results, found))

    def _inside(self, eqn: Any, kept: Any, operands: list[Any]) -> tuple[list[Any], Any]:
        primitive, params = _compat.primitive_name(eqn), _compat.equation_params(eqn)
        if primitive == "scan":
            return self._scan(params, kept, operands)
        programs = surgery.programs(eqn)
        if primitive == "cond":
            return self._cond(programs, kept, operands)
        (program,) = programs
        holds = primitives.of(primitive).holds
        if holds is Holds.CHECKPOINT and not self.storing:
            run = lambda kept, *xs: _Storing(storing=False).backward(program, kept, xs)
            policy, prevent_cse = params["policy"], params["prevent_cse"]
            apart = prevent_cse if isinstance(prevent_cse, bool) else any(prevent_cse)
            return jax.checkpoint(run, policy=policy, prevent_cse=apart)(kept, *operands), None
        if holds is Holds.MAPPED:
            return self._mapped(eqn, program, kept, operands)
        return self.program(program, kept, operands)

    def _mapped(
        self, eqn: Any, program: Any, kept: MappedValues | None, operands: list[Any]
    ) -> tuple[list[Any], MappedValues | None]:
        """Evaluates a `jax.shard_map`. What is kept goes out with the devices' parts one behind the other, along a new
        first axis.
        """
        if kept is not None:
            leaves, tree = jax.tree.flatten(kept.values)

            def read(*args: Any) -> list[Any]:
                parts = [part[0] for part in args[: len(leaves)]]
                with self._inner_body():
                    return self.program(program, jax.tree.unflatten(tree, parts), args[len(leaves) :])[0]

            return list(_compat.mapped_as(eqn, read, more_in=kept.specs)(*leaves, *operands)), None

        def store(*args: Any) -> list[Any]:
            results, found = self.program(program, None, args)
            return [*results, *(leaf[None] for leaf in jax.tree.leaves(found))]

        def types() -> tuple[list[Any], Any]:
            run = lambda *args: self.program(program, None, args)[1]
            traced, made = jax.make_jaxpr(run, return_shape=True)(*(v.aval for v in _compat.open_jaxpr(program).invars))
            return [v.aval for v in _compat.open_jaxpr(traced).outvars], jax.tree.structure(made)

        avals, tree = _compat.run_mapped(eqn, types)
        specs = tuple(_compat.spec_of_parts(eqn, aval) for aval in avals)
        out = list(_compat.mapped_as(eqn, store, more_out=specs)(*operands))
        count = len(eqn.outvars)
        return out[:count], MappedValues(jax.tree.unflatten(tree, out[count:]), specs)

    def _scan(
        self, params: dict[str, Any], kept: StoredValues | None, operands: list[Any]
    ) -> tuple[list[Any], StoredValues]:
        consts, carries = _compat.num_scan_consts_carry(params)
        fixed, init, xs = operands[:consts], operands[consts : consts + carries], operands[consts + carries :]

        def body(
            carry: list[Any], rows: tuple[list[Any], StoredValues | None]
        ) -> tuple[list[Any], tuple[list[Any], StoredValues]]:
            with self._inner_body():
                results, found = self.program(params["jaxpr"], rows[1], [*fixed, *carry, *rows[0]])
            return results[:carries], (results[carries:], found)

        last, (ys, found) = lax.scan(
            body, init, (xs, kept), length=params["length"], reverse=params["reverse"], unroll=params["unroll"]
        )
        return [*last, *ys], found

    def _cond(self, programs: list[Any], kept: Any, operands: list[Any]) -> tuple[list[Any], list[StoredValues]]:
        # What is mapped over the index runs all branches and selects from what goes in and out, on the device. So what
        # goes to the host does so behind the branches, and comes back before them.
        index, *inputs = operands
        kept = self._fetched(kept)
        self.branches += 1
        keeps = [_typed(lambda *xs, i=i: self._branch(programs, kept, i, *xs)[1], inputs) for i in range(len(programs))]

        def branch(place: int) -> Any:
            def run(*xs: Any) -> tuple[list[Any], list[StoredValues]]:
                results, found = self._branch(programs, kept, place, *xs)
                others = [jax.tree.map(_zeros, each) for each in keeps]
                return results, [*others[:place], found, *others[place + 1 :]]

            return run

        results, found = lax.switch(index, [branch(place) for place in range(len(programs))], *inputs)
        self.branches -= 1
        return results, self._moved(found) if self.storing and not self.branches else found

    def _moved(self, found: Any) -> Any:
        """Returns what was found in branches, with what goes to the host there."""
        if isinstance(found, MappedValues):
            return replace(found, values=self._moved(found.values))
        if isinstance(found, list):
            return [self._moved(each) for each in found]
        moved = {name: item if name.startswith(INTERNAL) else self._moved(item) for name, item in found.items()}
        return moved | {name: _in(jax.memory.Space.Host, found[name]) for name in self.away.intersection(found)}

    @contextlib.contextmanager
    def _inner_body(self) -> Iterator[None]:
        """Within this context, what is fetched is so without the start of the backward pass around the body."""
        start, self.start = self.start, None
        yield
        self.start = start

    def _fetched(self, arrays: Any) -> Any:
        """Returns arrays on the device, those that are on the host from there."""
        return jax.tree.map(lambda x: fetch(x, self.start) if _is_on_host(x) else x, arrays)

    def _branch(self, programs: list[Any], kept: Any, place: int, *inputs: Any) -> tuple[list[Any], StoredValues]:
        return self.program(programs[place], None if kept is None else kept[place], inputs)


def _in(space: Any, arrays: Any) -> Any:
    """Returns arrays in a memory; random keys stay where they are."""

    def move(x: Any) -> Any:
        now = jax.typeof(x).memory_space
        if now == space or jax.dtypes.issubdtype(x.dtype, jax.dtypes.extended):
            return x
        return jax.device_put(x, space, src=now)  # without the source it has no second derivative

    return jax.tree.map(move, arrays)


def _is_on_host(x: Any) -> bool:
    return _compat.is_on_host(jax.typeof(x))


def _typed(fun: Any, args: Sequence[Any]) -> Any:
    """Returns a function's results as types, which say in which memory each array is."""
    traced, shapes = jax.make_jaxpr(fun, return_shape=True)(*args)
    types = [var.aval for var in _compat.open_jaxpr(traced).outvars]
    return jax.tree.unflatten(jax.tree.structure(shapes), types)


def _zeros(aval: Any) -> Any:
    """Returns zeros of a type, in the same memory; within `jax.shard_map` they vary over the same axes."""
    zeros = jnp.zeros(aval.shape, aval.dtype)
    axes = tuple(getattr(_compat.varying_axes(aval), "varying", ()))
    return _in(aval.memory_space, lax.pcast(zeros, axes, to="varying") if axes else zeros)


def _after(kept: StoredValues, results: list[Any]) -> list[Any]:
    """Returns a program's results, which wait until what goes to the host is there.

    Else a compiler may keep the value itself on the device, and move it to the host right before it is fetched from
    there: XLA for GPUs and TPUs does, of jax 0.10.2. So the copies run beside the operations of this program, and what
    comes after it finds their memory free.
    """
    results = list(results)
    axes = lambda x: _compat.varying_axes(jax.typeof(x))
    there = [leaf for leaf in jax.tree.leaves(kept) if _compat.is_on_host(jax.typeof(leaf))]
    for kind in dict.fromkeys(map(axes, there)):
        # Within jax.shard_map a barrier makes its values vary over the axes of all.
        places = [place for place, x in enumerate(results) if isinstance(x, jax.Array) and axes(x) == kind]
        held = _waiting([results[i] for i in places], [leaf for leaf in there if axes(leaf) == kind])
        for place, x in zip(places, held):
            results[place] = x
    return results


@jax.custom_jvp
def _waiting(results: list[Any], there: Any) -> list[Any]:
    """Returns results, which wait for arrays. These do not go through the barrier themselves: XLA for GPUs finds no way
    from it to the buffer of a loop that they are written into.
    """
    return list(lax.optimization_barrier((results, there))[0])


def _waiting_tangents(primals: Any, tangents: Any) -> Any:
    # Zeros stay symbolic: made, they would be multiplied by what may be infinite.
    return _waiting(*primals), tangents[0]


_waiting.defjvp(_waiting_tangents, symbolic_zeros=True)


def _layouts(jaxpr: Any) -> dict[Any, Any]:
    """Returns value -> the equation that makes it and says how the devices divide it, a sharding constraint: what is
    restored of the value has that layout too. Names are left out.
    """
    found: dict[Any, Any] = {}
    for eqn in jaxpr.eqns:
        if primitives.of(_compat.primitive_name(eqn)).lays_out:
            found[eqn.outvars[0]] = eqn
        elif _compat.equation_name(eqn) is not None:
            source = eqn.invars[0]
            if not isinstance(source, _compat.Literal) and source in found:
                found[eqn.outvars[0]] = found[source]
    return found


def _stretches(jaxpr: Any) -> Iterator[tuple[bool, list[Any]]]:
    """Yields the equations in order: (False, those between markers and what holds some), (True, [one of these])."""
    plain: list[Any] = []
    for eqn in jaxpr.eqns:
        if marked(eqn) is None and not _holds(eqn):
            plain.append(eqn)
            continue
        if plain:
            yield False, plain
            plain = []
        yield True, [eqn]
    if plain:
        yield False, plain


def _together(x: Any, kept: Any) -> tuple[Any, Any]:
    """Returns both behind one barrier."""
    leaves, tree = jax.tree.flatten(kept)
    kinds = [_compat.varying_axes(jax.typeof(leaf)) for leaf in (x, *leaves)]
    if all(kind == kinds[0] for kind in kinds):
        return lax.optimization_barrier((x, kept))  # type: ignore[no-any-return]
    # Within jax.shard_map that barrier would make its values vary over the axes of all.
    x, *leaves = tie(x, *leaves)
    return x, jax.tree.unflatten(tree, leaves)


def _read(env: dict[Any, Any], atom: Any) -> Any:
    return atom.val if isinstance(atom, _compat.Literal) else env[atom]


def _is_own(action: Action) -> bool:
    return type(action).__module__.startswith("jaxckpt.")


def _decoded(action: Action, kept: Any, like: Any) -> Any:
    with _compat.usual_promotion() if _is_own(action) else contextlib.nullcontext():
        return action.decode(kept, like)


def _encoded(action: Action, x: Any) -> Any:
    if own := _is_own(action):
        with _compat.usual_promotion():
            kept, where = action.encode(x), ""
    else:
        kept, where = put_aside(action.encode, lambda: action.encode(x))
    if not own and not where and is_inexact(x) and not all(map(is_inexact, jax.tree.leaves(kept))):
        kept = action.encode(once(x, action))
    if where:
        raise EffectsError(
            f"encode (of {action!r}) must not put traced values into Python objects, for jaxckpt keeps what it returns, "
            f"and gives that to decode; it put one into {where}. Return the value instead."
        )
    if kept is None or not all(hasattr(leaf, "shape") and hasattr(leaf, "dtype") for leaf in jax.tree.leaves(kept)):
        raise ArgumentError("encode", f"a function that returns arrays, as {action!r} keeps them", kept)
    return _folded(kept)


LANES = 128
"""Numbers to which a TPU's compiler pads each row of an array in memory."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _Folded:
    """What an action keeps, with several rows in one where an array is small beside the others and its rows are short.
    A TPU pads rows: scales, 32 of them in a row, would take four times their bytes in HBM, on the chip and on the host.
    To exchange axes does not help, as the compiler lays out what it gets as it was before.

    Attributes:
      kept: as of `Action.encode`, but for the rows.
      rows: of each array, how many rows are one.
    """

    kept: Any
    rows: tuple[int, ...] = field(metadata={"static": True})


def _folded(kept: Any) -> _Folded:
    leaves, tree = jax.tree.flatten(kept)
    rows = tuple(_rows_in_one(x, leaves) for x in leaves)
    return _Folded(jax.tree.unflatten(tree, [_fold(x, count) for x, count in zip(leaves, rows)]), rows)


def _unfolded(folded: _Folded) -> Any:
    leaves, tree = jax.tree.flatten(folded.kept)
    return jax.tree.unflatten(tree, [_unfold(x, count) for x, count in zip(leaves, folded.rows)])


def _fold(x: Any, rows: int) -> Any:
    """Returns an array with so many rows in one. Neighbours in a column become neighbours in a row: what divides rows
    or columns over devices goes on to do so.
    """
    if rows == 1:
        return x
    *outer, height, width = x.shape
    apart = x.reshape(*outer, height // rows, rows, width)
    return jnp.swapaxes(apart, -1, -2).reshape(*outer, height // rows, width * rows)


def _unfold(x: Any, rows: int) -> Any:
    """The inverse of `_fold`."""
    if rows == 1:
        return x
    *outer, height, width = x.shape
    apart = x.reshape(*outer, height, width // rows, rows)
    return jnp.swapaxes(apart, -1, -2).reshape(*outer, height * rows, width // rows)


def _rows_in_one(x: Any, beside: Sequence[Any]) -> int:
    """Returns how many rows of an array are kept as one. Explicit axes that distribute rows or columns forbid it, and
    symbolic sizes do.
    """
    if (
        is_symbolic([x, *beside])
        or x.ndim < 2
        or not 0 < x.shape[-1] < LANES
        or 8 * x.nbytes > max(each.nbytes for each in beside)
    ):
        return 1
    if any(tuple(jax.typeof(x).sharding.spec)[x.ndim - 2 :]):
        return 1
    height, width = x.shape[-2:]
    fitting = [rows for rows in range(1, min(height, LANES) + 1) if height % rows == 0]
    return min(fitting, key=lambda rows: height // rows * -(-width * rows // LANES), default=1)


def _checked(action: Action, value: Any, like: Any) -> Any:
    if not hasattr(value, "shape") or not hasattr(value, "dtype"):
        raise ArgumentError("decode", f"a function that returns an array, as {action!r} kept it", value)
    if (value.shape, value.dtype) != (like.shape, like.dtype):
        raise ArgumentError(
            "decode",
            f"a function that returns {like.dtype}{list(like.shape)}, as {action!r} kept it",
            jax.typeof(value),
        )
    return value
