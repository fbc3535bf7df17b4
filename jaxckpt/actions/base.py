"""The base class of actions. An action says what becomes of a value between the forward pass and its use in the
backward pass.

An action is one class in one file. Policies, plans, the emitter, the planner, plan files and reports ask it. None of
them knows which actions exist. When a class with a `kind` is defined, in this package or anywhere else, it is known by
that name.
"""

from __future__ import annotations

import functools
import json
import math
import numbers
import operator
import re
from abc import ABCMeta
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from jaxckpt._errors import ArgumentError, ForwardModeError, nearest


class Array(Protocol):
    """The array that an action is asked about: anything with a shape, a dtype and bytes, all of one execution."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape, of one execution."""
        ...

    @property
    def dtype(self) -> Any:
        """The dtype, as in numpy."""
        ...

    @property
    def bytes(self) -> int:
        """The bytes, of one execution, on one device."""
        ...


@dataclass(frozen=True)
class Cost:
    """The cost to store a value and to restore it, both together, for each resource.

    Attributes:
      flops: FLOPs of elementwise arithmetic.
      memory_bytes: bytes that are read and written in device memory.
      host_bytes: bytes over the link to the host, in both directions.
      link_bytes: bytes over the links to other devices.

    Raises:
      ArgumentError: one of them is no finite number of at least 0.
    """

    flops: float = 0.0
    memory_bytes: float = 0.0
    host_bytes: float = 0.0
    link_bytes: float = 0.0

    def __post_init__(self) -> None:
        for name in self.__dataclass_fields__:
            given = getattr(self, name)
            if not isinstance(given, numbers.Real) or not 0 <= float(given) < math.inf:  # NaN is neither
                raise ArgumentError(name, "a finite number of at least 0, as part of a Cost", given)

    def __add__(self, other: Cost) -> Cost:
        names = self.__dataclass_fields__
        return Cost(**{name: getattr(self, name) + getattr(other, name) for name in names})


@dataclass(frozen=True)
class StoredArray:
    """An array that is kept of a value: an `Array`."""

    shape: tuple[int, ...]
    dtype: Any
    bytes: int


def _bytes(array: Any) -> int:
    return math.prod(array.shape) * array.dtype.itemsize  # type: ignore[no-any-return]


def device_share(value: Array) -> float:
    """Returns the share of a value that one device has: 1, unless the devices divide it among them."""
    whole = _bytes(value)
    return 1.0 if value.bytes == whole else value.bytes / max(whole, 1)  # equal where they are symbolic


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def once(x: Any, action: Action) -> Any:
    """Returns what an action rounds, or has rounded; it has no derivative: that of rounding, or of integers, is zero,
    which would be wrong without a word.
    """
    return x


@once.defjvp
def _twice(action: Action, primals: Any, tangents: Any) -> Any:
    raise ForwardModeError(
        f"{action!r} keeps values for one derivative, and a second one was asked for: no derivative passes the rounding. "
        'Where a gradient is differentiated again, keep these values by SAVE or compress("bfloat16").'
    )


def to_json(value: Any) -> Any:
    """Returns a parameter of an action or a schedule as a JSON value: NumPy's numbers as Python's, tuples as lists.

    >>> to_json((np.int64(3), "narrow"))
    [3, 'narrow']
    """
    if isinstance(value, (np.number, np.bool_)):
        return value.item()
    return [to_json(item) for item in value] if isinstance(value, (tuple, list)) else value


def from_json(value: Any) -> Any:
    """Returns a parameter of an action from what `to_json` returned: lists are tuples.

    >>> from_json([3, "narrow"])
    (3, 'narrow')
    """
    return tuple(from_json(item) for item in value) if isinstance(value, list) else value


KINDS: dict[str, type[Action]] = {}
"""Kind -> class of the action."""


