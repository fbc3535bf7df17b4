"""What JAX's primitives are: one table, a row for those that are alike, a column for each thing that jaxckpt has to
know of them.

A name stands in one row. What is not in the table is unknown, and is taken to be what the defaults of `Primitive` say:
an operation of one FLOP for each element of its results that wants its operands in memory and leaves its results there,
that is worth keeping, and of which nothing else is known.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp

from jaxckpt.core import flops as rules
from jaxckpt.core import turns
from jaxckpt.core.flops import Avals, FlopsRule, RunsRule


class Kernel(enum.Enum):
    """Where XLA computes an operation."""

    AT_USES = enum.auto()
    """In every kernel that uses its result, on every platform, since it only moves data."""
    FUSED = enum.auto()
    """In the kernels that use its result; where a platform stores what is used more than once, in one of its own."""
    ROOT = enum.auto()
    """In a kernel of its own, with what its operands are computed from: these need not be in memory, its results
    are.
    """
    OWN = enum.auto()
    """In a kernel of its own; operands and results are in memory."""


class Result(enum.IntEnum):
    """How much of its operand an operation's result is; each is what the ones before it are, too."""

    OTHER = enum.auto()
    REORDERED = enum.auto()
    """The operand's elements, which may lie in memory in another order."""
    RESHAPED = enum.auto()
    """The operand's memory, under another shape."""
    SAME = enum.auto()
    """The operand."""


class Holds(enum.Enum):
    """What the programs in an operation's parameters are."""

    PROGRAMS = enum.auto()
    """Programs of which nothing else is known."""
    SCALARS = enum.auto()
    """Functions of scalars, such as a reduction's: they are no programs of their own, and nobody looks into them."""
    CALL = enum.auto()
    """One that runs once, with the operands."""
    CHECKPOINT = enum.auto()
    """The same, under a checkpoint."""
    STATE = enum.auto()
    """The same, with references to the operands."""
    RULE = enum.auto()
    """A function with a derivative of the user's."""
    LOOP = enum.auto()
    BRANCHES = enum.auto()
    MAPPED = enum.auto()
    """What runs on every device of a mesh."""

    @property
    def in_line(self) -> bool:
        """Whether it is one program that could stand in the operation's place: it runs once, its inputs are the
        operands, and its results are the operation's.
        """
        return self in (Holds.CALL, Holds.CHECKPOINT, Holds.RULE)

    @property
    def returns(self) -> bool:
        """Whether it is one program whose results are the operation's, and that runs once, or once on each device."""
        return self.in_line or self is Holds.MAPPED


@dataclass(frozen=True)
class Primitive:
    """What is known of a primitive. The defaults are what an unknown one is taken to be.

    Attributes:
      flops: the rule for the FLOPs of one execution; operations that hold programs are added up from these instead.
      kernel: where XLA computes it.
      dear: whether it costs what it computes rather than what it moves. Its results are worth keeping; others can be
        computed again for a few times what it takes to read and write them.
      result: how much of its operand the result is.
      over_units: whether it is its operand under another shape where it only adds or drops axes of one element: a sum
        over these, a broadcast that puts some in.
      linear: whether it is linear in all of its operands together, so that its derivative needs none of them; False
        also where nobody asked.
      linear_in: of a product and the like, the places of the operands in each of which it is linear, the others held
        fixed: see `is_linear_in`. None also where nobody asked.
      lays_out: whether it is there to say how its operand lies over the devices, by its parameter `sharding`.
      sends: of a collective, what each device sends, in units of the larger of what goes in and what comes out.
      writes_over: whether it can write over an operand of the same size. What is fused can in any case.
      asks_result: whether its derivative may read its result: it is differentiated to find out. False where it is known
        not to.
      compares: whether its derivative looks for its result among its operands, as that of a maximum does. It needs the
        very result: a rounded one is equal to none of them.
      lower: whether only the lower triangle of its result is defined. What its derivative reads has zeros above it.
      shows: whether its results are parts of its operand, each read without the rest.
      holds: what the programs in its parameters are.
      runs: the rule for how often one execution runs each of them; once also where nobody knows.
      backward_rule: whether its backward pass is a rule of the user's, and so need not be linear: that of a
        `jax.custom_vjp`.
      opaque: whether no action can be given to the values of these.
      flat: whether its derivative is zero: see `is_flat`.
      barrier: whether it returns its operands when all of them are there.
      elementwise: whether element i of each result is computed from elements i of its operands, which have the result's
        shape, a 1 in place of some of its sizes, or no axis: so any axis passes through it. `core/tiling/axes.py` has
        the rules of the others.
    """

    flops: FlopsRule = rules.each_output
    kernel: Kernel = Kernel.OWN
    dear: bool = True
    result: Result = Result.OTHER
    over_units: bool = False
    linear: bool = False
    linear_in: tuple[int, ...] = ()
    lays_out: bool = False
    sends: float = 0.0
    writes_over: bool = False
    asks_result: bool = True
    compares: bool = False
    lower: bool = False
    shows: bool = False
    holds: Holds = Holds.PROGRAMS
    runs: RunsRule = rules.once
    backward_rule: bool = False
    opaque: bool = False
    flat: bool = False
    barrier: bool = False
    elementwise: bool = False

    @property
    def fused(self) -> bool:
        """Whether it is computed where its result is used."""
        return self.kernel in (Kernel.AT_USES, Kernel.FUSED)

    @property
    def collective(self) -> bool:
        """Whether devices send one another something."""
        return self.sends > 0

    @property
    def passes_operands(self) -> bool:
        """Whether the inputs of its program are its operands."""
        return self.holds in (Holds.CALL, Holds.CHECKPOINT, Holds.STATE)

    @property
    def forward_rule(self) -> bool:
        """Whether its derivative is a rule of the user's that runs forward: that of a `jax.custom_jvp`."""
        return self.holds is Holds.RULE and not self.backward_rule

    @property
    def entered(self) -> bool:
        """Whether plans and policies reach into its programs: regions, planned loops, and values that are kept in
        another form may be in them.
        """
        kinds = (Holds.LOOP, Holds.BRANCHES, Holds.CHECKPOINT, Holds.MAPPED, Holds.CALL)
        return self.holds in kinds and not self.opaque


