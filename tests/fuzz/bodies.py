"""Operations of random programs that have bodies: calls behind transforms, custom derivatives, loops, branches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tests.fuzz.builder import TAGS, Builder, Operation, Unfit, is_complex, is_integer, is_real
from tests.fuzz.policies import policy_text
from tests.fuzz.programs import Kind


def _one(b: Builder, params: list[str]) -> tuple[str, Sequence[str]]:
    """Ends a body: with one value that can be differentiated."""
    return "$0", [b.inexact(late=True)]


def _some(b: Builder, params: list[str]) -> tuple[str, Sequence[str]]:
    """Ends a body: with two values, of which the second may be anything, a parameter too."""
    return "$0, $1", [b.inexact(late=True), b.pick(lambda kind: not kind.dtype.startswith("key"))]


def _operands(b: Builder, most: int = 3) -> list[str]:
    return [b.inexact() if i == 0 else b.pick() for i in range(b.rng.randint(1, most))]


def _op_call(b: Builder) -> None:
    """A function of the program's own behind a transform, called once, or once more with another first argument."""
    operands = [b.inexact(), *(b.pick() for _ in range(b.rng.randrange(3)))]
    first = b.kind(operands[0])
    wrapper = b.rng.choice(_wrappers(b))
    twice = "grad" in wrapper
    body = b.body([b.kind(name) for name in operands], _one if twice or b.rng.random() < 0.6 else _some, twice=twice)
    pair = "$1" in body.returns
    calls = [", ".join(f"${i}" for i in range(len(operands)))]
    if b.rng.random() < 0.3:
        calls.append(", ".join([f"${len(operands)}", *(f"${i}" for i in range(1, len(operands)))]))
        operands.append(b.pick(lambda kind: kind == first))
    listed = ", ".join(f"{'*' if pair else ''}$g({call})" for call in calls)
    text = f"$g = {wrapper}\n$out, = {listed}," if pair or len(calls) > 1 else f"$g = {wrapper}\n$out = {listed}"
    b.emit(text, *operands, bodies=(body,), results=len(calls) * (2 if pair else 1))


_JAXS = ("dots_saveable", "everything_saveable", "nothing_saveable", "dots_with_no_batch_dims_saveable")


def _wrappers(b: Builder) -> list[str]:
    rng = b.rng
    found = [
        "jax.jit($f0)",
        "jax.jit($f0, inline=True)",
        "jax.checkpoint($f0)",
        "jax.checkpoint($f0, prevent_cse=False)",
        f"jax.checkpoint($f0, policy=jax.checkpoint_policies.{rng.choice(_JAXS)})",
        f"jax.checkpoint($f0, policy=jax.checkpoint_policies.save_only_these_names({rng.choice(TAGS)!r}, "
        f"{rng.choice(TAGS)!r}))",
        "jax.named_call($f0, name='block')",
        "jax.jit(jax.checkpoint($f0))",
        "jax.checkpoint(jax.jit($f0))",
        "jax.grad(lambda *a: jnp.sum(jnp.real($f0(*a))))",
    ]
    if b.style.own:
        found += [
            f"jaxckpt.checkpoint($f0, policy={policy_text(rng, ())})",
            "jaxckpt.checkpoint($f0)",
            f"jax.jit(jaxckpt.checkpoint($f0, policy={policy_text(rng, ())}))",
        ]
    return found


def _op_custom_rule(b: Builder) -> None:
    """A custom derivative that is not the function's own, so that a rule that is left out is seen."""
    operands = [b.inexact() for _ in range(b.rng.choice((1, 1, 2)))]
    body = b.body([b.kind(name) for name in operands], _one, most=4, closed=False)
    called = ", ".join(f"${i}" for i in range(len(operands)))
    factor = "jax.tree.map(lambda t: t * 0.5, {})"
    if b.rng.random() < 0.5:
        b.emit(
            "$g = jax.custom_jvp($f0)\n"
            f"$g.defjvp(lambda p, t: (lambda out: (out[0], {factor.format('out[1]')}))(jax.jvp($f0, p, t)))\n"
            f"$out = $g({called})",
            *operands,
            bodies=(body,),
        )
        return
    b.emit(
        "$g = jax.custom_vjp($f0)\n"
        f"$g.defvjp(lambda *a: jax.vjp($f0, *a), lambda pull, g: {factor.format('pull(g)')})\n"
        f"$out = $g({called})",
        *operands,
        bodies=(body,),
    )


def _op_vmap(b: Builder) -> None:
    mapped = b.inexact(lambda kind: len(kind.shape) >= 1)
    shape = b.kind(mapped).shape
    axis = b.rng.choice((0, len(shape) - 1))
    row = replace(b.kind(mapped), shape=shape[:axis] + shape[axis + 1 :])
    second = b.pick()
    body = b.body([row, b.kind(second)], _one)
    outer = b.rng.choice(
        (
            "jax.vmap($f0, ({a}, None))($0, $1)",
            "jax.vmap($f0, ({a}, None), out_axes=-1)($0, $1)",
            "lax.map(lambda r: $f0(r, $1), $0)",
        )
    )
    if "lax.map" in outer and axis:
        raise Unfit
    b.emit(outer.format(a=axis), mapped, second, bodies=(body,))


def _carries(b: Builder, most: int = 2) -> list[str]:
    found = [b.real(lambda kind: not kind.weak) for _ in range(b.rng.randint(1, most))]
    if b.rng.random() < 0.25:
        found.append(b.pick(lambda kind: not is_real(kind) and not kind.weak))
    return found


