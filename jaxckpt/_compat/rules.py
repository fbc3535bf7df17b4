"""Parts for an operation that jaxckpt defines: a primitive, and its rules for differentiation, batching and lowering.

`jax.interpreters` is partly private: its names come and go, and these functions have changed their parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax._src import core as _core
from jax._src import linear_util
from jax._src.interpreters import ad as _ad
from jax._src.interpreters import batching as _batching
from jax.extend.core import Primitive as Primitive
from jax.extend.core.primitives import custom_lin_p, stop_gradient_p
from jax.interpreters import ad, batching, mlir, partial_eval

from jaxckpt._compat.jaxprs import close_jaxpr, jaxpr_title, open_jaxpr
from jaxckpt._compat.needs import VERSION

jvp_rules = ad.primitive_jvps
"""primitive -> (primals, tangents, **params) -> (result, tangent)"""

transpose_rules = ad.primitive_transposes
"""primitive -> (cotangent, *operands, **params) -> cotangents of the operands"""

batching_rules = batching.primitive_batchers
"""primitive -> (operands, axes, **params) -> (result, axis)"""

Zero = ad.Zero
instantiate_zeros = ad.instantiate_zeros
broadcast = batching.broadcast


def drop_unused(primitive: Primitive, rule: Callable[[Sequence[bool], Any], tuple[list[bool], Any]]) -> None:
    """Sets the rule for an operation with unused results.

    Args:
      rule: (for each result whether it is used, equation) -> (for each operand whether it is used, new equation or
        None). jax 0.12 also passes which operands are known; no rule here needs that.
    """
    partial_eval.dce_rules[primitive] = lambda used, *rest: rule(used, rest[-1])


def without_unused(jaxpr: Any, used: Sequence[bool]) -> tuple[Any, list[bool]]:
    """Returns an open jaxpr with those results alone that are used, and what they take, in loops and branches too; and
    for each of its inputs whether it is still one.
    """
    return partial_eval.dce_jaxpr(jaxpr, list(used))


# JAX has no transpose of stop_gradient: its own derivatives never put one on a tangent. Where a derivative that a rule
# of ours has computed is batched, JAX's rule for branches does (jax 0.10 to 0.12.0.1). It is linear in a tangent: the
# identity.
ad.primitive_transposes[stop_gradient_p] = lambda cotangent, _: [cotangent]

# ------------------------------------------------------------------------------------------- reverse rules of users
# Where JAX differentiates a `jax.custom_vjp` it leaves an operation, custom_lin, that can be transposed and nothing
# else: JAX batches the function before. A derivative that is computed within a rule of ours is batched after.
# `reverse_rule_p` is custom_lin with a batching rule.

reverse_rule_p = Primitive("jaxckpt_reverse_rule")
reverse_rule_p.multiple_results = True
reverse_rule_p.def_abstract_eval(lambda *_, out_avals, **__: list(out_avals))
reverse_rule_p.def_impl(_ad.raise_custom_vjp_error_on_jvp)
mlir.register_lowering(reverse_rule_p, _ad.raise_custom_vjp_error_on_jvp)
_transposes = next(table for table in (_ad.primitive_transposes, _ad.fancy_transposes) if custom_lin_p in table)
_transposes[reverse_rule_p] = _transposes[custom_lin_p]  # the second from jax 0.11: it adds cotangents up in place


def _batch_reverse_rule(axis: Any, args: Any, dims: Any, **params: Any) -> Any:
    if all(dim is None for dim in dims):
        results = reverse_rule_p.bind(*args, **params)
        return results, [None] * len(results)
    count = params["num_res"]
    moving = iter(dims[count:])
    into = [None if zero else next(moving) for zero in params["in_zeros"]]
    coming = [*dims[:count], *([0] * len(params["out_avals"]))]
    more = () if VERSION < (0, 12) else (lambda: count, "a function with a rule of its own")
    bwd = _batching.batch_custom_vjp_bwd(params["bwd"], _core.TraceTag(), axis, lambda: coming, into, *more)
    avals = tuple(_core.unmapped_aval(axis.size, 0, aval, axis.explicit_mesh_axis) for aval in params["out_avals"])
    results = reverse_rule_p.bind(*args, **{**params, "bwd": _hashable(bwd), "out_avals": avals})
    return results, [0] * len(results)


_batching.fancy_primitive_batchers[reverse_rule_p] = _batch_reverse_rule


def batched_reverse_rule(eqn: Any) -> Any:
    """Returns the equation; where it is custom_lin, as the operation that can be batched."""
    if eqn.primitive is not custom_lin_p:
        return eqn
    lists = {name: tuple(eqn.params[name]) for name in ("out_avals", "in_zeros")}
    return eqn.replace(primitive=reverse_rule_p, params={**eqn.params, **lists, "bwd": _hashable(eqn.params["bwd"])})


def _hashable(bwd: Any) -> Any:
    """Returns a wrapped function as one that equations can have for a parameter: its transforms may hold lists."""
    if not bwd.transforms:
        return bwd
    return linear_util.wrap_init(lambda *args: bwd.call_wrapped(*args), debug_info=bwd.debug_info)


def closed_over_error() -> Exception:
    """Returns JAX's error of a `jax.custom_vjp` that closes over a value with a tangent."""
    error: Exception = _ad.CustomVJPException()
    return error


