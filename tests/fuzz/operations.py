"""Operations of random programs that have no bodies; each picks operands and writes a statement, or raises `Unfit`."""

from __future__ import annotations

from tests.fuzz.builder import TAGS, Builder, Operation, Unfit, broadcastable, is_complex, is_integer, is_real
from tests.fuzz.programs import Kind

_ELEMENTWISE = (
    "jnp.sin($0)", "jnp.cos($0)", "jnp.tanh($0)", "jnp.tanh($0)", "jax.nn.sigmoid($0)", "jax.nn.relu($0)", "jax.nn.gelu($0)",
    "jax.nn.silu($0)", "jax.nn.softplus($0)", "jnp.exp(jnp.minimum($0, 1.0))", "jnp.exp(-$0 * $0)", "jnp.abs($0)", "-$0", "$0 * $0",
    "$0 ** 3", "jnp.sqrt($0 * $0 + 1.0)", "lax.rsqrt($0 * $0 + 0.5)", "jnp.log1p(jnp.abs($0))", "jnp.log($0 * $0 + 1.0)",
    "1.0 / (1.0 + $0 * $0)", "lax.erf($0)", "jnp.clip($0, -1.0, 1.0)", "jnp.where($0 > 0, $0, 0.1 * $0)", "jnp.sign($0) * $0", "$0 * 0.5",
    "jnp.floor($0) + $0", "halved($0)", "doubled($0)", "clipped($0, -0.5, 0.5)", "jnp.exp($0)", "jnp.nan_to_num($0)", "jnp.expm1(-jnp.abs($0))",
    "jax.numpy.arctan($0)", "lax.stop_gradient($0)", "lax.stop_gradient($0) * $0", "lax.optimization_barrier($0)", "jnp.copy($0)",
    "lax.reduce_precision($0, 8, 7)", "lax.integer_pow($0, 2)", "jnp.square(jnp.sin($0))", "jax.nn.leaky_relu($0)",
)  # fmt: skip
_PAIRS = (
    "$0 + $1", "$0 - $1", "$0 * $1", "$0 * jnp.sin($1)", "jnp.maximum($0, $1)", "jnp.minimum($0, $1)", "$0 / (1.0 + "
    "$1 * $1)",
    "jnp.where($0 > $1, $0, $1)", "jnp.arctan2($0, $1 * $1 + 1.0)", "jnp.hypot($0, $1 + 2.0)", "jnp.where($0 > 0, "
    "$0, $1)",
    "jnp.logaddexp($0, $1)",
)  # fmt: skip
_ROWS = (
    "jnp.sum($0, axis=$a)", "jnp.mean($0, axis=$a)", "jnp.max($0, axis=$a)", "jnp.min($0, axis=$a, keepdims=True)", "jnp.prod($0, axis=$a)",
    "jax.nn.logsumexp($0, axis=$a)", "jnp.var($0, axis=$a, keepdims=True)", "jax.nn.softmax($0, axis=$a)", "jax.nn.log_softmax($0, axis=$a)",
    "jnp.cumsum($0, axis=$a)", "jnp.cumprod($0, axis=$a)", "lax.cummax($0, axis=$n)", "lax.cumlogsumexp($0, axis=$n)", "jnp.sort($0, axis=$a)",
    "jnp.argsort($0, axis=$a)", "jnp.argmax($0, axis=$a)", "jnp.flip($0, axis=$a)", "jnp.roll($0, 1, axis=$a)", "jnp.expand_dims($0, $a)",
    "jnp.squeeze(jnp.expand_dims($0, $a), $a)", "jnp.linalg.norm($0, axis=$a)", "jnp.concatenate([$0, $0], axis=$a)",
    "jnp.stack([$0, $0 * 2], axis=$a)",
    "($0 - jnp.mean($0, axis=$a, keepdims=True)) * lax.rsqrt(jnp.var($0, axis=$a, keepdims=True) + 1e-3)", "lax.top_k($0, 2)[0]",
    "lax.associative_scan(jnp.add, $0, axis=$n)", "jnp.median($0, axis=$a)", "jnp.diff($0, axis=$a)", "jnp.take($0, "
    "1, axis=$a)",
    "lax.index_in_dim($0, 0, axis=$n)", "jax.nn.standardize($0, axis=$a)", "jnp.any($0 > 0, axis=$a)",
    "jnp.pad($0, 1)", "lax.slice_in_dim($0, 0, 2, axis=$n)",
)  # fmt: skip
_SHAPES = (
    "jnp.reshape($0, (-1,))", "jnp.reshape($0, (1, -1))", "jnp.ravel($0)[:4]", "$0.T", "jnp.swapaxes($0, 0, -1)", "jnp.squeeze($0)",
    "jnp.broadcast_to($0, (2, *$0.shape))", "jnp.tile($0, 2)", "$0[..., None]", "$0[0]", "$0[..., ::2]", "$0[-1:]", "jnp.atleast_2d($0)",
    "jnp.reshape($0, $0.shape)", "jnp.split($0, 1)[0]", "$0[::-1]", "lax.rev($0, (0,))", "jnp.moveaxis($0, -1, 0)",
    "lax.dynamic_slice_in_dim($0, 1, 2)", "lax.dynamic_update_slice($0, $0 * 0.5, (0,) * $0.ndim)",
)  # fmt: skip
_MATMULS = (
    "$0 @ $1", "$0 @ $1", "$0 @ $1.T", "$0.T @ $1", "jnp.einsum('...i,...j->...ij', $0, $1)", "jnp.einsum('bij,bkj->bik', $0, $1)",
    "jnp.tensordot($0, $1, 1)", "jnp.dot($0, $1, preferred_element_type=jnp.float32)", "jnp.vdot($0, $1)", "jnp.outer($0[0], $1[0])",
    "jnp.einsum('ij,jk->ki', $0, $1)", "jnp.matmul($0, $1, precision='highest')",
    "lax.conv_general_dilated($0[None, None], $1[None, None], (1, 1), 'SAME')", "jnp.convolve(jnp.ravel($0)[:4], "
    "jnp.ravel($1)[:3])",
)  # fmt: skip
_LITERALS = (
    "jnp.linspace(0.0, 1.0, $w)", "jnp.arange($w)", "jnp.arange($w, dtype=jnp.float32)", "jnp.full(($r, $w), 0.5)", "jnp.zeros(($r, $w))",
    "jnp.ones(($w,))", "jnp.eye($w)", "jnp.asarray(0.5)", "jnp.array([1.0, 2.0])", "np.arange($w, dtype=np.float32) "
    "* jnp.float32(0.1)",
    "jnp.copy(jnp.float32(0.5))", "jnp.reshape(0.5, (1,))", "jnp.squeeze(jnp.ones((1,)))", "jnp.expand_dims(0.5, 0)",
    "lax.stop_gradient(jnp.asarray(0.5))", "lax.stop_gradient(jnp.ones(($w,)))", "jnp.asarray(np.linspace(0, 1, $w, "
    "dtype=np.float32))",
    "lax.iota(jnp.int32, $w)", "jnp.float32(2.0)", "lax.full((), 1.5)", "jnp.tri($w)", "jnp.broadcast_to(jnp.float32(1.5), ($w,))",
    "jnp.array(True)", "jnp.int32(1)", "jnp.asarray(1.0, jnp.bfloat16)", "jnp.array([[0.5]]) * 2", "lax.squeeze(jnp.full((1, 1), 0.25), (0, 1))",
    "lax.reshape(jnp.float32(0.5), (1, 1))", "jnp.full((), 0.5) + 1", "jnp.hanning($w)", "jnp.sin(jnp.linspace(0.0, "
    "1.0, $w))",
)  # fmt: skip
_INTEGERS = (
    "$0 + 1",
    "$0 % 3",
    "$0 * 2 - 1",
    "jnp.sort($0)",
    "jnp.cumsum($0)",
    "jnp.clip($0, 0, 1)",
    "$0 > 1",
    "$0 == 1",
    "jnp.max($0)",
    "-$0 // 2",
    "jnp.sum($0)",
)
_COMPLEX = (
    "jnp.real($0)", "jnp.imag($0)", "jnp.conj($0)", "jnp.abs($0 + 0.1)", "$0 * $0", "jnp.exp(1j * jnp.real($0))", "$0 * 1j", "jnp.sum($0)",
    "jnp.sin($0 * 0.1)", "$0 @ jnp.conj($0).T", "jnp.angle($0 + 2.0)", "jnp.mean($0)", "jnp.fft.fft($0)", "$0.T", "$0[0]",
    "jnp.real($0 * jnp.conj($0))",
)  # fmt: skip
_KEYS = (
    ("jax.random.split($0)[0]", 1), ("$out = jax.random.split($0)", 2), ("jax.random.fold_in($0, 3)", 1), ("jax.random.normal($0, ($r, $w))", 1),
    ("jax.random.uniform($0, ($w,))", 1), ("jax.random.bernoulli($0, 0.7, ($r, $w))", 1), ("jax.random.randint($0, "
    "($w,), 0, 3)", 1),
    ("jax.random.normal($0, ($w,), jnp.bfloat16)", 1), ("jax.random.permutation($0, $w)", 1), ("jax.random.split($0, 3)", 1),
)  # fmt: skip


