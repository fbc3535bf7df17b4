import pytest

from jaxckpt.memory.wire import Message


def varint(value: int) -> bytes:
    parts = []
    while value > 127:
        parts.append(value & 127 | 128)
        value >>= 7
    return bytes([*parts, value])


def field(number: int, value: int | bytes) -> bytes:
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    return varint(number << 3 | 2) + varint(len(value)) + value


def test_integers_of_any_length():
    for value in (0, 1, 127, 128, 300, 2**31, 2**63 - 1):
        assert Message(field(1, value)).number(1) == value
        assert Message(field(1000, value)).number(1000) == value


def test_repeated_integers_packed_or_not():
    values = [3, 270, 86942]
    assert Message(b"".join(field(4, v) for v in values)).numbers(4) == values
    assert Message(field(4, b"".join(map(varint, values)))).numbers(4) == values
    assert Message(b"").numbers(4) == []


def test_texts_and_nested_messages():
    inner = field(1, 5) + field(2, b"tanh")
    outer = Message(field(3, inner) + field(3, inner) + field(2, b"x"))
    assert [m.text(2) for m in outer.messages(3)] == ["tanh", "tanh"]
    assert outer.message(3).number(1) == 5
    assert outer.texts(2) == ["x"]
    assert outer.message(9).number(1) == 0


def test_fixed_width_fields_are_stepped_over():
    eight, four = varint(1 << 3 | 1) + b"12345678", varint(2 << 3 | 5) + b"1234"
    assert Message(eight + four + field(3, 7)).number(3) == 7


@pytest.mark.parametrize(
    ("data", "error", "message"),
    [
        (b"\x0b\x01", ValueError, "wire type 3"),
        (field(2, b"cut off")[:-2], ValueError, "the last field is cut off"),
        (b"\x08\xff", ValueError, "cut off"),  # `read_dump` makes one error of both
    ],
)
def test_what_is_no_message_is_an_error(data, error, message):
    with pytest.raises(error, match=message):
        Message(data)
