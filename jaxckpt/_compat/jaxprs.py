"""Programs: functions to read and make jaxprs and their equations.

A jaxpr and its constants are two classes up to jax 0.10 (Jaxpr, ClosedJaxpr). jax 0.12 has one class, which still has
both interfaces. `jax.extend.core` has no function that reads or makes an equation.
"""

from __future__ import annotations

import contextlib
import functools
import operator
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import jax
from jax._src import ad_checkpoint, effects, source_info_util
from jax._src import core as _core
from jax._src.interpreters import ad
from jax._src.sharding_impls import UnspecifiedValue
from jax.extend import core as _extend_core

from jaxckpt._compat.needs import VERSION, unsupported
from jaxckpt._compat.traces import returned_within

Var = _extend_core.Var
Literal = _extend_core.Literal
DropVar = _core.DropVar
Returned = TypeVar("Returned")


def open_jaxpr(jaxpr: Any) -> Any:
    """Returns the jaxpr without its constants."""
    return jaxpr.jaxpr if hasattr(jaxpr, "jaxpr") else jaxpr


def jaxpr_consts(jaxpr: Any) -> list[Any]:
    """Returns the constants of a closed jaxpr; none for an open jaxpr."""
    return list(getattr(jaxpr, "consts", ()))


def is_jaxpr(value: Any) -> bool:
    """Returns whether a parameter of an equation is a jaxpr, closed or open."""
    return isinstance(value, (_core.Jaxpr, _extend_core.ClosedJaxpr))


def held_jaxprs(eqn: Any) -> list[Any]:
    """Returns all jaxprs in an equation's parameters, those of reductions too: see `surgery.programs`."""
    found = []
    for param in equation_params(eqn).values():
        found += [item for item in (param if isinstance(param, tuple) else (param,)) if is_jaxpr(item)]
    return found


def close_jaxpr(jaxpr: Any, consts: Sequence[Any]) -> Any:
    """Returns the jaxpr with constants for its constvars."""
    return _extend_core.ClosedJaxpr(jaxpr, list(consts))


def like(original: Any, jaxpr: Any, consts: Sequence[Any]) -> Any:
    """Returns `jaxpr` in the form of `original`: closed over `consts`, or open."""
    if isinstance(original, _extend_core.ClosedJaxpr):
        return close_jaxpr(jaxpr, consts)
    return jaxpr


def build_jaxpr(
    constvars: Sequence[Any], invars: Sequence[Any], outvars: Sequence[Any], eqns: Sequence[Any], debug_info: Any
) -> Any:
    """Returns an open jaxpr without names of arguments and results, because a stretch of a program has none."""
    effects: frozenset[Any] = frozenset().union(*(eqn.effects for eqn in eqns)) if eqns else frozenset()
    return _extend_core.Jaxpr(
        constvars=list(constvars),
        invars=list(invars),
        outvars=list(outvars),
        eqns=list(eqns),
        effects=effects,
        debug_info=debug_info.with_unknown_names(),
        is_high=any(_is_high(eqn) for eqn in eqns),
    )


def _is_high(eqn: Any) -> bool:
    # With jax_remat3, names and checkpoints are "hi primitives". A jaxpr with one must say so, or it is not lowered.
    return bool(eqn.primitive.is_high(*(v.aval for v in eqn.invars), **eqn.params))


def fresh_var(aval: Any) -> Any:
    """Returns a new variable."""
    return Var(aval)


def eval_jaxpr(jaxpr: Any, consts: Sequence[Any], *args: Any) -> list[Any]:
    """Evaluates an open jaxpr, with the source lines and name stacks of its equations (as jaxpr_as_fun does)."""
    return list(_extend_core.jaxpr_as_fun(close_jaxpr(jaxpr, consts))(*args))


def rewritten(jaxpr: Any, eqns: Sequence[Any], outvars: Sequence[Any]) -> Any:
    """Returns an open jaxpr with other equations and results, which compute the same from the same inputs, with the
    same effects.
    """
    return jaxpr.replace(eqns=list(eqns), outvars=list(outvars))


def jaxpr_title(jaxpr: Any) -> str:
    """Returns the name of the function that a jaxpr was traced from."""
    return str(open_jaxpr(jaxpr).debug_info.func_src_info).split(" ")[0]


def jaxpr_file(jaxpr: Any) -> str:
    """Returns the path of the file with the function that a jaxpr was traced from; empty if JAX does not know it."""
    return str(open_jaxpr(jaxpr).debug_info.func_src_info).partition(" at ")[2].rpartition(":")[0]


def jvp_jaxpr(closed: Any, moving: Sequence[bool]) -> tuple[Any, list[bool]]:
    """Differentiates a closed jaxpr forward. Returns it as (inputs, nonzero tangents) -> (results, nonzero tangents),
    and which are nonzero.

    `jax.jvp` makes arrays of zero tangents. jax 0.12 has one class for open and closed jaxprs.
    """
    both, out_moving = ad.jvp_jaxpr(closed, list(moving), False)
    return both, list(out_moving)


