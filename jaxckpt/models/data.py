"""Real data that comes inside packages: the text of Python's standard library, and scikit-learn's handwritten digits.

Nothing is downloaded. Every batch is a function of its sizes, `seed` and `step`: the same on every run with the same
Python version (the text is that version's library). Batches are drawn with replacement.

Sources: the text is CPython's Lib/*.py (PSF licence). The digits are the 1,797 images of 8 by 8 pixels of the test set
of E. Alpaydin and C. Kaynak, "Optical Recognition of Handwritten Digits", UCI Machine Learning Repository, 1998;
`sklearn.datasets.load_digits` carries them.
"""

from __future__ import annotations

import functools
import re
import sysconfig
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from jaxckpt._errors import MissingPackageError

TEXT_BYTES = 2 << 20
"""How much of the library's text is read: its first 2 MiB, modules in alphabetical order."""

_PIECE = re.compile(rb" ?\w+|\n[ \n]*| +|[^\w\s]+|\s")


@functools.cache
def text() -> bytes:
    """Returns the first 2 MiB of the top-level modules of the standard library, in alphabetical order."""
    folder = Path(sysconfig.get_path("stdlib"))
    modules = sorted(folder.glob("*.py"))
    if not modules:
        raise FileNotFoundError(
            f"The language models train on the standard library's source, and there is none in {folder}."
        )
    found, size = [], 0
    for module in modules:
        found.append(module.read_bytes())
        size += len(found[-1])
        if size >= TEXT_BYTES:
            break
    return b"".join(found)[:TEXT_BYTES]


@dataclass(frozen=True)
class Tokenizer:
    """Tokens 0 to 255 are bytes; those above are the commonest pieces of the text (words, runs of spaces, operators).

    A piece that has no token of its own is spelt in bytes, so that any text can be encoded and comes back as it was.

    Attributes:
      pieces: the piece of token 256, of token 257, and so on.
    """

    pieces: tuple[bytes, ...]

    @classmethod
    def train(cls, corpus: bytes, vocabulary: int) -> Tokenizer:
        """Returns a tokenizer of at most `vocabulary` tokens (at least 256).

        Raises:
          ValueError: `vocabulary` is less than 256.

        >>> Tokenizer.train(b"the cat and the dog and the owl", 258).pieces
        (b' and', b' the')
        """
        if vocabulary < 256:
            raise ValueError(f"vocabulary must be at least 256, a token for each byte; got {vocabulary!r}.")
        counts = Counter(piece for piece in _PIECE.findall(corpus) if len(piece) > 1)
        return cls(tuple(piece for piece, _ in counts.most_common(vocabulary - 256)))

    def encode(self, corpus: bytes) -> np.ndarray:
        """Returns the tokens of `corpus`, int32.

        >>> Tokenizer.train(b"the cat and the dog and the owl", 258).encode(b"a the the").tolist()
        [97, 257, 257]
        """
        if not self.pieces:
            return np.frombuffer(corpus, np.uint8).astype(np.int32)
        number = {piece: token for token, piece in enumerate(self.pieces, start=256)}
        tokens: list[int] = []
        for piece in _PIECE.findall(corpus):
            token = number.get(piece)
            tokens.extend(piece if token is None else (token,))
        return np.asarray(tokens, np.int32)

    def decode(self, tokens: np.ndarray) -> bytes:
        """Returns the bytes that `tokens` (1-D) stand for; the inverse of `encode`."""
        return b"".join(bytes((token,)) if token < 256 else self.pieces[token - 256] for token in map(int, tokens))


@functools.cache
def tokenizer(vocabulary: int) -> Tokenizer:
    """Returns the tokenizer of the standard library's text with at most `vocabulary` tokens; 256 is plain bytes."""
    return Tokenizer.train(text(), vocabulary)


@functools.cache
def corpus(vocabulary: int) -> np.ndarray:
    """Returns the standard library's text in tokens, int32: 2 million as bytes, fewer with a larger vocabulary."""
    return tokenizer(vocabulary).encode(text())


def text_batch(
    batch: int, tokens: int, vocabulary: int = 256, *, seed: int = 0, step: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """Returns (inputs, targets), both int32 (batch, tokens): stretches of the text, and the same shifted by one.

    Raises:
      ValueError: the text is shorter than `tokens + 1`, or `vocabulary` is less than 256.
    """
    stream = corpus(vocabulary)
    if tokens + 1 > len(stream):
        raise ValueError(f"tokens must be less than the text's {len(stream)}; got {tokens!r}.")
    starts = np.random.default_rng([seed, step]).integers(0, len(stream) - tokens, size=batch)
    rows = stream[starts[:, None] + np.arange(tokens + 1)]
    return rows[:, :-1], rows[:, 1:]


@functools.cache
def _digits() -> tuple[np.ndarray, np.ndarray]:
    try:
        from sklearn.datasets import load_digits
    except ModuleNotFoundError as error:
        raise MissingPackageError(
            "The digits come with scikit-learn, which is not installed. Install it with: pip install scikit-learn."
        ) from error

    images, labels = load_digits(return_X_y=True)
    return (images.reshape(-1, 8, 8) / 8 - 1).astype(np.float32), labels.astype(np.int32)


def digits_batch(
    batch: int, size: int = 8, channels: int = 1, *, seed: int = 0, step: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """Returns (images, labels): float32 (batch, size, size, channels) in [-1, 1], int32 (batch,) in 0 to 9.

    Each of the 8 by 8 pixels becomes a square of size / 8; channels are copies of each other.

    Raises:
      ValueError: `size` is no multiple of 8.
    """
    if size < 8 or size % 8:
        raise ValueError(f"size must be a multiple of 8, the digits' own; got {size!r}.")
    images, labels = _digits()
    chosen = np.random.default_rng([seed, step]).integers(0, len(images), size=batch)
    scaled = images[chosen].repeat(size // 8, axis=1).repeat(size // 8, axis=2)
    return np.repeat(scaled[..., None], channels, axis=-1), labels[chosen]


def digits_features(batch: int, width: int, *, seed: int = 0, step: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Returns (features, labels): float32 (batch, width), the 64 pixels over and over, and int32 (batch,)."""
    images, labels = digits_batch(batch, seed=seed, step=step)
    return np.tile(images.reshape(batch, 64), -(-width // 64))[:, :width], labels
