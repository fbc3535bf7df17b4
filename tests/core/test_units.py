"""Bytes as text, both ways."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxckpt import ArgumentError
from jaxckpt.core.units import format_bytes, parse_bytes


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("12", 12),
        ("1.5 KiB", 1536),
        ("2GB", 2 * 10**9),
        ("1gib", 2**30),
        ("0.5MiB", 2**19),
        ("3 B", 3),
        ("1TiB", 2**40),
        (0, 0),
        (np.int64(2**40), 2**40),
    ],
)
def test_parse(text, count):
    assert parse_bytes(text) == count


@pytest.mark.parametrize(
    "text",
    ["12 GB or so", "", "GiB", "-1", "-5MiB", "1.5.2MB", "12XB", -1, 2.5, None, True, "nan", np.True_, np.float32(2)],
)
def test_what_does_not_parse_is_named(text):
    with pytest.raises(ArgumentError, match=r"budget must be a number of bytes, such as .*; got ") as caught:
        parse_bytes(text, "budget")
    assert repr(text) in str(caught.value)


@given(st.integers(0, 2**45))
def test_format_says_it_within_its_last_digit(count):
    text = format_bytes(count)
    assert abs(parse_bytes(text) - count) <= max(0.05001 * parse_bytes("1" + text.split()[1]), 0.5)
