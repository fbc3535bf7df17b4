"""Policy: rules from selectors to actions, decided on the traced graph.

    Policy({"mlp_*": SAVE, op("dot_general") & larger_than("1MiB"): OFFLOAD})

A selector picks values: a glob over tags, `op("conv*")`, `larger_than("1MiB")`, `intensity_above(128)`, `where(lambda
value: ...)`, or a combination of these with `&`, `|` and `~`. The first rule that picks a value decides its action. A
policy decides once, when the function is traced. So `jax.vmap` around a checkpointed function changes no decision.
"""

from __future__ import annotations

import fnmatch
import functools
import inspect
import operator
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import jax

from jaxckpt import _compat
from jaxckpt._errors import ArgumentError, InWords, UnmatchedTagError, did_you_mean
from jaxckpt.actions import OFFLOAD, RECOMPUTE, SAVE, Action, action_from, given
from jaxckpt.core.graph import Graph, Value
from jaxckpt.core.plan import Plan, Region
from jaxckpt.core.units import as_number, format_bytes, parse_bytes

# ------------------------------------------------------------------------------------------------------------ selectors


@dataclass(frozen=True)
class Selector:
    """Picks values of a graph. `tagged`, `op`, `larger_than`, `intensity_above` and `where` make selectors; `&`, `|`,
    `~` combine them.

    Selectors are equal if their kinds and operands are equal.

    Attributes:
      kind: a key of the table `PICKS`.
      operands: operands of the kind: a glob, a number, a function, or selectors.
    """

    kind: str
    operands: tuple[Any, ...]

    def picks(self, value: Value) -> bool:
        """Returns whether the selector picks a value."""
        return PICKS[self.kind](value, *self.operands)

    def globs(self, kind: str) -> tuple[str, ...]:
        """Returns the selector's globs over tags (kind "tagged") or names of primitives (kind "op"), for
        `Policy(strict=True)`.
        """
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
"""The last sentence in errors of a strict policy. The command line removes it, because it has no such argument."""


HAS = ("index", "shape", "dtype", "bytes", "tags", "primitive", "params", "flops", "source", "scope", "repeats")
"""What the predicate of `where` may ask a value for; see there."""


def _said(predicate: Callable[[Value], Any], value: Value) -> bool:
    try:
        said = predicate(value)
    except Exception as error:
        error.add_note(
            f"It was raised by the function of a policy's `where`, for {value.label} {value.dtype}{value.shape}. The "
            f"function takes that value, which has {', '.join(HAS)}."
        )
        raise
    try:
        return bool(said)
    except (ValueError, TypeError, jax.errors.JAXTypeError) as error:  # an array: of several, or that is being traced
        raise ArgumentError("predicate", "a function of a Value that returns True or False", said) from error


def _known(kind: str, value: Any, compare: Callable[[], Any]) -> bool:
    """Returns what a comparison of sizes says.

    Raises:
      ArgumentError: the shape is symbolic, and does not say.
    """
    try:
        return bool(compare())
    except (jax.errors.InconclusiveDimensionOperation, jax.errors.JAXTypeError) as error:
        rule = "used where the shapes of values say whether they are picked"
        hint = (
            f"{value.label} has a symbolic shape. Name values by tag or op, or bound the size: "
            "jax.export.symbolic_shape('b, 32', constraints=['b >= 1024'])."
        )
        raise ArgumentError(kind, rule, InWords(f"a value of shape {list(value.shape)}"), hint) from error


