"""Lifts a call of anything to a call of arrays. Other leaves are passed around it, and state is put back once.

All that is planned, checkpointed or compiled is a function of arrays that may be traced more than once. A user's call
may be neither: there are strings and functions among the leaves of its arguments, and modules of nnx whose Variables it
changes. So `take` takes a call apart: into a function of arrays, the arrays, and what makes the call's result of that
function's.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import jax

from jaxckpt import _compat
from jaxckpt._errors import ArgumentError, InWords, JaxckptError
from jaxckpt.core import graph as graphs
from jaxckpt.core.argument_names import leaf_name, named_leaves, positional
from jaxckpt.core.graph import Graph
from jaxckpt.core.leaves import Whole, is_array, is_given, is_number, is_operand, numbers_of_modules
from jaxckpt.core.typed import typed

T = TypeVar("T")


def _is_no_bool(x: Any) -> bool:
    return is_operand(x) and not isinstance(x, bool)


VALUE_NEEDED = (TypeError, jax.errors.NonConcreteBooleanIndexError)
"""What a function raises that needs the value of a number that is traced; see `is_value_needed`."""


def is_value_needed(error: Exception, *args: Any) -> bool:
    """Whether a function raised it because it needs the value of a number: of a jitted one, a static argument. Whether
    it may be, where modules of equinox with numbers are among its arguments.
    """
    return (
        isinstance(error, VALUE_NEEDED)
        or "Non-hashable static arguments" in str(error)
        or (not isinstance(error, JaxckptError) and any(numbers_of_modules(args)))
    )


def title(fun: Callable[..., Any]) -> str:
    """Returns what to call a function in messages: "Block.__call__"."""
    return getattr(fun, "__qualname__", None) or type(fun).__qualname__


@dataclass(frozen=True)
class Spec:
    """All of some operands but their arrays.

    Attributes:
      trees: operand, its structure, the labels of its leaves.
      constants: label -> leaf, of the leaves that are no arrays; compared by type and value.
    """

    trees: tuple[tuple[str, Any, tuple[str, ...]], ...]
    constants: tuple[tuple[str, Any], ...] = field(compare=False)
    key: Any = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "key", typed(self.constants))


def spread(operands: Mapping[str, Any], traced: Callable[[Any], bool] = is_array) -> tuple[dict[str, Any], Spec]:
    """Returns the arrays in operands, by label ("x['mask']"), and what else there is.

    Args:
      operands: name -> pytree of anything.
      traced: whether a leaf counts as an array.
    """
    leaves: dict[str, Any] = {}
    trees = []
    for operand, tree in operands.items():
        paths, structure = jax.tree_util.tree_flatten_with_path(tree)
        labels = tuple(operand + jax.tree_util.keystr(path) for path, _ in paths)
        leaves.update(zip(labels, (leaf for _, leaf in paths), strict=True))
        trees.append((operand, structure, labels))
    arrays = {label: leaf for label, leaf in leaves.items() if traced(leaf)}
    return arrays, Spec(tuple(trees), tuple((label, leaf) for label, leaf in leaves.items() if label not in arrays))


class Lifted:
    """A function of operands as a function of arrays.

    Operands that come out unchanged, as parameters do, are no results of the function of arrays: they would only be
    copied. Results that are no arrays are remembered from the trace.

    Args:
      fun: takes the operands, returns a pytree. May be traced more than once, so it must change nothing outside.
      spec: of the operands.
      name: of the function, for messages.

    Attributes:
      of_arrays: takes arrays by label, returns the list of what is computed.
      results: what the last trace says of the result, besides the arrays that are computed; None before.
    """

    def __init__(self, fun: Callable[[dict[str, Any]], Any], spec: Spec, name: str) -> None:
        self.name, self.spec, self._fun = name, spec, fun
        self.results: tuple[Any, list[tuple[str, Any]]] | None = None

        def of_arrays(arguments: dict[str, Any]) -> list[Any]:
            out = fun(self.operands(arguments))
            values, structure = jax.tree.flatten(out)
            unchanged = {id(array): label for label, array in arguments.items()}
            computed: list[Any] = []
            places: list[tuple[str, Any]] = []
            for value in values:
                if id(value) in unchanged:
                    places.append(("operand", unchanged[id(value)]))
                elif _compat.is_tracer(value):
                    places.append(("computed", len(computed)))
                    computed.append(value)
                else:
                    places.append(("constant", value))
            self.results = structure, places
            return computed

        of_arrays.__name__ = of_arrays.__qualname__ = name
        of_arrays.by_label = True  # type: ignore[attr-defined]
        self.of_arrays = of_arrays

    def operands(self, arrays: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the operands, with these arrays in their places."""
        leaves = {**dict(self.spec.constants), **arrays}
        return {key: jax.tree.unflatten(tree, [leaves[k] for k in labels]) for key, tree, labels in self.spec.trees}

    def everything(self, arguments: dict[str, Any]) -> list[Any]:
        """Returns all arrays of the function's result, operands that come out unchanged too."""
        return [leaf for leaf in jax.tree.leaves(self._fun(self.operands(arguments))) if is_array(leaf)]

    def result(self, arrays: Mapping[str, Any], computed: Sequence[Any]) -> Any:
        """Returns the function's result, from what its function of arrays computed of arrays; it was traced before."""
        assert self.results is not None, "the function was not traced"
        structure, places = self.results
        pick: dict[str, Callable[[Any], Any]] = {
            "operand": arrays.__getitem__,
            "computed": computed.__getitem__,
            "constant": lambda constant: constant,
        }
        return jax.tree.unflatten(structure, [pick[kind](place) for kind, place in places])


