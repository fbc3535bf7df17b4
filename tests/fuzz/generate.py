"""Makes random programs: arguments, statements, results."""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any

import jax

from tests.fuzz.bodies import BODIED, scan_under_test
from tests.fuzz.builder import Builder, Operations, Setting, Style
from tests.fuzz.operations import SIMPLE
from tests.fuzz.programs import VOCABULARY, Function, Kind, Leaf, Node, Program, execute

OPERATIONS: Operations = {False: SIMPLE, True: SIMPLE | BODIED}


def generate(rng: random.Random, style: Style) -> Program:
    """Returns the program that the state of `rng` stands for."""
    args = _arguments(rng, style)
    leaves = [leaf for node in args for leaf in node.leaves()]
    modes = {node.mode[0]: node.mode[1] for arg in args for node in _nodes(arg) if node.form == "box"}
    space = execute("\n".join(f"{leaf.name} = {leaf.text}" for leaf in leaves) + "\n", dict(VOCABULARY))
    space |= {name: eval(text) for name, text in modes.items()}
    arrays = [leaf for leaf in leaves if leaf.kind is not None]
    made: list[Function] = []

    def run(*values: Any) -> None:
        env = {**space, **{leaf.name: value for leaf, value in zip(arrays, values)}}
        statics = [*modes, *(leaf.name for leaf in leaves if leaf.kind is None)]
        builder = Builder(
            Setting(rng, style, OPERATIONS, iter(range(10**6))), env, [leaf.name for leaf in arrays], statics
        )
        for _ in range(style.scans[0]):
            builder.attempt(scan_under_test)
        builder.grow(rng.choice((2, 6, 12, 20, style.statements)) if not style.scans[0] else rng.choice((0, 0, 3, 8)))
        returns, outputs = _loss(builder) if style.loss else _results(builder)
        made.append(Function("fun", (), (), tuple(builder.statements), returns, outputs))

    jax.make_jaxpr(run)(*(space[leaf.name] for leaf in arrays))
    return Program(args, made[0])


# ------------------------------------------------------------------------------------------------------------ arguments


def _arguments(rng: random.Random, style: Style) -> tuple[Node, ...]:
    rows, width = style.rows, style.width
    count = iter(range(100))

    def array(shape: tuple[int, ...], dtype: str = "float32") -> Node:
        n = next(count)
        return Node("leaf", Leaf(f"x{n}", f"draw({n}, {shape}, {dtype!r})", Kind(shape, dtype)))

    def made(text: str, kind: Kind | None, letter: str) -> Node:
        return Node("leaf", Leaf(f"{letter}{next(count)}", text, kind))

    shapes = [(rows, width), (width, width), (width,), (), (2, rows, width)]
    first = [array((rows, width)), array((width, width))]
    first += [
        array(rng.choice(shapes), rng.choice(("float32", "float32", "bfloat16", "float16")))
        for _ in range(rng.randrange(3))
    ]
    if rng.random() < 0.15:
        first.append(array(rng.choice(shapes), "complex64"))
    others: list[Node] = []
    for chance, make in (
        (0.5, lambda: array((width,), "int32")),
        (0.2, lambda: array((rows, width), "bool")),
        (0.3, lambda: made("jax.random.key(3)", Kind((), "key<fry>"), "key")),
        (0.2, lambda: made("jax.random.PRNGKey(5)", Kind((2,), "uint32"), "raw")),
        (0.2, lambda: made(rng.choice(("0.5", "2.0")), Kind((), "float32", True), "s")),
        (0.1, lambda: made("2", Kind((), "int32", True), "n")),
        (
            0.1,
            lambda: made(f"np.asarray(draw(99, ({rows}, {width}), 'float32'))", Kind((rows, width), "float32"), "np_"),
        ),
        (0.1, lambda: Node("none")),
        (0.15 if style.statics != "none" else 0.0, lambda: made(rng.choice(("'tanh'", "'sin'")), None, "mode")),
        (0.1 if style.statics != "none" else 0.0, lambda: made(rng.choice(("jnp.tanh", "jax.nn.gelu")), None, "act")),
    ):
        if rng.random() < chance:
            others.append(make())
    rng.shuffle(others)
    if style.loss:
        return (_grouped(rng, first, next(count)), *_packed(rng, others, count, style))
    return tuple(_packed(rng, [*first, *others], count, style))


def _packed(rng: random.Random, nodes: list[Node], count: Any, style: Style) -> Iterable[Node]:
    """Yields arguments that hold the nodes."""
    apart = [
        node for node in nodes if style.statics == "arguments" and node.leaf is not None and node.leaf.kind is None
    ]
    rest = [node for node in nodes if node not in apart]
    while rest:
        size = rng.choice((1, 1, 2, 3))
        taken, rest = rest[:size], rest[size:]
        yield taken[0] if len(taken) == 1 and taken[0].form == "leaf" else _grouped(rng, taken, next(count))
    yield from apart


def _grouped(rng: random.Random, nodes: list[Node], n: int) -> Node:
    """Returns a pytree of the nodes."""
    if len(nodes) > 2 and rng.random() < 0.3:
        nodes = [_grouped(rng, nodes[:2], n + 1000), *nodes[2:]]
    if len(nodes) == 2 and rng.random() < 0.5:
        return Node("box", parts=tuple(nodes), mode=(f"m{n}", rng.choice(("'sin'", "'cos'"))))
    return Node(rng.choice(("dict", "tuple", "list")), parts=tuple(nodes))


def _nodes(node: Node) -> Iterable[Node]:
    yield node
    for part in node.parts:
        yield from _nodes(part)


# -------------------------------------------------------------------------------------------------------------- results


def _results(b: Builder) -> tuple[str, tuple[str, ...]]:
    """Returns what a program returns: a tree of some values, of which one at least can be differentiated."""
    rng = b.rng
    outputs = [b.inexact(late=True)]
    for _ in range(rng.randrange(4)):
        outputs.append(rng.choice(outputs) if rng.random() < 0.2 else b.pick(late=rng.random() < 0.8))
    places = [f"${i}" for i in range(len(outputs))]
    if rng.random() < 0.1:
        places.append("None")
    if rng.random() < 0.1:
        places.append("2.0")
    if len(places) == 1:
        return "$0", tuple(outputs)
    form = rng.choice(("tuple", "dict", "nested"))
    if form == "dict":
        return "{" + ", ".join(f'"o{i}": {place}' for i, place in enumerate(places)) + "}", tuple(outputs)
    if form == "nested":
        return f"({places[0]}, [{', '.join(places[1:])}])", tuple(outputs)
    return f"({', '.join(places)})", tuple(outputs)


def _loss(b: Builder) -> tuple[str, tuple[str, ...]]:
    """Returns a real number of some values."""
    outputs = tuple(dict.fromkeys(b.inexact(late=True) for _ in range(b.rng.choice((1, 1, 2, 3)))))
    return " + ".join(f"jnp.sum(jnp.real(${i})).astype(jnp.float32)" for i in range(len(outputs))), outputs