PICKS: dict[str, Callable[..., bool]] = {
    "tagged": lambda v, glob: any(fnmatch.fnmatchcase(tag, glob) for tag in v.tags),
    "op": lambda v, glob: bool(v.primitive) and fnmatch.fnmatchcase(v.primitive, glob),
    "larger_than": lambda v, size: _known("larger_than", v, lambda: v.kept_bytes > size),
    "intensity_above": lambda v, flops_per_byte: _known(
        "intensity_above", v, lambda: v.flops > flops_per_byte * max(v.bytes, 1)
    ),
    "where": lambda v, predicate: _said(predicate, v),
    "&": lambda v, left, right: left.picks(v) and right.picks(v),
    "|": lambda v, left, right: left.picks(v) or right.picks(v),
    "~": lambda v, inner: not inner.picks(v),
    "jax": lambda v, policy, action: _as_jax(v, policy, action),
}
"""Kind of selector -> function (value, operands...) -> bool, which says whether a value is picked."""


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
    """Picks values with a tag (`jaxckpt.tag`, `checkpoint_name`) that the glob matches. A string in a rule means the
    same.

    Args:
      glob: a pattern as in `fnmatch`: `*`, `?`, `[abc]`; it is case-sensitive.

    Raises:
      ArgumentError: it is no string, or empty.
    """
    return Selector("tagged", (_glob("tagged's glob", glob),))


def op(glob: str, *others: str) -> Selector:
    """Picks the results of operations whose primitive's name the glob matches: "dot_general", "conv*",
    "custom_vjp_call", "scan".

    Args:
      glob: a pattern as in `fnmatch`.
      *others: more of them; any of them will do.

    Raises:
      ArgumentError: one of them is no string, or empty.

    >>> op("dot_general", "tanh") == op("dot_general") | op("tanh")
    True
    """
    selectors = (Selector("op", (_glob("op's glob", each),)) for each in (glob, *others))
    return functools.reduce(operator.or_, selectors)


def _glob(argument: str, glob: Any) -> str:
    if not isinstance(glob, str) or not glob:
        raise ArgumentError(argument, "a string that is not empty, such as 'dot_general' or 'mlp_*'", glob)
    return glob


def larger_than(size: int | str) -> Selector:
    """Picks values that need more than `size` bytes when they are kept. Inside a loop, the bytes of all iterations are
    added.

    Args:
      size: bytes, or a string such as "1MiB".

    Raises:
      ArgumentError: the size does not parse.
    """
    return Selector("larger_than", (parse_bytes(size, "larger_than's size"),))


def intensity_above(flops_per_byte: float) -> Selector:
    """Picks values whose operation takes more than `flops_per_byte` FLOPs for each byte of the value.

    A matmul with a contracted length of K has an intensity of K for results of two bytes, and K/2 for results of four
    bytes. Elementwise operations have an intensity of less than 1.

    Args:
      flops_per_byte: the threshold.

    Raises:
      ArgumentError: it is negative, not a number, or a bool.
    """
    threshold = as_number(flops_per_byte)
    if threshold is None or not threshold >= 0:
        raise ArgumentError("flops_per_byte", "a number of at least 0", flops_per_byte)
    return Selector("intensity_above", (threshold,))


def where(predicate: Callable[[Value], bool]) -> Selector:
    """Picks the values for which a function of `jaxckpt.core.graph.Value` is true.

    A value has shape, dtype and bytes, as of one execution; tags; index, its number in the program; primitive, the
    operation that makes it, with its params, flops, source line and scope (of flax modules and `jax.named_scope`);
    repeats, how often that runs. So `where(lambda v: v.primitive == "dot_general" and v.index % 2)` picks matmuls by
    their number, and `where(lambda v: v.shape[-1:] == (4096,))` arrays by a shape.

    Two such selectors are equal if they have the same function. A function that is written at each use (`where(lambda
    v: ...)` in a layer's call) is a new function each time, so the layer is traced each time.
    """
    if not callable(predicate):
        raise ArgumentError("predicate", "a function of a Value", predicate)
    try:
        hash(predicate)
    except TypeError:  # an object with its own __eq__; as a function it is equal only to itself
        return Selector("where", (functools.wraps(predicate, updated=())(lambda value: predicate(value)),))
    return Selector("where", (predicate,))


