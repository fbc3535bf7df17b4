"""How an axis passes through gathers and scatters: as a batch, with the indices, or along a window that is whole.

What the rows of a tile add to a whole value, as the gradient of an embedding or a histogram does, is a sum over the
axis.
"""

from __future__ import annotations

from typing import Any

from jaxckpt import _compat
from jaxckpt.core.tiling.axes import one_place, rule, sized
from jaxckpt.core.tiling.shares import SUM, WHOLE, Axis, CoupledError, Kind, Passage, Share, rows, shape_of

_BY_ROW = "For entries of each row write jnp.take_along_axis(x, places[:, None], -1), or tile another axis."


@rule("gather")
def _gather(eqn: Any, shares: list[Share], axis: Axis) -> Passage:
    operand, indices = shares
    numbers, sizes = eqn.params["dimension_numbers"], eqn.params["slice_sizes"]
    batching, pairs = numbers.operand_batching_dims, numbers.start_indices_batching_dims
    places = [dim for dim in range(len(shape_of(eqn.outvars[0]))) if dim not in numbers.offset_dims]
    shape = shape_of(eqn.invars[0])
    if operand.kind is Kind.ROWS and operand.dim not in batching:
        window = [dim for dim in range(len(shape)) if dim not in (*numbers.collapsed_slice_dims, *batching)]
        dim = operand.dim
        if indices != WHOLE or dim not in window or dim in numbers.start_index_map or sizes[dim] != shape[dim]:
            raise CoupledError("picks rows along the axis", _BY_ROW)
        out = rows(numbers.offset_dims[window.index(dim)], operand.block)
        return Passage(shares, [out], sized("slice_sizes", sizes, operand))
    if operand.kind is Kind.ROWS:
        share = rows(pairs[list(batching).index(operand.dim)], operand.block)
        if indices not in (WHOLE, share):
            raise CoupledError("picks rows along the axis", _BY_ROW)
        return Passage([operand, share], [rows(places[share.dim], share.block)])
    if indices.dim == len(shape_of(eqn.invars[1])) - 1:
        raise CoupledError("takes the axis for the parts of an index")
    if indices.dim in pairs:
        operand = rows(batching[list(pairs).index(indices.dim)], indices.block)
    return Passage([operand, indices], [rows(places[indices.dim], indices.block)])


@rule("scatter", "scatter-add", "scatter-sub", "scatter-mul", "scatter-min", "scatter-max")
def _scatter(eqn: Any, shares: list[Share], axis: Axis) -> Passage:
    numbers = eqn.params["dimension_numbers"]
    operand_shape, indices_shape, updates_shape = map(shape_of, eqn.invars)
    batching, pairs = numbers.operand_batching_dims, numbers.scatter_indices_batching_dims
    free = [dim for dim in range(len(operand_shape)) if dim not in (*numbers.inserted_window_dims, *batching)]
    places = [dim for dim in range(len(updates_shape)) if dim not in numbers.update_window_dims]
    block = one_place([rows(0, share.block) for share in shares if share.kind is Kind.ROWS]).block

    def by_operand(dim: int) -> list[Share]:
        if dim in batching:
            index = pairs[list(batching).index(dim)]
            return [rows(dim, block), rows(index, block), rows(places[index], block)]
        update = numbers.update_window_dims[free.index(dim)] if dim in free else None
        if update is None or dim in numbers.scatter_dims_to_operand_dims or operand_shape[dim] != updates_shape[update]:
            raise CoupledError("writes rows along the axis")
        return [rows(dim, block), WHOLE, rows(update, block)]

    def by_index(dim: int) -> list[Share]:
        if dim == len(indices_shape) - 1:
            raise CoupledError("takes the axis for the parts of an index")
        if dim in pairs:
            return by_operand(batching[list(pairs).index(dim)])
        if _compat.primitive_name(eqn) != "scatter-add":
            raise CoupledError("writes what all rows have into one value")
        return [SUM, rows(dim, block), rows(places[dim], block)]

    def by_update(dim: int) -> list[Share]:
        sliding = list(numbers.update_window_dims)
        return by_operand(free[sliding.index(dim)]) if dim in sliding else by_index(places.index(dim))

    finders = (by_operand, by_index, by_update)
    found = [find(share.dim) for find, share in zip(finders, shares) if share.kind is Kind.ROWS]
    wants = found[0]
    if any(each != wants for each in found) or any(own not in (WHOLE, want) for own, want in zip(shares, wants)):
        raise CoupledError("joins values that have the axis in different places")
    return Passage(wants, [wants[0]])
