"""The parts that linen and nnx share: static arguments, a module's call as a function of arrays, classes, paths.

The engine (`jaxckpt.checkpoint`) needs a function of arrays that may be traced more than once. A module's call takes
flags and changes state. So everything that it reads becomes a named operand, everything that it changes becomes a
result, and values that are not arrays are passed around the engine.
"""

from __future__ import annotations

import copyreg
import functools
import inspect
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import jax

from jaxckpt._errors import ArgumentError, check_flags
from jaxckpt.core.argument_names import argument_numbers, positional
from jaxckpt.core.leaves import Whole
from jaxckpt.core.lift import Lifted, title
from jaxckpt.transforms.checkpoint import checkpoint

Key = TypeVar("Key")


@dataclass(frozen=True)
class Options:
    """The arguments of `jaxckpt.flax.checkpoint`."""

    policy: Any = None
    prevent_cse: bool = True
    static_argnums: tuple[int, ...] = ()

    def engine(self, fun: Callable[..., Any]) -> Callable[..., Any]:
        """Returns a function of arrays with a checkpoint around it."""
        return checkpoint(fun, policy=self.policy, prevent_cse=self.prevent_cse)


def options(policy: Any, prevent_cse: bool, static_argnums: int | Sequence[int]) -> Options:
    """Returns checked options.

    Raises:
      ArgumentError: the policy or `prevent_cse` is invalid, or `static_argnums` has something other than ints.
    """
    check_flags(prevent_cse=prevent_cse)
    made = Options(policy, prevent_cse, argument_numbers(static_argnums))
    made.engine(lambda: None)  # raises for an unknown policy here, and not at the first call
    return made


# ------------------------------------------------------------------------------------------------------------ arguments


