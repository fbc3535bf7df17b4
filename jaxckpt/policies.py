"""Policy: rules from selectors to actions, decided on the traced graph.

    Policy({"mlp_*": SAVE, op("dot_general") & larger_than("1MiB"): OFFLOAD})

A selector picks values: a glob over tags, `op("conv*")`, `larger_than("1MiB")`, `intensity_above(128)`, `where(lambda value: ...)`, and
combinations of them with `&`, `|` and `~`. The first rule that picks a value gives it its action. Decisions fall once, when the function is
traced, so `jax.vmap` around a checkpointed function changes none of them.
"""

from __future__ import annotations

import fnmatch
import functools
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from jaxckpt import _compat
from jaxckpt._errors import ArgumentError, UnmatchedTagError, did_you_mean
from jaxckpt.actions import OFFLOAD, RECOMPUTE, SAVE, Action, action_from, given
from jaxckpt.core.graph import Graph, Value
from jaxckpt.core.plan import Plan, Region
from jaxckpt.core.units import format_bytes, parse_bytes

# -------------------------------------------------------------------------------------------------------------- selectors


@dataclass(frozen=True)
class Selector:
    """Picks values of a graph. Made by `tagged`, `op`, `larger_than`, `intensity_above`, `where`, and by `&`, `|`, `~` of those.

    Selectors are values: equal where kind and operands are.

    Attributes:
      kind: a key of the table `PICKS`.
      operands: what the kind takes: a glob, a number, a function, or selectors.
    """

    kind: str
    operands: tuple[Any, ...]

    def picks(self, value: Value) -> bool:
        """Whether it picks a value."""
        return PICKS[self.kind](value, *self.operands)

    def globs(self, kind: str) -> tuple[str, ...]:
        """Returns the globs in it, over tags ("tagged") or over names of primitives ("op"), for `Policy(strict=True)`."""
        if self.kind == kind:
            return self.operands
        return tuple(glob for each in self.operands if isinstance(each, Selector) for glob in each.globs(kind))

    def __and__(self, other: Selector | str) -> Selector:
        return Selector("&", (self, selector(other)))

    def __or__(self, other: Selector | str) -> Selector:
        return Selector("|", (self, selector(other)))

    def __rand__(self, other: str) -> Selector:
        return selector(other) & self

    def __ror__(self, other: str) -> Selector:
        return selector(other) | self

    def __invert__(self) -> Selector:
        return Selector("~", (self,))

    def __str__(self) -> str:
        return _TEXTS.get(self.kind, _call_text)(self.kind, *self.operands)

    __repr__ = __str__


LENIENT = " Or pass strict=False to the Policy."
"""The end of errors of a strict policy; the command line, which has no such argument, leaves it out."""

PICKS: dict[str, Callable[..., bool]] = {
    "tagged": lambda v, glob: any(fnmatch.fnmatchcase(tag, glob) for tag in v.tags),
    "op": lambda v, glob: bool(v.primitive) and fnmatch.fnmatchcase(v.primitive, glob),
    "larger_than": lambda v, size: v.kept_bytes > size,
    "intensity_above": lambda v, flops_per_byte: v.flops > flops_per_byte * max(v.bytes, 1),
    "where": lambda v, predicate: bool(predicate(v)),
    "&": lambda v, left, right: left.picks(v) and right.picks(v),
    "|": lambda v, left, right: left.picks(v) or right.picks(v),
    "~": lambda v, inner: not inner.picks(v),
    "jax": lambda v, policy, action: _as_jax(v, policy, action),
}
"""What each kind of selector picks: (value, operands...) -> bool."""


def _call_text(kind: str, operand: Any) -> str:
    return f"{kind}({operand!r})"


_TEXTS: dict[str, Callable[..., str]] = {
    "tagged": lambda kind, glob: repr(glob),
    "larger_than": lambda kind, size: f"{kind}({format_bytes(size)!r})",
    "intensity_above": lambda kind, number: f"{kind}({number:g})",
    "where": lambda kind, predicate: f"{kind}({getattr(predicate, '__name__', 'function')})",
    "&": lambda kind, left, right: f"({left} & {right})",
    "|": lambda kind, left, right: f"({left} | {right})",
    "~": lambda kind, inner: f"~{inner}",
}


