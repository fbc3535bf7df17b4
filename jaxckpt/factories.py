"""Model factories: find one by `FILE.py:NAME`, call it, and build its standard variants.

A factory is a function that returns `(fun, args)`. It may have these parameters, and may omit each of them:

    def model(checkpoint=None, segment_size=1, *, real=False, ...):
        ...
        return loss, (params, batch)

`checkpoint` is a transform such as `jax.checkpoint`. The factory puts it around each segment of `segment_size` blocks,
and around none for None. `segment_size` is an int or "sqrt". `real=True` asks for arrays instead of shapes.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import pathlib
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import jax

from jaxckpt._errors import ArgumentError, FactoryError, JaxckptError, did_you_mean
from jaxckpt.policies import PRESETS, Policy
from jaxckpt.transforms.checkpoint import checkpoint

Factory = Callable[..., Any]

# -------------------------------------------------------------------------------------------------------------- finding


def load(spec: str) -> Factory:
    """Returns the factory that `FILE.py:NAME` or `package.module:NAME` names.

    A file inside a package (folders with an `__init__.py`) is imported under its dotted name, and the folder that holds
    the package is added to `sys.path`. Another file is imported as a module, and its folder is added to `sys.path`.

    Raises:
      FactoryError: there is no such file, module or name, it cannot be imported, or it is not a function.
    """
    place, colon, name = spec.rpartition(":")
    if not colon or not place or not name:
        raise FactoryError(
            f"FACTORY must be FILE.py:NAME or package.module:NAME, with a function that returns (fun, args); got "
            f"{spec!r}."
        )
    module = _import_file(pathlib.Path(place)) if place.endswith(".py") else _import_module(place)
    if not hasattr(module, name):
        functions = [
            key
            for key, value in vars(module).items()
            if inspect.isfunction(value) and value.__module__ == module.__name__ and not key.startswith("_")
        ]
        near = did_you_mean(name, functions) if functions else "It defines no functions."
        raise FactoryError(f"{place} has no function {name!r}. {near}")
    found = getattr(module, name)
    if not callable(found):
        raise FactoryError(
            f"{spec} must be a function that returns (fun, args); it is {type(found).__name__}: {found!r:.80}."
        )
    return found  # type: ignore[no-any-return]


def _import_file(path: pathlib.Path) -> ModuleType:
    if not path.is_file():
        there = [p.name for p in path.parent.glob("*.py")]
        raise FactoryError(f"There is no file {path}. {did_you_mean(path.name, there) if there else ''}".rstrip())
    path = path.resolve()
    root, parts = path.parent, [path.stem]
    while (root / "__init__.py").is_file():
        parts.insert(0, root.name)
        root = root.parent
    if parts[-1] == "__init__":
        parts.pop()
    if str(root) not in sys.path:
        sys.path.insert(0, str(root))
    name = ".".join(parts)
    if len(parts) > 1:
        module = _importing(str(path), lambda: importlib.import_module(name))
        if pathlib.Path(module.__file__ or "").resolve() != path:
            raise FactoryError(
                f"{path} must be imported as the module {name}. A package of that name is already imported from "
                f"{module.__file__}. Run "
                "from another folder, or name the module as package.module:NAME."
            )
        return module
    # A file may have the same name as an installed module. Loading it by its path keeps the two apart.
    if name in sys.modules:
        name = f"_jaxckpt_{name}"
    module_spec = importlib.util.spec_from_file_location(name, path)
    assert module_spec is not None and module_spec.loader is not None  # the path ends in .py
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[name] = module  # dataclasses and pickling look there
    try:
        _importing(str(path), lambda: module_spec.loader.exec_module(module))  # type: ignore[union-attr]
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _import_module(name: str) -> ModuleType:
    if "" not in sys.path:
        sys.path.insert(0, "")  # as in `python -m`; for a console script, it is the script's folder
    return _importing(name, lambda: importlib.import_module(name))


def _importing(what: str, run: Callable[[], Any]) -> Any:
    """Runs an import. An exception becomes an error of one line with the place in the user's code."""
    try:
        return run()
    except JaxckptError:
        raise
    except Exception as error:
        raise FactoryError(f"Importing {what} failed: {_one_line(error)}.") from error


def _one_line(error: BaseException) -> str:
    frames = [
        f
        for f in traceback.extract_tb(error.__traceback__)
        if "importlib" not in f.filename and "jaxckpt/" not in f.filename
    ]
    place = f" ({pathlib.Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {' '.join(str(error).split()).rstrip('.')}{place}"


