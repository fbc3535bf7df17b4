"""Stores compilers' results on disk, so that planning or measuring the same program again compiles nothing.

The folder is the one that the platform's conventions name for caches. The environment variable `JAXCKPT_CACHE_DIR` or
an argument names another one, or turns the cache off. It holds `CACHE_BYTES` at most: what was not used for longest is
removed.

The key of a result is everything that decides it: the lowered program with its operations' names, the target, XLA's
options and flags, JAX's settings for the compiler, and the versions of jax, its compilers and jaxckpt. Source lines are
not in the key: the buffers of a stored result have the source lines of the program that was compiled. A file has a
digest, then the figures of the report and the compiler's buffer assignment, compressed. It is written whole or not at
all. If a file has changed, it is ignored, and the program is compiled again. Problems with the folder or a file are
written to the log, and have no other effect.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import importlib.metadata
import itertools
import json
import logging
import os
import pathlib
import re
import zlib
from collections.abc import Collection, Mapping
from typing import Any

import jax
import platformdirs

from jaxckpt import _compat
from jaxckpt._errors import ArgumentError
from jaxckpt.core.constants import CACHE_BYTES
from jaxckpt.core.files import read_whole, write_whole
from jaxckpt.memory.platforms import PLATFORMS

logger = logging.getLogger("jaxckpt")

FOLDER = "JAXCKPT_CACHE_DIR"
OFF = "off"
_SUFFIX = ".report"
PLANS_SUFFIX = ".plans"
"""Ends the names of the files of `jaxckpt.planner.remembered`, which lie in the same folder."""
_NAMED = re.compile(r'loc\("(?:([^"]*/[^"]*)"\(|([^"]*)"\))')
"""Matches names of operations ("jit(loss)/Block_0/dot_general") and arguments in a program's locations. Names of
functions have no slash.
"""
_SETTINGS = (
    "jax_compiler_enable_remat_pass",
    "jax_disable_most_optimizations",
    "jax_enable_pgle",
    "jax_exec_time_optimization_effort",
    "jax_memory_fitting_effort",
    "jax_memory_fitting_level",
    "jax_optimization_level",
    "jax_use_shardy_partitioner",
)
"""JAX's settings that become options of its compilers; those that a version does not have are left out."""


@dataclasses.dataclass(frozen=True)
class Answer:
    """A compiler's result for a program.

    Attributes:
      figures: the fields of a `MemoryReport`.
      dump: the compiled program with its buffer assignment, as XLA dumps it; None if there is no dump.
    """

    figures: Mapping[str, Any]
    dump: bytes | None


_READING = "3"
"""Counts up when figures are read from a dump in another way: those that were stored before are not read again."""


def folder_of(cache: str | os.PathLike[str] | bool | None) -> pathlib.Path | None:
    """Returns the folder of results, which may not exist yet; None if nothing is to be stored.

    Args:
      cache: the folder; False or "off" for none; None or True for that of `JAXCKPT_CACHE_DIR`, and where that is not
        set, for the one of the platform.

    Raises:
      ArgumentError: `cache` is something else.
    """
    given = not (cache is None or cache is True)
    if not given:
        cache = os.environ.get(FOLDER, "") or platformdirs.user_cache_path("jaxckpt", appauthor=False)
    if cache is False or (isinstance(cache, str) and cache.lower() == OFF):
        return None
    if not isinstance(cache, (str, os.PathLike)) or not os.fspath(cache) or "\0" in str(cache):
        raise ArgumentError("cache", "a folder, None for the usual one, or False for none", cache)
    try:
        folder = pathlib.Path(cache).expanduser()
        if given and folder.exists() and not folder.is_dir():
            raise ArgumentError("cache", "a folder, None for the usual one, or False for none", cache, "It is a file.")
        return folder
    except (RuntimeError, OSError) as error:  # the home of a user that does not exist; a name that is too long
        why = getattr(error, "strerror", None) or error  # an OSError's text has the whole name
        _warn(f"{str(cache)!r:.200} cannot be the folder of compilers' results: {why}")
        return None


