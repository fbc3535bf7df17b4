"""Compilers' answers on disk, so that planning or measuring the same program again compiles nothing.

Off unless the environment variable `JAXCKPT_CACHE_DIR` names a folder. An answer is found by everything that decides it: the lowered program
with its operations' names, the target, XLA's options and flags, and the versions of jax, its compilers and jaxckpt. Not by source lines: the
buffers of an answer name those of when it was compiled. A file holds the figures of the report and the compiler's buffer assignment,
compressed; it is written whole or not at all, and one that cannot be read is compiled again.
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

from jaxckpt.core.files import write_whole

logger = logging.getLogger("jaxckpt")

FOLDER = "JAXCKPT_CACHE_DIR"
_FLAGS = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")
_NAMED = re.compile(r'loc\("(?:([^"]*/[^"]*)"\(|([^"]*)"\))')
"""Names of operations ("jit(loss)/Block_0/dot_general") and of arguments among the locations of a program; functions' names have no slash."""
_COMPILERS = ("jax", "jaxlib", "jaxckpt", "libtpu", "jax-cuda12-pjrt", "jax-cuda13-pjrt")


@dataclasses.dataclass(frozen=True)
class Answer:
    """What a compiler said of a program.

    Attributes:
      figures: the fields of a `MemoryReport`.
      dump: the compiled program with its buffer assignment as XLA dumps it; None where it dumped none.
    """

    figures: Mapping[str, Any]
    dump: bytes | None


def enabled() -> bool:
    """Whether `JAXCKPT_CACHE_DIR` names a folder."""
    return bool(os.environ.get(FOLDER))


def entry(lowered: Any, target: str, devices: Any, options: Mapping[str, Any]) -> pathlib.Path:
    """Returns the file of a program's answer, which may not exist yet.

    Args:
      lowered: the program as `jax.stages.Lowered`.
      target: name of the target.
      devices: the devices' kind, and the order in which they are used.
      options: XLA's options for this program.
    """
    names = sorted({operation or argument for operation, argument in _NAMED.findall(lowered.as_text(debug_info=True))})
    decides = [lowered.as_text(), *names, target, repr(devices), repr(sorted(options.items()))]
    decides += [os.environ.get(name, "") for name in _FLAGS]
    decides += [f"{name} {_version(name)}" for name in _COMPILERS]
    digest = hashlib.sha256("\0".join(decides).encode()).hexdigest()
    return pathlib.Path(os.environ[FOLDER]).expanduser() / f"{digest[:40]}.report"


def load(path: pathlib.Path, figures: Collection[str]) -> Answer | None:
    """Returns the answer in a file, with the figures of these names; None where there is none, or none that can be read."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        logger.warning("cannot read %s, which holds what a compiler said of this program: %s", path, error)
        return None
    try:
        head, _, rest = content.partition(b"\n")
        stored = json.loads(head)
        dump = zlib.decompress(rest)
        if len(dump) != stored["dump_bytes"] or set(stored["figures"]) != set(figures):
            raise ValueError("not what was written")
        return Answer(stored["figures"], dump if stored["dumped"] else None)
    except (ValueError, KeyError, TypeError, zlib.error):
        logger.warning("%s is no report of a compiler, or cut short: the program is compiled again", path)
        return None


def store(path: pathlib.Path, answer: Answer) -> None:
    """Writes an answer; where it cannot be written the log says so, and nothing else happens."""
    dump = answer.dump or b""
    head = {"figures": dict(answer.figures), "dumped": answer.dump is not None, "dump_bytes": len(dump)}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps(head).encode() + b"\n" + zlib.compress(dump))
    except OSError as error:
        logger.warning("cannot keep what the compiler said in %s: %s", path, error)


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "none"
