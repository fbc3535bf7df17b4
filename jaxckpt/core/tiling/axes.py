"""How an axis passes through the operations that hold no programs: one rule a primitive.

The rules are those by which compilers partition programs over devices (Xu et al., "GSPMD", 2021): a tile is to a tiled
program what a device is to a partitioned one, and a sum over tiles is an all-reduce. Elementwise operations are told by
the table of `core/primitives.py`. An operation without a rule couples.

A rule takes an equation, what a tile has of its operands, and the axis. It returns a `Passage`, or raises
`CoupledError`. It is asked where at least one operand has the axis, and none is a sum over it. What is done with sums
is `linear`'s.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxckpt import _compat
from jaxckpt.core import primitives
from jaxckpt.core.tiling.shares import (
    SUM,
    WHOLE,
    At,
    Axis,
    CoupledError,
    Kind,
    Passage,
    Share,
    holds_all,
    is_differentiable,
    rows,
    shape_of,
)

_Rule = Callable[[Any, list[Share], Axis], Passage]

RULES: dict[str, _Rule] = {}
"""Primitive -> its rule."""

MIXED: set[str] = set()
"""Primitives whose rules also take sums over the axis."""


def rule(*names: str, mixed: bool = False) -> Callable[[_Rule], _Rule]:
    """Returns a decorator that notes a rule for primitives; `mixed`: it takes sums over the axis, too."""

    def note(fun: _Rule) -> _Rule:
        RULES.update(dict.fromkeys(names, fun))
        MIXED.update(names if mixed else ())
        return fun

    return note


def passage(eqn: Any, shares: list[Share], axis: Axis) -> Passage:
    """Returns how the axis passes through an equation.

    Args:
      eqn: the equation.
      shares: what a tile has of its operands; one at least is not WHOLE.
      axis: the axis.

    Raises:
      CoupledError: it couples rows.
    """
    name = _compat.primitive_name(eqn)
    kinds = {share.kind for share in shares}
    found = RULES.get(name)
    if Kind.SUM in kinds and name not in MIXED:
        if Kind.ROWS in kinds:
            raise CoupledError("joins rows with a sum over all rows")
        return linear(name, eqn, shares)
    if found is not None:
        return found(eqn, shares, axis)
    if primitives.of(name).elementwise:
        return elementwise(eqn, shares)
    if not any(is_differentiable(var.aval.dtype) for var in eqn.outvars):
        program = _compat.expansion(eqn)
        if program is not None:  # it has no derivative that could be another one than its program's
            body = axis.follow(program, shares)
            return Passage(shares, body.outs, run=body)
    raise CoupledError("is an operation that tile has no rule for")


# ------------------------------------------------------------------------------------------------ sums, and elementwise


def _data(name: str, eqn: Any) -> Sequence[int]:
    """Returns the places of the operands that an operation moves, in which it is linear together; the others are
    indices. Nothing where it does something else with them, too.
    """
    if name == "gather":
        fills = eqn.params["mode"] == lax.GatherScatterMode.FILL_OR_DROP
        value = eqn.params["fill_value"]
        nan = value is None and is_differentiable(eqn.invars[0].aval.dtype)
        return () if fills and not nan and value != 0 else (0,)
    if name == "scatter":  # of several writes to one place one wins
        once = eqn.params["unique_indices"] or math.prod(shape_of(eqn.invars[1])[:-1]) == 1
        return (0, 2) if once else ()
    if name == "dynamic_slice":
        return (0,)
    if name == "dynamic_update_slice":
        return (0, 1)
    return (0, 2) if name == "scatter-add" else ()


def linear(name: str, eqn: Any, shares: list[Share]) -> Passage:
    """Returns the passage of sums over the axis through an operation that is linear in them."""
    outs = [SUM] * len(eqn.outvars)
    dtypes = [atom.aval.dtype for atom in (*eqn.invars, *eqn.outvars)]
    sums = [share.kind is Kind.SUM for share in shares]
    if name == "convert_element_type":
        if all(map(is_differentiable, dtypes)) and holds_all(dtypes[1], dtypes[0]):
            return Passage([SUM], outs)
    elif primitives.of(name).linear:
        return Passage([SUM] * len(shares), outs)
    elif moved := _data(name, eqn):
        if not any(flag for place, flag in enumerate(sums) if place not in moved):
            return Passage([SUM if place in moved else share for place, share in enumerate(shares)], outs)
    elif name == "select_n" and not sums[0]:
        return Passage([WHOLE, *[SUM] * (len(shares) - 1)], outs)
    elif sum(sums) == 1 and primitives.is_linear_in(name, place := sums.index(True), dtypes[place]):
        return Passage(shares, outs)
    raise CoupledError("needs the whole sum over the axis")


def elementwise(eqn: Any, shares: list[Share]) -> Passage:
    """Returns the passage through an elementwise operation, whose operands may have a 1 in place of a size."""
    share = one_place(shares)
    shape = shape_of(eqn.outvars[0])
    wants = []
    for atom, own in zip(eqn.invars, shares):
        there = shape_of(atom)
        has_axis = len(there) == len(shape) and there[share.dim] == shape[share.dim]
        if own.kind is Kind.ROWS and not has_axis:
            raise CoupledError("broadcasts along the axis")
        wants.append(share if has_axis else WHOLE)
    return Passage(wants, [share] * len(eqn.outvars))


def one_place(shares: Sequence[Share]) -> Share:
    """Returns the place of the axis in the operands that have it."""
    found = {share for share in shares if share.kind is Kind.ROWS}
    if len(found) > 1:
        raise CoupledError("joins values that have the axis in different places")
    return found.pop()


def _aligned(eqn: Any, shares: list[Share]) -> tuple[Share, list[Share]]:
    """Returns the place of the axis in operands that all have it there, and what to take of each."""
    share = one_place(shares)
    return share, [share if shape_of(atom) else WHOLE for atom in eqn.invars]


def sized(name: str, sizes: Sequence[int], share: Share) -> Callable[[At], dict[str, Any]]:
    """Returns the parameter that is a shape, in a tile."""
    return lambda at: {name: at.sized(sizes, share)}


# ----------------------------------------------------------------------------------------------------- what moves data


@rule("broadcast_in_dim")
def _broadcast(eqn: Any, shares: list[Share], axis: Axis) -> Passage:
    share = shares[0]
    shape, dims = eqn.params["shape"], eqn.params["broadcast_dimensions"]
    out = rows(dims[share.dim], share.block)
    if shape[out.dim] != shape_of(eqn.invars[0])[share.dim]:
        raise CoupledError("broadcasts along the axis")
    return Passage([share], [out], sized("shape", shape, out))


@rule("reshape")
def _reshape(eqn: Any, shares: list[Share], axis: Axis) -> Passage:
    share, shape, sizes = shares[0], shape_of(eqn.invars[0]), eqn.params["new_sizes"]
    below = share.block
    for size in shape[share.dim + 1 :]:
        below *= size
    after = 1
    if eqn.params["dimensions"] is not None:
        raise CoupledError("reorders dimensions in a reshape")
    if 0 in sizes:
        raise CoupledError("makes an array without elements")
    for dim in reversed(range(len(sizes))):
        if below % after == 0 and sizes[dim] and sizes[dim] % (axis.size * (below // after)) == 0:
            out = rows(dim, below // after)
            return Passage([share], [out], sized("new_sizes", sizes, out))
        after *= sizes[dim]
    raise CoupledError("splits the axis into several dimensions", "Split it before, and tile the outer part.")


@rule("squeeze")
def _squeeze(eqn: Any, shares: list[Share], axis: Axis) -> Passage:
    share = shares[0]
    return Passage([share], [_without(share, eqn.params["dimensions"], len(shape_of(eqn.invars[0])))])


def _without(share: Share, dims: Sequence[int], rank: int) -> Share:
    """Returns the place of the axis when other dimensions are gone."""
    gone = {dim % rank for dim in dims}
    return rows(share.dim - sum(dim < share.dim for dim in gone), share.block)


@rule("transpose")
def _transpose(eqn: Any, shares: list[Share], axis: Axis) -> Passage:
    share = shares[0]
    return Passage([share], [rows(list(eqn.params["permutation"]).index(share.dim), share.block)])


@rule("slice")
def _slice(eqn: Any, shares: list[Share], axis: Axis) -> Passage:
    share, params = shares[0], eqn.params
    dim, shape = share.dim, shape_of(eqn.invars[0])
    stride = 1 if params["strides"] is None else params["strides"][dim]
    if (params["start_indices"][dim], params["limit_indices"][dim], stride) != (0, shape[dim], 1):
        raise CoupledError("takes a slice of the axis")
    return Passage([share], [share], sized("limit_indices", params["limit_indices"], share))


@rule("dynamic_slice")
def _dynamic_slice(eqn: Any, shares: list[Share], axis: Axis) -> Passage:
    share, sizes = shares[0], eqn.params["slice_sizes"]
    if sizes[share.dim] != shape_of(eqn.invars[0])[share.dim]:
        raise CoupledError("takes a slice of the axis")
    return Passage(shares, [share], sized("slice_sizes", sizes, share))


@rule("dynamic_update_slice")
def _dynamic_update_slice(eqn: Any, shares: list[Share], axis: Axis) -> Passage:
    share = one_place(shares[:2])
    if shape_of(eqn.invars[0])[share.dim] != shape_of(eqn.invars[1])[share.dim]:
        raise CoupledError("writes a slice of the axis")
    return Passage([share, share, *shares[2:]], [share])


@rule("concatenate", "stack")
def _join(eqn: Any, shares: list[Share], axis: Axis) -> Passage:
    share = one_place(shares)
    params = eqn.params
    if "dimension" in params:
        if params["dimension"] == share.dim:
            raise CoupledError("concatenates along the axis")
        return Passage([share] * len(shares), [share])
    out = rows(share.dim + (params["axis"] <= share.dim), share.block)
    return Passage([share] * len(shares), [out])


@rule("split", "unstack")
def _split(eqn: Any, shares: list[Share], axis: Axis) -> Passage:
    share, along = shares[0], eqn.params["axis"]
    if along == share.dim:
        raise CoupledError("splits the axis")
    if len(shape_of(eqn.outvars[0])) < len(shape_of(eqn.invars[0])):
        return Passage([share], [_without(share, [along], share.dim + along + 1)] * len(eqn.outvars))
    return Passage([share], [share] * len(eqn.outvars))


@rule("tile")
def _tile(eqn: Any, shares: list[Share], axis: Axis) -> Passage:
    return Passage(shares, shares)  # a repeated axis is in its dimension several times


@rule("pad")
def _pad(eqn: Any, shares: list[Share], axis: Axis) -> Passage:
    share = shares[0]
    if tuple(eqn.params["padding_config"][share.dim]) != (0, 0, 0):
        raise CoupledError("pads the axis")
    return Passage(shares, [share])


@rule("rev")
def _rev(eqn: Any, shares: list[Share], axis: Axis) -> Passage:
    if shares[0].dim in eqn.params["dimensions"]:
        raise CoupledError("reverses the axis")
    return Passage(shares, shares)


@rule("optimization_barrier", "jaxckpt_tie", "psum", "psum_invariant", "pvary", mixed=True)
def _each_by_itself(eqn: Any, shares: list[Share], axis: Axis) -> Passage:
    return Passage(shares, shares)


def is_each_by_itself(eqn: Any) -> bool:
    """Whether an equation makes each of its results of one operand."""
    return RULES.get(_compat.primitive_name(eqn)) is _each_by_itself


@rule("device_put", mixed=True)
def _to_a_memory(eqn: Any, shares: list[Share], axis: Axis) -> Passage:
    if not all(place is None or isinstance(place, jax.memory.Space) for place in eqn.params["devices"]):
        raise CoupledError("places the whole array on devices")
    return Passage(shares, shares)


@rule("jaxckpt_start_of_backward", mixed=True)
def _start_of_backward(eqn: Any, shares: list[Share], axis: Axis) -> Passage:
    return Passage(shares, [WHOLE, *shares])  # a number, and what goes in


@rule("jaxckpt_hold_on_host", mixed=True)
def _hold_on_host(eqn: Any, shares: list[Share], axis: Axis) -> Passage:
    return Passage(shares, shares[:1])


@rule("pmax", "pmin", "ppermute", "pbroadcast")
def _between_devices(eqn: Any, shares: list[Share], axis: Axis) -> Passage:
    return Passage(shares, shares)


# --------------------------------------------------------------------------------------- reductions, and along one axis


@rule("reduce_sum")
def _reduce_sum(eqn: Any, shares: list[Share], axis: Axis) -> Passage:
    share, dims = shares[0], eqn.params["axes"]
    if share.dim in dims:
        return Passage(shares, [SUM])
    return Passage(shares, [_without(share, dims, len(shape_of(eqn.invars[0])))])


@rule("reduce_max", "reduce_min", "reduce_prod", "reduce_and", "reduce_or", "reduce_xor", "argmax", "argmin", "reduce")
def _reduce(eqn: Any, shares: list[Share], axis: Axis) -> Passage:
    share, wants = _aligned(eqn, shares)
    dims = eqn.params["axes"] if "axes" in eqn.params else eqn.params["dimensions"]
    if share.dim in dims:
        raise CoupledError("reduces over the axis, and is not a sum")
    out = _without(share, dims, len(shape_of(eqn.invars[0])))
    return Passage(wants, [out] * len(eqn.outvars))


@rule("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp", "sort", "top_k")
def _along(eqn: Any, shares: list[Share], axis: Axis) -> Passage:
    share, wants = _aligned(eqn, shares)
    last = len(shape_of(eqn.invars[0])) - 1
    along = eqn.params["dimension"] if "dimension" in eqn.params else eqn.params.get("axis", last)
    if share.dim == along:
        raise CoupledError("runs along the axis")
    return Passage(wants, [share] * len(eqn.outvars))


@rule("reduce_window", "reduce_window_sum", "reduce_window_max", "reduce_window_min")
def _windows(eqn: Any, shares: list[Share], axis: Axis) -> Passage:
    share, wants = _aligned(eqn, shares)
    params, dim = eqn.params, share.dim
    ones = [params[name][dim] for name in ("window_dimensions", "window_strides", "base_dilation", "window_dilation")]
    if set(ones) != {1} or tuple(params["padding"][dim]) != (0, 0):
        raise CoupledError("has a window that spans several rows")
    return Passage(wants, [share] * len(eqn.outvars))


@rule("triangular_solve")
def _triangular(eqn: Any, shares: list[Share], axis: Axis) -> Passage:
    sides = len(shape_of(eqn.invars[1])) - (1 if eqn.params["left_side"] else 2)
    if shares[0] == WHOLE and shares[1].dim == sides:  # one matrix, and right sides that are rows of the axis
        return Passage(shares, [shares[1]])
    return _matrices(eqn, shares, axis)


@rule("cholesky", "lu", "qr", "geqrf", "householder_product", "eigh", "svd", "eig")
def _matrices(eqn: Any, shares: list[Share], axis: Axis) -> Passage:
    return _leading(eqn, shares, 2, "works on matrices that the axis is a dimension of")


@rule("fft")
def _fft(eqn: Any, shares: list[Share], axis: Axis) -> Passage:
    return _leading(eqn, shares, len(eqn.params["fft_lengths"]), "transforms along the axis")


def _leading(eqn: Any, shares: list[Share], own: int, why: str) -> Passage:
    """Returns the passage of a leading axis through what works on each of the last `own` dimensions of its first
    operand; the others have the same leading axes.
    """
    share = one_place(shares)
    if share.dim >= len(shape_of(eqn.invars[0])) - own:
        raise CoupledError(why)
    return Passage([share] * len(shares), [share] * len(eqn.outvars))


@rule("random_bits", "random_split", "random_wrap", "random_unwrap", "random_seed", "bitcast_convert_type")
def _kept_in_place(eqn: Any, shares: list[Share], axis: Axis) -> Passage:
    share = shares[0]
    kinds = {str(atom.aval.dtype) for atom in (*eqn.invars, *eqn.outvars)}
    if any(kind.startswith("key<") and kind != "key<fry>" for kind in kinds):
        raise CoupledError("draws for many keys at once, where other keys than threefry's may share what they draw")
    shapes = shape_of(eqn.invars[0]), shape_of(eqn.outvars[0])
    if share.dim >= min(map(len, shapes)) or shapes[0][share.dim] != shapes[1][share.dim]:
        raise CoupledError("turns the axis into another one")
    return Passage(shares, [share])


# ------------------------------------------------------------------------------------------------------------- products


@rule("dot_general")
def _dot(eqn: Any, shares: list[Share], axis: Axis) -> Passage:
    contract, batch = eqn.params["dimension_numbers"]
    moving = [place for place, share in enumerate(shares) if share.kind is Kind.ROWS]
    here = moving[0]
    share, there = shares[here], 1 - here
    for pairs, kind in ((batch, "batch"), (contract, "sum")):
        if share.dim in pairs[here]:
            place = list(pairs[here]).index(share.dim)
            other = rows(pairs[there][place], share.block)
            if shares[there] not in (WHOLE, other):
                raise CoupledError("multiplies values that have the axis in different places")
            wants = [share, other] if here == 0 else [other, share]
            return Passage(wants, [rows(place, share.block) if kind == "batch" else SUM])
    if len(moving) > 1:
        raise CoupledError("multiplies each row with each row", "Give one of both whole: None in in_axes.")
    gone = [*contract[here], *batch[here]]
    dim = len(batch[0]) + _without(share, gone, len(shape_of(eqn.invars[here]))).dim
    if here == 1:
        dim += len(shape_of(eqn.invars[0])) - len(contract[0]) - len(batch[0])
    return Passage(shares, [rows(dim, share.block)])


@rule("conv_general_dilated")
def _conv(eqn: Any, shares: list[Share], axis: Axis) -> Passage:
    numbers = eqn.params["dimension_numbers"]
    if shares[1].kind is not Kind.WHOLE or eqn.params["batch_group_count"] != 1:
        raise CoupledError("has the axis in its kernel, or groups the batch")
    if shares[0].dim != numbers.lhs_spec[0]:
        raise CoupledError("has the axis in what it slides over, or contracts over")
    return Passage(shares, [rows(numbers.out_spec[0], shares[0].block)])


# ----------------------------------------------------------------------------- whole values, of which a tile takes rows


def narrowed(eqn: Any, share: Share, axis: Axis) -> Passage | None:
    """Returns how a tile makes its own rows of a whole value, from less than the value; None where it takes a slice.

    Masks and broadcast biases are as large as what they are used with. Made tile by tile they are never whole in
    memory.

    Args:
      eqn: the equation that makes the value.
      share: what the tile wants of it.
      axis: the axis.
    """
    name, out = _compat.primitive_name(eqn), [share]
    if name == "broadcast_in_dim":
        shape, dims = eqn.params["shape"], list(eqn.params["broadcast_dimensions"])
        want = WHOLE
        if share.dim in dims:
            dim = dims.index(share.dim)
            want = rows(dim, share.block) if shape_of(eqn.invars[0])[dim] == shape[share.dim] else WHOLE
        return Passage([want], out, sized("shape", shape, share))
    if name == "iota":
        shape = eqn.params["shape"]
        if eqn.params["dimension"] != share.dim:
            return Passage([], out, sized("shape", shape, share))
        if share.block != 1 or shape[share.dim] != axis.size:
            return None

        def count(at: At, operands: list[Any]) -> list[Any]:
            # A narrow dtype would round the start and what is added to it.
            counted = at.numbers().astype(eqn.params["dtype"])
            wide = [at.size if dim == share.dim else 1 for dim in range(len(shape))]
            return [jnp.broadcast_to(counted.reshape(wide), at.sized(shape, share))]

        return Passage([], out, run=count)
    if primitives.of(name).elementwise and len(eqn.outvars) == 1 and eqn.invars:
        shape = shape_of(eqn.outvars[0])
        wants = []
        for atom in eqn.invars:
            there = shape_of(atom)
            has_axis = len(there) == len(shape) and there[share.dim] == shape[share.dim]
            wants.append(share if has_axis else WHOLE)
        return Passage(wants, out)
    return None