def enter(kinds: dict[str, Any], kind: str, cls: type) -> None:
    """Enters a class by its kind. A class of the same name in the same module takes the place of the one before, as
    when a cell of a notebook runs again.

    Raises:
      ArgumentError: the kind is that of another class.
    """
    known = kinds.get(kind, cls)
    if (known.__module__, known.__qualname__) != (cls.__module__, cls.__qualname__):
        rule = "a name of its own: plan files say by it what to load"
        raise ArgumentError("kind", rule, kind, f"It is that of {known.__module__}.{known.__qualname__}.")
    kinds[kind] = cls


class _Kinds(ABCMeta):
    """Adds each class with a `kind` to KINDS. A class without parameters has one object. `Action("save")` returns the
    object of that kind.
    """

    _plain: Any

    def __init__(cls, name: str, bases: tuple[type, ...], fields: dict[str, Any]) -> None:
        super().__init__(name, bases, fields)
        kind = fields.get("kind", "")
        if not isinstance(kind, str):
            raise ArgumentError("kind", "a str in the class of an action: its name in plan files", kind)
        if kind:
            enter(KINDS, kind, cls)

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if cls is Action:
            return action_from(*args, **{"argument": "kind", **kwargs})
        if not cls.__dict__.get("kind"):
            raise ArgumentError("kind", "set in the class of an action: its name in plan files", cls.__qualname__)
        if args or kwargs:
            return super().__call__(*args, **kwargs)
        if "_plain" not in cls.__dict__:
            cls._plain = super().__call__()  # one object for a class without parameters
        return cls.__dict__["_plain"]


