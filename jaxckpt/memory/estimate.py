"""Closed forms: what checkpointing saves on a uniform chain, without tracing or compiling anything.

The idea of segments is that of Chen, Xu, Zhang and Guestrin, "Training Deep Nets with Sublinear Memory Cost" (2016, arXiv:1604.06174):
keep the input of each segment, recompute a segment when the backward pass comes to it. They give O(sqrt(N)); the exact count follows.

The chain: N layers `x_i = f_i(x_{i-1})`, each activation x_i of `a` bytes, the backward pass of layer i needing x_{i-1} and x_i (a dense
layer and its nonlinearity do). x_0 is the program's argument and no activation; parameters and their gradients are no activations either.
What is counted is what else is live at once. Segments of s layers: K = ceil(N / s) of them, the last with r = N - (K - 1) s layers.

*Without checkpointing* all of x_1 ... x_N live when the backward pass begins. It first turns the cotangent of x_N into that of the layer's
linear part, in the place of x_N, and from that makes the cotangent of x_{N-1}: while it does, x_1 ... x_{N-1} and two cotangents are live,

    without = (N + 1) a.

*With checkpointing* the inputs of segments 2 ... K are kept (that of the first is x_0). Two moments can be the peak:

  - in the last segment, which is at work when the backward pass begins: K - 1 kept inputs, and its r activations and one more for the
    second cotangent, as above: K + r;
  - in the segment before, where everything but its own input is over: K - 2 kept inputs, its s recomputed activations, the cotangent that
    comes in, in whose place the next is made: K - 1 + s. Segments further to the front have fewer kept inputs.

So

    with = max(K + r, K - 1 + s) a,       K = ceil(N / s), r = N - (K - 1) s, s at most N.

The last segment's values are needed at once, hence it costs the same memory checkpointed or not: this is why `checkpoint_sequential` leaves
it alone. (A last segment of one layer, left alone, can do with one activation less: its only other value is its input, which may go before
the next cotangent comes. XLA finds that on an H100, not on the CPU. The formula does not count on it.)

Segments of one layer keep every activation, and one checkpoint around everything brings all of them back: both save nothing. The least is
near s = sqrt(N), with some 2 sqrt(N) activations.

`python -m benchmarks.estimates` holds this against compiled programs.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from jaxckpt._errors import ArgumentError
from jaxckpt.core.units import parse_bytes
from jaxckpt.transforms.sequential import segment_length


class MemorySavings(NamedTuple):
    """Activation bytes of a chain at its peak: a tuple, so that it can be taken apart.

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

    The formula and what it counts stand at the top of this module. On compiled chains of dense layers it is right within 5% on the CPU and
    on an H100 wherever activations are large beside parameters (many rows in the batch).

    Args:
      num_layers: layers of the chain, 0 or more.
      activation_bytes: bytes of one layer's activation, an int or a string such as "16MiB".
      segment_size: layers in a segment, each segment one checkpoint: an int >= 1, not necessarily a divisor, or "sqrt" for
        round(sqrt(num_layers)).

    Returns:
      `(without_checkpoint, with_checkpoint, savings_percent)`: bytes, bytes, percent of the first.

    Raises:
      ArgumentError: an argument is none of these.

    >>> without_checkpoint, with_checkpoint, percent = estimate_memory_savings(100, 1024, segment_size=10)
    >>> without_checkpoint, with_checkpoint, round(percent, 1)
    (103424, 20480, 80.2)
    >>> estimate_memory_savings(100, "1KiB", "sqrt").with_checkpoint
    20480
    """
    if not isinstance(num_layers, int) or isinstance(num_layers, bool) or num_layers < 0:
        raise ArgumentError("num_layers", "an int >= 0", num_layers)
    size = parse_bytes(activation_bytes, "activation_bytes")
    segment = segment_length(segment_size, num_layers)
    if num_layers == 0:
        return MemorySavings(0, 0, 0.0)
    without = num_layers + 1
    segments = math.ceil(num_layers / segment)
    last = num_layers - (segments - 1) * segment
    with_ = max(segments + last, segments - 1 + min(segment, num_layers))
    return MemorySavings(without * size, with_ * size, 100 * (1 - with_ / without))