def surroundings() -> dict[str, str]:
    """Returns what a result depends on, apart from the program: variables with flags, JAX's settings, and versions,
    with "" for missing ones.
    """
    platforms = PLATFORMS.values()
    variables = ["XLA_FLAGS", *(name for platform in platforms for name in platform.variables)]
    packages = ["jax", "jaxlib", "jaxckpt", *(name for platform in platforms for name in platform.packages)]
    flags = {name: os.environ.get(name, "") for name in variables}
    settings = {name: str(jax.config.values[name]) for name in _SETTINGS if name in jax.config.values}
    return flags | settings | {name: _version(name) for name in packages} | {"reading": _READING}


def entry(folder: pathlib.Path, lowered: Any, target: str, devices: Any, options: Mapping[str, Any]) -> pathlib.Path:
    """Returns the file for a program's result, which may not exist yet.

    Args:
      folder: as of `folder_of`.
      lowered: the program as `jax.stages.Lowered`.
      target: name of the target, and the row of its chip.
      devices: the devices' kind, and the order in which they are used.
      options: XLA's options for this program, beside those that it carries itself.
    """
    names = [operation or argument for operation, argument in _NAMED.findall(lowered.as_text(debug_info=True))]
    decides = [lowered.as_text(), *names, target, repr(devices), repr(sorted(options.items()))]
    decides.append(repr(sorted(_compat.own_options(lowered))))
    decides += surroundings().values()
    digest = hashlib.sha256("\0".join(decides).encode()).hexdigest()
    return folder / f"{digest[:40]}{_SUFFIX}"


def load(path: pathlib.Path, figures: Collection[str]) -> Answer | None:
    """Returns the result in a file, with figures of these names; None if there is no readable result."""
    try:
        content = read_whole(path)
        with contextlib.suppress(OSError):
            os.utime(path)  # used now: it is not among the first to be removed
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
        if set(stored["figures"]) != set(figures) or not all(itertools.starmap(_can_be, stored["figures"].items())):
            raise ValueError("the figures of another version")
        return Answer(stored["figures"], zlib.decompress(dump) if stored["dumped"] else None)
    except (ValueError, KeyError, TypeError, zlib.error) as error:
        logger.warning("%s is not a compiler's result; the program is compiled again: %s", path, error)
        return None


def store(path: pathlib.Path, answer: Answer) -> None:
    """Writes a result, and removes others where the folder would hold more than `CACHE_BYTES`. If it cannot be written,
    only the log says so.
    """
    head = {"figures": dict(answer.figures), "dumped": answer.dump is not None}
    rest = json.dumps(head).encode() + b"\n" + zlib.compress(answer.dump or b"")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, _digest(rest) + b"\n" + rest)
        _prune(path)
    except (OSError, ArgumentError) as error:
        _warn(f"cannot store compilers' results in {path.parent}: {error}")


def _prune(newest: pathlib.Path) -> None:
    """Removes the results that were not used for longest, until the folder holds no more than `CACHE_BYTES`."""
    found = []
    for path in itertools.chain(newest.parent.glob(f"*{_SUFFIX}"), newest.parent.glob(f"*{PLANS_SUFFIX}")):
        with contextlib.suppress(OSError):  # another process removed it
            about = path.lstat()
            found.append((path != newest, about.st_mtime, about.st_size, path))
    held = sum(size for _, _, size, _ in found)
    for other, _, size, path in sorted(found, key=lambda each: each[:2]):
        if held <= CACHE_BYTES:
            break
        if other:
            with contextlib.suppress(OSError):
                path.unlink()
            held -= size


@functools.cache
def _warn(message: str) -> None:
    """Logs a warning; the same one once in a process."""
    logger.warning(message)


def _can_be(name: str, figure: Any) -> bool:
    """Returns whether a value can be a report's figure of a name: bytes, FLOPs or seconds, text, or None; or a flag."""
    if name == "stopped":
        return isinstance(figure, bool)
    return figure is None or isinstance(figure, str) or (type(figure) in (int, float) and figure >= 0)


def _digest(content: bytes) -> bytes:
    return hashlib.sha256(content).hexdigest().encode()


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""
