"""Keep a value in fewer bits: see `compress`."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxckpt import _compat
from jaxckpt._errors import ArgumentError, InWords, nearest
from jaxckpt.actions.base import Action, Array, Cost, device_share, once
from jaxckpt.actions.narrow import Narrow


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

RANDOM_FLOPS = 100.0
"""Operations for a random number, as `core/flops.py` counts them."""


@dataclass(frozen=True, eq=False, repr=False)
class Compress(Action):
    """Keeps the value in fewer bits; see `compress`.

    Attributes:
      form: one of FORMS.
      block: numbers that share a scale.
      key: of rounding at random: the name of a generator and the key's words; None to round to the nearest.
    """

    form: str
    block: int = BLOCK
    key: Any = None

    kind = "compress"
    example = 'compress("int8")'
    words = (*FORMS, "narrow")
    changes = True

    def __new__(cls, form: Any = None, block: Any = BLOCK, key: Any = None) -> Any:
        """Returns the action of integers for "narrow", so that files and command lines may name it as `compress`
        does.
        """
        if not isinstance(form, str) or form != "narrow":
            return super().__new__(cls)
        if key is not None:
            raise ArgumentError("key", "None for 'narrow', which rounds nothing", key)
        return Narrow()

    def __post_init__(self) -> None:
        if not isinstance(self.form, str) or self.form not in FORMS:
            known = [*FORMS, "narrow"]
            raise ArgumentError("form", f"one of {', '.join(known)}", self.form, nearest(str(self.form), known))
        if isinstance(self.block, bool) or not isinstance(self.block, (int, np.integer)) or self.block < 1:
            raise ArgumentError("block", "an int of at least 1: numbers that share a scale", self.block)
        object.__setattr__(self, "block", int(self.block))
        if self._form.most is None:  # plan files of before have a block for every form
            object.__setattr__(self, "block", BLOCK)
        if self.key is not None:
            if not self._form.error:
                raise ArgumentError("key", f"None for {self.form!r}, which rounds nothing", self.key)
            object.__setattr__(self, "key", _words(self.key))

    @property
    def _form(self) -> Form:
        return FORMS[self.form]

    def admits(self, value: Array) -> bool:
        """Returns whether the value is an array that the form makes smaller: of booleans for "bits", of floats for the
        others.
        """
        if not value.shape or not value.bytes:
            return False
        of_bits = self.form == "bits"
        if value.dtype != jnp.bool_ if of_bits else not jnp.issubdtype(value.dtype, jnp.floating):
            return False
        last = value.shape[-1]
        if not isinstance(last, int) and (last % 8 != 0 if of_bits else self._form.most is not None):
            rule = f"another for values whose last axis has a symbolic size: {self!r} divides that axis into blocks"
            hint = "Use SAVE." if of_bits else 'Use "bfloat16" or SAVE.'
            raise ArgumentError("form", rule, InWords(f"a value of shape {list(value.shape)}"), hint)
        return of_bits or self.device_bytes(value) < value.bytes

    def device_bytes(self, value: Array) -> int:
        """Returns the bytes of the numbers and of their scales."""
        if not value.shape:
            return value.bytes  # is saved as it is
        *outer, last = value.shape
        # In whole numbers: sizes may be symbolic.
        scales = 0 if self._form.most is None else -(-last // self.block) * _wide(value.dtype).itemsize
        whole: int = math.prod(outer) * (-(-last * self._form.bits // 8) + scales)
        share = device_share(value)
        return whole if share == 1 else math.ceil(whole * share)

    def cost(self, value: Array) -> Cost:
        """Returns some operations for each number, and that the value is read, and what is stored written and read."""
        count = math.prod(value.shape)
        random = 0.0 if self.key is None else RANDOM_FLOPS
        reads = 1 if self.key is None else 2  # once more for the sum of its bits
        return Cost((8.0 + random) * count, reads * value.bytes + 2.0 * self.device_bytes(value))

    def encode(self, x: Any) -> Any:
        """Returns (numbers, scales), or the numbers alone where nothing is scaled."""
        form = self._form
        if self.form == "bits":
            return jnp.packbits(x, axis=-1)
        wide = x.astype(_wide(x.dtype))
        finite = jnp.isfinite(wide)
        if form.most is None:
            limit = float(jnp.finfo(form.dtype).max)  # rounding takes no number from there to infinity
            return jnp.where(finite, jnp.clip(self._rounded(wide, x), -limit, limit), wide).astype(form.dtype)
        block = min(self.block, max(x.shape[-1], 1))
        largest = _in_blocks(jnp.abs(jnp.where(finite, wide, 0)), block).max(-1)
        scales = jnp.clip(largest / form.most, *_scales_from_to(wide.dtype, form.most))
        scaled = wide / _spread(scales, block, x.shape[-1])
        numbers = self._rounded(jnp.clip(scaled, -form.most, form.most), x)
        numbers = jnp.where(finite, jnp.clip(numbers, -form.most, form.most), scaled)
        if not form.uniform:
            numbers = numbers.astype(form.dtype)
            # As bits: JAX reduces the precision of floats that a checkpoint in a checkpoint keeps, and takes
            # float8_e4m3fn for a float with infinities, so that what is above 240 becomes NaN (jax 0.10.2 to 0.12.0.1).
            return lax.bitcast_convert_type(numbers, jnp.uint8) if form.bits == 8 else numbers, scales
        whole = jnp.where(finite, numbers, -form.most - 1).astype(jnp.int8)
        return (_packed(whole) if form.bits == 4 else whole), scales

    def _rounded(self, numbers: jax.Array, x: jax.Array) -> jax.Array:
        """Returns numbers of the form: rounded, at random with a key. Without one the cast to a float's form rounds."""
        if self.key is None:
            return jnp.round(numbers) if self._form.uniform else numbers
        chance = _uniform(self.key, x, numbers.dtype)
        if self._form.uniform:
            return jnp.floor(numbers + chance)
        info = jnp.finfo(self._form.dtype)
        _, exponent = jnp.frexp(numbers)
        step = jnp.maximum(exponent - 1, info.minexp) - info.nmant  # of the form at this number: its power of two
        return jnp.ldexp(jnp.floor(jnp.ldexp(numbers, -step) + chance), step)

    def decode(self, stored: Any, like: Any) -> Any:
        """Returns the array, with the shape and dtype of `like`."""
        form, last = self._form, like.shape[-1]
        if self.form == "bits":
            return jnp.unpackbits(stored, axis=-1, count=last).astype(bool)
        if form.most is None:
            return (stored if self.key is None else once(stored, self)).astype(like.dtype)
        numbers, scales = once(stored, self)
        if form.uniform:
            whole = _unpacked(numbers, last) if form.bits == 4 else numbers
            numbers = jnp.where(whole < -form.most, jnp.nan, whole.astype(scales.dtype))
        elif form.bits == 8:
            numbers = lax.bitcast_convert_type(numbers, form.dtype)
        numbers = numbers.astype(scales.dtype)
        return (numbers * _spread(scales, min(self.block, max(last, 1)), last)).astype(like.dtype)

    def error(self, dtype: Any) -> float:
        """Returns the largest error of a restored number, its rounding to the dtype counted: relative to itself; for
        "int8" and "int4" relative to the largest number of its block.
        """
        times = 1 if self.key is None else 2
        return times * self._form.error + (float(jnp.finfo(dtype).eps) / 2 if self._form.error else 0.0)

    def parameters(self) -> dict[str, Any]:
        """Returns the form, the block, and the words of the key if there is one."""
        key = {} if self.key is None else {"key": list(self.key)}
        block = {} if self._form.most is None else {"block": self.block}
        return {"form": self.form, **block, **key}

    def __repr__(self) -> str:
        scaled = self._form.most is not None and self.block != BLOCK
        key = "" if self.key is None else f", key={self.key}"
        return f"compress({self.form!r}{f', block={self.block}' if scaled else ''}{key})"


