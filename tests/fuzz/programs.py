"""A random program: a list of statements that prints as Python, runs as what it prints, and can be cut down.

    def fun(params, x):
        w = params["w"]
        v1 = x @ w
        def f2(c, r):
            v3 = jnp.tanh(c @ w) + r
            return v3, c
        v4, v5 = lax.scan(f2, v1, v5)
        return v4

Names are used once in the whole program, so that a statement may be taken out, and its results replaced by others of
the same kind, without a look at scopes.
"""

from __future__ import annotations

import dataclasses
import itertools
import linecache
import re
import textwrap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.ad_checkpoint
import jax.numpy as jnp
import numpy as np
from jax import lax

import jaxckpt
from jaxckpt import (
    RECOMPUTE,
    SAVE,
    Policy,
    Slots,
    intensity_above,
    larger_than,
    op,
    tag,
    where,
)

# ------------------------------------------------------------------------------------------- what programs can refer to


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Box:
    """A pytree of the program's own, with a string for static metadata."""

    first: Any
    second: Any
    mode: str = field(default="sin", metadata={"static": True})


@jax.custom_jvp
def halved(x: Any) -> Any:
    """sin(x), of half the derivative."""
    return jnp.sin(x)


@halved.defjvp
def _halved_jvp(primals: Any, tangents: Any) -> Any:
    return halved(*primals), jnp.cos(primals[0]) * 0.5 * tangents[0]


@jax.custom_vjp
def doubled(x: Any) -> Any:
    """tanh(x), of twice the derivative, with its own result as a residual."""
    return jnp.tanh(x)


doubled.defvjp(lambda x: (doubled(x), jnp.tanh(x)), lambda t, g: (2 * g * (1 - t * t),))


def clipped(x: Any, low: float, high: float) -> Any:
    """x, whose cotangent is clipped: a custom rule with arguments that are not differentiated."""
    return _clipped(x, low, high)


_clipped = jax.custom_vjp(lambda x, low, high: x * 1.0, nondiff_argnums=(1, 2))
_clipped.defvjp(lambda x, low, high: (x * 1.0, None), lambda low, high, _, g: (jnp.clip(g, low, high),))


@jax.custom_vjp
def looked_up(table: Any, places: Any) -> Any:
    """Rows of a table, with a rule that has no cotangent for the integers."""
    return table[places]


looked_up.defvjp(
    lambda table, places: (table[places], (places, table)),
    lambda kept, g: (jnp.zeros_like(kept[1]).at[kept[0]].add(g), None),
)


def draw(seed: int, shape: tuple[int, ...], dtype: str) -> jax.Array:
    """Returns seeded data: normal values (divided by the root of the last axis but one), integers of 0 to 2,
    booleans.
    """
    rng = np.random.default_rng([seed, *shape])
    if dtype == "bool":
        return jnp.asarray(rng.integers(0, 2, shape), bool)
    if "int" in dtype:
        return jnp.asarray(rng.integers(0, 3, shape), dtype)
    values = rng.normal(size=shape) / (shape[-2] if len(shape) > 1 else 1) ** 0.5
    if "complex" in dtype:
        values = values + 1j * rng.normal(size=shape)
    return jnp.asarray(values, dtype)


VOCABULARY: dict[str, Any] = {
    "jax": jax,
    "jnp": jnp,
    "np": np,
    "lax": lax,
    "jaxckpt": jaxckpt,
    "Box": Box,
    "halved": halved,
    "doubled": doubled,
    "clipped": clipped,
    "looked_up": looked_up,
    "draw": draw,
    **{f.__name__: f for f in (Policy, Slots, intensity_above, larger_than, op, tag, where)},
    "SAVE": SAVE,
    "RECOMPUTE": RECOMPUTE,
    "SCAN": lax.scan,
}
"""The names that a program's text may use. `SCAN` is the scan that is under test, `lax.scan` in the reference."""