def selector(value: Selector | str) -> Selector:
    """Returns a selector unchanged, and `tagged(value)` for a string.

    Raises:
      ArgumentError: `value` is neither a selector nor a string.
    """
    if isinstance(value, Selector):
        return value
    if isinstance(value, str):
        return tagged(value)
    raise ArgumentError("selector", "a tag glob or one of op(), larger_than(), intensity_above(), where()", value)


# --------------------------------------------------------------------------------------------------------------- policy

_GIVEN = ("input", "argument")
"""Kinds of values that are not computed, and that a policy decides on if they are tagged."""


_ELSEWHERE = {
    **dict.fromkeys(("matmul", "mm", "bmm", "addmm", "linear", "dense", "einsum", "dot", "tensordot"), "dot_general"),
    **dict.fromkeys(("conv", "conv1d", "conv2d", "conv3d", "convolution", "convolve"), "conv_general_dilated"),
    "sum": "reduce_sum",
    "sigmoid": "logistic",
    "where": "select_n",
    "relu": "max",
    "concat": "concatenate",
}
"""What users of `jax.numpy` and of other libraries call operations -> the primitive of JAX."""


class Policy:
    """Rules that give every intermediate value of a function an action.

    Args:
      rules: a mapping from selector to action, or pairs of both. The first rule that picks a value decides. An action
        may be a name ("save").
      default: the action of values that no rule picks.
      strict: if True, a tag glob that matches no tag of the function raises `UnmatchedTagError`. An `op` glob that
        matches no name of a primitive of this JAX, in the function or not, raises `ArgumentError`.

    Raises:
      ArgumentError: a selector or an action is invalid.

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
            hint = "A preset has a name alone: policy='dots'." if isinstance(rules, str) and rules in PRESETS else ""
            raise ArgumentError("rules", "a mapping, or pairs, from selector to action", rules, hint) from error
        if not isinstance(strict, bool):
            raise ArgumentError("strict", "a bool", strict)
        self.default = action_from(default, "default")
        self.strict = strict

    def decide(self, graph: Graph) -> dict[int, Action]:
        """Returns index -> action for the values that are not recomputed.

        Arguments and constants are in memory anyway. So a policy decides only on intermediates, and on tagged inputs of
        loop bodies. A tagged argument is kept in another form, or on the host, if its action says so: instead of the
        argument, where nothing else reads that.

        Raises:
          UnmatchedTagError: the policy is strict, and one of its tag globs matches no tag.
          ArgumentError: the policy is strict, and one of its `op` globs matches no name of a primitive.
        """
        if self.strict:
            self._check_globs(graph)
        actions: dict[int, Action] = {}
        for value in graph.values:
            if not value.addressable or not (value.kind == "intermediate" or (value.kind in _GIVEN and value.tags)):
                continue
            action = next((action for sel, action in self.rules if sel.picks(value)), self.default)
            if action.keeps and (value.kind != "argument" or action.changes or action.on_host):
                actions[value.index] = given(action, value)
        return actions

    @property
    def may_tie(self) -> bool:
        """Whether `regions` ties some functions: whether a value may be kept on the host or in another form."""
        return any(action.on_host or action.changes for action in (self.default, *(action for _, action in self.rules)))

    def regions(self, graph: Graph, *, ties: bool = True) -> tuple[Region, ...]:
        """Returns the decisions of `decide` as one region around the whole function.

        With values on the host or in another form it is tied: else compilers leave the gradients of many layers for
        later, and have in memory at once what these are computed from, fetched and restored. Not if `ties` is False.
        """
        actions = self.decide(graph)
        tied = ties and any(action.on_host or action.changes for action in actions.values())
        return (Region(0, len(graph.ops), actions, tied=tied),)

    def plan(self, graph: Graph, *, prevent_cse: bool = True) -> Plan:
        """Returns the decisions of `decide` as a plan."""
        return Plan(self.regions(graph), graph.fingerprint, prevent_cse)

    def as_jax(self) -> tuple[bool, Any]:
        """Returns (True, JAX's policy) for a policy that keeps nothing, or everything, in every program; else (False,
        None).

        So these two give exactly the programs of jax.checkpoint. JAX keeps what derivatives need (`cos x`). Names can
        keep only what the function computes (`x`, `sin x`), which is more if everything is kept. (jax.checkpoint cannot
        keep complex values; they are recomputed even then.)
        """
        if self.rules or self.default not in (RECOMPUTE, SAVE):
            return False, None
        return True, None if self.default == RECOMPUTE else _compat.everything_saveable

    def _check_globs(self, graph: Graph) -> None:
        for glob in sorted({glob for sel, _ in self.rules for glob in sel.globs("op")}):
            known = {value.primitive for value in graph.values if value.primitive}
            if fnmatch.filter(known, glob) or fnmatch.filter(known := known | _compat.primitive_names(), glob):
                continue
            known_as = _ELSEWHERE.get(glob.lower().removeprefix("aten.").removeprefix("nn."))
            hint = f"JAX calls it {known_as!r}." if known_as else did_you_mean(glob, sorted(known)) + LENIENT
            raise ArgumentError("op's glob", "one that matches the name of a primitive of this JAX", glob, hint)
        globs = {glob for sel, _ in self.rules for glob in sel.globs("tagged")}
        for glob in sorted(globs):
            if any(fnmatch.fnmatchcase(tag, glob) for tag in graph.tags):
                continue
            hidden = [t for v in graph.values if not v.addressable for t in v.tags if fnmatch.fnmatchcase(t, glob)]
            if hidden:
                raise UnmatchedTagError(
                    f"Policy: the tag glob {glob!r} matches {hidden[0]!r}, which is inside a function with a custom "
                    f"derivative or a while "
                    "loop; JAX can keep nothing from there. Tag the function's result instead."
                )
            rule, _, place = glob.rpartition("/")
            of_rule = place.isdigit() and any(fnmatch.fnmatchcase(tag.rpartition("/")[0], rule) for tag in graph.tags)
            hint = (
                f"If place {place} of what that rule keeps is an argument of it, tag the argument before the call."
                if of_rule
                else "Tag a value with jaxckpt.tag(x, name)."
            )
            raise UnmatchedTagError(
                f"Policy: the tag glob {glob!r} matches no tag of the traced function. "
                f"{did_you_mean(glob, graph.tags)} {hint}{LENIENT}"
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


# -------------------------------------------------------------------------------------------------------------- presets


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
"""Keep the results of matmuls without batch dimensions: a transformer's projections, but not its attention scores."""