def compress(form: str, *, block: int = BLOCK, key: Any = None) -> Action:
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
    `"narrow"`         of int32 1/4 or 1/2       none
    =================  ========================  =========================================================

    A restored value is also rounded to its own dtype. Second derivatives work with "bfloat16", "bits" and "narrow"
    only; with the other forms they raise ForwardModeError.

    A block is `block` neighbours on the last axis, which `block` need not divide. Its scale takes its largest number to
    the largest of the form; it is a float32 (a float64 for float64). No finite number becomes infinite: with "bfloat16"
    a number beyond its largest (of float64 values, and the last 2^-8 of float32's range) comes back as that one.
    (Of float64 values, what is below some 1e-38 comes back as 0 with it.) A scale is a normal number, so errors up to
    the least of these, 1.2e-38 of float32 and 2.2e-308 of float64, come on top of those of the table.
    Infinities and NaN come back as they are, but as NaN with "float8_e4m3fn", "int8" and "int4"; they do not disturb
    their neighbours. "int8" and "int4" restore numbers near zero as 0, and a relu of 0 passes no gradient: keep its
    mask too. Values that the form does not make smaller are saved as they are: scalars, integers, keys, complex
    numbers, and numbers that are no wider.

    "narrow" keeps integers in the narrowest dtype that holds all that they can be, as far as the program shows it:
    indices from `argmax`, `argsort`, `top_k` and `arange`, remainders, counts, and what `clip` bounds. An int32 index
    into 256 experts takes one byte. Integers of which the program does not show that they fit are saved as they are.

    With a `key`, numbers are rounded up or down at random, so that a restored number is right on average (stochastic
    rounding); the errors above double. The sum of a value's bits is folded into the key. So other values, and the
    values of other steps, get other random numbers, and equal values the same. A GPU spends some 100 operations a
    number on it. Second derivatives do not pass it.

    Args:
      form: see above.
      block: how many numbers share a scale; for the forms with scales.
      key: a key such as `jax.random.key(0)`, to round at random; None to round to the nearest. It is a part of the
        action: no key that is being traced.

    Raises:
      ArgumentError: there is no such form, `block` is no int of at least 1, `key` is no key, there is a key for a form
        that rounds nothing, or a block for one without scales.

    >>> import jax, jax.numpy as jnp
    >>> import jaxckpt
    >>> def layer(w, x):
    ...     return jnp.sin(jaxckpt.tag(jnp.tanh(x @ w), "hidden"))
    >>> policy = jaxckpt.Policy({"hidden": compress("int8")})
    >>> kept = jaxckpt.residuals(jaxckpt.checkpoint(layer, policy=policy), jnp.ones((64, 256)), jnp.ones((32, 64)))
    >>> sum(each.bytes for each in kept.residuals if each.name == "hidden")  # of 32 x 256 float32 numbers
    8448
    """
    made = Compress(form, block, key)
    if form == "narrow" or FORMS[form].most is None:
        _check_block(form, block)
    return made


def _check_block(form: str, block: Any) -> None:
    """Raises:
    ArgumentError: there are blocks for a form without scales.
    """
    if block != BLOCK or isinstance(block, bool):
        scaled = ", ".join(name for name, each in FORMS.items() if each.most is not None)
        hint = f"Leave it out. Forms with scales are {scaled}."
        raise ArgumentError("block", f"left out for {form!r}, which has no scales", block, hint)


def _words(key: Any) -> tuple[Any, ...]:
    """Returns a key as the name of its generator and its words.

    Raises:
      ArgumentError: it is no single key, or it is being traced.
    """
    rule = "one key whose numbers are known: jax.random.key(0)"
    if isinstance(key, _compat.Tracer):
        hint = "Make it outside of the functions that are differentiated or jitted. Each value and each step draws its own bits."
        raise ArgumentError("key", rule, key, hint)
    dtype = getattr(key, "dtype", None)
    if isinstance(key, (tuple, list)) and key and isinstance(key[0], str):
        name, *words = key
        if not all(isinstance(word, int) and not isinstance(word, bool) and 0 <= word < 2**32 for word in words):
            raise ArgumentError("key", rule, key)
    elif dtype == jnp.uint32 or (dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key)):
        with jax.ensure_compile_time_eval():
            if dtype == jnp.uint32:  # words alone are of the generator that is used by default
                name, data = str(jax.random.key_impl(jax.random.key(0))), key
            else:
                name, data = str(jax.random.key_impl(key)), jax.random.key_data(key)
        if data.ndim != 1:
            raise ArgumentError("key", rule, key, "It has several keys: index one." if data.ndim else "")
        words = np.asarray(data).tolist()
    else:
        raise ArgumentError("key", rule, key)
    if not _makes_key(name, tuple(words)):
        raise ArgumentError("key", rule, key, f"JAX makes no key of {len(words)} words for a generator {name!r}.")
    return (name, *words)


@functools.cache
def _makes_key(name: str, words: tuple[int, ...]) -> bool:
    """Returns whether there is such a generator whose keys have so many words."""
    try:
        with jax.ensure_compile_time_eval():
            jax.random.wrap_key_data(jnp.array(words, jnp.uint32), impl=name)
    except (TypeError, ValueError):
        return False
    return True


def _uniform(key: tuple[Any, ...], x: jax.Array, dtype: Any) -> jax.Array:
    """Returns numbers from [0, 1), other ones for each value and step: the sum of the value's bits is folded in."""
    name, *words = key
    made = jax.random.wrap_key_data(jnp.array(words, jnp.uint32), impl=name)
    words_of = {1: jnp.uint8, 2: jnp.uint16}.get(x.dtype.itemsize, jnp.uint32)
    bits = lax.bitcast_convert_type(x, words_of)
    made = jax.random.fold_in(made, bits.astype(jnp.uint32).sum(dtype=jnp.uint32))
    return jax.random.uniform(made, x.shape, dtype)


def _wide(dtype: Any) -> Any:
    """Returns the dtype of scales, and of the arithmetic with them."""
    return jnp.promote_types(dtype, jnp.float32)


@functools.cache
def _scales_from_to(dtype: Any, most: float) -> tuple[Any, Any]:
    """Returns the least scale, and the largest one by which the form's largest number is finite."""
    info = jnp.finfo(dtype)
    largest = info.max / info.dtype.type(most)
    with np.errstate(over="ignore"):
        while not np.isfinite(largest * info.dtype.type(most)):
            largest = np.nextafter(largest, info.dtype.type(0))
    return info.tiny, largest


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
    """Returns (..., half of the last axis) bytes of integers from -8 to 7. Neighbours share a byte, the second one in
    the high bits: so each device packs its part of an axis that several have.
    """
    *outer, last = whole.shape
    if last % 2:
        whole = jnp.pad(whole, [(0, 0)] * len(outer) + [(0, 1)])
    pairs = whole.reshape(*outer, math.ceil(last / 2), 2).astype(jnp.uint8)
    return (pairs[..., 0] & 15) | (pairs[..., 1] << 4)


def _unpacked(packed: jax.Array, last: int) -> jax.Array:
    """The inverse of `_packed`, of an axis of `last` numbers; elementwise, so that it fuses with what reads it."""
    nibbles = packed[..., None] >> jnp.array([0, 4], jnp.uint8)
    signed = ((nibbles & 15).astype(jnp.int8) ^ 8) - 8
    return signed.reshape(*packed.shape[:-1], 2 * packed.shape[-1])[..., :last]