def _op_elementwise(b: Builder) -> None:
    b.emit(b.rng.choice(_ELEMENTWISE), b.real())


def _op_pair(b: Builder) -> None:
    first = b.real()
    b.emit(b.rng.choice(_PAIRS), first, b.like(first, lambda one, other: is_real(other) and broadcastable(one, other)))


def _op_rows(b: Builder) -> None:
    name = b.real(lambda kind: len(kind.shape) >= 1)
    rank = len(b.kind(name).shape)
    text = b.rng.choice(_ROWS).replace("$n", str(b.rng.randrange(rank)))
    axis = b.rng.choice([*range(rank), -1])
    every = (
        "None"
        if b.rng.random() < 0.3 and any(word in text for word in ("sum(", "mean(", "max(", "prod(", "sumexp("))
        else str(axis)
    )
    b.emit(text.replace("$a", every), name)


def _op_shape(b: Builder) -> None:
    b.emit(b.rng.choice(_SHAPES), b.pick(lambda kind: not kind.dtype.startswith("key")))


def _op_matmul(b: Builder) -> None:
    text = b.rng.choice(_MATMULS)
    first = b.real(lambda kind: len(kind.shape) >= 1)
    inner = b.kind(first).shape[-1]
    b.emit(text, first, b.real(lambda kind: len(kind.shape) >= 1 and ("@ $1" not in text or inner in kind.shape)))