hybrid = Policy([(intensity_above(128), SAVE)])
"""Keep values that need many FLOPs for each byte, and recompute the others. Matmuls and convolutions over long
contractions are kept (longer than 128 for results of two bytes, 256 for four). Attention scores, normalisations and
elementwise operations are recomputed. Korthikanti et al. 2022 (arXiv:2205.05198) call this selective recomputation."""

PRESETS: dict[str, Policy] = {
    "nothing": nothing,
    "everything": everything,
    "dots": dots,
    "dots_no_batch": dots_no_batch,
    "hybrid": hybrid,
}


def policy_of(policy: Any) -> Policy | Callable[..., Any] | None:
    """Returns the policy for a user's argument: None, a Policy, a preset's name, or one of JAX's policies, which is
    returned unchanged.

    Raises:
      ArgumentError: the argument is none of these.
    """
    if policy is None or isinstance(policy, Policy):
        return policy
    if isinstance(policy, str):
        if policy in PRESETS:
            return PRESETS[policy]
        hint = did_you_mean(policy, PRESETS)
        if hasattr(jax.checkpoint_policies, policy):
            hint = f"JAX's policy is no text: jax.checkpoint_policies.{policy}. {hint}"
        raise ArgumentError("policy", "a preset's name", policy, hint)
    if callable(policy) and not isinstance(policy, type):
        if _is_torchs(policy):
            hint = "Write policy=Policy({where(lambda value: ...): SAVE}), or name operations: op('dot_general')."
            raise ArgumentError("policy", "asked about values", InWords("a policy_fn of PyTorch, (ctx, op, ...)"), hint)
        if any(policy is getattr(jax.checkpoint_policies, name, None) for name in _MAKERS):
            hint = f"Call it: jax.checkpoint_policies.{policy.__name__}(...)."
            raise ArgumentError("policy", "a policy, not what makes one", policy, hint)
        if not _is_jaxs(policy):
            hint = (
                "Such a policy is asked about an operation. For values, write Policy({where(lambda value: ...): SAVE})."
            )
            raise ArgumentError("policy", "a function of (primitive, *avals, **params), as JAX's are", policy, hint)
        return policy  # type: ignore[no-any-return]
    hint = "Write policy=Policy({...})." if isinstance(policy, Mapping) else ""
    if isinstance(policy, (list, tuple)) and policy and all(isinstance(each, str) for each in policy):
        hint = f"To keep what is tagged so: Policy({{{policy[0]!r}: 'save', ...}})."
    if isinstance(policy, Action):
        hint = f"Write policy=Policy(default={policy!r}), or name what it is for: Policy({{'tag': {policy!r}}})."
    raise ArgumentError("policy", "None, a Policy, a preset's name, or one of jax.checkpoint_policies", policy, hint)


