"""Names of values, checkpoints that keep values by name, and JAX's policies."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.ad_checkpoint  # jax does not import it by itself in every version
from jax._src import ad_checkpoint, config
from jax._src import core as _core
from jax._src.interpreters import partial_eval as pe
from jax.extend.core import primitives

from jaxckpt._compat.jaxprs import build_jaxpr, equation_name, eval_jaxpr, fresh_var, held_jaxprs, open_jaxpr
from jaxckpt._compat.needs import unsupported
from jaxckpt._compat.traces import alone, cache_in_context, shaped_array


def working_checkpoints() -> Any:
    """A context to trace and emit checkpoints in. It uses the old jax.checkpoint, because the new one (flag jax_remat3)
    is not finished.

    In jax 0.10, the names of the new one cannot be batched ("for vmap support, subclass CheckpointName must implement
    `batch`"), and offloaded values are recomputed without an error. In 0.11, values that are named inside a nested
    checkpoint are not kept. In 0.12.0.1, names inside a function with its own derivative are not seen, so no derivative
    could read what is kept (see `core/reads.py`). Outside of the context, the flag does not change.
    """
    if config.remat3.value:
        return config.remat3(False)
    return contextlib.nullcontext()


def name_equation(operand: Any, result: Any, name: str, maker: Any) -> Any:
    """Returns an equation `result = name[name] operand` in the form of this JAX and its flags, with the source line of
    `maker`.
    """
    template = _name_template(operand.aval)
    prim = template.params.get("_prim")
    params = {"name": name} if prim is None else {**template.params, "_prim": type(prim)(name, operand.aval)}
    return template.replace(invars=[operand], outvars=[result], params=params, source_info=maker.source_info)


def keep_names(saved: Sequence[str]) -> Any:
    """Returns JAX's policy that keeps the values of some names; None if there are no names.

    Raises:
      UnsupportedJaxError: checkpoints of this JAX lose these names.
    """
    _check_kept_names()
    return jax.checkpoint_policies.save_only_these_names(*saved) if saved else None


def kept_equations(operand: Any, result: Any, name: str, maker: Any) -> list[Any]:
    """Returns equations that name a value so that a policy keeps it: `result = name[name] operand`, for a complex value
    one for each part.

    jax.checkpoint rounds a kept value to its own type with `reduce_precision`, which does not take complex types. So up
    to jax 0.12.0.1, a complex value that a policy keeps is a TypeError.
    """
    if not jax.dtypes.issubdtype(operand.aval.dtype, jax.numpy.complexfloating):
        return [name_equation(operand, result, name, maker)]
    real, imaginary, join = _complex_templates(operand.aval)
    equations, kept = [], []
    for template in (real, imaginary):
        part, named = (fresh_var(template.outvars[0].aval) for _ in range(2))
        equations.append(template.replace(invars=[operand], outvars=[part], source_info=maker.source_info))
        equations.append(name_equation(part, named, name, maker))
        kept.append(named)
    return [*equations, join.replace(invars=kept, outvars=[result], source_info=maker.source_info)]


@cache_in_context
def _complex_templates(aval: Any) -> list[Any]:
    made = jax.make_jaxpr(lambda x: jax.lax.complex(jax.lax.real(x), jax.lax.imag(x)))(aval)
    return list(open_jaxpr(made).eqns)


@cache_in_context
def _name_template(aval: Any) -> Any:
    made = open_jaxpr(jax.make_jaxpr(lambda x: jax.ad_checkpoint.checkpoint_name(x, "name"))(aval)).eqns
    if not made or equation_name(made[-1]) != "name":
        found = f"makes the operations {[str(eqn.primitive) for eqn in made]}, in which no name can be read"
        raise unsupported("jax.ad_checkpoint.checkpoint_name", "name the values that a checkpoint keeps", found)
    return made[-1]


@functools.cache
def _check_kept_names() -> None:
    """Checks that jax.checkpoint keeps a value that `name_equation` names, and does not compute it again.

    Raises:
      UnsupportedJaxError: the name is lost.
    """

    def gradient(x: Any) -> Any:
        y = jax.lax.sin(x)
        return jax.lax.mul(y, y)

    with alone(), working_checkpoints():
        aval = jax.ShapeDtypeStruct((), jax.numpy.float32)
        plain = open_jaxpr(jax.make_jaxpr(gradient)(aval))
        sine, *rest = plain.eqns
        bare = fresh_var(sine.outvars[0].aval)
        naming = name_equation(bare, sine.outvars[0], "jaxckpt:probe", sine)
        named = build_jaxpr(
            [], plain.invars, plain.outvars, [sine.replace(outvars=[bare]), naming, *rest], plain.debug_info
        )
        policy = jax.checkpoint_policies.save_only_these_names("jaxckpt:probe")
        kept = jax.checkpoint(lambda x: eval_jaxpr(named, [], x)[0], policy=policy)
        count = _count("sin", jax.make_jaxpr(jax.grad(kept))(aval))
        if count != 1:
            title = "jax.checkpoint_policies.save_only_these_names"
            found = f"runs an operation whose result is named and kept {count} times instead of once"
            raise unsupported(title, "keep values in checkpoints", found)


def _count(primitive: str, closed: Any) -> int:
    """Returns the number of operations of a primitive in a program."""
    eqns = open_jaxpr(closed).eqns
    return sum((e.primitive.name == primitive) + sum(_count(primitive, j) for j in held_jaxprs(e)) for e in eqns)


# ------------------------------------------------------------------------------------------------------------- policies
# A policy of JAX is a function of a primitive (the object, not its name), avals and parameters.


def ask_policy(policy: Callable[..., Any], primitive: str, params: Any, value: Any, name: str | None) -> str:
    """Returns the decision of JAX's policy on a value, as the result of `primitive` or by its `name`: "save", "offload"
    or "recompute".
    """
    aval = shaped_array(value.shape, value.dtype)
    if name is not None:
        answer = policy(ad_checkpoint.name_p, aval, name=name)
    else:
        answer = policy(_primitives().get(primitive, _core.Primitive(primitive)), aval, **params)
    if isinstance(answer, pe.Offloadable):
        return "offload"
    return "save" if answer is True or answer is pe.Saveable or isinstance(answer, pe.SaveableType) else "recompute"


def everything_saveable(primitive: Any, *avals: Any, **params: Any) -> bool:
    """JAX's policy of this name, except that complex values are recomputed, because jax.checkpoint cannot keep them:
    see `kept_equations`.
    """
    made = params.get("new_dtype", params.get("dtype"))
    dtypes = [getattr(aval, "dtype", None) for aval in avals] + [made]
    if primitive.name in ("complex", "fft", "eig"):
        return False
    return not any(d is not None and jax.dtypes.issubdtype(d, jax.numpy.complexfloating) for d in dtypes)


@functools.cache
def _primitives() -> dict[str, Any]:
    return {p.name: p for p in vars(primitives).values() if isinstance(p, _core.Primitive)}