HEADER = """\
import jax, jax.numpy as jnp, numpy as np
from jax import lax
import jaxckpt
from jaxckpt import RECOMPUTE, SAVE, Policy, Slots, intensity_above, larger_than, op, tag, where
from tests.fuzz.programs import Box, clipped, doubled, draw, halved, looked_up
"""

# ------------------------------------------------------------------------------------------------------------- the tree


@dataclass(frozen=True)
class Kind:
    """What a value is; values of one kind may stand for each other."""

    shape: tuple[int, ...]
    dtype: str
    weak: bool = False

    @property
    def literal(self) -> str:
        """An expression of this kind."""
        if self.dtype.startswith("key<"):
            return "jax.random.key(7)" if not self.shape else f"jax.random.split(jax.random.key(7), {self.shape})"
        if self.weak:
            return f"jnp.full({self.shape}, {1 if 'int' in self.dtype else 0.5})"
        value = {"b": "True", "i": "1", "u": "1"}.get(self.dtype[0], "0.5") if self.dtype != "bfloat16" else "0.5"
        return f"jnp.full({self.shape}, {value}, {self.dtype!r})"


@dataclass(frozen=True)
class Statement:
    """Lines of Python.

    Attributes:
      text: with $0, $1, ... for the operands, $f0, ... for the bodies' names, $out for the results, $g for a name of
        its own.
      operands, results: names.
      kinds: of the results.
      bodies: functions that it defines first.
    """

    text: str
    operands: tuple[str, ...]
    results: tuple[str, ...]
    kinds: tuple[Kind, ...]
    bodies: tuple[Function, ...] = ()

    def lines(self) -> Iterator[str]:
        """Yields its lines."""
        for body in self.bodies:
            yield from body.lines()
        names = {str(i): name for i, name in enumerate(self.operands)}
        names |= {f"f{i}": body.name for i, body in enumerate(self.bodies)}
        names |= {"out": ", ".join(self.results), "g": f"g_{self.results[0]}"}
        yield from substituted(self.text, names).splitlines()


@dataclass(frozen=True)
class Function:
    """A function: of the program, or a body in it.

    Attributes:
      name: of it.
      params: names of its parameters.
      kinds: of the parameters.
      statements: in order.
      returns: an expression with $0, $1, ... for the outputs.
      outputs: names.
      closed: whether its statements may use what is outside.
    """

    name: str
    params: tuple[str, ...]
    kinds: tuple[Kind, ...]
    statements: tuple[Statement, ...]
    returns: str
    outputs: tuple[str, ...]
    closed: bool = True

    def lines(self, signature: str | None = None, first: tuple[str, ...] = ()) -> Iterator[str]:
        """Yields its lines; `first` are put at its beginning."""
        yield f"def {self.name}({', '.join(self.params) if signature is None else signature}):"
        inner = [*first, *(line for statement in self.statements for line in statement.lines())]
        returned = substituted(self.returns, {str(i): name for i, name in enumerate(self.outputs)})
        for line in [*inner, f"return {returned}"]:
            yield f"    {line}"


def substituted(text: str, names: Mapping[str, str]) -> str:
    """Returns the text with names for its `$`s."""
    return re.sub(r"\$(\w+)", lambda found: names[found[1]], text)


@dataclass(frozen=True)
class Leaf:
    """A leaf of the arguments.

    Attributes:
      name: that it has in the program.
      text: an expression that makes it.
      kind: of an array or a number; None of what is no array.
    """

    name: str
    text: str
    kind: Kind | None = None