UNKNOWN = Primitive()
"""What a primitive that is not in the table is taken to be."""

_MOVED = Primitive(rules.free, Kernel.AT_USES, dear=False, asks_result=False)
_FREE = replace(_MOVED, kernel=Kernel.FUSED)
_FUSED = Primitive(kernel=Kernel.FUSED, dear=False)
_SIMPLE = replace(_FUSED, asks_result=False)
_EACH = replace(_FUSED, elementwise=True)
_EACH_SIMPLE = replace(_SIMPLE, elementwise=True)
_REDUCED = Primitive(rules.reduction, Kernel.ROOT, dear=False, holds=Holds.SCALARS)
# Not dear, although on a CPU a cumulative sum takes 12 to 60 times as long as an elementwise operation, and a maximum
# over windows of 3 x 3 takes 10 to 25 times (float32, 256 x 512 and 2048 x 2048; a matmul with a square matrix takes
# 1.4 and 6 times as long as the sum). What they make is as large as what they read: a scan that keeps it has room for
# fewer steps, and runs the matmuls of the others again. And a mixture of experts cut at its cumulative sums has plans
# that take up to 1.2% of a step longer on an H100 than one cut at its matmuls alone.
_CUMULATIVE = Primitive(rules.each_input, dear=False)
_WINDOW = replace(_REDUCED, flops=rules.window)
# Series of some hundred operations for each element: 350 times as long as a tanh, on the same CPU.
_SERIES = replace(_EACH, dear=True)
_SCATTER = Primitive(rules.scatter, dear=False, writes_over=True, holds=Holds.SCALARS)
_COLLECTIVE = Primitive(sends=1.0)
# A ring reduces by scattering and gathering (R. Thakur et al., "Optimization of collective communication operations in
# MPICH", 2005).
_REDUCED_BY_ALL = replace(_COLLECTIVE, sends=2.0)
_CALL = Primitive(holds=Holds.CALL, asks_result=False)
_CHECKPOINT = replace(_CALL, holds=Holds.CHECKPOINT)
_RULE = Primitive(holds=Holds.RULE, opaque=True)
_LOOP = Primitive(holds=Holds.LOOP, asks_result=False, writes_over=True)