def _op_product(b: Builder) -> None:
    first = b.real(lambda kind: len(kind.shape) == 2)
    columns = b.kind(first).shape[1]
    b.emit("$0 @ $1", first, b.real(lambda kind: len(kind.shape) == 2 and kind.shape[0] == columns))


def _op_literal(b: Builder) -> None:
    b.emit(_sized(b, b.rng.choice(_LITERALS)))


def _sized(b: Builder, text: str) -> str:
    return text.replace("$r", str(b.style.rows)).replace("$w", str(b.style.width))


def _op_cast(b: Builder) -> None:
    dtype = b.rng.choice(("float32", "bfloat16", "float16", "float32", "int32", "bool", "complex64"))
    name = b.pick(lambda kind: kind.dtype != dtype and not is_complex(kind) and not kind.dtype.startswith("key"))
    b.emit(f"$0.astype(jnp.{dtype})" if dtype != "int32" else "jnp.clip($0, -3, 3).astype(jnp.int32)", name)


def _op_integer(b: Builder) -> None:
    b.emit(b.rng.choice(_INTEGERS), b.pick(is_integer))


def _op_complex(b: Builder) -> None:
    if b.rng.random() < 0.3:
        first = b.pick(lambda kind: kind.dtype == "float32")
        b.emit(
            "lax.complex($0, $1)",
            first,
            b.like(first, lambda one, other: (one.shape, one.dtype) == (other.shape, other.dtype)),
        )
        return
    b.emit(b.rng.choice(_COMPLEX), b.pick(is_complex))