_MAKERS = (
    "save_only_these_names",
    "save_any_names_but_these",
    "save_anything_except_these_names",
    "save_from_both_policies",
    "save_and_offload_only_these_names",
    "offload_dot_with_no_batch_dims",
)
"""Functions of `jax.checkpoint_policies` that return a policy."""


def _is_torchs(policy: Callable[..., Any]) -> bool:
    """Returns whether a function takes what PyTorch asks a policy about; JAX would ask it too, and mean another."""
    try:
        return next(iter(inspect.signature(policy).parameters), "") == "ctx"
    except (TypeError, ValueError):  # some builtins have no signature
        return False


def _is_jaxs(policy: Callable[..., Any]) -> bool:
    """Returns whether a function can be called as JAX calls its policies."""
    try:
        inspect.signature(policy).bind("dot_general", "aval", "aval", dimension_numbers=None)
    except TypeError:
        return False
    except ValueError:  # some builtins have no signature
        return True
    return True


def from_jax(policy: Callable[..., Any]) -> Policy:
    """Returns a Policy that decides as one of JAX's policies does, but once, on the traced graph.

    So its decisions are the same under `jax.vmap`, and under the flag jax_remat3, where JAX takes most callables for
    "recompute all". JAX also asks its policies about the operations of the derivative (`cos` for `sin`). This policy is
    asked only about the operations of the function.

    Args:
      policy: one of `jax.checkpoint_policies`, or a function with their signature.
    """

    rules = [(Selector("jax", (policy, action)), action) for action in (SAVE, OFFLOAD)]
    return Policy(rules, strict=False)


def _as_jax(value: Value, policy: Callable[..., Any], wanted: Action) -> bool:
    """Returns whether one of JAX's policies, asked about the names and the operation of a value, gives it the wanted
    action.
    """
    answers = {_compat.ask_policy(policy, value.primitive, value.params, value, name) for name in (*value.tags, None)}
    return wanted == (OFFLOAD if "offload" in answers else SAVE if "save" in answers else RECOMPUTE)


# ----------------------------------------------------------------------------------------------------------------- text

_CALL = re.compile(r"(op|larger_than|intensity_above)\(([^()]*)\)")


def parse(text: str) -> Policy:
    """Returns a policy from text: a preset's name, or rules `selector=action` with commas between them.

    A selector is a tag glob, `op(dot_general)`, `larger_than(1MiB)` or `intensity_above(64)`. `~` before a selector
    negates it, and `&` between selectors combines them. The rule `*=save` sets the default.

    Raises:
      ArgumentError: the text is not a policy.

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