@dataclass(frozen=True)
class Arguments:
    """The names of a call's arguments, and which of them are static.

    Attributes:
      names: names of the positional parameters, without self.
      positions: positions of the static arguments among the positional arguments of a call.
      keywords: names of the static arguments, for calls that pass them by name.
    """

    names: tuple[str, ...]
    positions: frozenset[int]
    keywords: frozenset[str]

    def wrap(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        """Returns the arguments with each static one as an opaque leaf; `unwrap` reverses this."""
        wrapped = [Whole(x) if i in self.positions else x for i, x in enumerate(args)]
        return wrapped, {k: Whole(x) if k in self.keywords else x for k, x in kwargs.items()}

    def labels(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[list[str], dict[str, str]]:
        """Returns a different name for each argument in messages: (of positional arguments, of keyword arguments)."""
        names = [positional(place, self.names) for place in range(len(args))]
        return names, {k: f"kwargs[{k!r}]" if k in names else k for k in kwargs}


def unwrap(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """Undoes `Arguments.wrap`."""
    plain = [x.value if isinstance(x, Whole) else x for x in args]
    return plain, {k: x.value if isinstance(x, Whole) else x for k, x in kwargs.items()}


def arguments(fun: Callable[..., Any], numbers: tuple[int, ...], *, has_self: bool) -> Arguments:
    """Returns which arguments of a function or unbound method are static.

    Args:
      fun: the function.
      numbers: `static_argnums`; negative numbers count from the last positional parameter.
      has_self: whether the first parameter is a module; it is not counted.

    Raises:
      ArgumentError: a number is out of range.
    """
    try:
        parameters = list(inspect.signature(fun).parameters.values())
    except (TypeError, ValueError):  # a builtin may have no signature
        parameters = [inspect.Parameter("args", inspect.Parameter.VAR_POSITIONAL)]
    by_position = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    names = tuple(p.name for p in parameters if p.kind in by_position)[has_self:]
    endless = any(p.kind == inspect.Parameter.VAR_POSITIONAL for p in parameters)
    for number in numbers:
        if (number >= len(names) and not endless) or number < (0 if endless else -len(names)):
            takes = ", ".join(f"{i} ({name})" for i, name in enumerate(names)) or "none"
            rule = f"among the positional arguments of {title(fun)}: {takes}"
            raise ArgumentError("static_argnums", rule, number, "`self` is not counted." if has_self else "")
    positions = frozenset(n if n >= 0 else len(names) + n for n in numbers)
    return Arguments(names, positions, frozenset(names[i] for i in positions if i < len(names)))


# ------------------------------------------------------------------------------------------------------------- the call


_ADVICE = (
    "The program branches on the argument named above in arguments['...']: pass a Python value, which is not "
    "traced, or put its "
    "number, self not counted, into static_argnums."
)


def run(lifted: Lifted, engine: Callable[..., Any], arrays: Mapping[str, Any]) -> Any:
    """Runs a lifted function through the engine, which gets only arrays, and returns the result.

    Args:
      lifted: the function.
      engine: makes a checkpointed function from a function of arrays.
      arrays: the arrays of operands that have the function's spec.

    Raises:
      jax.errors.ConcretizationTypeError: the function branches on an array; the message names it.
    """
    try:
        computed = engine(lifted.of_arrays)(dict(arrays))
    except jax.errors.ConcretizationTypeError as error:
        advised = any(
            note.endswith(_ADVICE) for note in getattr(error, "__notes__", ())
        )  # a checkpoint inside has added it
        if not advised:
            error.add_note(f"{lifted.name} is checkpointed, so its arguments that are arrays are traced. {_ADVICE}")
        raise
    return lifted.result(arrays, computed)


# -------------------------------------------------------------------------------------------------------------- classes


def subclass(
    make: Callable[[type, Any], type], base: type, key: Any, members: Mapping[str, Any], **keywords: Any
) -> type:
    """Returns a subclass that looks like its base: it has the base's name, module, text and pickles.

    Args:
      make: the function of (base, key) that makes the subclass; it makes it again when an instance is unpickled.
      base: the module class.
      key: everything else that the subclass depends on.
      members: attributes that the subclass overrides.
      keywords: arguments for the base's `__init_subclass__`.
    """

    def reduce(self: Any, protocol: Any) -> Any:
        new, args, *state = super(made, self).__reduce_ex__(protocol)
        named: Any = sys.modules.get(base.__module__)
        for part in base.__qualname__.split("."):
            named = getattr(named, part, None)
        if new is not copyreg.__newobj__ or type(self) is not made or named is made:  # type: ignore[attr-defined]
            return new, args, *state
        return _rebuild, (make, base, key), *state

    namespace = {
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
        "__doc__": base.__doc__,
        "__reduce_ex__": reduce,
        **members,
    }
    made: Any = type(base)(base.__name__, (base,), namespace, **keywords)
    return made  # type: ignore[no-any-return]


def _rebuild(make: Callable[[type, Any], type], base: type, key: Any) -> Any:
    return object.__new__(make(base, key))


def cached(make: Callable[[type, Key], type]) -> Callable[[type, Key], type]:
    """Returns `make` with a cache of its classes, because a model may ask for a class at every layer of every trace."""
    remembered = functools.lru_cache(maxsize=1024)(make)

    @functools.wraps(make)
    def made(base: type, key: Key) -> type:
        try:
            hash(key)
        except TypeError:  # the policy cannot be hashed
            return make(base, key)
        return remembered(base, key)

    return made


# ---------------------------------------------------------------------------------------------------------------- paths


@dataclass(frozen=True)
class Rules:
    """Globs over the paths of a model's modules. The first glob that matches decides.

    Attributes:
      options: glob -> options, in order.
    """

    options: tuple[tuple[str, Options], ...]

    @functools.cached_property
    def _matchers(self) -> list[tuple[str, re.Pattern[str], Options]]:
        return [(text, re.compile(glob(text)), made) for text, made in self.options]

    def matching(self, path: str) -> list[tuple[str, Options]]:
        """Returns all globs that match a path, with their options. Only "" matches the model itself."""
        return [(text, made) for text, regex, made in self._matchers if (path or not text) and regex.fullmatch(path)]


def glob(pattern: str) -> str:
    """Returns the regular expression of a glob over module paths: `*` and `?` match within a name, and `**` also
    matches "/".

    >>> import re
    >>> bool(re.fullmatch(glob("layers/*"), "layers/0")), bool(re.fullmatch(glob("layers/*"), "layers/0/mlp"))
    (True, False)
    >>> bool(re.fullmatch(glob("**/mlp"), "layers/0/mlp")), bool(re.fullmatch(glob("**/mlp"), "mlp"))
    (True, True)
    """
    tokens = {"**/": "(.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    return "".join(tokens.get(part, re.escape(part)) for part in re.split(r"(\*\*/|\*\*|\*|\?)", pattern))
