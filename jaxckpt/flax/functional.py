"""What linen and nnx share: which arguments are static, a module's call as a function of arrays, classes, paths.

The engine (`jaxckpt.checkpoint`) wants a function of arrays that may be traced more than once. A module's call is
neither: it takes flags and changes state. So all that it reads goes in as named operands, all that it changes comes
out as results, and what is no array in either goes around the engine.
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

from jaxckpt._errors import ArgumentError
from jaxckpt.core.leaves import Whole
from jaxckpt.core.lift import Lifted, title
from jaxckpt.transforms.checkpoint import checkpoint

Key = TypeVar("Key")


@dataclass(frozen=True)
class Options:
    """How to checkpoint: the arguments of `jaxckpt.flax.checkpoint`."""

    policy: Any = None
    prevent_cse: bool = True
    static_argnums: tuple[int, ...] = ()

    def engine(self, fun: Callable[..., Any]) -> Callable[..., Any]:
        """Returns the function of arrays, checkpointed."""
        return checkpoint(fun, policy=self.policy, prevent_cse=self.prevent_cse)


def options(policy: Any, prevent_cse: bool, static_argnums: int | Sequence[int]) -> Options:
    """Returns checked options.

    Raises:
      ArgumentError: the policy is none, or `static_argnums` holds something else than ints.
    """
    numbers = (static_argnums,) if isinstance(static_argnums, int) else static_argnums
    if not isinstance(numbers, Sequence) or not all(isinstance(n, int) and not isinstance(n, bool) for n in numbers):
        raise ArgumentError("static_argnums", "an int or a sequence of ints", static_argnums)
    made = Options(policy, prevent_cse, tuple(numbers))
    made.engine(lambda: None)  # an unknown policy is an error here and not at the first call
    return made


# ------------------------------------------------------------------------------------------------------------ arguments


@dataclass(frozen=True)
class Arguments:
    """How a call's arguments are named, and which of them are static.

    Attributes:
      names: of the positional parameters, without self.
      positions: of the static ones among a call's positional arguments.
      keywords: the static ones among the names, for when they are passed by name.
    """

    names: tuple[str, ...]
    positions: frozenset[int]
    keywords: frozenset[str]

    def wrap(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        """Returns the arguments with the static ones as leaves that nothing looks into; `unwrap` undoes it."""
        wrapped = [Whole(x) if i in self.positions else x for i, x in enumerate(args)]
        return wrapped, {k: Whole(x) if k in self.keywords else x for k, x in kwargs.items()}

    def labels(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[list[str], dict[str, str]]:
        """Returns what to call each argument in messages, all different: of the positional ones, and by keyword."""
        names = [self.names[i] if i < len(self.names) else f"args[{i}]" for i in range(len(args))]
        return names, {k: f"kwargs[{k!r}]" if k in names else k for k in kwargs}


def unwrap(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """Undoes `Arguments.wrap`."""
    plain = [x.value if isinstance(x, Whole) else x for x in args]
    return plain, {k: x.value if isinstance(x, Whole) else x for k, x in kwargs.items()}


def arguments(fun: Callable[..., Any], numbers: tuple[int, ...], *, has_self: bool) -> Arguments:
    """Returns which arguments of a function or unbound method are static.

    Args:
      fun: the function.
      numbers: `static_argnums`; negative ones count from the last positional parameter.
      has_self: whether the first parameter is a module, which is not counted.

    Raises:
      ArgumentError: a number is out of range.
    """
    try:
        parameters = list(inspect.signature(fun).parameters.values())
    except (TypeError, ValueError):  # a builtin without a signature
        parameters = [inspect.Parameter("args", inspect.Parameter.VAR_POSITIONAL)]
    by_position = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    names = tuple(p.name for p in parameters if p.kind in by_position)[has_self:]
    endless = any(p.kind == inspect.Parameter.VAR_POSITIONAL for p in parameters)
    for number in numbers:
        if (number >= len(names) and not endless) or number < (0 if endless else -len(names)):
            takes = ", ".join(f"{i} ({name})" for i, name in enumerate(names)) or "none"
            rule = f"among the positional arguments of {title(fun)}: {takes}"
            raise ArgumentError("static_argnums", rule, number, "Self is not counted." if has_self else "")
    positions = frozenset(n if n >= 0 else len(names) + n for n in numbers)
    return Arguments(names, positions, frozenset(names[i] for i in positions if i < len(names)))


# ------------------------------------------------------------------------------------------------------------- the call


_ADVICE = (
    "The one named above in arguments['...'] was branched on: pass a Python value, which is not traced, or put its "
    "number, self not counted, into static_argnums."
)


def run(lifted: Lifted, engine: Callable[..., Any], arrays: Mapping[str, Any]) -> Any:
    """Returns the result of a lifted function, by way of the engine, which sees nothing but arrays.

    Args:
      lifted: the function.
      engine: turns a function of arrays into a checkpointed one.
      arrays: of operands with the function's spec.

    Raises:
      jax.errors.ConcretizationTypeError: the function branches on an array; the message names it.
    """
    try:
        computed = engine(lifted.of_arrays)(dict(arrays))
    except jax.errors.ConcretizationTypeError as error:
        advised = any(note.endswith(_ADVICE) for note in getattr(error, "__notes__", ()))  # by a checkpoint inside
        if not advised:
            error.add_note(f"{lifted.name} is checkpointed, so its arguments that are arrays are traced. {_ADVICE}")
        raise
    return lifted.result(arrays, computed)


# -------------------------------------------------------------------------------------------------------------- classes


def subclass(
    make: Callable[[type, Any], type], base: type, key: Any, members: Mapping[str, Any], **keywords: Any
) -> type:
    """Returns a subclass that passes for its base: its name, module, text and pickles are the base's.

    Args:
      make: the function of (base, key) that is making it, and that makes it again where an instance is unpickled.
      base: the module class.
      key: all else that the subclass depends on.
      members: what the subclass overrides.
      keywords: for the base's `__init_subclass__`.
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
    """Returns `make`, giving the same class for the same arguments: a model may ask at every layer of every trace."""
    remembered = functools.lru_cache(maxsize=1024)(make)

    @functools.wraps(make)
    def made(base: type, key: Key) -> type:
        try:
            hash(key)
        except TypeError:  # a policy that cannot be hashed
            return make(base, key)
        return remembered(base, key)

    return made


# ---------------------------------------------------------------------------------------------------------------- paths


@dataclass(frozen=True)
class Rules:
    """Globs over the paths of a model's modules, the first that matches counts.

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
    """Returns the regular expression of a glob over module paths: `*` and `?` stay within a name, `**` crosses "/".

    >>> import re
    >>> bool(re.fullmatch(glob("layers/*"), "layers/0")), bool(re.fullmatch(glob("layers/*"), "layers/0/mlp"))
    (True, False)
    >>> bool(re.fullmatch(glob("**/mlp"), "layers/0/mlp")), bool(re.fullmatch(glob("**/mlp"), "mlp"))
    (True, True)
    """
    tokens = {"**/": "(.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    return "".join(tokens.get(part, re.escape(part)) for part in re.split(r"(\*\*/|\*\*|\*|\?)", pattern))