class Action(metaclass=_Kinds):
    """What becomes of an intermediate value. Two actions are equal if their kinds and parameters are equal.

    A subclass sets `kind`. If it is a dataclass, its fields are its parameters. They are written to plan files, so JSON
    must have their types: text, numbers, flags and tuples of these.

    Attributes:
      kind: the name in plan files, on the command line and in reports.
      keeps: whether anything is kept; False if the value is computed again.
      changes: whether another form of the value is kept; `encode` and `decode` then define it.
      on_host: whether the kept bytes are in host memory.
      listed: whether messages list the kind; False if people write something else, such as `a | b`.
      example: how one is written in Python, for messages; "" to show none.
      words: first parameters that somebody may write without the kind, for messages.
    """

    kind: ClassVar[str] = ""
    example: ClassVar[str] = ""
    words: ClassVar[Collection[str]] = ()
    listed: ClassVar[bool] = True
    keeps: ClassVar[bool] = True
    changes: ClassVar[bool] = False
    on_host: ClassVar[bool] = False

    @property
    def saves(self) -> bool:
        """Whether the value itself is kept, in device memory, as `SAVE` keeps it."""
        return self.keeps and not self.changes and not self.on_host

    def admits(self, value: Array) -> bool:
        """Returns whether the action can be used for a value. Other values are saved as they are."""
        return True

    def given(self, value: Array) -> Action | None:
        """Returns the action as it is used for a value, this one unless the value says more; None if it cannot be."""
        return self if self.admits(value) else None

    def device_bytes(self, value: Array) -> int:
        """Returns the bytes that are kept of a value in device memory, for one execution: by default, what `kept` has,
        unless the action keeps it on the host.
        """
        return 0 if self.on_host or not self.keeps else sum(array.bytes for array in self.kept(value))

    def host_bytes(self, value: Array) -> int:
        """Returns the bytes that are kept of a value in host memory, for one execution: by default, what `kept` has if
        the action keeps it there.
        """
        return sum(array.bytes for array in self.kept(value)) if self.on_host and self.keeps else 0

    def stored_bytes(self, value: Array) -> int:
        """Returns the bytes that are kept of a value in both memories, for one execution."""
        return self.device_bytes(value) + self.host_bytes(value)

    def kept(self, value: Array) -> tuple[Array, ...]:
        """Returns the arrays that are kept of a value: the value itself, or what `encode` makes of it."""
        if not self.changes:
            return (value,)
        made = jax.eval_shape(self.encode, jax.ShapeDtypeStruct(value.shape, value.dtype))
        share = device_share(value)
        return tuple(StoredArray(each.shape, each.dtype, round(_bytes(each) * share)) for each in jax.tree.leaves(made))

    def cost(self, value: Array) -> Cost:
        """Returns the cost to store a value and to restore it, for one execution."""
        return Cost()

    def encode(self, x: Any) -> Any:
        """Returns what is kept of an array, as a pytree of arrays: itself, unless the action `changes` it.

        A gradient that is differentiated again goes through it. Where it returns integers of floats, that raises
        `ForwardModeError`; the derivative of `jnp.round`, which is 0, would be wrong without a word.
        """
        if self.changes:
            raise NotImplementedError(f"{type(self).__name__} changes what it keeps, so it needs encode and decode")
        return x

    def decode(self, stored: Any, like: Any) -> Any:
        """Returns the array for the backward pass from the result of `encode`, with the shape and dtype of `like`."""
        if self.changes:
            raise NotImplementedError(f"{type(self).__name__} changes what it keeps, so it needs encode and decode")
        return stored

    def error(self, dtype: Any) -> float:
        """Returns the largest relative error of a restored value of a dtype; 0 if it is exact.

        By default, if the action `changes` values, that of a sample: of some hundred random numbers, encoded and
        decoded, relative to the largest. An action with parts that are rarely reached should say its bound itself.
        """
        if not self.changes or jax.dtypes.issubdtype(dtype, jax.dtypes.extended):
            return 0.0
        return _sampled_error(self, jax.dtypes.canonicalize_dtype(dtype))

    def refusal(self, target: Any) -> str:
        """Returns a sentence that says why a target (a `jaxckpt.Target`) cannot have this action; "" if it can."""
        return ""

    def parameters(self) -> Mapping[str, Any]:
        """Returns the parameters by name, as JSON values."""
        return {name: getattr(self, name) for name in getattr(self, "__dataclass_fields__", ())}

    def to_json(self) -> Any:
        """Returns the action as a JSON value: its kind, or an object with kind and parameters. `action_from` reads
        it.
        """
        parameters = {name: to_json(value) for name, value in self.parameters().items()}
        return {"kind": self.kind, **parameters} if parameters else self.kind

    def __or__(self, other: Action) -> Action:
        """Returns both in order: this action, and then the other one on what this one keeps.

        `compress("int8") | OFFLOAD` keeps numbers in a byte each, in host memory. `SAVE` on either side changes
        nothing. Only the last action may move what is kept to the host.

        Raises:
          ArgumentError: one is no action or recomputes, the left one keeps its bytes on the host, or both round values.
        """
        return composed((self, _other(other)))

    def __ror__(self, other: Any) -> Action:
        """Raises:
        ArgumentError: what stands before `|` is no action.
        """
        return composed((_other(other), self))

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and self.to_json() == other.to_json()  # type: ignore[attr-defined]

    def __hash__(self) -> int:
        return hash((self.kind, json.dumps(self.to_json(), sort_keys=True)))

    def __str__(self) -> str:
        return repr(self) if self.parameters() else self.kind

    def __repr__(self) -> str:
        given = ", ".join(f"{name}={value!r}" for name, value in self.parameters().items())
        return f"{self.kind}({given})" if given else self.kind.upper()


