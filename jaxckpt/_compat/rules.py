"""Parts for an operation that jaxckpt defines: a primitive, and its rules for differentiation, batching and lowering.

`jax.interpreters` is partly private: its names come and go, and these functions have changed their parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from jax.extend.core import Primitive as Primitive
from jax.interpreters import ad, batching, mlir, partial_eval

jvp_rules = ad.primitive_jvps
"""primitive -> (primals, tangents, **params) -> (result, tangent)"""

transpose_rules = ad.primitive_transposes
"""primitive -> (cotangent, *operands, **params) -> cotangents of the operands"""

batching_rules = batching.primitive_batchers
"""primitive -> (operands, axes, **params) -> (result, axis)"""

register_lowering = mlir.register_lowering
lower_fun = mlir.lower_fun

Zero = ad.Zero
instantiate_zeros = ad.instantiate_zeros
zeros_like_aval = ad.zeros_like_aval
broadcast = batching.broadcast


def drop_unused(primitive: Primitive, rule: Callable[[Sequence[bool], Any], tuple[list[bool], Any]]) -> None:
    """Sets the rule for an operation with unused results.

    Args:
      rule: (for each result whether it is used, equation) -> (for each operand whether it is used, new equation or
        None). jax 0.12 also passes which operands are known; no rule here needs that.
    """
    partial_eval.dce_rules[primitive] = lambda used, *rest: rule(used, rest[-1])