def allowed_in_custom_rules(jaxpr: Any) -> bool:
    """Returns whether JAX allows the effects of a jaxpr in a function with its own derivative (jax.custom_jvp). The
    list is private.
    """
    return not effects.custom_derivatives_allowed_effects.filter_not_in(jaxpr.effects)


def remat_disallowed_effects(jaxpr: Any) -> list[Any]:
    """Returns the effects of a jaxpr that JAX does not allow in a checkpointed function that is differentiated."""
    return list(effects.remat_allowed_effects.filter_not_in(jaxpr.effects))


def side_effects(jaxpr: Any) -> list[Any]:
    """Returns the effects of a jaxpr that an order or a number of runs can show: all but those that say over which axes
    of a jax.shard_map or a jax.vmap it has collectives.
    """
    return [effect for effect in jaxpr.effects if not isinstance(effect, _core.NamedAxisEffect)]


# ------------------------------------------------------------------------------------------------------------ equations
# With jax_remat3, a name is not the primitive `name`. It is a "hi primitive" in the parameter `_prim` of
# `call_hi_primitive`. So is a nested checkpoint.


_NAMING: tuple[Any, ...] = (ad_checkpoint.CheckpointName,)
if VERSION >= (0, 12):
    _NAMING = (*_NAMING, ad_checkpoint.CheckpointNameFwd)  # type: ignore[attr-defined]
_HI_NAMES = {ad_checkpoint.RematTraced: "checkpoint", **dict.fromkeys(_NAMING, "name")}


_MAPPED = ("mesh", "in_specs", "out_specs", "newly_manual_axes", "check_vma")


def _mapped_parameters(eqn: Any) -> Any:
    """Returns the parameters of a jax.shard_map's equation, whose names are not public."""
    if missing := [name for name in _MAPPED if name not in eqn.params]:
        raise unsupported(f"the parameter {missing[0]} of jax.shard_map", "plan inside of it", "has none")
    return eqn.params


def mapped_sizes(eqn: Any) -> list[int]:
    """Returns the sizes of the axes that a jax.shard_map's equation maps over."""
    params = _mapped_parameters(eqn)
    return [params["mesh"].shape[name] for name in params["newly_manual_axes"]]


def mapped_devices(jaxpr: Any) -> int:
    """Returns how many devices the largest mesh of a jax.shard_map in a program has; 1 if there is none."""
    sizes = [1]
    for eqn in open_jaxpr(jaxpr).eqns:
        sizes += map(mapped_devices, held_jaxprs(eqn))
        if primitive_name(eqn) == "shard_map":
            sizes.append(_mapped_parameters(eqn)["mesh"].size)
    return max(sizes)


def mapped_as(
    eqn: Any, fun: Callable[..., Any], more_in: Sequence[Any] = (), more_out: Sequence[Any] = ()
) -> Callable[..., Any]:
    """Returns a flat function of what one device has as a function of the whole arrays, mapped as a jax.shard_map's
    equation is.

    Args:
      eqn, fun: see above.
      more_in: specs of operands before those of the equation.
      more_out: specs of results after those of the equation.
    """
    params = _mapped_parameters(eqn)
    return jax.shard_map(
        lambda *args: tuple(fun(*args)),
        mesh=params["mesh"],
        in_specs=(*more_in, *params["in_specs"]),
        out_specs=(*params["out_specs"], *more_out),
        axis_names=params["newly_manual_axes"],
        check_vma=params["check_vma"],
    )


def spec_of_parts(eqn: Any, aval: Any) -> Any:
    """Returns the spec by which the parts that devices have of a value inside of a jax.shard_map lie one behind the
    other along a first axis: over the axes that it varies over, or all where JAX does not know these.
    """
    params = _mapped_parameters(eqn)
    axes = aval.manual_axis_type.varying if params["check_vma"] else params["newly_manual_axes"]
    names = params["mesh"].axis_names
    return jax.sharding.PartitionSpec(tuple(n for n in names if n in axes and n in params["newly_manual_axes"]))


def run_mapped(eqn: Any, fun: Callable[[], Returned]) -> Returned:
    """Returns what `fun()` returns, called where the axes of a jax.shard_map's equation are those of a device."""
    params = {**eqn.params, "in_specs": (), "out_specs": ()}
    return returned_within(functools.partial(mapped_as, eqn.replace(params=params)), fun)


def num_scan_consts_carry(params: Mapping[str, Any]) -> tuple[int, int]:
    """Returns the numbers of constants and of carries among the operands of a scan.

    jax 0.12 has replaced `num_consts` and `num_carry` by flat trees (consts, carry, xs).
    """
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    try:
        consts, carry, _ = map(len, params["ft_in"].unpack())
        return consts, carry
    except (KeyError, AttributeError, TypeError, ValueError) as error:
        why = "tell the constants of a loop from its carries"
        raise unsupported("the parameters of scan", why, f"gives it {', '.join(params)}") from error


