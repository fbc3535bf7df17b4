"""The parts of Flax that jaxckpt needs beyond the documented interface: the table, the probe, and the names. Imported
only with Flax.

Supported: flax 0.12 and later; developed against 0.12.8 (with jax 0.10.2) and 0.12.12 (with jax 0.12.0.1).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jax

from jaxckpt._compat.needs import Need, check, unsupported
from jaxckpt._compat.traces import alone

KNOWN = ("0.12.8", "0.12.12")
"""Versions of flax that the tests run with."""

_SPLICED = ("ref_index", "ref_outer_index", "with_paths", "graph")

NEEDS: tuple[Need, ...] = (
    # Linen: a call is lifted to a function of variables, as in `nn.remat`.
    Need(
        "flax.core.lift.pack",
        "lift calls of linen modules",
        positional=("fn", "in_variable_filters", "out_variable_filters", "rng_filters"),
        keywords=("name", "enable_kwargs"),
    ),
    Need("flax.linen.transforms.decorator_lift_transform", "lift calls of linen modules", positional=2),
    Need("flax.linen.module.wrap_method_once", "make methods of linen modules", positional=1),
    Need("flax.linen.module._context", "call a linen module that is being called", has=("module_stack",)),
    Need("flax.linen.Module", "set up copies of linen modules", has=("_try_setup",)),
    Need("flax.ids.uuid", "tell copies of linen modules apart", positional=0),
    Need(
        "flax.core.scope.Scope",
        "draw the random numbers of unrolled layers",
        positional=3,
        has=("has_rng",),
    ),
    Need("flax.core.scope.Scope.push", "draw the random numbers of unrolled layers", positional=4),
    Need("flax.core.scope.Scope.rewound", "draw the random numbers of unrolled layers", positional=2),
    Need("flax.core.scope.Scope.make_rng", "draw the random numbers of unrolled layers", positional=2),
    Need(
        "flax.core.scope.LazyRng",
        "draw the random numbers of unrolled layers",
        positional=2,
        has=("rng", "suffix", "as_jax_rng"),
    ),
    Need("flax.config.flax_fix_rng_separator", "draw the random numbers of unrolled layers"),
    Need("flax.core.meta.add_axis", "stack partitioned variables", positional=3),
    Need("flax.core.meta.remove_axis", "stack partitioned variables", positional=3),
    Need("flax.linen.PARTITION_NAME", "stack partitioned variables"),
    # Nnx: modules are graphs of objects, as in `nnx.remat`.
    Need("flax.nnx.flatten", "take modules apart", positional=1, keywords=_SPLICED),
    Need(
        "flax.nnx.unflatten",
        "put modules together",
        positional=2,
        keywords=("index_ref", "outer_index_outer_ref"),
    ),
    Need("flax.nnx.Variable", "read and set Variables", has=("ref", "hijax", "get_raw_value", "set_raw_value")),
    Need("flax.nnx.GraphDef", "compare modules", has=("with_same_outer_index",)),
    Need("flax.nnx.Module", "make subclasses of modules", has=("_pytree__is_pytree",)),
    Need("flax.nnx.graphlib.is_node_module", "find modules among arguments", positional=1),
    Need("flax.nnx.graphlib.RefMap", "take modules apart", positional=0, has=("from_indexmap",)),
    Need("flax.nnx.graphlib.IndexMap", "put modules together", positional=0, has=("from_refmap",)),
    Need("flax.nnx.spmd.add_axis", "stack partitioned Variables", positional=3),
    Need("flax.nnx.spmd.remove_axis", "stack partitioned Variables", positional=3),
)


def probe(needs: Iterable[Need] = NEEDS) -> None:
    """Checks the table, and that `is_wrapped` finds the methods that Flax has wrapped.

    Raises:
      UnsupportedJaxError: the installed Flax lacks a part, or has it in another form.
    """
    for need in needs:
        check(need, "flax", KNOWN)
    from flax.linen.module import wrap_method_once

    if not is_wrapped(wrap_method_once(lambda self: None)):
        why, found = "find the methods of linen modules", "does not mark what it returns with method_handler_wrapped"
        raise unsupported("flax.linen.module.wrap_method_once", why, found, "flax", KNOWN)


def is_wrapped(fun: Any) -> bool:
    """Returns whether Flax has wrapped a method of a linen module."""
    return hasattr(fun, "method_handler_wrapped")


def mark_wrapped(fun: Any) -> None:
    """Marks a method as wrapped by Flax."""
    fun.method_handler_wrapped = True


probe()

from flax import config as config  # noqa: E402 (the probe comes first)
from flax import nnx  # noqa: E402
from flax.core import meta  # noqa: E402
from flax.core.lift import pack as pack  # noqa: E402
from flax.core.scope import LazyRng as LazyRng  # noqa: E402
from flax.core.scope import Scope as Scope  # noqa: E402
from flax.ids import uuid as uuid  # noqa: E402
from flax.linen import PARTITION_NAME as PARTITION_NAME  # noqa: E402
from flax.linen import module as _module  # noqa: E402
from flax.linen.module import wrap_method_once as wrap_method_once  # noqa: E402
from flax.linen.transforms import decorator_lift_transform as decorator_lift_transform  # noqa: E402
from flax.nnx import graphlib, spmd  # noqa: E402

NnxModule = nnx.Module
RefMap, IndexMap = graphlib.RefMap, graphlib.IndexMap
is_node_module = graphlib.is_node_module
add_variable_axis, remove_variable_axis = spmd.add_axis, spmd.remove_axis
add_axis, remove_axis = meta.add_axis, meta.remove_axis


def is_pytree(module_class: Any) -> bool:
    """Returns whether an nnx module class is a pytree. Its subclasses need this as an argument."""
    return bool(module_class._pytree__is_pytree)


def set_up(module: Any) -> None:
    """Runs a linen module's `setup`, if it has not run."""
    module._try_setup()


@contextmanager
def being_called(module: Any) -> Iterator[None]:
    """A context in which a module is the one that linen is calling."""
    _module._context.module_stack.append(module)
    try:
        yield
    finally:
        _module._context.module_stack.pop()


def check_word(word: Callable[[Sequence[str | int]], int]) -> None:
    """Checks that `word` returns the number that linen folds into a key for a path of names and a count.

    Raises:
      UnsupportedJaxError: linen folds in another number, so a stack of layers would draw other numbers than unrolled
        layers.
    """
    _check_word(word, bool(config.flax_fix_rng_separator))


@functools.cache
def _check_word(word: Callable[[Sequence[str | int]], int], separator: bool) -> None:
    path = ("layer", 258)
    with alone():
        key = jax.eval_shape(lambda: jax.random.key(0))
        theirs = jax.make_jaxpr(lambda key: LazyRng(key, path).as_jax_rng())(key)
        ours = jax.make_jaxpr(lambda key: jax.random.fold_in(key, jax.numpy.uint32(word(path))))(key)
    if str(theirs) != str(ours):
        why, found = "draw the random numbers of unrolled layers", "folds another number into its keys"
        raise unsupported("flax.core.scope.LazyRng.as_jax_rng", why, found, "flax", KNOWN)