def _scan(b: Builder, function: str, most: int = 7) -> None:
    rng = b.rng
    carries = _carries(b)
    rows = [b.pick(lambda kind: len(kind.shape) >= 1) for _ in range(rng.choice((0, 1, 1, 2)))]
    length = b.kind(rows[0]).shape[0] if rows else rng.randint(1, most)
    if rows:
        rows = [rows[0], *(row for row in rows[1:] if b.kind(row).shape[0] == length)]
    if length > 16:
        raise Unfit
    ys = rng.choice((0, 1, 1, 2))
    kinds = [b.kind(name) for name in carries]
    slices = [replace(b.kind(name), shape=b.kind(name).shape[1:], weak=False) for name in rows]

    def returns(inner: Builder, params: list[str]) -> tuple[str, Sequence[str]]:
        state, after = params[: len(carries)], params[len(carries) :]
        out = [inner.fitted(kind, [*state, *after]) for kind in kinds]
        if rng.random() < 0.1:
            out = list(state)  # the carry as it came
        stacked = [inner.inexact(late=True) if rng.random() < 0.8 else inner.pick() for _ in range(ys)]
        carried = ", ".join(f"${i}" for i in range(len(out)))
        listed = ", ".join(f"${i + len(out)}" for i in range(ys))
        return f"({carried},), {f'({listed},)' if ys else 'None'}", [*out, *stacked]

    body = b.body([*kinds, *slices], returns)
    n, m = len(carries), len(rows)
    state, row = ", ".join(f"c[{i}]" for i in range(n)), "".join(f", r[{i}]" for i in range(m))
    taken = f"({', '.join(f'${n + i}' for i in range(m))},)" if m else "None"
    options = (
        f"length={length}"
        + (", reverse=True" if rng.random() < 0.3 else "")
        + (", unroll=2" if rng.random() < 0.15 else "")
    )
    results = "$g_c, $g_y"
    text = f"{results} = {function}(lambda c, r: $f0({state}{row}), ({', '.join(f'${i}' for i in range(n))},), {taken}, {options})\n"
    text = text.replace("$g_c", "$g").replace(", $g_y", "")
    unpacked = ", ".join([f"$g[0][{i}]" for i in range(n)] + [f"$g[1][{i}]" for i in range(ys)])
    b.emit(
        f"{text}$out{',' if n + ys == 1 else ''} = {unpacked}{',' if n + ys == 1 else ''}",
        *carries,
        *rows,
        bodies=(body,),
        results=n + ys,
    )


def _op_scan(b: Builder) -> None:
    _scan(b, "lax.scan")


def scan_under_test(b: Builder) -> None:
    _scan(b, "SCAN", b.style.scans[1])


def _op_own_scan(b: Builder) -> None:
    if not b.style.own:
        raise Unfit
    schedules = ["'every'", "'sqrt'", "'log'", "2", "(2, 8)"] + ([] if b.twice else ["Slots(2)"])
    _scan(
        b,
        f"functools.partial(jaxckpt.scan, schedule={b.rng.choice(schedules)})".replace(
            "functools.partial", "jax.tree_util.Partial"
        ),
    )


def _op_fori(b: Builder) -> None:
    carry = b.real(lambda kind: not kind.weak)
    kind = b.kind(carry)
    body = b.body([Kind((), "int32", True), kind], lambda inner, params: ("$0", [inner.fitted(kind, params)]), most=3)
    b.emit(f"lax.fori_loop(0, {b.rng.randint(1, 4)}, $f0, $0)", carry, bodies=(body,))


def _op_while(b: Builder) -> None:
    """A loop of unknown length, on a value from which no derivative comes."""
    carry = b.real(lambda kind: not kind.weak)
    kind = b.kind(carry)
    body = b.body([kind], lambda inner, params: ("$0", [inner.fitted(kind, params)]), most=3, closed=False)
    b.emit(
        f"lax.while_loop(lambda c: c[0] < {b.rng.randint(0, 4)}, lambda c: (c[0] + 1, $f0(c[1])), (0, lax.stop_gradient($0)))[1]",
        carry,
        bodies=(body,),
    )


def _op_branch(b: Builder) -> None:
    rng = b.rng
    operands = _operands(b, 2)
    kinds = [b.kind(name) for name in operands]
    kind = b.kind(b.real())
    kind = replace(kind, weak=False)
    bodies = tuple(
        b.body(kinds, lambda inner, params: ("$0", [inner.fitted(kind, params)]), most=3)
        for _ in range(rng.choice((2, 2, 3)))
    )
    called = ", ".join(f"${i + 1}" for i in range(len(operands)))
    if len(bodies) == 2 and rng.random() < 0.8:
        predicate = b.pick(lambda each: not each.dtype.startswith("key") and not is_complex(each))
        b.emit(f"lax.cond(jnp.sum($0) > 0, $f0, $f1, {called})", predicate, *operands, bodies=bodies)
        return
    place = b.pick(is_integer)
    listed = ", ".join(f"$f{i}" for i in range(len(bodies)))
    b.emit(f"lax.switch(jnp.max($0), [{listed}], {called})", place, *operands, bodies=bodies)


BODIED: dict[Operation, float] = {
    _op_call: 4,
    _op_custom_rule: 1.2,
    _op_vmap: 1,
    _op_scan: 2,
    _op_own_scan: 0.6,
    _op_fori: 0.6,
    _op_while: 0.6,
    _op_branch: 1.2,
}
"""Operation -> how often it comes."""