def equation_name(eqn: Any) -> str | None:
    """Returns the name that an equation gives its operand, or None if it does not name it."""
    if eqn.primitive.name == "name":
        return str(eqn.params["name"])
    prim = eqn.params.get("_prim")
    if isinstance(prim, _NAMING):
        return str(prim.name)  # type: ignore[attr-defined]
    return None


def primitive_name(eqn: Any) -> str:
    """Returns the name of an equation's primitive, or of its hi primitive if it has one."""
    prim = eqn.params.get("_prim")
    if prim is None:
        return str(eqn.primitive.name)
    return next((name for kind, name in _HI_NAMES.items() if isinstance(prim, kind)), type(prim).__name__)


def equation_params(eqn: Any) -> dict[str, Any]:
    """Returns the parameters of an equation, or of its hi primitive if it has one."""
    prim = eqn.params.get("_prim")
    return dict(eqn.params) if prim is None else dict(prim.params)


def replace_params(eqn: Any, **changes: Any) -> Any:
    """Returns the equation with some of `equation_params` changed."""
    prim = eqn.params.get("_prim")
    if prim is None:
        return eqn.replace(params={**eqn.params, **changes})
    return eqn.replace(params={**eqn.params, "_prim": type(prim)(**{**prim.params, **changes})})


def expansion(eqn: Any) -> Any:
    """Returns what a hi primitive computes, as a closed jaxpr of the equation's operands; None for other primitives.

    From jax 0.12 on, `jnp.searchsorted` and `jnp.nonzero` are hi primitives.
    """
    prim = eqn.params.get("_prim")
    if not (hasattr(prim, "expand") and hasattr(prim, "in_tree")):
        return None
    expand = lambda *flat: jax.tree.leaves(prim.expand(*jax.tree.unflatten(prim.in_tree, flat)))
    return jax.make_jaxpr(expand)(*(atom.aval for atom in eqn.invars))


def is_unspecified(sharding: Any) -> bool:
    """Returns whether a sharding of a jit equation is unspecified (the class for that is private)."""
    return sharding is None or isinstance(sharding, UnspecifiedValue)


def is_own_file(path: str) -> bool:
    """Returns whether a file is one of jaxckpt's own; its models are programs like those of users."""
    return path.startswith(_PACKAGE) and not path.startswith(_PROGRAMS)


def call_path(eqn: Any) -> tuple[tuple[Any, ...], ...]:
    """Returns where in the user's code the calls are that led to an equation, the outermost first: file, function, and
    lines and columns, of the beginning and the end, of each. The first one is in the function that was traced, which
    for a call of `jax.jit` that was written out is that one's. Frames of JAX and jaxckpt are left out, and those of
    libraries for models.
    """
    frames = (
        frame
        for frame in source_info_util.user_frames(eqn.source_info.traceback)
        if not is_own_file(frame.file_name) and not any(library in frame.file_name for library in _LIBRARIES)
    )
    place = operator.attrgetter("file_name", "function_name", "start_line", "start_column", "end_line", "end_column")
    return tuple(reversed([place(each) for each in frames]))


def source_line(eqn: Any) -> str:
    """Returns "file.py:12 (function)" of the user's code that made the equation, or "".

    Frames of JAX and jaxckpt are left out. Frames of libraries for models are left out if there are other frames.
    """
    first = None
    for frame in source_info_util.user_frames(eqn.source_info.traceback):
        if is_own_file(frame.file_name):
            continue
        first = first or frame
        if not any(library in frame.file_name for library in _LIBRARIES):
            first = frame
            break
    return "" if first is None else f"{first.file_name}:{first.start_line} ({first.function_name})"


def at_line_of(eqn: Any) -> contextlib.AbstractContextManager[Any]:
    """Within this context, what is traced has the source line and the scopes of an equation."""
    stack = source_info_util.current_name_stack() + eqn.source_info.name_stack
    return source_info_util.user_context(eqn.source_info.traceback, name_stack=stack)


_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_PROGRAMS = (_PACKAGE + "models" + os.sep, _PACKAGE + "templates" + os.sep)
"""Folders of programs like those of users."""
_LIBRARIES = tuple(f"site-packages/{name}/" for name in ("flax", "optax", "haiku", "equinox", "chex", "einops"))


def name_stack(eqn: Any) -> str:
    """Returns the scopes that an equation was traced in (flax modules, jax.named_scope), joined by "/"."""
    return str(eqn.source_info.name_stack)


def prepend_name_stack(outer: Any, inner: Any) -> Any:
    """Returns `inner` with the scopes of the call `outer` before its own, for when the call is replaced by its
    operations. Operations of functions of JAX's own, such as jnp.cumsum, have no source line: they get the call's.
    """
    info = inner.source_info
    traceback = info.traceback if source_line(inner) else outer.source_info.traceback
    scopes = outer.source_info.name_stack + info.name_stack
    return inner.replace(source_info=info.replace(traceback=traceback, name_stack=scopes))
