"""Writes a program statement by statement, each run on abstract values as soon as it is written.

So an operation's result is whatever JAX says that it is, and a statement that JAX refuses is left out.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np

from tests.fuzz.programs import VOCABULARY, Function, Kind, Statement, execute

TAGS = ("up", "down", "mlp_up", "attn", "x")
DEEPEST = 2
"""Bodies within each other."""
LARGEST = 1 << 13
"""Elements of an array; statements that make larger ones are left out."""


class Unfit(Exception):
    """There are no operands for an operation."""


@dataclass(frozen=True)
class Style:
    """What programs of a kind are like.

    Attributes:
      statements: most at the top level.
      width, rows: sizes of the axes.
      statics: "leaves" where leaves that are no arrays may stand anywhere, "arguments" where they are arguments of
        their own, "none".
      scans: how many `SCAN`s it begins with at least, and of how many steps at most.
      loss: whether the program returns one real number, and its first argument is made of arrays that can be
        differentiated in.
      own: whether jaxckpt's own transforms may stand in it.
    """

    statements: int = 40
    width: int = 4
    rows: int = 3
    statics: str = "leaves"
    scans: tuple[int, int] = (0, 0)
    loss: bool = False
    own: bool = True


def kind_of(value: Any) -> Kind:
    """Returns what an abstract value is."""
    aval = jax.typeof(value)
    return Kind(tuple(aval.shape), str(aval.dtype), bool(getattr(aval, "weak_type", False)))


Operation = Callable[["Builder"], None]
Operations = Mapping[bool, Mapping[Operation, float]]
"""Whether bodies may be written -> operation -> how often it comes."""


@dataclass(frozen=True)
class Setting:
    """What all builders of a program share.

    Attributes:
      rng: where its choices come from.
      style: what it is like.
      operations: what may be written.
      numbers: for names.
    """

    rng: random.Random
    style: Style
    operations: Operations
    numbers: Iterator[int]


class Builder:
    """Statements so far, and the values that the next one may use.

    Attributes:
      env: name -> value, abstract but for what is no array.
      scope: names of values, in order.
      statics: names of what is no array.
      depth: bodies around this one.
      twice: whether what is written is differentiated within the program, so that schedules of slots and while loops
        have no place in it.
    """

    def __init__(
        self,
        setting: Setting,
        env: dict[str, Any],
        scope: list[str],
        statics: list[str],
        depth: int = 0,
        twice: bool = False,
    ) -> None:
        self.setting, self.env, self.scope, self.statics = setting, env, scope, statics
        self.depth, self.twice = depth, twice
        self.rng, self.style = setting.rng, setting.style
        self.statements: list[Statement] = []

    def fresh(self, letter: str = "v") -> str:
        return f"{letter}{next(self.setting.numbers)}"

    # ---- operands

    def pick(self, fits: Callable[[Kind], bool] = lambda kind: True, late: bool | None = None) -> str:
        """Returns the name of a value that fits, a late one rather than an early one."""
        found = [name for name in self.scope if fits(kind_of(self.env[name]))]
        if not found:
            raise Unfit
        late = self.rng.random() < 0.6 if late is None else late
        return self.rng.choice(found[-4:] if late else found)

    def real(self, fits: Callable[[Kind], bool] = lambda kind: True, **how: Any) -> str:
        return self.pick(lambda kind: is_real(kind) and fits(kind), **how)

    def inexact(self, fits: Callable[[Kind], bool] = lambda kind: True, **how: Any) -> str:
        return self.pick(lambda kind: (is_real(kind) or is_complex(kind)) and fits(kind), **how)

    def like(self, name: str, fits: Callable[[Kind, Kind], bool]) -> str:
        """Returns a second operand that fits to the first."""
        kind = self.kind(name)
        return self.pick(lambda other: (is_real(other) or is_complex(other)) and fits(kind, other))

    def kind(self, name: str) -> Kind:
        return kind_of(self.env[name])

    # ---- statements

    def emit(self, text: str, *operands: str, bodies: tuple[Function, ...] = (), results: int = 1) -> tuple[str, ...]:
        """Writes a statement and runs it; raises `Unfit` where that does not go."""
        names = tuple(self.fresh() for _ in range(results))
        text = text if "$out" in text else f"$out = {text}"
        statement = Statement(text, operands, names, (), bodies)
        trial = dict(self.env)
        try:
            execute("\n".join(statement.lines()) + "\n", trial)
            kinds = tuple(kind_of(trial[name]) for name in names)
        except Unfit:
            raise
        except Exception as error:  # what JAX refuses is no program
            raise Unfit from error
        if any(int(np.prod(kind.shape)) > LARGEST or 0 in kind.shape or len(kind.shape) > 4 for kind in kinds):
            raise Unfit
        if any(kind.dtype in ("float64", "complex128", "int64", "float0") for kind in kinds):
            raise Unfit
        self.env.update({name: trial[name] for name in names})
        self.statements.append(replace(statement, kinds=kinds))
        self.scope.extend(names)
        return names

    def attempt(self, operation: Callable[[Builder], Any]) -> bool:
        """Writes an operation's statements, or none."""
        before, names = len(self.statements), len(self.scope)
        try:
            operation(self)
        except Unfit:
            del self.statements[before:], self.scope[names:]
            return False
        return True

    def grow(self, count: int) -> None:
        """Writes so many statements, about."""
        for _ in range(3 * count):
            if len(self.statements) >= count:
                break
            weights = self.setting.operations[self.depth < DEEPEST]
            self.attempt(self.rng.choices(list(weights), list(weights.values()))[0])

    def body(
        self,
        params: Sequence[Kind],
        returns: Callable[[Builder, list[str]], tuple[str, Sequence[str]]],
        *,
        most: int = 5,
        closed: bool = True,
        twice: bool = False,
    ) -> Function:
        """Returns a function of values of such kinds.

        Args:
          params: kinds of its parameters.
          returns: called with its builder and its parameters when its statements are written: returns the expression
            and the outputs.
          most: statements.
          closed: whether it may use what is outside of it.
          twice: see `Builder`.
        """
        name, names = self.fresh("f"), [self.fresh("p") for _ in params]
        made: list[Function] = []

        def run(*values: Any) -> None:
            outside = self.env if closed else {key: self.env[key] for key in [*VOCABULARY, *self.statics]}
            env = {**outside, **dict(zip(names, values))}
            scope = [*(self.scope if closed else ()), *names]
            inner = Builder(self.setting, env, scope, self.statics, self.depth + 1, twice or self.twice)
            inner.grow(self.rng.randint(0, most))
            text, outputs = returns(inner, names)
            made.append(
                Function(name, tuple(names), tuple(params), tuple(inner.statements), text, tuple(outputs), closed)
            )

        jax.make_jaxpr(run)(*(abstract(kind) for kind in params))
        return made[0]

    def fitted(self, kind: Kind, params: Sequence[str]) -> str:
        """Returns a value of that kind, made for it if there is none; now and then a parameter or a literal, which
        nothing was computed for.
        """
        same = [name for name in self.scope if self.kind(name) == kind]
        chance = self.rng.random()
        if chance < 0.1 and is_real(kind):
            return self.emit(kind.literal)[0]
        own = [name for name in same if name in params]
        if chance < 0.2 and own:
            return self.rng.choice(own)
        computed = [s for statement in self.statements for s in statement.results if s in same]
        if computed:
            return computed[-1]
        if is_real(kind):
            source = self.real()
            if kind.shape == self.kind(source).shape:
                return self.emit(f"jnp.tanh($0).astype({kind.dtype!r})", source)[0]
            return self.emit(f"jnp.broadcast_to(jnp.tanh(jnp.mean($0)), {kind.shape}).astype({kind.dtype!r})", source)[
                0
            ]
        if not same:
            raise Unfit
        return self.rng.choice(same)


def abstract(kind: Kind) -> Any:
    """Returns an abstract value of a kind."""
    if kind.dtype.startswith("key<"):
        return jax.eval_shape(
            lambda: jax.random.split(jax.random.key(0), kind.shape) if kind.shape else jax.random.key(0)
        )
    return jax.ShapeDtypeStruct(kind.shape, kind.dtype, weak_type=kind.weak)


def is_real(kind: Kind) -> bool:
    """Whether values are floating-point numbers."""
    return "float" in kind.dtype


def is_complex(kind: Kind) -> bool:
    """Whether values are complex numbers."""
    return "complex" in kind.dtype


def is_integer(kind: Kind) -> bool:
    """Whether values are signed integers."""
    return kind.dtype.startswith("int")


def broadcastable(one: Kind, other: Kind) -> bool:
    """Whether shapes go together."""
    try:
        np.broadcast_shapes(one.shape, other.shape)
    except ValueError:
        return False
    return True
