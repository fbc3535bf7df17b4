"""Model factories: find one by `FILE.py:NAME` or by the name of a model, and call it.

A factory is a function that returns `(fun, args)`, a loss and its arguments; or `(fun, args, step)`, where `step(fun)`
is the training step and `args` are the step's arguments. It may have these parameters, and may omit each of them:

    def model(checkpoint=None, segment_size=1, *, real=False, ...):
        ...
        return loss, (params, batch)

`checkpoint` is a transform such as `jax.checkpoint`. The factory puts it around each segment of `segment_size` blocks,
and around none for None. `segment_size` is an int or "sqrt". `real=True` asks for arrays instead of shapes.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import pathlib
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from jaxckpt import models
from jaxckpt._errors import FactoryError, JaxckptError, did_you_mean
from jaxckpt.memory.gradient import StepMaker

Factory = Callable[..., Any]

# -------------------------------------------------------------------------------------------------------------- finding


def load(spec: str) -> Factory:
    """Returns the factory that a word names: `FILE.py:NAME`, `package.module:NAME`, or one of `jaxckpt.models.NAMES`.

    A file inside a package (folders with an `__init__.py`) is imported under its dotted name, and the folder that holds
    the package is added to `sys.path`. Another file is imported as a module, and its folder is added to `sys.path`.

    Raises:
      FactoryError: there is no such file, module or name, it cannot be imported, or it is not a function.
      MissingPackageError: a model of jaxckpt needs a package that is not installed.
    """
    if spec in models.NAMES:
        return models.factory(spec)
    found = named(spec, "FACTORY", "a function that returns (fun, args), or the name of a model")
    if not callable(found):
        raise FactoryError(
            f"{spec} must be a function that returns (fun, args); it is {type(found).__name__}: {found!r:.80}."
        )
    return found  # type: ignore[no-any-return]


def load_step(spec: str) -> StepMaker:
    """Returns the maker of a training step that `FILE.py:NAME` or `package.module:NAME` names; raises as `load`."""
    found = named(spec, "--step", "a function that takes the loss and returns the training step")
    if not callable(found):
        raise FactoryError(
            f"{spec} must be a function that takes the loss and returns the training step; it is "
            f"{type(found).__name__}: {found!r:.80}."
        )
    return found  # type: ignore[no-any-return]


def named(spec: str, argument: str, what: str) -> Any:
    """Returns what `FILE.py:NAME` or `package.module:NAME` names.

    Args:
      spec: the word.
      argument: the name of the argument in messages.
      what: what it should name, in messages.

    Raises:
      FactoryError: there is no such file, module or name, or it cannot be imported.
    """
    place, colon, name = spec.rpartition(":")
    if not colon or not place or not name:
        hint = _missing_name(spec.removesuffix(":"), argument) if spec.strip(":") and not spec.startswith(":") else ""
        raise FactoryError(f"{argument} must be FILE.py:NAME or package.module:NAME, with {what}; got {spec!r}.{hint}")
    module = _import_file(pathlib.Path(place)) if place.endswith(".py") else _import_module(place)
    if not hasattr(module, name):
        functions = [
            key
            for key, value in vars(module).items()
            if inspect.isfunction(value) and value.__module__ == module.__name__ and not key.startswith("_")
        ]
        near = did_you_mean(name, functions) if functions else "It defines no functions."
        raise FactoryError(f"{place} has no function {name!r}. {near}")
    return getattr(module, name)


def _missing_name(place: str, argument: str) -> str:
    """Returns sentences, after a blank, on a word without a NAME: what to write, and what there is to choose from."""
    path = pathlib.Path(place)
    if not place.endswith(".py"):
        module = f" {place} may be a module: write {place}:NAME." if "." in place else ""
        return module or (f" {did_you_mean(place, models.NAMES)}" if argument == "FACTORY" else "")
    if not path.is_file():
        return f" {_no_file(path)}"
    try:
        parsed = ast.parse(path.read_bytes()).body  # the file is read and not run
    except (SyntaxError, ValueError):
        return f" Write {place}:NAME."
    functions = [each.name for each in parsed if isinstance(each, ast.FunctionDef) and not each.name.startswith("_")]
    there = f"The file's functions are {', '.join(functions)}." if functions else "The file defines no functions."
    return f" Write {place}:NAME. {there}"


def _no_file(path: pathlib.Path) -> str:
    """Returns the sentence on a file that is not there, with the nearest that are."""
    there = [p.name for p in path.parent.glob("*.py")]
    return f"There is no file {path}. {did_you_mean(path.name, there) if there else ''}".rstrip()


def _import_file(path: pathlib.Path) -> ModuleType:
    if not path.is_file():
        raise FactoryError(_no_file(path))
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
    except SystemExit as error:
        raise FactoryError(
            f"Importing {what} ended the program (sys.exit). Put what is to run as a script under "
            f"`if __name__ == '__main__':`."
        ) from error
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


def parameters(factory: Factory) -> frozenset[str]:
    """Returns the names of a factory's keyword arguments, with "*" if it takes any keyword."""
    found = inspect.signature(factory).parameters.values()
    named = {p.name for p in found if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    return frozenset(named | ({"*"} if any(p.kind is p.VAR_KEYWORD for p in found) else set()))


@dataclass(frozen=True)
class Made:
    """What a factory returned.

    Attributes:
      fun: the loss, or another function to differentiate.
      args: of the training step; without a `step`, of the function.
      step: makes the training step of the function; None for its value and gradient.
    """

    fun: Callable[..., Any]
    args: tuple[Any, ...]
    step: StepMaker | None = None


def call(factory: Factory, **settings: Any) -> Made:
    """Calls a factory and returns what it made: `(fun, args)` or `(fun, args, step)`.

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
    except SystemExit as error:
        raise FactoryError(f"{name} must return (fun, args); it ended the program (sys.exit).") from error
    except Exception as error:
        raise FactoryError(
            f"{name}({', '.join(f'{k}={v!r:.40}' for k, v in settings.items())}) failed: {_one_line(error)}."
        ) from error
    is_step = isinstance(made, tuple) and len(made) == 3 and callable(made[2])
    if (
        not isinstance(made, tuple)
        or not (len(made) == 2 or is_step)
        or not callable(made[0])
        or not isinstance(made[1], (tuple, list))
    ):
        raise FactoryError(
            f"{name} must return (fun, args): a function and the tuple of its arguments (arrays or "
            f"jax.ShapeDtypeStruct); or (fun, args, step), where step(fun) is the training step and args are the "
            f"step's. It returned {_describe(made)}."
        )
    if not made[1]:
        raise FactoryError(
            f"{name} must return arguments, with the parameters in the first; it returned an empty tuple of them."
        )
    return Made(made[0], tuple(made[1]), made[2] if is_step else None)


def make(factory: Factory, **settings: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Calls a factory and returns its `(fun, args)`; raises as `call`."""
    made = call(factory, **settings)
    return made.fun, made.args


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
