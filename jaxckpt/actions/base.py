"""The base class of actions. An action says what becomes of a value between the forward pass and its use in the
backward pass.

An action is one class in one file. Policies, plans, the emitter, the planner, plan files and reports ask it. None of
them knows which actions exist. When a class with a `kind` is defined, in this package or anywhere else, it is known by
that name.
"""

from __future__ import annotations

import json
from abc import ABCMeta
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from jaxckpt._errors import ArgumentError, did_you_mean


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
    """

    flops: float = 0.0
    memory_bytes: float = 0.0
    host_bytes: float = 0.0
    link_bytes: float = 0.0


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
    must have their types.

    Attributes:
      kind: the name in plan files, on the command line and in reports.
      keeps: whether anything is kept; False if the value is computed again.
      changes: whether another form of the value is kept; `encode` and `decode` then define it.
      on_host: whether the kept bytes are in host memory.
    """

    kind: ClassVar[str] = ""
    keeps: ClassVar[bool] = True
    changes: ClassVar[bool] = False
    on_host: ClassVar[bool] = False

    def admits(self, value: Array) -> bool:
        """Returns whether the action can be used for a value. Other values are saved as they are."""
        return True

    def device_bytes(self, value: Array) -> int:
        """Returns the bytes that are kept of a value in device memory, for one execution."""
        return 0 if self.on_host or not self.keeps else value.bytes

    def host_bytes(self, value: Array) -> int:
        """Returns the bytes that are kept of a value in host memory, for one execution."""
        return value.bytes if self.on_host and self.keeps else 0

    def stored_bytes(self, value: Array) -> int:
        """Returns the bytes that are kept of a value in both memories, for one execution."""
        return self.device_bytes(value) + self.host_bytes(value)

    def cost(self, value: Array) -> Cost:
        """Returns the cost to store a value and to restore it, for one execution."""
        return Cost()

    def encode(self, x: Any) -> Any:
        """Returns what is kept of an array, as a pytree of arrays. Used only if `changes`."""
        raise NotImplementedError(f"{type(self).__name__} changes what it keeps, so it needs encode and decode")

    def decode(self, stored: Any, like: Any) -> Any:
        """Returns the array for the backward pass from the result of `encode`, with the shape and dtype of `like`."""
        raise NotImplementedError(f"{type(self).__name__} changes what it keeps, so it needs encode and decode")

    def error(self, dtype: Any) -> float:
        """Returns the largest relative error of a restored value of a dtype; 0 if it is exact."""
        return 0.0

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
        parameters = self.parameters()
        return {"kind": self.kind, **parameters} if parameters else self.kind

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and self.parameters() == other.parameters()  # type: ignore[attr-defined]

    def __hash__(self) -> int:
        return hash((self.kind, json.dumps(dict(self.parameters()), sort_keys=True)))

    def __str__(self) -> str:
        return repr(self) if self.parameters() else self.kind

    def __repr__(self) -> str:
        given = ", ".join(f"{name}={value!r}" for name, value in self.parameters().items())
        return f"{self.kind}({given})" if given else self.kind.upper()


def action_from(value: Any, argument: str = "action") -> Action:
    """Returns the action for an action, its kind in upper or lower case ("save"), or the result of `Action.to_json`.

    Raises:
      ArgumentError: there is no such action, or it does not have these parameters.

    >>> action_from("save")
    SAVE
    """
    if isinstance(value, Action):
        return value
    kind, parameters = value, {}
    if isinstance(value, Mapping) and "kind" in value:
        kind, parameters = value["kind"], {name: item for name, item in value.items() if name != "kind"}
    found = KINDS.get(kind.strip().lower()) if isinstance(kind, str) else None
    if found is None:
        rule = f"{'' if argument == 'kind' else 'an action, '}one of {', '.join(KINDS)}"
        raise ArgumentError(argument, rule, value, did_you_mean(str(kind), KINDS))
    try:
        return found(**parameters)  # type: ignore[no-any-return]
    except TypeError as error:
        raise ArgumentError(argument, f"{found.kind} with the parameters that it has", value, f"{error}.") from error