@functools.cache
def _sampled_error(action: Action, dtype: Any) -> float:
    """Returns the largest relative error of an action on random numbers of a dtype; 1 if it cannot be asked, 0 if it
    does not admit them.
    """
    random = np.random.default_rng(0)
    with jax.ensure_compile_time_eval():
        for shape in (512,), (16, 32), (2, 8, 32):
            numbers = random.normal(size=shape)
            if dtype == np.bool_:
                sample = numbers > 0
            else:
                sample = (numbers if jnp.issubdtype(dtype, jnp.inexact) else 100 * np.abs(numbers)).astype(dtype)
            if not action.admits(StoredArray(shape, dtype, sample.nbytes)):
                continue
            like = jax.ShapeDtypeStruct(shape, dtype)
            try:
                restored = np.asarray(action.decode(action.encode(jnp.asarray(sample)), like))
            except Exception:  # what is wrong with it is said where a value is kept
                return 1.0
            off = np.abs(restored.astype(complex) - sample.astype(complex))
            return float(np.max(off) / np.max(np.abs(sample.astype(complex))))
    return 0.0


def _other(value: Any) -> Action:
    """Returns what stands beside an action and `|`, if it is an action."""
    if isinstance(value, Action):
        return value
    found = KINDS.get(value.strip().lower()) if isinstance(value, str) else None
    hint = "" if found is None or not found.example else f"Write {found.example}."
    raise ArgumentError("each side of |", "an action", value, hint)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Layers:
    """What a composition has encoded: the arrays that are kept, and how to undo each part.

    Attributes:
      arrays: what is kept.
      shapes: of each part, the types of the arrays that it was given, and the structure of what it made of each; None
        for one that it left as it was.
    """

    arrays: list[Any]
    shapes: tuple[tuple[tuple[Any, Any], ...], ...] = field(metadata={"static": True})


@dataclass(frozen=True, eq=False, repr=False)
class Composed(Action):
    """Several actions, each on what the one before it keeps: the result of `Action.__or__`.

    Attributes:
      parts: at least two actions, none of them `RECOMPUTE`, `SAVE` or composed.
    """

    parts: tuple[Action, ...]

    kind = "composed"
    listed = False

    def __post_init__(self) -> None:
        if isinstance(self.parts, (str, bytes)) or not isinstance(self.parts, Sequence) or len(self.parts) < 2:
            raise ArgumentError("parts", "a sequence of at least two actions", self.parts)
        parts = tuple(action_from(part, "parts") for part in self.parts)
        _check_order(parts)
        if any(part.saves for part in parts):
            raise ArgumentError("parts", "actions that change or move what is kept", " | ".join(map(repr, parts)))
        object.__setattr__(self, "parts", parts)

    @property
    def changes(self) -> bool:  # type: ignore[override]
        """Whether one of the parts keeps another form."""
        return any(part.changes for part in self.parts)

    @property
    def on_host(self) -> bool:  # type: ignore[override]
        """Whether the last part keeps its bytes in host memory."""
        return self.parts[-1].on_host

    def given(self, value: Array) -> Action | None:
        """Returns the composition of the parts that admit what they get of a value; None if there are none."""
        parts: list[Action] = []
        arrays: list[Array] = [value]
        for part in self.parts:
            found = next(filter(None, map(part.given, arrays)), None)
            if found is not None:
                parts.append(found)
                arrays = _kept_by(found, arrays)
        return composed(parts) if parts else None

    def admits(self, value: Array) -> bool:
        """Returns whether every part admits something of what the part before it keeps."""
        found = self.given(value)
        return isinstance(found, Composed) and len(found.parts) == len(self.parts)

    def kept(self, value: Array) -> tuple[Array, ...]:
        """Returns the arrays that the last part keeps."""
        arrays: list[Array] = [value]
        for part in self.parts:
            arrays = _kept_by(part, arrays)
        return tuple(arrays)

    def device_bytes(self, value: Array) -> int:
        """Returns the bytes of what the last part keeps, if that is in device memory."""
        return 0 if self.on_host else sum(array.bytes for array in self.kept(value))

    def host_bytes(self, value: Array) -> int:
        """Returns the bytes of what the last part keeps, if that is in host memory."""
        return sum(array.bytes for array in self.kept(value)) if self.on_host else 0

    def cost(self, value: Array) -> Cost:
        """Returns the costs of all parts."""
        total, arrays = Cost(), [value]
        for part in self.parts:
            for array in filter(part.admits, arrays):
                total += part.cost(array)
            arrays = _kept_by(part, arrays)
        return total

    def encode(self, x: Any) -> Any:
        """Returns what all parts that change make of an array."""
        arrays, shapes = [x], []
        for part in self._changing:
            made: list[Any] = []
            each: list[tuple[Any, Any]] = []
            for array in arrays:
                kind = jax.typeof(array)
                if part.admits(StoredArray(kind.shape, kind.dtype, _bytes(kind))):
                    leaves, tree = jax.tree.flatten(part.encode(array))
                else:
                    leaves, tree = [array], None
                made += leaves
                each.append((kind, tree))
            arrays = made
            shapes.append(tuple(each))
        return Layers(arrays, tuple(shapes))

    def decode(self, stored: Any, like: Any) -> Any:
        """Returns the array, all parts undone from the last to the first."""
        arrays = stored.arrays
        for number, part in reversed(tuple(enumerate(self._changing))):
            left, given = iter(arrays), []
            for kind, tree in stored.shapes[number]:
                leaves = [next(left) for _ in range(1 if tree is None else tree.num_leaves)]
                kind = like if number == 0 else kind
                given.append(leaves[0] if tree is None else part.decode(jax.tree.unflatten(tree, leaves), kind))
            arrays = given
        return arrays[0]

    @property
    def _changing(self) -> tuple[Action, ...]:
        return tuple(part for part in self.parts if part.changes)

    def error(self, dtype: Any) -> float:
        """Returns the error of the part that rounds; 0 if there is none."""
        return max(part.error(dtype) for part in self.parts)

    def refusal(self, target: Any) -> str:
        """Returns the first refusal of a part."""
        return next((said for part in self.parts if (said := part.refusal(target))), "")

    def parameters(self) -> Mapping[str, Any]:
        """Returns the parts, each as a JSON value."""
        return {"parts": [part.to_json() for part in self.parts]}

    def __repr__(self) -> str:
        return " | ".join(map(repr, self.parts))


