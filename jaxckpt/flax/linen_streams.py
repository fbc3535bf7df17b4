"""Random keys in a scanned stack of linen layers, equal to those of unrolled layers.

When a number is drawn, linen hashes a module's path and a count, and folds the first word of the hash into the stream's
key. A layer's name is in the path, but a scan has one path for all layers. So `nn.scan` splits the key before the scan,
and then draws other numbers than unrolled layers. Here a table has a row of words for each layer's name, and the number
of the layer in the scan selects the row. A draw needs one fold, as without a scan.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxckpt._compat.flax import LazyRng, Scope, check_word, config


@dataclass(frozen=True, eq=False)
class Layer:
    """The layer that is being traced.

    Attributes:
      names: names of the unrolled layers.
      number: number of the layer, a traced scalar.
      own: the stack's scope.
    """

    names: tuple[str, ...]
    number: Any
    own: Scope

    def enter(self, scope: Scope) -> None:
        """Makes a scope in a trace of the layer draw the numbers of an unrolled layer's scope.

        Keys that lifted transforms in the block get from it are already folded with the layer's name.
        """
        scope.rngs = {stream: LazyRng(self.fold(stream, ()), rng.suffix) for stream, rng in scope.rngs.items()}
        self.adopt(scope)

    def adopt(self, scope: Scope) -> None:
        """Makes a scope one of the layer's scopes. Its keys are not changed."""
        scope.__class__ = LayerScope
        scope.layer = self  # type: ignore[attr-defined]

    def fold(self, stream: str, path: Sequence[str | int]) -> Any:
        """Returns the stream's key at a path within the layer."""
        check_word(_word)
        rng = self.own.rngs[stream]
        at = rng.suffix[:-1] if rng.suffix[-1:] == (self.own.name,) else rng.suffix  # the path of a model has no name
        words = np.array([_word((*at, name, *path)) for name in self.names], np.uint32)
        return jax.random.fold_in(rng.rng, jnp.asarray(words)[self.number])


class LayerScope(Scope):
    """A scope in a layer of a stack; a Scope becomes one by `Layer.enter`."""

    layer: Layer

    def push(self, name: str | None = None, prefix: str = "", reuse: bool = False) -> Scope:
        """Returns a child, as `Scope.push`."""
        return layered(self, super().push(name, prefix, reuse))

    def rewound(self, rewind_rngs: bool = False) -> Scope:
        """Returns a copy, as `Scope.rewound`."""
        return layered(self, super().rewound(rewind_rngs))

    def make_rng(self, name: str = "params") -> Any:
        """Draws a key, as `Scope.make_rng`."""
        super().make_rng(name)  # counts, and raises if there is no such stream
        stream = name if self.has_rng(name) else "params"
        inside = self.rngs[stream].suffix[len(self.layer.own.rngs[stream].suffix) :]
        return self.layer.fold(stream, (*inside, self.rng_counters[stream]))


def layered(outer: Scope, inner: Scope) -> Scope:
    """Returns the inner scope. If the outer scope is in a layer, the inner scope is now in the same layer."""
    if isinstance(outer, LayerScope):
        outer.layer.adopt(inner)
    return inner


def _word(path: Sequence[str | int]) -> int:
    """Returns the word that linen folds into a key for a path of names and a count: the first 4 bytes of a SHA-1."""
    digest = hashlib.sha1()
    for part in path:
        if config.flax_fix_rng_separator:
            digest.update(b"\00")
        digest.update(part.encode() if isinstance(part, str) else part.to_bytes((part.bit_length() + 7) // 8, "big"))
    return int.from_bytes(digest.digest()[:4], "big")
