"""What an action is: what may become of a value between its computation in the forward pass and its use in the backward pass.

An action is one class in one file. Policies, plans, the emitter, the planner, plan files and reports ask it; none of them knows which actions
there are. A class with a `kind` is known by that name from its definition on, in this package or anywhere else.
"""

from __future__ import annotations

import json
from abc import ABCMeta
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from jaxckpt._errors import ArgumentError, did_you_mean


class Array(Protocol):
    """What an action is asked about: anything with the shape, the dtype and the bytes of one execution."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Of one execution."""
        ...

    @property
    def dtype(self) -> Any:
        """As numpy's."""
        ...

    @property
    def bytes(self) -> int:
        """Of one execution, on one device."""
        ...


@dataclass(frozen=True)
class Cost:
    """What it takes to store a value and to bring it back, both together, by the resource that it is spent on.

    Attributes:
      flops: elementwise arithmetic.
      memory_bytes: read and written in device memory.
      host_bytes: over the link to the host, one way and back.
      link_bytes: over the links to other devices.
    """

    flops: float = 0.0
    memory_bytes: float = 0.0
    host_bytes: float = 0.0
    link_bytes: float = 0.0


KINDS: dict[str, type[Action]] = {}
"""The classes of actions by their kind."""


class _Kinds(ABCMeta):
    """Enters each class with a `kind` into the table; a class without parameters has one object; `Action("save")` is that kind's."""

    _plain: Any

    def __init__(cls, name: str, bases: tuple[type, ...], fields: dict[str, Any]) -> None:
        super().__init__(name, bases, fields)
        kind = fields.get("kind", "")
        if kind:
            KINDS[kind] = cls  # type: ignore[assignment]

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if cls is Action:
            return action_from(*args, **{"argument": "kind", **kwargs})
        if args or kwargs:
            return super().__call__(*args, **kwargs)
        if "_plain" not in cls.__dict__:
            cls._plain = super().__call__()  # one object for all that have no parameters
        return cls.__dict__["_plain"]


class Action(metaclass=_Kinds):
    """One thing that may become of an intermediate value. Actions are values: equal where kind and parameters are.

    A subclass sets `kind`; a dataclass's fields are its parameters, and are written to plan files, so they are what JSON has.

    Attributes:
      kind: its name, in plan files, on the command line and in reports.
      keeps: whether anything is kept; False for a value that is computed again.
      changes: whether what is kept is not the value itself: then `encode` and `decode` say what is.
      on_host: whether what is kept lies in the host's memory.
    """

    kind: ClassVar[str] = ""
    keeps: ClassVar[bool] = True
    changes: ClassVar[bool] = False
    on_host: ClassVar[bool] = False

    def admits(self, value: Array) -> bool:
        """Whether it can be given to a value; one that it cannot be given to is saved as it is."""
        return True

    def device_bytes(self, value: Array) -> int:
        """Returns the bytes that it keeps of a value in device memory, of one execution."""
        return 0 if self.on_host or not self.keeps else value.bytes

    def host_bytes(self, value: Array) -> int:
        """Returns the bytes that it keeps of a value in host memory, of one execution."""
        return value.bytes if self.on_host and self.keeps else 0

    def stored_bytes(self, value: Array) -> int:
        """Returns the bytes that it keeps of a value wherever they lie, of one execution."""
        return self.device_bytes(value) + self.host_bytes(value)

    def cost(self, value: Array) -> Cost:
        """Returns what it takes to store a value and to bring it back, of one execution."""
        return Cost()

    def encode(self, x: Any) -> Any:
        """Returns what is kept of an array, a pytree of arrays. Only where `changes`."""
        raise NotImplementedError(f"{type(self).__name__} changes what it keeps, so it needs encode and decode")

    def decode(self, stored: Any, like: Any) -> Any:
        """Returns the array that the backward pass uses, from what `encode` returned; of the shape and dtype of `like`."""
        raise NotImplementedError(f"{type(self).__name__} changes what it keeps, so it needs encode and decode")

    def error(self, dtype: Any) -> float:
        """Returns the largest relative error that it brings into a value of a dtype; 0 where it is exact."""
        return 0.0

    def refusal(self, target: Any) -> str:
        """Returns why it cannot be used on a target (a `jaxckpt.Target`), a sentence; "" where it can."""
        return ""

    def parameters(self) -> Mapping[str, Any]:
        """Returns its parameters by name, as JSON has them."""
        return {name: getattr(self, name) for name in getattr(self, "__dataclass_fields__", ())}

    def to_json(self) -> Any:
        """Returns the action as a JSON value: its kind, or an object with kind and parameters; `action_from` reads it back."""
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
    """Returns an action from itself, from its kind in any case ("save"), or from what `Action.to_json` returned.

    Raises:
      ArgumentError: there is no such action, or its parameters are others.

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