def tagged(glob: str) -> Selector:
    """Picks values with a tag (`jaxckpt.tag`, `checkpoint_name`) that the glob matches; a plain string in a rule means this.

    Args:
      glob: as of `fnmatch`: `*`, `?`, `[abc]`; case counts.

    Raises:
      ArgumentError: it is no string, or empty.
    """
    return Selector("tagged", (_glob("tagged's glob", glob),))


def op(glob: str) -> Selector:
    """Picks the results of operations whose primitive's name the glob matches: "dot_general", "conv*", "custom_vjp_call", "scan".

    Args:
      glob: as of `fnmatch`.

    Raises:
      ArgumentError: it is no string, or empty.
    """
    return Selector("op", (_glob("op's glob", glob),))


def _glob(argument: str, glob: Any) -> str:
    if not isinstance(glob, str) or not glob:
        raise ArgumentError(argument, "a string that is not empty, such as 'dot_general' or 'mlp_*'", glob)
    return glob


def larger_than(size: int | str) -> Selector:
    """Picks values that cost more than so many bytes to keep; inside a loop all iterations are counted.

    Args:
      size: bytes, or a string such as "1MiB".

    Raises:
      ArgumentError: the size does not parse.
    """
    return Selector("larger_than", (parse_bytes(size, "larger_than's size"),))


def intensity_above(flops_per_byte: float) -> Selector:
    """Picks values that are dear to recompute: more FLOPs of their operation for each byte that keeping them costs.

    A matmul with a contracted length of K has an intensity of K for results of two bytes, K/2 for four. Elementwise operations have less
    than one.

    Args:
      flops_per_byte: the threshold.

    Raises:
      ArgumentError: it is negative, not a number, or a bool.
    """
    number = isinstance(flops_per_byte, (int, float)) and not isinstance(flops_per_byte, bool)
    if not number or not flops_per_byte >= 0:
        raise ArgumentError("flops_per_byte", "a number of at least 0", flops_per_byte)
    return Selector("intensity_above", (flops_per_byte,))


def where(predicate: Callable[[Value], bool]) -> Selector:
    """Picks the values for which a function of `jaxckpt.core.graph.Value` (shape, dtype, bytes, tags, primitive, params, ...) is true.

    Two such selectors are equal where they have the same function. One that is written anew at each use (`where(lambda v: ...)` in a layer's
    call) is another each time, and has the layer traced anew.
    """
    if not callable(predicate):
        raise ArgumentError("predicate", "a function of a Value", predicate)
    try:
        hash(predicate)
    except TypeError:  # an object that defines what is equal to it; as a function it equals itself alone
        return Selector("where", (functools.wraps(predicate, updated=())(lambda value: predicate(value)),))
    return Selector("where", (predicate,))


def selector(value: Selector | str) -> Selector:
    """Returns a selector: itself, or `tagged(value)` for a string.

    Raises:
      ArgumentError: it is neither.
    """
    if isinstance(value, Selector):
        return value
    if isinstance(value, str):
        return tagged(value)
    raise ArgumentError("selector", "a tag glob or one of op(), larger_than(), intensity_above(), where()", value)


# ----------------------------------------------------------------------------------------------------------------- policy


