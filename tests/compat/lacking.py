"""A process in which jaxckpt is imported with a JAX, or a Flax, that lacks one thing after another: `python -m
tests.compat.lacking jax`.

It prints a JSON object: "symbol: what it lacks" -> what the import raised, or None.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import sys
from collections.abc import Iterator
from typing import Any

from jaxckpt._compat.needs import NEEDS as JAX_NEEDS
from jaxckpt._compat.needs import VERSION, Need


class Without:
    """Something that lacks an attribute."""

    def __init__(self, original: Any, missing: str) -> None:
        self._original, self._missing = original, missing

    def __getattr__(self, name: str) -> Any:
        if name == self._missing:
            raise AttributeError(name)
        found = getattr(self._original, name)
        return {k: v for k, v in found.items() if k != self._missing} if name == "__dataclass_fields__" else found


class Renamed:
    """A primitive of another name."""

    name = "renamed"


def other(*, needed: Any) -> None:
    """Takes what nobody gives."""


def ways(need: Need) -> dict[str, Any]:
    """Returns in what ways something can be missing: what is missing -> what is there instead, given what was; None for
    nothing.
    """
    found: dict[str, Any] = {"all": None}
    for attribute in need.has:
        found[f"attribute {attribute}"] = lambda original, attribute=attribute: Without(original, attribute)
    if need.name:
        found["its name"] = lambda _: Renamed()
    if need.positional is not None or need.keywords:
        found["its parameters"] = lambda _: other
    return found


@contextlib.contextmanager
def changed(symbol: str, instead: Any) -> Iterator[None]:
    """A context in which a symbol is something else, or, for None, missing."""
    *path, last = symbol.split(".")
    owner: Any = importlib.import_module(path[0])
    for place, part in enumerate(path[1:], 2):
        if not hasattr(owner, part):  # a module that nobody has imported yet
            importlib.import_module(".".join(path[:place]))
        owner = getattr(owner, part)
    original = getattr(owner, last)
    own = last in vars(owner)
    if instead is not None:
        setattr(owner, last, instead(original))
    elif own:
        delattr(owner, last)
    else:  # inherited, or from a module's __getattr__
        with changed(".".join(path), lambda owner: Without(owner, last)):
            yield
        return
    try:
        yield
    finally:
        if own:
            setattr(owner, last, original)
        else:
            delattr(owner, last)


def attempt(module: str, forget: tuple[str, ...]) -> dict[str, Any] | None:
    """Imports a module anew, and returns what that raised."""
    for name in list(sys.modules):
        if any(name == each or name.startswith(f"{each}.") for each in forget):
            del sys.modules[name]
    try:
        importlib.import_module(module)
    except Exception as error:
        kinds = [kind.__name__ for kind in type(error).__mro__]
        return {"kinds": kinds, "symbol": getattr(error, "symbol", None), "text": str(error)}
    return None


def main(package: str) -> None:
    """Prints what came of each."""
    if package == "jax":
        needs, module, forget = JAX_NEEDS, "jaxckpt", ("jaxckpt",)
    else:
        from jaxckpt._compat.flax import NEEDS

        needs, module, forget = NEEDS, "jaxckpt.flax", ("jaxckpt.flax", "jaxckpt._compat.flax")
    found: dict[str, Any] = {}
    for need in needs:
        if need.late or need.since > VERSION:
            continue
        for what, instead in ways(need).items():
            with changed(need.symbol, instead):
                found[f"{need.symbol}: {what}"] = attempt(module, forget)
    found["nothing"] = attempt(module, forget)
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