_ROWS: tuple[tuple[str, Primitive], ...] = (
    # Only moved: no FLOPs.
    (
        "copy name jaxckpt_once_in_reverse jaxckpt_last_reverse",
        replace(_MOVED, result=Result.SAME, linear=True, elementwise=True),
    ),
    ("stop_gradient", replace(_MOVED, result=Result.SAME, linear=True, elementwise=True, flat=True)),
    ("reshape squeeze", replace(_MOVED, result=Result.RESHAPED, linear=True, over_units=True)),
    ("transpose", replace(_MOVED, result=Result.REORDERED, linear=True)),
    ("broadcast_in_dim", replace(_MOVED, linear=True, over_units=True)),
    ("convert_element_type", replace(_MOVED, linear=True, elementwise=True)),
    ("slice", replace(_MOVED, linear=True, shows=True)),
    ("split unstack", replace(_MOVED, linear=True, shows=True)),
    ("stack tile", replace(_MOVED, linear=True)),
    ("bitcast_convert_type empty empty2 from_edtype iota tie to_edtype", _MOVED),
    ("rev concatenate pad", replace(_FREE, linear=True)),
    ("dynamic_slice", _FREE),
    ("real imag reduce_precision", replace(_FREE, elementwise=True)),
    ("sharding_constraint", replace(_FREE, elementwise=True, lays_out=True)),
    ("pvary", replace(_FREE, shows=True, result=Result.SAME)),
    ("preduced reduced_vary_cast vary_unreduced_cast reshard axis_index", _FREE),
    ("random_seed random_wrap random_unwrap", _FREE),
    ("random_clone", replace(_FREE, elementwise=True)),
    (
        "optimization_barrier jaxckpt_tie",
        Primitive(rules.free, dear=False, result=Result.SAME, asks_result=False, barrier=True),
    ),
    ("device_put layout_constraint", Primitive(rules.free, dear=False, asks_result=False)),
    ("create_token after_all", Primitive(rules.free, dear=False)),
    ("gather", Primitive(rules.free, Kernel.ROOT, dear=False, asks_result=False)),
    ("dynamic_update_slice", Primitive(rules.free, dear=False, writes_over=True, asks_result=False)),
    # Elementwise, and computed where they are used.
    ("add add_any sub neg", replace(_EACH_SIMPLE, linear=True)),
    ("mul", replace(_EACH_SIMPLE, linear_in=(0, 1))),
    ("square sin cos log log1p abs complex conj clamp select_n", _EACH_SIMPLE),
    ("sign floor ceil round", replace(_EACH_SIMPLE, flat=True)),
    ("eq ne lt le gt ge and or xor not is_finite", _EACH_SIMPLE),
    ("integer_pow", replace(_EACH_SIMPLE, flops=rules.integer_pow)),
    ("max min", replace(_EACH, compares=True)),
    ("div", replace(_EACH, linear_in=(0,))),
    ("rem pow sqrt rsqrt cbrt exp exp2 expm1 log2 logistic tanh one_minus_square polynomial", _EACH),
    ("tan asin acos atan atan2 sinh cosh asinh acosh atanh", _EACH),
    ("erf erfc erf_inv lgamma digamma bessel_i0e bessel_i1e", _EACH),
    ("eq_to lt_to le_to nextafter mulhi clz population_count", _EACH),
    ("shift_left shift_right_arithmetic shift_right_logical", _EACH),
    ("threefry2x32 random_fold_in", replace(_EACH_SIMPLE, flops=rules.threefry)),
    ("random_bits", replace(_SIMPLE, flops=rules.threefry)),
    ("random_split", replace(_FUSED, flops=rules.threefry)),
    ("polygamma zeta", _SERIES),
    # XLA makes loops of these.
    ("igamma igammac igamma_grad_a regularized_incomplete_beta", Primitive(elementwise=True)),
    # Reductions.
    ("reduce_sum", replace(_REDUCED, linear=True, asks_result=False, over_units=True)),
    ("reduce_max reduce_min", replace(_REDUCED, compares=True, over_units=True)),
    ("reduce_prod reduce_and reduce_or reduce_xor", replace(_REDUCED, over_units=True)),
    ("reduce argmax argmin", _REDUCED),
    ("reduce_window reduce_window_sum reduce_window_max reduce_window_min", _WINDOW),
    ("cumsum", replace(_CUMULATIVE, linear=True, asks_result=False)),
    ("cumprod cummax cummin cumlogsumexp", _CUMULATIVE),
    # What costs what it computes.
    ("dot_general", Primitive(rules.dot_general, asks_result=False, linear_in=(0, 1))),
    ("ragged_dot_general", Primitive(rules.ragged_dot)),
    ("scaled_matmul_wrapper", Primitive(rules.scaled_matmul)),
    ("conv_general_dilated", Primitive(rules.conv, asks_result=False)),
    ("sort", Primitive(rules.sort, holds=Holds.SCALARS)),
    ("top_k", Primitive(rules.top_k)),
    ("fft", Primitive(rules.fft)),
    ("cholesky", Primitive(rules.cubic(1 / 3), lower=True)),
    ("lu", Primitive(rules.cubic(2 / 3))),
    ("geqrf householder_product", Primitive(rules.cubic(4 / 3))),
    ("qr", Primitive(rules.cubic(2))),
    ("eigh", Primitive(rules.cubic(9))),
    ("svd", Primitive(rules.cubic(20))),
    ("eig", Primitive(rules.cubic(25))),
    ("triangular_solve", Primitive(rules.triangular_solve)),
    (
        "select_and_gather_add select_and_scatter select_and_scatter_add",
        Primitive(rules.window_scatter, holds=Holds.SCALARS),
    ),
    ("scatter scatter-add", replace(_SCATTER, asks_result=False)),
    ("scatter-mul scatter-sub", _SCATTER),
    ("scatter-min scatter-max", replace(_SCATTER, compares=True)),
    # Collectives.
    ("psum psum_invariant", replace(_REDUCED_BY_ALL, linear=True)),
    ("pmax pmin", _REDUCED_BY_ALL),
    ("all_gather all_gather_invariant all_gather_reduced reduce_scatter", _COLLECTIVE),
    ("all_to_all ragged_all_to_all ppermute", _COLLECTIVE),
    ("pbroadcast", replace(_COLLECTIVE, flops=rules.free)),
    # What holds programs.
    ("jit pjit closed_call core_call eval_jaxpr", _CALL),
    ("checkpoint remat remat2", _CHECKPOINT),
    ("run_state", Primitive(holds=Holds.STATE)),
    ("custom_jvp_call", _RULE),
    ("custom_vjp_call", replace(_RULE, backward_rule=True)),
    ("CustomVJPTraced", Primitive(backward_rule=True)),  # a jax.custom_vjp under the flag jax_custom_vjp3
    ("scan", replace(_LOOP, runs=rules.each_iteration)),
    ("while", replace(_LOOP, opaque=True, runs=turns.said)),
    ("cond", Primitive(holds=Holds.BRANCHES, asks_result=False)),
    ("shard_map", Primitive(holds=Holds.MAPPED, asks_result=False)),
    ("pallas_call", Primitive(opaque=True, runs=rules.each_block)),
    ("custom_lin custom_linear_solve", Primitive(holds=Holds.SCALARS, opaque=True)),
)