@dataclass(frozen=True, eq=False)
class CustomRule:
    """The rule of a `custom_vjp_call`, as the parameters of its equation hold it.

    Attributes:
      name: of the user's function.
      symbolic_zeros: whether the rules are told what is not differentiated.
      num_consts: how many of the first operands it closes over; it has no derivative in these.
    """

    equation: Any
    name: str
    symbolic_zeros: bool
    num_consts: int

    def trace(self, moving: Sequence[bool]) -> tuple[Any, list[int | None]]:
        """Traces the forward rule.

        Args:
          moving: for each operand but the constants whether it is differentiated.

        Returns:
          The closed jaxpr of (operands but the constants) -> (residuals that are no operands, results); and for each
          leaf of the residuals the operand that it is, constants counted, or None.
        """
        jaxpr, consts = self.equation.params["fwd_jaxpr_thunk"].call_wrapped(*moving)
        forwards = list(self.equation.params["out_trees"]()[2])
        return close_jaxpr(jaxpr, consts), forwards

    def tangents(
        self, residuals: Sequence[Any], moving: Sequence[Any], still: Sequence[bool], avals: Sequence[Any]
    ) -> list[Any]:
        """Returns the results' tangents, which can only be transposed: by the user's backward rule.

        Args:
          residuals: all leaves.
          moving: tangents of the operands that have one.
          still: for each operand whether it has none.
          avals: of the results' tangents.

        Raises:
          CustomVJPException: JAX's own, if a constant has a tangent.
        """
        if not all(still[: self.num_consts]):
            raise closed_over_error()
        params = self.equation.primitive.get_bind_params(self.equation.params)
        results: list[Any] = reverse_rule_p.bind(
            *residuals,
            *moving,
            num_res=len(residuals),
            bwd=_hashable(params["subfuns"][2]),
            out_avals=tuple(avals),
            symbolic_zeros=params["symbolic_zeros"],
            in_zeros=tuple(still),
        )
        return results


def with_changed_rules(
    eqn: Any, program: Callable[[Any], Any], function: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> Any:
    """Returns a `custom_vjp_call` with other rules.

    Args:
      eqn: the equation.
      program: changes the open jaxpr of the forward rule.
      function: changes the backward rule where it is traced: a function of arrays that returns a list of arrays.
    """
    forward, backward = eqn.params["fwd_jaxpr_thunk"], eqn.params["bwd"]

    def traced_forward(*moving: bool) -> tuple[Any, Any]:
        jaxpr, consts = forward.call_wrapped(*moving)
        return program(jaxpr), consts

    params = {
        **eqn.params,
        "fwd_jaxpr_thunk": linear_util.wrap_init(traced_forward, debug_info=forward.debug_info),
        "bwd": linear_util.wrap_init(_changed(backward, function), debug_info=backward.debug_info),
    }
    return eqn.replace(params=params)


def _changed(backward: Any, function: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Callable[..., Any]:
    def run(*operands: Any) -> Any:
        if not all(isinstance(each, jax.core.Tracer) for each in operands):
            return backward.call_wrapped(*operands)  # run at once, or told what is zero
        found: list[Any] = []

        def arrays(*operands: Any) -> list[Any]:
            leaves, tree = jax.tree.flatten(backward.call_wrapped(*operands))
            found.append((tree, [leaf if isinstance(leaf, Zero) else None for leaf in leaves]))
            return [leaf for leaf in leaves if not isinstance(leaf, Zero)]

        made = iter(function(arrays)(*operands))
        tree, zeros = found[-1]
        return jax.tree.unflatten(tree, [next(made) if zero is None else zero for zero in zeros])

    return run


def custom_rule(eqn: Any) -> CustomRule:
    """Returns the rule of an equation that is a `custom_vjp_call`."""
    params = eqn.params
    return CustomRule(eqn, jaxpr_title(params["call_jaxpr"]), bool(params["symbolic_zeros"]), params["num_consts"])


def pull_back(eqn: Any, residuals: Sequence[Any], cotangents: Sequence[Any]) -> list[Any]:
    """Returns the operands' cotangents by the backward rule of a `custom_vjp_call`; None for those that have none.

    Args:
      eqn: the equation.
      residuals: all leaves of what the forward rule keeps.
      cotangents: of all results.
    """
    params = eqn.primitive.get_bind_params(eqn.params)
    found = params["subfuns"][2].call_wrapped(*residuals, *cotangents)
    if VERSION >= (0, 12):  # a pair of cotangents and logs
        found = found[0]
    return [None if isinstance(each, Zero) else each for each in found]


def tangent_program(eqn: Any, zeros: Sequence[bool]) -> tuple[Any, int, list[bool]]:
    """Returns the rule of a `custom_jvp_call` as traced.

    Args:
      eqn: the equation.
      zeros: for each operand but the constants whether its tangent is zero.

    Returns:
      The closed jaxpr of (operands but the constants, tangents that are not zero) -> (results, tangents that are not
      zero); the number of constants, which are the equation's first operands; for each result whether its tangent is
      zero.
    """
    jaxpr, consts, out_zeros = eqn.params["jvp_jaxpr_fun"].call_wrapped(*zeros)
    return close_jaxpr(open_jaxpr(jaxpr), consts), eqn.params["num_consts"], list(out_zeros)


def zeros_like_aval(aval: Any) -> Any:
    """Returns zeros of an abstract value, with its manual and explicit axes.

    Over a mesh of automatic axes alone a type says nothing of how a value is sharded, but JAX would write its sharding
    into the program. That would be another one than the program of arguments without shardings.
    """
    kinds = getattr(getattr(getattr(aval, "sharding", None), "mesh", None), "axis_types", ())
    if set(kinds) == {jax.sharding.AxisType.Auto}:
        aval = aval.update(sharding=None)
    return ad.zeros_like_aval(aval)