# ------------------------------------------------------------------------------------------------------------- the call


@dataclass(frozen=True)
class Taken:
    """A call, taken apart.

    Attributes:
      fun, args, kwargs: a function of pytrees of arrays, `jax.ShapeDtypeStruct`s and Python numbers, and its arguments.
      finish: makes the call's result of what `fun` returned, and sets the state that the call changed. `fun` was traced
        before.
      restore: returns the call's own (args, kwargs), the leaves that are arrays replaced by those of such a tuple as
        (`args`, `kwargs`).
      everything: as `fun`, but returns all arrays of the result and of the state, unchanged ones too.
      key: what calls with one program have in common besides the kinds of their arrays and what is constant; may be
        impossible to hash.
      lifted: what `fun` is of; None where the call is itself, for all of its leaves are arrays or numbers.
    """

    fun: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    finish: Callable[[Any], Any]
    restore: Callable[[Any], tuple[tuple[Any, ...], dict[str, Any]]]
    everything: Callable[..., Any]
    key: Any
    lifted: Lifted | None = None

    @property
    def whole(self) -> bool:
        """Whether the call is itself."""
        return self.lifted is None

    def paths(self) -> list[tuple[str, Any]]:
        """Returns the leaves of the arguments, each with its path: "args[0]['w']", "model.layers.0.kernel"."""
        return named_leaves(self.args, self.kwargs) if self.whole else list(self.args[0].items())