class Policy:
    """Rules that give every intermediate value of a function an action.

    Args:
      rules: a mapping, or pairs, from selector to action; the first that picks a value counts. Actions may be given by name ("save").
      default: the action of values that no rule picks.
      strict: whether a tag glob that matches no tag of the function raises `UnmatchedTagError`, and an `op` that matches the name of no
        primitive of this JAX, in the function or not, raises `ArgumentError`.

    Raises:
      ArgumentError: a selector or an action is none.

    >>> Policy({"mlp_*": SAVE, op("dot_general"): "offload"})
    Policy({'mlp_*': SAVE, op('dot_general'): OFFLOAD})
    """

    def __init__(
        self,
        rules: Mapping[Any, Action | str] | Iterable[tuple[Any, Action | str]] = (),
        *,
        default: Action | str = RECOMPUTE,
        strict: bool = True,
    ) -> None:
        pairs = rules.items() if isinstance(rules, Mapping) else rules
        try:
            self.rules = tuple((selector(key), action_from(action)) for key, action in pairs)
        except (TypeError, ValueError) as error:
            if isinstance(error, ArgumentError):
                raise
            raise ArgumentError("rules", "a mapping, or pairs, from selector to action", rules) from error
        if not isinstance(strict, bool):
            raise ArgumentError("strict", "a bool", strict)
        self.default = action_from(default, "default")
        self.strict = strict

    def decide(self, graph: Graph) -> dict[int, Action]:
        """Returns index -> action for the values that are not recomputed.

        Arguments and constants are there anyway, so only intermediates are decided on, and the tagged inputs of loop bodies.

        Raises:
          UnmatchedTagError: the policy is strict and a glob of its matches no tag.
          ArgumentError: the policy is strict and an `op` of its matches no primitive's name.
        """
        if self.strict:
            self._check_globs(graph)
        actions: dict[int, Action] = {}
        for value in graph.values:
            if not value.addressable or not (value.kind == "intermediate" or (value.kind == "input" and value.tags)):
                continue
            action = next((action for sel, action in self.rules if sel.picks(value)), self.default)
            if action.keeps:
                actions[value.index] = given(action, value)
        return actions

    def regions(self, graph: Graph) -> tuple[Region, ...]:
        """Returns these decisions as one region around the whole function."""
        return (Region(0, len(graph.ops), self.decide(graph)),)

    def plan(self, graph: Graph, *, prevent_cse: bool = True) -> Plan:
        """Returns these decisions as a plan."""
        return Plan(self.regions(graph), graph.fingerprint, prevent_cse)

    def as_jax(self) -> tuple[bool, Any]:
        """Returns (True, policy of JAX's own) where one decides the same whatever the program: nothing kept, or everything; else (False, None).

        So those two are jax.checkpoint's own programs, to the letter. JAX keeps what derivatives need (`cos x`) where names could only keep
        what the function computes (`x`, `sin x`); with everything kept that is less. (Complex values, which jax.checkpoint cannot keep
        itself, are recomputed even then.)
        """
        if self.rules or self.default not in (RECOMPUTE, SAVE):
            return False, None
        return True, None if self.default == RECOMPUTE else _compat.everything_saveable

    def _check_globs(self, graph: Graph) -> None:
        for glob in sorted({glob for sel, _ in self.rules for glob in sel.globs("op")}):
            known = {value.primitive for value in graph.values if value.primitive}
            if fnmatch.filter(known, glob) or fnmatch.filter(known := known | _compat.primitive_names(), glob):
                continue
            hint = did_you_mean(glob, sorted(known)) + LENIENT
            raise ArgumentError("op's glob", "one that matches the name of a primitive of this JAX", glob, hint)
        globs = {glob for sel, _ in self.rules for glob in sel.globs("tagged")}
        for glob in sorted(globs):
            if any(fnmatch.fnmatchcase(tag, glob) for tag in graph.tags):
                continue
            hidden = [t for v in graph.values if not v.addressable for t in v.tags if fnmatch.fnmatchcase(t, glob)]
            if hidden:
                raise UnmatchedTagError(
                    f"Policy: the tag glob {glob!r} matches {hidden[0]!r}, which is inside a function with a custom derivative or a while "
                    "loop; JAX keeps nothing from there. Tag the function's result instead."
                )
            raise UnmatchedTagError(
                f"Policy: the tag glob {glob!r} matches no tag of the traced function. {did_you_mean(glob, graph.tags)} "
                f"Tag a value with jaxckpt.tag(x, name).{LENIENT}"
            )

    def __repr__(self) -> str:
        rules = ", ".join(f"{sel}: {action!r}" for sel, action in self.rules)
        default = "" if self.default == RECOMPUTE else f", default={self.default!r}"
        return f"Policy({{{rules}}}{default}{'' if self.strict else ', strict=False'})"

    def __eq__(self, other: object) -> bool:
        same = isinstance(other, Policy) and (self.rules, self.default, self.strict) == (
            other.rules,
            other.default,
            other.strict,
        )
        return self is other or same

    def __hash__(self) -> int:
        return hash((self.rules, self.default, self.strict))


# ---------------------------------------------------------------------------------------------------------------- presets


def _no_batch(value: Value) -> bool:
    if value.primitive == "scaled_matmul_wrapper":
        return value.shape[0] == 1
    if value.primitive != "dot_general":
        return False
    _, (left, right) = value.params["dimension_numbers"]
    return not left and not right


nothing = Policy()
"""Keep only the inputs; recompute everything."""

everything = Policy(default=SAVE)
"""Keep everything, as if there were no checkpoint."""

dots = Policy([(op("dot_general"), SAVE), (op("conv_general_dilated"), SAVE), (op("scaled_matmul_wrapper"), SAVE)])
"""Keep the results of matmuls and convolutions."""