@dataclass(frozen=True)
class Node:
    """An argument, or a part of one: a leaf, or a dict, tuple, list or Box of parts; "none" is None, in a place where a
    leaf might be.

    Attributes:
      form: "leaf", "none", "dict", "tuple", "list" or "box".
      leaf: of a leaf.
      parts: of the others.
      mode: of a box: (name, text), its metadata.
    """

    form: str
    leaf: Leaf | None = None
    parts: tuple[Node, ...] = ()
    mode: tuple[str, str] = ("", "")

    def leaves(self) -> Iterator[Leaf]:
        """Yields its leaves."""
        if self.leaf is not None:
            yield self.leaf
        for part in self.parts:
            yield from part.leaves()

    @property
    def text(self) -> str:
        """An expression that makes it, of its leaves' names."""
        parts = [part.text for part in self.parts]
        match self.form:
            case "leaf":
                assert self.leaf is not None
                return self.leaf.name
            case "dict":
                return "{" + ", ".join(f'"k{i}": {part}' for i, part in enumerate(parts)) + "}"
            case "tuple":
                return f"({', '.join(parts)},)"
            case "list":
                return f"[{', '.join(parts)}]"
            case "box":
                return f"Box({', '.join(parts)}, {self.mode[1]})"
        return "None"

    def unpacked(self, path: str) -> Iterator[str]:
        """Yields statements that take it apart."""
        if self.leaf is not None and path != self.leaf.name:
            yield f"{self.leaf.name} = {path}"
        places = {
            "dict": lambda i: f'["k{i}"]',
            "box": lambda i: (".first", ".second")[i],
            "tuple": lambda i: f"[{i}]",
            "list": lambda i: f"[{i}]",
        }
        for i, part in enumerate(self.parts):
            yield from part.unpacked(path + places[self.form](i))
        if self.form == "box":
            yield f"{self.mode[0]} = {path}.mode"


@dataclass(frozen=True)
class Program:
    """A function and its arguments."""

    args: tuple[Node, ...]
    fun: Function

    def __len__(self) -> int:
        return sum(1 for _ in statements_of(self.fun))

    def source(self) -> str:
        """Returns the program as Python: `fun` and `args`."""
        heads = [node.leaf.name if node.leaf is not None else f"a{i}" for i, node in enumerate(self.args)]
        first = [line for head, node in zip(heads, self.args) for line in node.unpacked(head)]
        lines = list(self.fun.lines(", ".join(heads), tuple(first)))
        lines += [f"{leaf.name} = {leaf.text}" for node in self.args for leaf in node.leaves()]
        lines.append(f"args = ({', '.join(node.text for node in self.args)},)")
        return "\n".join(lines) + "\n"

    def load(self, scan: Callable[..., Any] = lax.scan) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """Returns the function and the arguments; `scan` is what the program's `SCAN` is."""
        space = execute(self.source(), {**VOCABULARY, "SCAN": scan})
        return space["fun"], space["args"]


_COUNT = itertools.count()


def execute(source: str, space: dict[str, Any]) -> dict[str, Any]:
    """Runs Python text in a namespace, and returns that. Tracebacks show the text's lines."""
    name = f"<program {next(_COUNT) % 64}>"
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    exec(compile(source, name, "exec"), space)
    return space


def statements_of(function: Function) -> Iterator[Statement]:
    """Yields the statements of a function and of the bodies in it."""
    for statement in function.statements:
        for body in statement.bodies:
            yield from statements_of(body)
        yield statement


def replace_statements(function: Function, change: Callable[[Statement], Statement | None]) -> Function:
    """Returns the function with its statements changed, the innermost first; None takes one out."""
    changed = []
    for statement in function.statements:
        bodies = tuple(replace_statements(body, change) for body in statement.bodies)
        if any(a is not b for a, b in zip(bodies, statement.bodies)):
            statement = dataclasses.replace(statement, bodies=bodies)
        new = change(statement)
        if new is not None:
            changed.append(new)
    if len(changed) == len(function.statements) and all(a is b for a, b in zip(changed, function.statements)):
        return function
    return dataclasses.replace(function, statements=tuple(changed))


def indented(text: str) -> str:
    """Returns text as a block of a report."""
    return textwrap.indent(text, "    ")
