"""Reads the wire format of protocol buffers, as far as it is needed for a few fields of a message.

A message is a sequence of fields. Each field is a key (the field's number and a wire type) and a value. Its length is
known without its meaning, so a reader needs to know only the fields that it reads.
https://protobuf.dev/programming-guides/encoding
"""

from __future__ import annotations

from typing import Any


class Message:
    """A message: the values of its fields by their numbers. A missing field reads as 0, "" or an empty message.

    A compiled program has tens of thousands of messages, and most of the time to measure one would go into this loop.
    So numbers of one byte, as most are, are read without a call.

    >>> message = Message(bytes([0x08, 0x96, 0x01, 0x12, 0x02, 0x68, 0x69]))  # field 1: 150, field 2: "hi"
    >>> message.number(1), message.text(2), message.number(3)
    (150, 'hi', 0)
    """

    __slots__ = ("_fields",)

    def __init__(self, data: bytes | memoryview = b"") -> None:
        fields: dict[int, list[Any]] = {}
        self._fields = fields
        data = bytes(data)  # no copy of what is bytes already
        at, end = 0, len(data)
        try:
            while at < end:
                key = data[at]
                at += 1
                if key > 127:
                    key, at = _varint(data, at - 1)
                wire = key & 7
                value: Any
                if wire == 2:
                    size = data[at]
                    at += 1
                    if size > 127:
                        size, at = _varint(data, at - 1)
                    stop = at + size
                    value = data[at:stop]
                    at = stop
                elif wire == 0:
                    value = data[at]
                    at += 1
                    if value > 127:
                        value, at = _varint(data, at - 1)
                elif wire in (1, 5):
                    stop = at + (8 if wire == 1 else 4)
                    value = data[at:stop]
                    at = stop
                else:
                    raise ValueError(f"no protocol buffer: wire type {wire}")
                number = key >> 3
                if number in fields:
                    fields[number].append(value)
                else:
                    fields[number] = [value]
        except IndexError:
            raise ValueError("no protocol buffer: a number is cut off") from None
        if at > end:
            raise ValueError("no protocol buffer: the last field is cut off")

    def number(self, field: int) -> int:
        """Returns an integer or boolean field."""
        value = self._fields[field][-1] if field in self._fields else 0
        if not isinstance(value, int):
            raise ValueError(f"field {field} is no number")
        return value

    def numbers(self, field: int) -> list[int]:
        """Returns a repeated integer field, packed or not."""
        result = []
        for value in self._fields.get(field, ()):
            if isinstance(value, int):
                result.append(value)
                continue
            at = 0
            while at < len(value):
                item, at = _varint(value, at)
                result.append(item)
        return result

    def text(self, field: int) -> str:
        """Returns a string field."""
        return _bytes(field, self._fields[field][-1]).decode(errors="replace") if field in self._fields else ""

    def texts(self, field: int) -> list[str]:
        """Returns a repeated string field."""
        return [_bytes(field, value).decode(errors="replace") for value in self._fields.get(field, ())]

    def message(self, field: int) -> Message:
        """Returns a field that is itself a message."""
        return Message(_bytes(field, self._fields[field][-1])) if field in self._fields else Message()

    def messages(self, field: int) -> list[Message]:
        """Returns a repeated field of messages."""
        return [Message(_bytes(field, value)) for value in self._fields.get(field, ())]


def _bytes(field: int, value: Any) -> bytes:
    if not isinstance(value, bytes):
        raise ValueError(f"field {field} is no text and no message")
    return value


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """Returns the integer at a position (seven bits in each byte, the lowest first) and the position after it."""
    byte = data[at]
    at += 1
    if byte < 128:
        return byte, at
    value, shift = byte & 127, 7
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
        shift += 7
        if shift > 63:
            raise ValueError("no protocol buffer: a number of more than 64 bits")
