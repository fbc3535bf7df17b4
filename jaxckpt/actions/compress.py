"""Keep a value in fewer bits: see `compress`."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxckpt._errors import ArgumentError, ForwardModeError, did_you_mean
from jaxckpt.actions.base import Action, Array, Cost


@dataclass(frozen=True)
class Form:
    """How numbers are stored.

    Attributes:
      bits: of a number.
      error: largest error of a restored number: relative to itself, or to its block's largest where `uniform`.
      dtype: what is stored, of floats.
      most: the largest number of that form; blocks are scaled so that their largest number becomes this one. None
        where nothing is scaled.
      uniform: whether numbers are stored as integers.
    """

    bits: int
    error: float
    dtype: Any = None
    most: float | None = None
    uniform: bool = False


FORMS: dict[str, Form] = {
    "bfloat16": Form(16, 2.0**-8, jnp.bfloat16),
    "float16": Form(16, 2.0**-11, jnp.float16, 65504.0),
    "float8_e4m3fn": Form(8, 2.0**-4, jnp.float8_e4m3fn, 448.0),
    "float8_e5m2": Form(8, 2.0**-3, jnp.float8_e5m2, 57344.0),
    "int8": Form(8, 0.5 / 127, most=127.0, uniform=True),
    "int4": Form(4, 0.5 / 7, most=7.0, uniform=True),
    "bits": Form(1, 0.0),
}
"""Name of a form -> how it stores numbers."""

BLOCK = 128
"""Numbers that share a scale, unless asked otherwise."""


@dataclass(frozen=True, eq=False, repr=False)
class Compress(Action):
    """Keeps the value in fewer bits; see `compress`."""

    form: str
    block: int = BLOCK

    kind = "compress"
    changes = True

    def __post_init__(self) -> None:
        if not isinstance(self.form, str) or self.form not in FORMS:
            hint = did_you_mean(str(self.form), FORMS)
            raise ArgumentError("form", f"one of {', '.join(FORMS)}", self.form, hint)
        if isinstance(self.block, bool) or not isinstance(self.block, int) or self.block < 1:
            raise ArgumentError("block", "an int of at least 1: numbers that share a scale", self.block)

    @property
    def _form(self) -> Form:
        return FORMS[self.form]

    def admits(self, value: Array) -> bool:
        """Returns whether the value is an array that the form makes smaller: of booleans for "bits", of floats for the
        others.
        """
        if not value.shape or not value.bytes:
            return False
        if self.form == "bits":
            return bool(value.dtype == jnp.bool_)
        if not jnp.issubdtype(value.dtype, jnp.floating):
            return False
        return self.device_bytes(value) < value.bytes

    def device_bytes(self, value: Array) -> int:
        """Returns the bytes of the numbers and of their scales."""
        *outer, last = value.shape
        scales = 0 if self._form.most is None else math.ceil(last / self.block) * _wide(value.dtype).itemsize
        whole = math.prod(outer) * (math.ceil(last * self._form.bits / 8) + scales)
        share = value.bytes / max(math.prod(value.shape) * value.dtype.itemsize, 1)  # that one device has
        return math.ceil(whole * share)

    def cost(self, value: Array) -> Cost:
        """Returns some operations for each number, and that the value is read, and what is stored written and read."""
        count = math.prod(value.shape)
        return Cost(flops=8.0 * count, memory_bytes=value.bytes + 2.0 * self.device_bytes(value))

    def encode(self, x: Any) -> Any:
        """Returns (numbers, scales), or the numbers alone where nothing is scaled."""
        form = self._form
        if self.form == "bits":
            return jnp.packbits(x, axis=-1)
        if form.most is None:
            return x.astype(form.dtype)
        wide = x.astype(_wide(x.dtype))
        finite = jnp.isfinite(wide)
        largest = _in_blocks(jnp.abs(jnp.where(finite, wide, 0)), self.block).max(-1)
        scales = largest / form.most
        scales = jnp.maximum(scales, jnp.finfo(scales.dtype).tiny)
        scaled = wide / _spread(scales, self.block, x.shape[-1])
        numbers = jnp.where(finite, jnp.clip(scaled, -form.most, form.most), scaled)
        if not form.uniform:
            return numbers.astype(form.dtype), scales
        whole = jnp.where(finite, jnp.round(numbers), -form.most - 1).astype(jnp.int8)
        return (_packed(whole) if form.bits == 4 else whole), scales

    def decode(self, stored: Any, like: Any) -> Any:
        """Returns the array, with the shape and dtype of `like`."""
        form, last = self._form, like.shape[-1]
        if self.form == "bits":
            return jnp.unpackbits(stored, axis=-1, count=last).astype(bool)
        if form.most is None:
            return stored.astype(like.dtype)
        numbers, scales = _once(stored, self)
        if form.uniform:
            whole = _unpacked(numbers, last) if form.bits == 4 else numbers
            numbers = jnp.where(whole < -form.most, jnp.nan, whole.astype(scales.dtype))
        numbers = numbers.astype(scales.dtype)
        return (numbers * _spread(scales, self.block, last)).astype(like.dtype)

    def error(self, dtype: Any) -> float:
        """Returns the largest error of a restored number, its rounding to the dtype counted: relative to itself; for
        "int8" and "int4" relative to the largest number of its block.
        """
        return self._form.error + (float(jnp.finfo(dtype).eps) / 2 if self._form.error else 0.0)

    def __repr__(self) -> str:
        scaled = self._form.most is not None and self.block != BLOCK
        return f"compress({self.form!r}{f', block={self.block}' if scaled else ''})"


def compress(form: str, *, block: int = BLOCK) -> Action:
    """Returns the action that keeps a value in fewer bits.

    The forward pass stays exact. The backward pass starts from what is restored.

    =================  ========================  =========================================================
    form               kept of a float32 number  error of a restored number
    =================  ========================  =========================================================
    `"bfloat16"`       1/2                       at most 2^-8 of it
    `"float16"`        1/2 and scales            at most 2^-11 of it, down to 2^-29 of its block's largest
    `"float8_e4m3fn"`  1/4 and scales            at most 2^-4 of it, down to 2^-14 of its block's largest
    `"float8_e5m2"`    1/4 and scales            at most 2^-3 of it, down to 2^-29 of its block's largest
    `"int8"`           1/4 and scales            at most 1/254 of its block's largest
    `"int4"`           1/8 and scales            at most 1/14 of its block's largest
    `"bits"`           of booleans 1 bit each    none
    =================  ========================  =========================================================

    To that comes the rounding to the value's own dtype. Second derivatives pass "bfloat16" and "bits" alone; with the
    other forms they raise ForwardModeError.

    A block is `block` neighbours on the last axis, which `block` need not divide. Its scale takes its largest number to
    the largest of the form, so that nothing overflows; it is a float32 (a float64 for float64). Infinities and NaN come
    back as they are, but as NaN with "float8_e4m3fn", "int8" and "int4"; they do not disturb their neighbours. Values
    that the form does not make smaller are saved as they are: scalars, integers, keys, complex numbers, and numbers
    that are no wider.

    Args:
      form: see above.
      block: how many numbers share a scale.

    Raises:
      ArgumentError: there is no such form, or `block` is no int of at least 1.

    >>> import jax, jax.numpy as jnp
    >>> import jaxckpt
    >>> def layer(w, x):
    ...     return jnp.sin(jaxckpt.tag(jnp.tanh(x @ w), "hidden"))
    >>> policy = jaxckpt.Policy({"hidden": compress("int8")})
    >>> kept = jaxckpt.residuals(jaxckpt.checkpoint(layer, policy=policy), jnp.ones((64, 256)), jnp.ones((32, 64)))
    >>> sum(each.bytes for each in kept.residuals if each.name == "hidden")  # of 32 x 256 float32 numbers
    8448
    """
    return Compress(form, block)


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def _once(stored: Any, action: Compress) -> Any:
    """Returns what is stored; it has no derivative: that of rounding is zero, which would be wrong without a word."""
    return stored


@_once.defjvp
def _twice(action: Compress, primals: Any, tangents: Any) -> Any:
    raise ForwardModeError(
        f"{action!r} keeps values for one derivative, and a second one was asked for: no derivative passes the rounding. "
        'Where a gradient is differentiated again, keep these values by SAVE or compress("bfloat16").'
    )


def _wide(dtype: Any) -> Any:
    """Returns the dtype of scales, and of the arithmetic with them."""
    return jnp.promote_types(dtype, jnp.float32)


def _in_blocks(x: jax.Array, block: int) -> jax.Array:
    """Returns (..., blocks, block); zeros fill up the last one."""
    *outer, last = x.shape
    blocks = math.ceil(last / block)
    if blocks * block != last:
        x = jnp.pad(x, [(0, 0)] * len(outer) + [(0, blocks * block - last)])
    return x.reshape(*outer, blocks, block)


def _spread(scales: jax.Array, block: int, last: int) -> jax.Array:
    """Returns each number's scale, (..., last), of scales (..., blocks)."""
    *outer, blocks = scales.shape
    each = jnp.broadcast_to(scales[..., None], (*outer, blocks, block))
    return each.reshape(*outer, blocks * block)[..., :last]


def _packed(whole: jax.Array) -> jax.Array:
    """Returns (..., half of the last axis) bytes of integers from -8 to 7: the second half in the high bits."""
    half = math.ceil(whole.shape[-1] / 2)
    low, high = whole[..., :half], whole[..., half:]
    if high.shape[-1] < half:
        high = jnp.pad(high, [(0, 0)] * (whole.ndim - 1) + [(0, 1)])
    return (low.astype(jnp.uint8) & 15) | (high.astype(jnp.uint8) << 4)


def _unpacked(packed: jax.Array, last: int) -> jax.Array:
    """The inverse of `_packed`, of an axis of `last` numbers; elementwise, so that it fuses with what reads it."""
    nibbles = packed[..., None, :] >> jnp.array([[0], [4]], jnp.uint8)
    signed = ((nibbles & 15).astype(jnp.int8) ^ 8) - 8
    return signed.reshape(*packed.shape[:-1], 2 * packed.shape[-1])[..., :last]
