"""Closed forms: what checkpointing saves on a uniform chain, without tracing or compiling anything.

Segments are from Chen, Xu, Zhang and Guestrin, "Training Deep Nets with Sublinear Memory Cost" (2016,
arXiv:1604.06174): keep the input of each segment, and recompute a segment when the backward pass comes to it. The paper
gives O(sqrt(N)); the exact count follows.

The chain has N layers `x_i = f_i(x_{i-1})`. Each activation x_i has `a` bytes. The backward pass of layer i needs
x_{i-1} and x_i, as for a dense layer with a nonlinearity. x_0 is the program's argument and not an activation.
Parameters and their gradients are not activations either. Counted are all other bytes that are live at once. There are
K = ceil(N / s) segments of s layers; the last has r = N - (K - 1) s layers.

*Without checkpointing*, all of x_1 ... x_N are live when the backward pass begins. First it computes the cotangent of
the layer's linear part from that of x_N, in the place of x_N. From this it computes the cotangent of x_{N-1}. Then x_1
... x_{N-1} and two cotangents are live,

    without = (N + 1) a.

*With checkpointing*, the inputs of segments 2 ... K are kept (that of the first is x_0). The peak is at one of two
times:

  - in the last segment, when the backward pass begins: K - 1 kept inputs, its r activations, and one more for the
    second cotangent, as above: K + r;
  - in the segment before it: K - 2 kept inputs, its s recomputed activations, and the incoming cotangent, in whose
    place the next one is computed: K - 1 + s. Earlier segments have fewer kept inputs.

So

    with = max(K + r, K - 1 + s) a,       K = ceil(N / s), r = N - (K - 1) s, s at most N.

The values of the last segment are needed at once, so it takes the same memory with and without a checkpoint. This is
why `checkpoint_sequential` leaves it without one. (A last segment of one layer without a checkpoint can take one
activation less: its only other value is its input, which may be freed before the next cotangent is computed. XLA does
that for an H100, but not for the CPU. The formula does not assume it.)

Segments of one layer keep every activation, and one checkpoint around everything recomputes all of them at once: both
save nothing. The minimum is near s = sqrt(N), with about 2 sqrt(N) activations.

`python -m benchmarks.estimates` compares this with compiled programs.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from jaxckpt._errors import ArgumentError
from jaxckpt.core.units import as_int, parse_bytes
from jaxckpt.transforms.sequential import segment_length


class MemorySavings(NamedTuple):
    """Activation bytes of a chain at its peak, as a tuple, so that it can be unpacked.

    Attributes:
      without_checkpoint: bytes.
      with_checkpoint: bytes.
      savings_percent: 0 to 100.
    """

    without_checkpoint: int
    with_checkpoint: int
    savings_percent: float


def estimate_memory_savings(num_layers: int, activation_bytes: int | str, segment_size: int | str = 2) -> MemorySavings:
    """Estimates the peak of activation memory of a uniform chain of layers, without and with checkpointing in segments.

    The top of this module has the formula, and what it counts. For chains of dense layers it is within 5% of the
    compiled bytes on the CPU and on an H100, if activations are large compared with parameters (many rows in the
    batch).

    Args:
      num_layers: number of layers, 0 or more.
      activation_bytes: bytes of one layer's activation, an int or a string such as "16MiB".
      segment_size: layers in a segment; each segment has one checkpoint. An int >= 1, which need not divide
        `num_layers`, or "sqrt" for round(sqrt(num_layers)).

    Returns:
      `(without_checkpoint, with_checkpoint, savings_percent)`: bytes, bytes, and percent of `without_checkpoint`.

    Raises:
      ArgumentError: an argument is none of these.

    >>> without_checkpoint, with_checkpoint, percent = estimate_memory_savings(100, 1024, segment_size=10)
    >>> without_checkpoint, with_checkpoint, round(percent, 1)
    (103424, 20480, 80.2)
    >>> estimate_memory_savings(100, "1KiB", "sqrt").with_checkpoint
    20480
    """
    layers = as_int(num_layers)
    if layers is None or layers < 0:
        raise ArgumentError("num_layers", "an int >= 0", num_layers)
    num_layers = layers
    size = parse_bytes(activation_bytes, "activation_bytes")
    segment = segment_length(segment_size, num_layers)
    if num_layers == 0:
        return MemorySavings(0, 0, 0.0)
    without = num_layers + 1
    segments = math.ceil(num_layers / segment)
    last = num_layers - (segments - 1) * segment
    with_ = max(segments + last, segments - 1 + min(segment, num_layers))
    return MemorySavings(without * size, with_ * size, 100 * (1 - with_ / without))