def composed(actions: Iterable[Action]) -> Action:
    """Returns actions in order as one: see `Action.__or__`."""
    flat = [part for action in actions for part in (action.parts if isinstance(action, Composed) else (action,))]
    if len(flat) > 1:
        _check_order(flat)
    plain = [part for part in flat if not part.keeps or part.changes or part.on_host]
    return (plain or flat)[0] if len(plain) < 2 else Composed(tuple(plain))


def _kept_by(part: Action, arrays: Iterable[Array]) -> list[Array]:
    return [each for array in arrays for each in (part.kept(array) if part.admits(array) else (array,))]


def _check_order(parts: Sequence[Action]) -> None:
    rule = "actions of which each can follow the one before it"
    shown = " | ".join(map(repr, parts))
    lossy: list[Action] = []
    for place, part in enumerate(parts):
        if isinstance(part, Composed):
            raise ArgumentError("parts", "actions that are not composed themselves", shown)
        if not part.keeps:
            hint = f"{part!r} keeps nothing, so no other action can follow or precede it."
            raise ArgumentError("parts", rule, shown, hint)
        later = [each for each in parts[place + 1 :] if each.changes or each.on_host]
        if part.on_host and later:
            better = " | ".join(map(repr, [*parts[:place], *later, part]))
            hint = f"What {part!r} has moved to the host is not changed there. Write {better}."
            if any(each.on_host for each in later):
                hint = "Values are moved to the host once."
            raise ArgumentError("parts", rule, shown, hint)
        if part.changes and part.error("float32"):
            lossy.append(part)
    if len(lossy) > 1:
        hint = f"{lossy[0]!r} and {lossy[1]!r} both round values, and their bounds do not add up. Take one of them."
        raise ArgumentError("parts", rule, shown, hint)