TABLE: Mapping[str, Primitive] = {name: row for names, row in _ROWS for name in names.split()}


def of(primitive: str) -> Primitive:
    """Returns what is known of a primitive, by its name."""
    return TABLE.get(primitive, UNKNOWN)


def is_flat(primitive: str, dtype: Any) -> bool:
    """Returns whether the derivative of an operation is zero for operands of a dtype. From jax 0.12 on the sign of a
    complex number, which is its direction, has a derivative.
    """
    return of(primitive).flat and not (primitive == "sign" and jnp.issubdtype(dtype, jnp.complexfloating))


def is_linear_in(primitive: str, place: int, dtype: Any) -> bool:
    """Returns whether an operation is linear in the operand at a place, one of a dtype, the others held fixed. The
    quotient of integers is not: it is rounded.
    """
    rounded = primitive == "div" and not jnp.issubdtype(dtype, jnp.inexact)
    return place in of(primitive).linear_in and not rounded


def holding(*kinds: Holds) -> frozenset[str]:
    """Returns the names of the primitives that hold programs of these kinds."""
    return frozenset(name for name, row in TABLE.items() if row.holds in kinds)


def flops(primitive: str, inputs: Avals, outputs: Avals, params: Mapping[str, Any]) -> int:
    """Returns the FLOPs of one execution of an operation that holds no programs.

    Args:
      primitive: the name of JAX's primitive.
      inputs, outputs: abstract values of the operands and results.
      params: the equation's parameters.
    """
    return of(primitive).flops(inputs, outputs, params)


def is_same(primitive: str, params: Mapping[str, Any], dtype: Any) -> bool:
    """Whether an operation's results are its operands, and nothing is computed or moved in the compiled program.

    So it is with barriers and copies, and with the rounding of a value to its own type that `jax.checkpoint` puts on
    what it keeps: XLA takes both away.

    Args:
      primitive, params: the operation's.
      dtype: that of its first result.
    """
    if primitive == "reduce_precision":
        info = jnp.finfo(dtype)
        return (params["exponent_bits"], params["mantissa_bits"]) == (info.nexp, info.nmant)
    return of(primitive).result is Result.SAME


def altogether(primitive: str, params: Mapping[str, Any], each: Sequence[float]) -> float:
    """Returns what an operation takes that holds programs: of branches that of the dearest, of a while loop that of one
    iteration, unless it is one of `jaxckpt.core.turns`.

    Args:
      primitive, params: the operation's.
      each: what one run of each of its programs takes.
    """
    facts = of(primitive)
    return max(each) if facts.holds is Holds.BRANCHES else facts.runs(params) * sum(each)