# -------------------------------------------------------------------------------------------------------------- calling


def _default(factory: Callable[..., Any], name: str) -> Any:
    """Returns the default of a factory's parameter, or None if there is no default."""
    parameter = inspect.signature(factory).parameters.get(name)
    return None if parameter is None or parameter.default is inspect.Parameter.empty else parameter.default


def parameters(factory: Factory) -> frozenset[str]:
    """Returns the names of a factory's keyword arguments, with "*" if it takes any keyword."""
    found = inspect.signature(factory).parameters.values()
    named = {p.name for p in found if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    return frozenset(named | ({"*"} if any(p.kind is p.VAR_KEYWORD for p in found) else set()))


def make(factory: Factory, **settings: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Calls a factory and returns its `(fun, args)`.

    Raises:
      FactoryError: the factory does not take one of the keywords, it fails, or it returns something else.
    """
    name = getattr(factory, "__name__", repr(factory))
    known = parameters(factory)
    for key in settings:
        if key not in known and "*" not in known:
            free = sorted(known - {"checkpoint", "segment_size", "real"})
            near = did_you_mean(key, free) if free else "It has no arguments to set."
            raise FactoryError(f"{name} takes no argument {key!r}. {near}")
    needed = [parameter for parameter in _required(factory) if parameter not in settings]
    if needed:
        raise FactoryError(
            f"{name} must be a factory: a function that is called without arguments and returns (fun, args). It needs "
            f"{', '.join(needed)}. If {name} is the function to look at, write one that returns it and its arguments."
        )
    try:
        made = factory(**settings)
    except JaxckptError:
        raise
    except Exception as error:
        raise FactoryError(
            f"{name}({', '.join(f'{k}={v!r:.40}' for k, v in settings.items())}) failed: {_one_line(error)}."
        ) from error
    if not isinstance(made, tuple) or len(made) != 2 or not callable(made[0]) or not isinstance(made[1], (tuple, list)):
        raise FactoryError(
            f"{name} must return (fun, args): a function and the tuple of its arguments (arrays or "
            f"jax.ShapeDtypeStruct). It returned "
            f"{_describe(made)}."
        )
    return made[0], tuple(made[1])


def _required(factory: Factory) -> list[str]:
    """Returns the names of the arguments that a function cannot be called without."""
    try:
        parameters = inspect.signature(factory).parameters.values()
    except (TypeError, ValueError):
        return []
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [each.name for each in parameters if each.default is each.empty and each.kind not in variable]


def _describe(value: Any) -> str:
    if isinstance(value, tuple):
        return f"a tuple of {len(value)}: ({', '.join(type(item).__name__ for item in value)})"
    return f"{type(value).__name__}: {value!r:.60}"


# ------------------------------------------------------------------------------------------------------------- variants


@dataclass(frozen=True)
class Variant:
    """A way to checkpoint a factory's function.

    Attributes:
      name: its name in tables.
      policy: the policy of its checkpoints; None keeps only their inputs.
      segment_size: blocks in a segment.
      where: "none", "blocks" (the factory puts checkpoints around its blocks) or "whole" (one checkpoint around the
        function).
      aliases: other names of the variant.
    """

    name: str
    policy: Policy | None = None
    segment_size: int | str = 1
    where: str = "blocks"
    aliases: tuple[str, ...] = ()


STANDARD: tuple[Variant, ...] = (
    Variant("none", where="none"),
    Variant("whole", where="whole"),
    Variant("nothing (segments:1)", PRESETS["nothing"], aliases=("nothing", "segments:1")),
    *(Variant(f"segments:{size}", segment_size=size) for size in (2, 4, "sqrt")),
    *(Variant(name, policy) for name, policy in PRESETS.items() if name not in ("nothing", "everything")),
    Variant("everything", PRESETS["everything"]),
)
"""The variants of every comparison, in the order of its table: no checkpoint, one checkpoint around everything,
segments of blocks that keep only their inputs, and each preset around each block."""


def variants_for(
    factory: Factory, added: Mapping[str, Policy] | None = None, chosen: Iterable[str] = ()
) -> tuple[Variant, ...]:
    """Returns the variants of a factory: the standard variants that its parameters allow, then those that the user
    adds.

    Args:
      factory: see the top of this module. Without the parameter `checkpoint`, only "none" and "whole" are possible.
        Without `segment_size`, a segment is one block.
      added: name -> policy. The policy is for each block, or for the whole function if the factory does not take
        `checkpoint`.
      chosen: names of the variants to return, in this order; all variants if it is empty.

    Raises:
      ArgumentError: there is no variant with a chosen name.
    """
    known = parameters(factory)
    blocks, segments = "checkpoint" in known or "*" in known, "segment_size" in known or "*" in known
    standard = [v for v in STANDARD if (blocks or v.where != "blocks") and (segments or v.segment_size == 1)]
    everywhere = "blocks" if blocks else "whole"
    own = [Variant(name, policy, where=everywhere) for name, policy in (added or {}).items()]
    offered = {name: variant for variant in (*standard, *own) for name in (variant.name, *variant.aliases)}
    picked = []
    for name in chosen:
        variant = offered.get(name) or (_segments(name) if segments and blocks else None)
        if variant is None:
            raise ArgumentError("variants", "names of variants", name, did_you_mean(name, offered))
        picked.append(variant)
    if not picked:
        return (*standard, *own)
    return tuple(dict.fromkeys([*picked, *own]))


def _segments(name: str) -> Variant | None:
    """Returns the variant for a name such as "segments:7", or None for other names."""
    head, _, size = name.partition(":")
    return Variant(name, segment_size=int(size)) if head == "segments" and size.isdecimal() and int(size) else None


def build(
    factory: Factory, variants: Iterable[Variant], *, real: bool = False, settings: Mapping[str, Any] | None = None
) -> tuple[dict[str, Callable[..., Any]], tuple[Any, ...]]:
    """Returns (name of a variant -> its function, the arguments of all variants).

    Args:
      factory: see the top of this module.
      variants: the variants to build.
      real: whether to ask the factory for arrays, if it takes `real`.
      settings: other keyword arguments for the factory.

    Raises:
      FactoryError: as for `make`; or two variants take arguments of different shapes.
      ArgumentError: `settings` has `checkpoint` or `segment_size`, or a string for a parameter that is a number.
    """
    settings = dict(settings or {})
    for key in ("checkpoint", "segment_size"):
        if key in settings:
            raise ArgumentError(
                "set", f"without {key!r}, which is what the variants vary", settings[key], "Choose variants instead."
            )
    _check_settings(factory, settings)
    known = parameters(factory)
    functions: dict[str, Callable[..., Any]] = {}
    args: tuple[Any, ...] = ()
    shapes: Any = None
    for variant in variants:
        more: dict[str, Any] = {}
        if variant.where == "blocks":
            more["checkpoint"] = functools.partial(checkpoint, policy=variant.policy)
            if "segment_size" in known or variant.segment_size != 1:
                more["segment_size"] = variant.segment_size
        elif "checkpoint" in known and _default(factory, "checkpoint") is None:
            more["checkpoint"] = None
        if real and "real" in known and not functions:  # once: all variants have the same arguments
            more["real"] = True
        fun, its_args = make(factory, **{**settings, **more})
        if variant.where == "whole":
            fun = checkpoint(fun, policy=variant.policy)
        its_shapes = _shapes(its_args)
        if not functions:
            args, shapes = its_args, its_shapes
        elif its_shapes != shapes:
            raise FactoryError(
                f"{getattr(factory, '__name__', factory)} must return arguments of the same structure and shapes "
                f"for every `checkpoint`. "
                f"They differ between {next(iter(functions))!r} and {variant.name!r}. If they are a module's "
                f"parameters, the transform "
                "has renamed submodules, as flax.linen.remat does. Use jaxckpt.flax.checkpoint, which keeps the names."
            )
        functions[variant.name] = fun
    return functions, args


def _check_settings(factory: Factory, settings: Mapping[str, Any]) -> None:
    """Raises ArgumentError for a string if the parameter's default is a number and its annotation allows no string."""
    taken = inspect.signature(factory).parameters
    for key, value in settings.items():
        default = taken[key].default if key in taken else None
        if (
            isinstance(value, str)
            and isinstance(default, (bool, int, float))
            and "str" not in str(taken[key].annotation)
        ):
            kind = {bool: "True or False", int: "a whole number", float: "a number"}[type(default)]
            hint = f"{getattr(factory, '__name__', 'The factory')} has {key}={default!r} by default."
            raise ArgumentError(f"--set {key}", kind, value, hint)


def _shapes(args: Any) -> Any:
    leaves, tree = jax.tree.flatten(args)
    return tree, [(getattr(leaf, "shape", ()), str(getattr(leaf, "dtype", type(leaf)))) for leaf in leaves]
