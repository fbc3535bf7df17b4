"""Stores compilers' results on disk, so that planning or measuring the same program again compiles nothing.

The cache is off unless the environment variable `JAXCKPT_CACHE_DIR` names a folder. The key of a result is everything
that decides it: the lowered program with its operations' names, the target, XLA's options and flags, and the versions
of jax, its compilers and jaxckpt. Source lines are not in the key: the buffers of a stored result have the source lines
of the program that was compiled. A file has a digest, then the figures of the report and the compiler's buffer
assignment, compressed. It is written whole or not at all. If a file has changed, it is ignored, and the program is
compiled again. Problems with the folder or a file are written to the log, and have no other effect.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.metadata
import json
import logging
import os
import pathlib
import re
import zlib
from collections.abc import Collection, Mapping
from typing import Any

from jaxckpt._errors import ArgumentError
from jaxckpt.core.files import read_whole, write_whole

logger = logging.getLogger("jaxckpt")

FOLDER = "JAXCKPT_CACHE_DIR"
_FLAGS = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")
_NAMED = re.compile(r'loc\("(?:([^"]*/[^"]*)"\(|([^"]*)"\))')
"""Matches names of operations ("jit(loss)/Block_0/dot_general") and arguments in a program's locations. Names of
functions have no slash.
"""
_COMPILERS = ("jax", "jaxlib", "jaxckpt", "libtpu", "jax-cuda12-pjrt", "jax-cuda13-pjrt")


@dataclasses.dataclass(frozen=True)
class Answer:
    """A compiler's result for a program.

    Attributes:
      figures: the fields of a `MemoryReport`.
      dump: the compiled program with its buffer assignment, as XLA dumps it; None if there is no dump.
    """

    figures: Mapping[str, Any]
    dump: bytes | None


def enabled() -> bool:
    """Returns whether `JAXCKPT_CACHE_DIR` names a folder."""
    return bool(os.environ.get(FOLDER))


def surroundings() -> dict[str, str]:
    """Returns what a result depends on, apart from the program: variables with flags, and versions, with "" for missing
    ones.
    """
    versions = {name: _version(name) for name in _COMPILERS}
    return {name: os.environ.get(name, "") for name in _FLAGS} | versions


def entry(lowered: Any, target: str, devices: Any, options: Mapping[str, Any]) -> pathlib.Path | None:
    """Returns the file for a program's result, which may not exist yet; None if `JAXCKPT_CACHE_DIR` is not a valid
    folder.

    Args:
      lowered: the program as `jax.stages.Lowered`.
      target: name of the target.
      devices: the devices' kind, and the order in which they are used.
      options: XLA's options for this program.
    """
    try:
        folder = pathlib.Path(os.environ[FOLDER]).expanduser()
    except RuntimeError as error:  # the home of a user that does not exist
        logger.warning("%s is %r, which cannot be a folder: %s", FOLDER, os.environ[FOLDER], error)
        return None
    names = sorted({operation or argument for operation, argument in _NAMED.findall(lowered.as_text(debug_info=True))})
    decides = [lowered.as_text(), *names, target, repr(devices), repr(sorted(options.items()))]
    decides += surroundings().values()
    digest = hashlib.sha256("\0".join(decides).encode()).hexdigest()
    return folder / f"{digest[:40]}.report"


def load(path: pathlib.Path, figures: Collection[str]) -> Answer | None:
    """Returns the result in a file, with figures of these names; None if there is no readable result."""
    try:
        content = read_whole(path)
    except FileNotFoundError:
        return None
    except (OSError, ArgumentError) as error:
        logger.warning("cannot read %s, which has the compiler's result for this program: %s", path, error)
        return None
    try:
        digest, _, rest = content.partition(b"\n")
        if digest != _digest(rest):
            raise ValueError("not what was written")
        head, _, dump = rest.partition(b"\n")
        stored = json.loads(head)
        if set(stored["figures"]) != set(figures) or not all(map(_can_be, stored["figures"].values())):
            raise ValueError("the figures of another version")
        return Answer(stored["figures"], zlib.decompress(dump) if stored["dumped"] else None)
    except (ValueError, KeyError, TypeError, zlib.error) as error:
        logger.warning("%s is not a compiler's result; the program is compiled again: %s", path, error)
        return None


def store(path: pathlib.Path, answer: Answer) -> None:
    """Writes a result. If it cannot be written, only the log says so."""
    head = {"figures": dict(answer.figures), "dumped": answer.dump is not None}
    rest = json.dumps(head).encode() + b"\n" + zlib.compress(answer.dump or b"")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, _digest(rest) + b"\n" + rest)
    except (OSError, ArgumentError) as error:
        logger.warning("cannot store the compiler's result in %s: %s", path, error)


def _can_be(figure: Any) -> bool:
    """Returns whether a value can be a figure of a report: bytes, FLOPs or seconds, a name, or None."""
    return figure is None or isinstance(figure, str) or (type(figure) in (int, float) and figure >= 0)


def _digest(content: bytes) -> bytes:
    return hashlib.sha256(content).hexdigest().encode()


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""