def _op_compare(b: Builder) -> None:
    first = b.real()
    second = b.like(first, lambda one, other: is_real(other) and broadcastable(one, other))
    b.emit(
        b.rng.choice(("$0 > $1", "($0 < $1) | ($0 > 1)", "jnp.isfinite($0) & ($1 > 0)", "jnp.logical_not($0 >= $1)")),
        first,
        second,
    )


def _op_select(b: Builder) -> None:
    mask = b.pick(lambda kind: kind.dtype == "bool")
    fits = lambda kind: broadcastable(kind, b.kind(mask))
    b.emit(
        b.rng.choice(("jnp.where($0, $1, $2)", "jnp.where($0, $1, 0.0)", "jnp.sum($1, where=$0)", "$1 * $0")),
        mask,
        b.real(fits),
        b.real(fits),
    )


def _op_gather(b: Builder) -> None:
    table, places = (
        b.real(lambda kind: len(kind.shape) >= 1),
        b.pick(lambda kind: is_integer(kind) and len(kind.shape) <= 1),
    )
    n = b.kind(table).shape[0]
    b.emit(
        b.rng.choice(
            (
                f"$0[$1 % {n}]", f"jnp.take($0, $1 % {n}, axis=0)", f"$0.at[$1 % {n}].set(0.5)", f"$0.at[$1 % "
                f"{n}].add($0[0])",
                f"$0.at[$1 % {n}].multiply(2.0)", f"$0.at[$1 % {n}].max(0.0)", "$0[$1]", f"jax.nn.one_hot($1 % {n}, "
                f"{n}) @ $0",
                "jnp.take_along_axis($0, jnp.argsort($0, axis=-1), axis=-1)", f"jax.ops.segment_sum($0, "
                f"jnp.arange({n}) % 2, 2)",
                f"looked_up($0, $1 % {n})", f"lax.dynamic_index_in_dim($0, jnp.max($1) % {n})",
                "jnp.searchsorted(jnp.sort(jnp.ravel($0)), 0.1)", f"$0.at[$1 % {n}].get(mode='fill', fill_value=0.0)",
            )
        ),
        table,
        places,
    )  # fmt: skip


def _op_random(b: Builder) -> None:
    key = b.pick(lambda kind: kind.dtype.startswith("key") or kind == Kind((2,), "uint32"))
    if b.rng.random() < 0.4:
        x = b.real()
        b.emit("jnp.where(jax.random.bernoulli($0, 0.8, $1.shape), $1 / 0.8, 0.0)", key, x)
        return
    if b.kind(key).dtype.startswith("key") and b.rng.random() < 0.1:
        b.emit("jax.random.key_data($0)", key)
        return
    text, results = b.rng.choice(_KEYS)
    b.emit(_sized(b, text), key, results=results)


def _op_tag(b: Builder) -> None:
    b.emit(f"tag($0, {b.rng.choice(TAGS)!r})", b.pick() if b.rng.random() < 0.2 else b.inexact())


def _op_static(b: Builder) -> None:
    if not b.statics:
        raise Unfit
    name = b.rng.choice(b.statics)
    b.emit("getattr(jnp, $0)($1)" if isinstance(b.env[name], str) else "$0($1)", name, b.real())


def _op_effect(b: Builder) -> None:
    if b.depth:  # JAX itself loses a value that has two names and is called back with, in a scan in two checkpoints
        raise Unfit
    b.emit("$out = $0\njax.debug.callback(lambda value: None, $0)", b.real())


SIMPLE: dict[Operation, float] = {
    _op_elementwise: 10,
    _op_pair: 7,
    _op_rows: 6,
    _op_shape: 5,
    _op_matmul: 3,
    _op_product: 5,
    _op_literal: 4,
    _op_cast: 2,
    _op_integer: 1,
    _op_complex: 1.5,
    _op_compare: 0.7,
    _op_select: 1.5,
    _op_gather: 2,
    _op_random: 2.5,
    _op_tag: 4,
    _op_static: 2,
    _op_effect: 0.15,
}
"""Operation -> how often it comes."""
