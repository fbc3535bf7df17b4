"""Compilers' dumps to spoil: a real one for each target, and edits of its fields."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp

from jaxckpt.memory import report as module
from jaxckpt.memory.report import measure


def loss(ws: Any, x: Any) -> Any:
    """Has a loop, values that share places, and constants."""
    layer = jax.checkpoint(lambda x, w: x + jnp.tanh(x @ w))
    return jnp.sum(jax.lax.scan(lambda x, w: (layer(x, w), None), x, ws)[0] ** 2)


def arguments(layers: int = 4) -> tuple[Any, Any]:
    """Shapes of weights and input."""
    return tuple(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((layers, 128, 128), (512, 128)))


@functools.cache
def dump(target: str, layers: int = 4) -> bytes:
    """What XLA dumps of the step of `loss`."""
    dumped, seen = module.largest_dump, []
    with mock.patch.object(module, "largest_dump", lambda *args: seen.append(dumped(*args)) or seen[-1]):
        measure(jax.value_and_grad(loss), *arguments(layers), target=target)
    return seen[0]


def varint(value: int) -> bytes:
    """A number as protocol buffers write it."""
    parts = []
    while value > 127:
        parts.append(value & 127 | 128)
        value >>= 7
    return bytes([*parts, value])


def fields(data: bytes) -> Iterator[tuple[int, int, bytes]]:
    """Yields (number, wire type, content) of a message's fields."""
    at = 0

    def number() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = data[at]
            at, value, shift = at + 1, value | (byte & 127) << shift, shift + 7
            if byte < 128:
                return value

    while at < len(data):
        key = number()
        start = at
        if key & 7 == 0:
            number()
        elif key & 7 == 2:
            size = number()
            start, at = at, at + size
        else:
            at += 8 if key & 7 == 1 else 4
        yield key >> 3, key & 7, data[start:at]


def joined(parts: list[tuple[int, int, bytes]]) -> bytes:
    """The inverse of `fields`."""
    return b"".join(
        varint(number << 3 | wire) + (varint(len(content)) if wire == 2 else b"") + content
        for number, wire, content in parts
    )


def edited(data: bytes, path: tuple[int, ...], number: int | None) -> bytes:
    """Returns a message with the fields at a path (numbers, outermost first; all there are of each) dropped or given
    another number.
    """
    parts = []
    for field, wire, content in fields(data):
        if field != path[0]:
            parts.append((field, wire, content))
        elif len(path) > 1:
            parts.append((field, wire, edited(content, path[1:], number)))
        elif number is not None:
            parts.append((number, wire, content))
    return joined(parts)


def emptied(data: bytes, path: tuple[int, ...]) -> bytes:
    """Returns a message with nothing in the fields at a path: messages and texts without content, numbers 0."""
    parts = []
    for field, wire, content in fields(data):
        if field == path[0]:
            content = (
                emptied(content, path[1:]) if len(path) > 1 else b"" if wire == 2 else bytes({0: 1, 1: 8, 5: 4}[wire])
            )
        parts.append((field, wire, content))
    return joined(parts)


def paths(data: bytes, depth: int) -> set[tuple[int, ...]]:
    """Returns the paths of all fields of a message down to a depth; what is no message has none inside."""
    found = set()
    for field, wire, content in fields(data):
        found.add((field,))
        if depth > 1 and wire == 2:
            try:
                found |= {(field, *inner) for inner in paths(content, depth - 1)}
            except IndexError:
                continue
    return found
