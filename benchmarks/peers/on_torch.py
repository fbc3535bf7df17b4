"""Measures a model in PyTorch.

PyTorch's profiler records each allocation and each release of its CPU allocator, with bytes, and each operation that
runs, compiled programs included.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.peers.measured import Measured

COUNTED = {"mm": 1, "addmm": 1, "bmm": 1, "baddbmm": 1, "convolution": 1, "convolution_backward": 2}
"""Matmuls and convolutions of an operation. A convolution's backward pass runs two: both operands have gradients."""


class Counter(TorchDispatchMode):
    """Counts what runs. What a selective checkpoint has kept does not run, and does not come here."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs an operation, and counts it."""
        self.count += COUNTED.get(func._overloadpacket.__name__, 0)
        return func(*args, **(kwargs or {}))


def measured(loss: Callable[[Any], Any], parameters: Sequence[Any], x: Any, compiled: bool) -> Measured:
    """Runs value and gradient of a loss, compiles what is compiled, and records one more run.

    A compiled program does not run in a `TorchDispatchMode`. So its operations are counted in the profiler's record.
    """

    def run() -> Any:
        for parameter in parameters:
            parameter.grad = None
        value = loss(x)
        value.backward()
        return value

    run()
    for parameter in parameters:
        parameter.grad = None
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        value = run()
    events = record.profiler.kineto_results.events()
    count = sum(COUNTED.get(event.name().removeprefix("aten::"), 0) for event in events)
    if not compiled:
        with Counter() as counter:
            run()
        count = counter.count
    gradients = [parameter.grad for parameter in parameters]
    made = sum(each.untyped_storage().nbytes() for each in (value, *gradients))
    norm = float(torch.sqrt(sum(gradient.square().sum() for gradient in gradients)))
    for parameter in parameters:  # so that nothing of a step is left when the next one begins
        parameter.grad = None
    return Measured(_peak(events, made), count, None, value.item(), norm, run)


def _peak(events: Sequence[Any], made: int) -> int:
    """Returns the peak of the live bytes; what is live in the end must be what the step made."""
    live = peak = 0
    for event in sorted((event for event in events if event.name() == "[memory]"), key=lambda event: event.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    if abs(live - made) > 0.01 * made + 2**16:
        raise RuntimeError(f"the record of allocations must end with the {made} bytes that the step made; got {live}.")
    return peak