dots_no_batch = Policy([(where(_no_batch), SAVE)])
"""Keep the results of matmuls without batch dimensions: of a transformer's projections, and not its attention scores."""

hybrid = Policy([(intensity_above(128), SAVE)])
"""Keep what is dear for its size, recompute what is cheap: matmuls and convolutions over long contractions are kept (over 128 for results of
two bytes, over 256 for four), attention scores, normalisations and elementwise operations are not. Korthikanti et al. 2022
(arXiv:2205.05198) call it selective recomputation."""

PRESETS: dict[str, Policy] = {
    "nothing": nothing,
    "everything": everything,
    "dots": dots,
    "dots_no_batch": dots_no_batch,
    "hybrid": hybrid,
}


def policy_of(policy: Any) -> Policy | Callable[..., Any] | None:
    """Returns a policy from what a user may pass: None, a Policy, a preset's name, or a policy of JAX's own, which stays as it is.

    Raises:
      ArgumentError: it is none of these.
    """
    if policy is None or isinstance(policy, Policy):
        return policy
    if isinstance(policy, str):
        if policy in PRESETS:
            return PRESETS[policy]
        raise ArgumentError("policy", "a preset's name", policy, did_you_mean(policy, PRESETS))
    if callable(policy):
        return policy  # type: ignore[no-any-return]
    raise ArgumentError("policy", "None, a Policy, a preset's name, or one of jax.checkpoint_policies", policy)


def from_jax(policy: Callable[..., Any]) -> Policy:
    """Returns a Policy that decides as one of JAX's own does, but once, on the traced graph.

    So it holds under `jax.vmap`, and under the flag jax_remat3, where JAX takes most callables for "recompute all". JAX asks its policies about
    the operations of the derivative too (`cos` for `sin`); this one is asked about those of the function itself.

    Args:
      policy: one of `jax.checkpoint_policies`, or a function with their signature.
    """

    rules = [(Selector("jax", (policy, action)), action) for action in (SAVE, OFFLOAD)]
    return Policy(rules, strict=False)


def _as_jax(value: Value, policy: Callable[..., Any], wanted: Action) -> bool:
    """Whether a policy of JAX's own has an action for a value, asked about its names and its operation."""
    answers = {_compat.ask_policy(policy, value.primitive, value.params, value, name) for name in (*value.tags, None)}
    return wanted == (OFFLOAD if "offload" in answers else SAVE if "save" in answers else RECOMPUTE)


# ------------------------------------------------------------------------------------------------------------------- text

_CALL = re.compile(r"(op|larger_than|intensity_above)\(([^()]*)\)")


def parse(text: str) -> Policy:
    """Returns a policy from text: a preset's name, or rules `selector=action` with commas between them.

    A selector is a tag glob, `op(dot_general)`, `larger_than(1MiB)`, `intensity_above(64)`, one of those after `~`, or several with `&`
    between them. `*=save` as the last rule sets the default.

    Raises:
      ArgumentError: the text does not parse.

    >>> parse("mlp_*=save, op(conv*)&larger_than(1MiB)=offload")
    Policy({'mlp_*': SAVE, (op('conv*') & larger_than('1.0 MiB')): OFFLOAD})
    """
    if "=" not in text:
        resolved = policy_of(text.strip())
        assert isinstance(resolved, Policy)
        return resolved
    rules: list[tuple[Selector, Action]] = []
    default = RECOMPUTE
    for rule in re.split(r",(?![^()]*\))", text):
        left, equals, right = rule.rpartition("=")
        if not equals or not left.strip():
            raise ArgumentError("policy", "a preset's name or rules such as 'mlp_*=save, op(conv*)=offload'", text)
        action = action_from(right.strip(), "the action in the policy")
        if left.strip() == "*":
            default = action
            continue
        parts = [_parse_selector(part.strip()) for part in left.split("&")]
        combined = parts[0]
        for part in parts[1:]:
            combined = combined & part
        rules.append((combined, action))
    return Policy(rules, default=default)


def _parse_selector(text: str) -> Selector:
    if text.startswith("~"):
        return ~_parse_selector(text[1:].strip())
    found = _CALL.fullmatch(text)
    if not found:
        return tagged(text)
    name, argument = found[1], found[2].strip().strip("'\"")
    if name == "op":
        return op(argument)
    if name == "larger_than":
        return larger_than(argument)
    try:
        return intensity_above(float(argument))
    except ValueError as error:
        raise ArgumentError("intensity_above", "a number", argument) from error