def take(
    fun: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    traced: Callable[[Any], bool] = is_operand,
) -> Taken:
    """Takes a call apart.

    Args:
      fun: any function; a bound method of an nnx module, or such a module, too.
      args, kwargs: anything.
      traced: whether a leaf counts as an array.
    """
    nnx = _nnx()
    fun, args = unbound(_hashable(fun), args)
    is_object = nnx.is_object if nnx is not None else None
    flat, tree = jax.tree_util.tree_flatten_with_path((args, kwargs), is_leaf=is_object)
    leaves = [leaf for _, leaf in flat]
    places = [place for place, leaf in enumerate(leaves) if is_object is not None and is_object(leaf)]
    if not places and all(map(traced, leaves)):
        return Taken(fun, args, kwargs, lambda out: out, lambda given: given, fun, tree)

    names = parameters_of(fun, args)
    labels = [leaf_name(path, names) for path, _ in flat]
    rest = [place for place in range(len(leaves)) if place not in set(places)]
    name = lambda path: ".".join((labels[places[path[0]]], *map(str, path[1:])))
    objects = nnx.Objects([leaves[place] for place in places], name) if places else None
    operands = {labels[place]: leaves[place] for place in rest} | ({} if objects is None else objects.operands)
    arrays, spec = spread(operands, traced)

    def merged(operands: dict[str, Any], built: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        values: list[Any] = [None] * len(leaves)
        for place in rest:
            values[place] = operands[labels[place]]
        for place, value in zip(places, built, strict=True):
            values[place] = value
        return jax.tree.unflatten(tree, values)  # type: ignore[no-any-return]

    def inner(operands: dict[str, Any]) -> Any:
        if objects is None:
            inside_args, inside_kwargs = merged(operands, ())
            return fun(*inside_args, **inside_kwargs)
        built, inside = objects.build(operands)
        inside_args, inside_kwargs = merged(operands, built)
        return objects.take_up(built, inside, fun(*inside_args, **inside_kwargs))

    lifted = Lifted(inner, spec, title(fun))

    def finish(computed: Any) -> Any:
        result = lifted.result(arrays, computed)
        return result if objects is None else objects.put_back(result)

    def restore(given: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        operands = lifted.operands(given[0][0])
        return merged(operands, () if objects is None else objects.build(operands)[0])

    key = (tree, tuple(labels), spec.trees, None if objects is None else objects.key)
    return Taken(lifted.of_arrays, (arrays,), {}, finish, restore, lifted.everything, key, lifted)


def _hashable(fun: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the function, or one that calls it where it has no hash, which jax.jit needs: an equinox transform has
    dictionaries in it.
    """
    try:
        hash(fun)
    except TypeError:
        call = functools.wraps(fun, updated=())(lambda *args, **kwargs: fun(*args, **kwargs))
        call.__qualname__ = title(fun)
        return call
    return fun


def unbound(fun: Callable[..., Any], args: tuple[Any, ...]) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Returns a function and its arguments, a module of nnx that it is bound to or is itself among them."""
    nnx = _nnx()
    return (fun, args) if nnx is None else nnx.unbound(fun, args)


def is_jitted(fun: Callable[..., Any]) -> bool:
    """Returns whether a function is what `jax.jit` or a wrapper of it returns, and can be traced by it. A method of
    such a function is none: its `trace` is that of the function, which wants the object too.
    """
    return not isinstance(fun, types.MethodType) and hasattr(fun, "trace") and hasattr(fun, "lower")


def has_objects(tree: Any) -> bool:
    """Returns whether there are objects in a pytree whose state a call may change: modules of nnx, Variables."""
    nnx = _nnx()
    return nnx is not None and any(map(nnx.is_object, jax.tree.leaves(tree, is_leaf=nnx.is_object)))


def is_model(fun: Any) -> bool:
    """Returns whether a function is a callable pytree of arrays, such as a module of equinox or nnx. Its arrays are
    then arguments, and what is made of it stays a pytree of them: in a model, a function would hide them from
    gradients.
    """
    if has_objects(fun):
        return True
    if jax.tree_util.all_leaves([fun]):
        return False
    if any(map(is_array, jax.tree.leaves(fun))):
        return True
    try:
        hash(fun)
    except TypeError:
        return True
    return False


def is_module_class(fun: Any) -> bool:
    """Returns whether a function is a class of flax's modules: what a call of it returns is no array."""
    if not isinstance(fun, type):
        return False
    names = {f"{base.__module__}.{base.__qualname__}" for base in fun.__mro__}
    return bool(names & {"flax.linen.module.Module", "flax.nnx.module.Module"})


def refuse_module(fun: Any, rule: str, hint: str = "") -> None:
    """Raises ArgumentError for a module that cannot be called with arrays: a class, or an instance of linen's without
    its parameters.

    Args:
      fun: a function.
      rule: what it must be.
      hint: what to do; if left out, how to write a function of its parameters.
    """
    linen, equinox = (getattr(sys.modules.get(name), "Module", None) for name in ("flax.linen", "equinox"))
    given = "lambda params, x: model.apply({'params': params}, x)"
    if linen is not None and isinstance(fun, linen) and fun.scope is None:
        instance = InWords(f"an instance of {type(fun).__name__}, which has no parameters")
        raise ArgumentError("fun", rule, instance, hint or f"Pass {given}.")
    if is_module_class(fun) or (equinox is not None and isinstance(fun, type) and issubclass(fun, equinox)):
        call = given if linen is not None and issubclass(fun, linen) else "lambda model, x: model(x)"
        raise ArgumentError("fun", rule, fun, hint or f"It is a class: pass {call}.")


def snapshot(tree: Any) -> tuple[list[Any], Callable[[], None]]:
    """Returns the arrays in a pytree, those in nnx modules too, and a function that puts back what the modules hold."""
    nnx = _nnx()
    leaves = jax.tree.leaves(tree, is_leaf=None if nnx is None else nnx.is_object)
    objects = [leaf for leaf in leaves if nnx is not None and nnx.is_object(leaf)]
    arrays = [leaf for leaf in leaves if isinstance(leaf, jax.Array)]
    if not objects:
        return arrays, lambda: None
    assert nnx is not None
    values, restore = nnx.snapshot(objects)
    return [*arrays, *(leaf for leaf in jax.tree.leaves(values) if isinstance(leaf, jax.Array))], restore


def paths_of(tree: Any) -> dict[tuple[Any, ...], Any]:
    """Returns the leaves of a pytree by path; objects are leaves."""
    nnx = _nnx()
    return dict(jax.tree_util.tree_leaves_with_path(tree, is_leaf=None if nnx is None else nnx.is_object))


def map_leaves(fun: Callable[[Any], Any], tree: Any) -> Any:
    """Returns the pytree with `fun` of its leaves, objects left as they are."""
    nnx = _nnx()
    if nnx is None:
        return jax.tree.map(fun, tree)
    return jax.tree.map(lambda leaf: leaf if nnx.is_object(leaf) else fun(leaf), tree, is_leaf=nnx.is_object)


def attempt(fun: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], use: Callable[[Taken], T]) -> T:
    """Returns `use(call)` of a call that is taken apart: with Python's bools and numbers as arrays, as JAX has it. If
    the function needs their values (`if train:`, `range(n)`), with bools as they are; and if that does not help, with
    all numbers as they are. Layers of equinox ask for the types of theirs, and raise what they like where these are
    traced.
    """
    numbers = [type(leaf) for leaf in jax.tree.leaves((args, kwargs)) if is_number(leaf)]
    ways = [is_operand, *([_is_no_bool] if bool in numbers else []), *([is_given] if {*numbers} - {bool} else [])]
    for traced in ways[:-1]:
        try:
            return use(take(fun, args, kwargs, traced=traced))
        except Exception as error:
            if isinstance(error, JaxckptError) or not is_value_needed(error, args, kwargs):
                raise
    return use(take(fun, args, kwargs, traced=ways[-1]))


def through(fun: Callable[..., Any], use: Callable[[Taken], Any]) -> Callable[..., Any]:
    """Returns a function with `fun`'s signature whose calls are taken apart and are `use(call)`; see `attempt`."""
    signature = signature_of(fun)

    @functools.wraps(fun)
    def call(*args: Any, **kwargs: Any) -> Any:
        return attempt(fun, *by_position(signature, args, kwargs), use)

    return call


def transformed(
    transform: Callable[[Callable[..., Any]], Callable[..., Any]], fun: Callable[..., Any]
) -> Callable[..., Any]:
    """Returns `transform(fun)`, which may be called with anything: `transform` sees functions of arrays alone.

    Args:
      transform: returns a function that traces the one that it is given and has its values.
      fun: any function; see `take`.
    """
    return through(fun, lambda call: call.finish(transform(call.fun)(*call.args, **call.kwargs)))


def anything(
    plain: Callable[..., Any],
    fun: Callable[..., Any],
    engine: Callable[[Callable[..., Any]], Callable[..., Any]],
    static: tuple[int, ...] = (),
) -> Callable[..., Any]:
    """Returns `plain`, which may be called with anything: where not all leaves are arrays it is what
    `transformed(engine, fun)` is.

    Args:
      plain: `fun` transformed, for arguments that are arrays.
      fun, engine: as of `transformed`.
      static: numbers of positional arguments that are passed as they are.
    """

    bare, owner = unbound(fun, ())

    @functools.wraps(bare)
    def unwrapped(*args: Any, **kwargs: Any) -> Any:
        return bare(*(arg.value if isinstance(arg, Whole) else arg for arg in args), **kwargs)

    @functools.wraps(fun)
    def call(*args: Any, **kwargs: Any) -> Any:
        places = {number % len(args) for number in static if -len(args) <= number < len(args)}
        dynamic = [arg for place, arg in enumerate(args) if place not in places]
        if (
            not owner
            and not has_objects((dynamic, kwargs))
            and all(map(is_operand, jax.tree.leaves((dynamic, kwargs))))
            and not any(numbers_of_modules((dynamic, kwargs)))
        ):
            return plain(*args, **kwargs)
        wrapped = (Whole(arg) if place in places else arg for place, arg in enumerate(args))
        use = lambda call: call.finish(engine(call.fun)(*call.args, **call.kwargs))
        return attempt(unwrapped, (*owner, *wrapped), kwargs, use)

    return call


def trace(fun: Callable[..., Any], *args: Any, **kwargs: Any) -> Graph:
    """Returns the graph of `fun(*args, **kwargs)`, calls written out. Nothing is computed.

    Args:
      fun: any function; see `jaxckpt.checkpoint`. It may close over arrays, also over ones that are being traced.
      *args: arrays, or anything with a shape and a dtype; modules; other leaves are passed as they are.
      **kwargs: the same, by name.

    Raises:
      ArgumentError: `fun` cannot be called.

    >>> import jax.numpy as jnp
    >>> graph = trace(lambda x: jnp.sin(x) @ x, jnp.ones((3, 3)))
    >>> [op.primitive for op in graph.ops], graph.flops
    (['sin', 'dot_general'], 63)
    """
    if not callable(fun):
        raise ArgumentError("fun", "a function", fun)
    try:
        return attempt(fun, args, kwargs, lambda call: graphs.trace(call.fun, *call.args, **call.kwargs))
    except JaxckptError:
        raise
    except Exception as error:
        if args and not any(_TRACED in note for note in getattr(error, "__notes__", ())):
            error.add_note(f"{_TRACED} {title(fun)} with the arguments that came, in their order: {came(fun, args)}.")
        raise


_TRACED = "jaxckpt traced"


def came(fun: Callable[..., Any], args: tuple[Any, ...]) -> str:
    """Returns the arguments that came for a function, as text: "params=dict, x=float32[8, 4]"."""
    names = [*(signature_of(fun) or inspect.Signature()).parameters]
    given = itertools.zip_longest(names[: len(args)], args, fillvalue="?")
    return ", ".join(f"{name}={_kind(arg)}" for name, arg in given)


def _kind(arg: Any) -> str:
    shape, dtype = getattr(arg, "shape", None), getattr(arg, "dtype", None)
    return type(arg).__name__ if shape is None or dtype is None else f"{dtype}{list(shape)}"


def count_flops(fun: Callable[..., Any], *args: Any) -> int:
    """Returns the FLOPs of `fun(*args)` as traced, loops multiplied out; a multiply-add counts as two.

    `count_flops(jax.grad(loss), *args)` counts what a checkpoint recomputes, since the recomputation is part of that
    program. A while loop counts as one iteration, and a cond as its most expensive branch.

    Args:
      fun: any function; see `jaxckpt.checkpoint`.
      *args: arrays, or anything with a shape and a dtype; modules; other leaves are passed as they are.

    >>> import jax, jax.numpy as jnp
    >>> count_flops(lambda a, b: a @ b, jnp.ones((2, 3)), jnp.ones((3, 4)))
    48
    """
    return trace(fun, *args).flops


def result_of(fun: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """Returns what a call returns, with abstract values for arrays; nothing is computed, no state is changed."""
    found: list[Any] = []

    @functools.wraps(fun)
    def noted(*args: Any, **kwargs: Any) -> Any:
        out = fun(*args, **kwargs)
        found.append(jax.tree.map(lambda leaf: jax.typeof(leaf) if is_operand(leaf) else leaf, out))
        return out

    attempt(noted, args, {}, lambda call: jax.eval_shape(call.fun, *call.args))
    return found[-1]


def accepts(fun: Callable[..., Any], args: tuple[Any, ...]) -> bool:
    """Whether a function takes so many positional arguments; True where its signature is not known."""
    signature = signature_of(fun)
    if signature is None:
        return True
    try:
        signature.bind(*args)
    except TypeError:
        return False
    return True


def leaves(fun: Callable[..., Any], args: tuple[Any, ...]) -> list[Any]:
    """Returns the arrays, shapes and numbers among the arguments of a call, those in objects too, each once."""
    return [leaf for _, leaf in take(fun, args, {}).paths()]


def refuse_traced(fun: Callable[..., Any], args: tuple[Any, ...], what: str) -> None:
    """Raises ArgumentError if an argument is being traced. A function that compiles its own program cannot take one.

    Args:
      what: the name of the function that was called.
    """
    for path, leaf in take(fun, args, {}).paths():
        if _compat.is_tracer(leaf):
            hint = (
                f"{what} compiles: call it outside of jax.jit and of other transformations, or give it shapes: "
                "jax.ShapeDtypeStruct(x.shape, x.dtype), jax.eval_shape(init, key)."
            )
            rule = (
                "an array or a shape that is known; inside of a transformation (jax.jit, jax.grad) it is being traced"
            )
            raise ArgumentError(path, rule, jax.typeof(leaf), hint)


def by_position(
    signature: inspect.Signature | None, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns the arguments with those by keyword that can be positional by position: the first is the first, however
    it is passed.
    """
    if kwargs and signature is not None:
        # A call that does not fit is the function's own error, later.
        with contextlib.suppress(TypeError):
            bound = signature.bind(*args, **kwargs)
            return bound.args, dict(bound.kwargs)
    return args, kwargs


def signature_of(fun: Callable[..., Any]) -> inspect.Signature | None:
    """Returns a function's signature, or None where it has none."""
    try:
        return inspect.signature(fun)
    except (TypeError, ValueError):  # some builtins have none
        return None


def module_gradient(argument: Any, *, values: bool) -> Callable[..., Any] | None:
    """Returns nnx's own gradient, with values or without, where an argument has modules of nnx in it; else None."""
    nnx = _nnx()
    return None if nnx is None or not nnx.has_modules(argument) else nnx.gradient(values)


def closes_over_objects(error: Exception) -> bool:
    """Returns whether an error is nnx's, and says that an object changes which the traced function closes over."""
    nnx = _nnx()
    return nnx is not None and nnx.is_closed_over(error)


def _nnx() -> Any:
    """Returns what knows nnx's objects, once the user has imported flax; before, there are none."""
    if "flax.nnx" not in sys.modules:
        return None
    from jaxckpt.core import objects

    return objects


def parameters_of(fun: Callable[..., Any], args: tuple[Any, ...]) -> list[str]:
    """Returns what to call the positional arguments, all different."""
    signature = signature_of(fun)
    by_position = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = [] if signature is None else [p.name for p in signature.parameters.values() if p.kind in by_position]
    return [positional(place, parameters) for place in range(len(args))]
