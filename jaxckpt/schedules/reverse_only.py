"""Identities that can be differentiated in only one way, with errors that say what to do.

JAX's own, "can't apply forward-mode autodiff (jvp) to a custom_vjp function", is raised where the tangent would be
computed: at once, when the program is batched, or when it is compiled. A linear identity on tangents that raises in the
same places, put before the custom_vjp, comes first. In reverse mode it is transposed and never evaluated. The other
identity is the other way round: its tangent may be evaluated, which is what forward over reverse does, and raises when
it is transposed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jaxckpt import _compat
from jaxckpt._errors import ForwardModeError

_INSTEAD = 'Use a nested schedule, which can: schedule="sqrt", "log", an int or a tuple of ints.'


def no_forward_mode(values: list[Any]) -> list[Any]:
    """Returns the values as they are; differentiated forward, an error is raised.

    Raises:
      ForwardModeError: when the tangent of one is computed.
    """
    return [_once.bind(value) for value in values]


def no_second_reverse(values: list[Any]) -> list[Any]:
    """Returns the values as they are, None for None; differentiated in reverse, an error is raised.

    Raises:
      ForwardModeError: when the tangent of one is transposed.
    """
    return [None if value is None else _last.bind(value) for value in values]


def _forward(*_: Any, **__: Any) -> Any:
    raise ForwardModeError(
        "jaxckpt.scan with schedule=Slots(n), or with a budget that chose it, cannot be differentiated in forward "
        "mode (jax.jvp, "
        "jax.jacfwd), nor can a plan that has it. In jax.jvp of jax.grad, tangents must be of what jax.grad differentiates "
        f"in, too: jax.grad(fun, argnums=(0, 1)). {_INSTEAD}"
    )


def _twice(*_: Any, **__: Any) -> Any:
    raise ForwardModeError(
        "jaxckpt.scan with schedule=Slots(n), or with a budget that chose it, cannot be differentiated in reverse "
        "more than once, nor "
        f"can a plan that has it; jax.jvp of jax.grad (forward over reverse) is fine. {_INSTEAD}"
    )


def _primitive(name: str, tangent: _compat.Primitive | None = None) -> _compat.Primitive:
    """Returns an identity, with another as its derivative."""
    primitive = _compat.Primitive(name)
    primitive.def_impl(lambda x: x)
    primitive.def_abstract_eval(lambda aval: aval)
    _compat.batching_rules[primitive] = lambda args, dims: (primitive.bind(*args), dims[0])
    _compat.register_lowering(primitive, lambda context, x: [x])
    # The primal is handed on as it is: differentiated once, in the allowed way, it may be differentiated further.
    rule: Callable[..., Any] = lambda primals, tangents: (primals[0], (tangent or primitive).bind(*tangents))
    _compat.jvp_rules[primitive] = rule
    return primitive


_no_tangent = _primitive("jaxckpt_no_tangent")
_no_tangent.def_impl(_forward)
_compat.transpose_rules[_no_tangent] = lambda cotangent, x: [cotangent]
_compat.batching_rules[_no_tangent] = _forward
_compat.register_lowering(_no_tangent, _forward)

_no_cotangent = _primitive("jaxckpt_no_cotangent")
_compat.transpose_rules[_no_cotangent] = _twice

_once = _primitive("jaxckpt_once_in_reverse", _no_tangent)
_last = _primitive("jaxckpt_last_reverse", _no_cotangent)
