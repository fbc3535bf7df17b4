"""What an operation of our own is made with: a primitive, and how it is differentiated, batched and lowered.

`jax.interpreters` is semi-private: names in it have come and gone, and these have changed their parameters.
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
    """Sets what becomes of an operation of which some results are not used.

    Args:
      rule: (for each result whether it is used, equation) -> (for each operand whether it is used, new equation or None). jax 0.12 also says
        which operands are there, which none of ours asks.
    """
    partial_eval.dce_rules[primitive] = lambda used, *rest: rule(used, rest[-1])