_CALL = re.compile(r"\s*([^\W\d]\w*)\s*(?:\(\s*['\"]?(\w+)['\"]?\s*\))?\s*")


def _called(kind: str, parameter: str | None, argument: str) -> Action:
    """Returns the action of a kind, with its first parameter if there is one."""
    if parameter is None:
        return action_from(kind, argument)
    names = list(getattr(KINDS.get(kind.lower()), "__dataclass_fields__", ()))
    if not names:
        action_from(kind, argument)  # raises if there is no such action
        raise ArgumentError(argument, "an action, and with a parameter only if it has one", f"{kind}({parameter})")
    return action_from({"kind": kind.lower(), names[0]: parameter}, argument)


def action_from(value: Any, argument: str = "action") -> Action:
    """Returns the action for an action, for its text, or for the result of `Action.to_json`.

    Args:
      value: as a text, an action is its kind in upper or lower case, "save"; with its first parameter in brackets,
        "compress(int8)"; or several such in order, "compress(int8) | offload".
      argument: the name that an error gives to the action.

    Raises:
      ArgumentError: there is no such action, it does not have these parameters, or they are no JSON values.

    >>> action_from("save"), action_from("compress(int8) | offload")
    (SAVE, compress('int8') | OFFLOAD)
    """
    if isinstance(value, Action):
        try:
            json.dumps(value.to_json())
        except (TypeError, ValueError) as error:
            raise ArgumentError(argument, "an action whose parameters are JSON values", value, f"{error}.") from error
        return value
    if isinstance(value, str) and not value.strip().isidentifier():
        calls = [_CALL.fullmatch(part) for part in value.split("|")]
        if all(calls):
            return functools.reduce(operator.or_, (_called(call[1], call[2], argument) for call in calls if call))
    kind, parameters = value, {}
    if isinstance(value, Mapping) and "kind" in value:
        kind = value["kind"]
        parameters = {name: from_json(item) for name, item in value.items() if name != "kind"}
    found = KINDS.get(kind.strip().lower()) if isinstance(kind, str) else None
    if found is None:
        known = [name for name, cls in KINDS.items() if cls.listed]
        rule = f"{'' if argument == 'kind' else 'an action, '}one of {', '.join(known)}"
        hint = nearest(str(kind).lower(), known) or next(
            (f"Did you mean {name!r}?" for name in known if name in str(kind).lower()), ""
        )
        words = [kind] if isinstance(kind, str) else []
        hint = next(
            (f"Write {cls.kind}({kind!r})." for cls in KINDS.values() for kind in words if kind in cls.words), hint
        )
        if isinstance(value, Mapping) and isinstance(kind, str) and not hint:  # of a file
            hint = f"Import what defines the action {kind!r} first."
        raise ArgumentError(argument, rule, value, hint)
    try:
        return found(**parameters)  # type: ignore[no-any-return]
    except ArgumentError:
        raise  # says itself which parameter is wrong
    except TypeError as error:
        hint = f"Write {found.example}." if found.example and not parameters else f"{error}."
        raise ArgumentError(argument, f"{found.kind} with the parameters that it has", value, hint) from error


def asked_of(action: Action, value: Array) -> tuple[Cost, int, int]:
    """Returns what an action says of a value: its cost, and the bytes on the device and on the host.

    Raises:
      ArgumentError: it says no Cost, or bytes that are no whole number of at least 0.
    """
    name = type(action).__name__
    cost, device, host = action.cost(value), action.device_bytes(value), action.host_bytes(value)
    if not isinstance(cost, Cost):
        raise ArgumentError("actions", f"actions whose `cost` returns a Cost; {name}'s did not", cost)
    for method, said in ("device_bytes", device), ("host_bytes", host):
        if not isinstance(said, numbers.Integral) or said < 0:
            rule = f"actions whose `{method}` returns a whole number of at least 0; {name}'s did not"
            raise ArgumentError("actions", rule, said)
    return cost, int(device), int(host)
