"""The figures of one variant, in every framework."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Measured:
    """A training step: value and gradient, ready to run.

    Attributes:
      bytes: peak of the live bytes, without parameters and input.
      matmuls: matmuls and convolutions that it executes.
      compiled_matmuls: those in the compiled program; None if that has loops.
      loss: the value.
      norm: Euclidean norm of the gradient.
      run: runs it to its end, and returns what it made.
    """

    bytes: int
    matmuls: int
    compiled_matmuls: int | None
    loss: float
    norm: float
    run: Callable[[], Any]
