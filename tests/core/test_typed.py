"""Keys by type and value: what selects two programs has two keys, and what selects one has one."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import pytest

from jaxckpt.core.typed import hashable, typed


class Named(NamedTuple):
    scale: Any
    mode: str = "plain"


class Pair(tuple):
    pass


class Bag(frozenset):
    pass


@dataclass(frozen=True)
class Config:
    scale: Any
    inner: Any = None
    note: str = field(default="", compare=False)


@dataclass(frozen=True)
class Listed:
    scale: Any
    widths: list[int] = field(default_factory=list, hash=False)


class ByIdentity(tuple):
    __eq__ = object.__eq__
    __hash__ = object.__hash__


ONES = (1, 1.0, True, 1 + 0j, np.float32(1), np.float64(1), np.int32(1))
CONTAINERS = [
    lambda x: x,
    lambda x: (x,),
    lambda x: frozenset([x]),
    Named,
    lambda x: Pair((0, x)),
    lambda x: Bag([x]),
    Config,
    lambda x: Config("a", inner=(Named(x),)),
    lambda x: (0, Config(Config(x))),
    Listed,
]


@pytest.mark.parametrize("container", CONTAINERS)
def test_equal_values_of_different_types_have_different_keys_at_every_depth(container):
    keys = [typed(container(one)) for one in ONES]
    assert all(a != b for a, b in itertools.combinations(keys, 2))
    assert typed(container(0.0)) != typed(container(-0.0))
    assert typed(container(np.float32(0.0))) != typed(container(np.float32(-0.0)))


@pytest.mark.parametrize("container", CONTAINERS)
def test_values_made_twice_have_one_key(container):
    for value in (*ONES, "text", None, (1, "a")):
        assert typed(container(value)) == typed(container(value))
        assert hash(typed(container(value))) == hash(typed(container(value)))


def test_containers_of_different_types_have_different_keys():
    kinds = [(1, 2), Pair((1, 2)), Named(1, 2), Config(1, 2), frozenset([1, 2]), Bag([1, 2])]
    assert all(typed(a) != typed(b) for a, b in itertools.combinations(kinds, 2))


def test_a_nan_has_one_key():
    for container in (lambda x: x, Named, lambda x: Pair((x, 1))):
        assert typed(container(float("nan"))) == typed(container(float("nan")))


def test_what_a_class_does_not_compare_is_not_in_the_key():
    assert typed(Config(1, note="a")) == typed(Config(1, note="b"))
    assert typed(ByIdentity((1,))) != typed(ByIdentity((1,)))


def test_a_key_can_be_hashed_where_the_value_can():
    assert hashable(typed(Listed(1, [2]))) and typed(Listed(1, [2])) != typed(Listed(1, [3]))
    assert hashable(typed(ByIdentity(([],))))
    for value in ([1], ([1],), Named([1]), Config([1]), {"a": 1}):
        assert not hashable(typed(value))
