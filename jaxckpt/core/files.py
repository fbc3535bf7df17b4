"""Writes files whole or not at all, and reads only regular files."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import pathlib
import re
import secrets
import stat
from collections.abc import Iterator

from jaxckpt._errors import ArgumentError

try:
    import fcntl
except ImportError:  # Windows has no such locks: files that killed writers left stay
    fcntl = None  # type: ignore[assignment]

_SUFFIX = ".jaxckpt"
_LONGEST = 200
"""Bytes of a name that a temporary file's name repeats; file systems allow 255 in all."""


def write_whole(path: str | os.PathLike[str], content: str | bytes) -> None:
    """Writes a file by way of a temporary one beside it, which then takes its name: a failure leaves what was there
    before.

    A symbolic link stays one: the file that it points to is written. A file that exists keeps its permissions.
    Temporary files of writers of the same file that were killed are removed.

    Raises:
      ArgumentError: the folder does not exist, or `path` is a folder, a device, a pipe or a socket.
      OSError: the disk is full, or the folder or the file is not writable.
    """
    target = _target(path, "path")
    data = content.encode() if isinstance(content, str) else content
    with _saying(path):
        _remove_left_over(target)
        handle, temporary = _create(target)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
                if fcntl is not None:  # while it is locked, lest another writer takes it for left over
                    file.flush()
                    os.replace(temporary, target)
            if fcntl is None:  # Windows renames no open file
                os.replace(temporary, target)
        except BaseException:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary)
            raise


def check_writable(path: str | os.PathLike[str], argument: str = "path") -> None:
    """Raises if `write_whole` could not write a file, so that the user learns it before hours of work.

    Args:
      path: of the file; what is there stays as it is.
      argument: the name that an error gives to it.

    Raises:
      ArgumentError: the folder does not exist or is not writable, or `path` is a folder, a device, a pipe or a socket.
    """
    try:
        handle, temporary = _create(_target(path, argument))
        os.close(handle)
        os.unlink(temporary)
    except OSError as error:
        raise ArgumentError(argument, "a file that can be written", str(path), f"{error.strerror}.") from error


def read_whole(path: str | os.PathLike[str]) -> bytes:
    """Returns a file's content; what is no regular file is an error, at once: a pipe would wait for a writer.

    Raises:
      ArgumentError: `path` is a device, a pipe or a socket.
      OSError: there is no such file, it is a folder, or it cannot be read.
    """
    _check_path(path, "path")
    handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    mode = os.fstat(handle).st_mode
    if not stat.S_ISREG(mode):
        os.close(handle)
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        raise ArgumentError("path", "a regular file", str(path))
    with os.fdopen(handle, "rb") as file:
        return file.read()


def _check_path(path: object, argument: str) -> None:
    if not isinstance(path, (str, os.PathLike)) or "\0" in str(path):
        raise ArgumentError(argument, "the path of a file", path)


def _target(path: str | os.PathLike[str], argument: str) -> pathlib.Path:
    """Returns the file to write: the one that a symbolic link points to."""
    _check_path(path, argument)
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        mode = stat.S_IFREG  # to be made
    except OSError as error:
        raise ArgumentError(argument, "a file that can be written", str(path), f"{error.strerror}.") from error
    target = pathlib.Path(os.path.realpath(path))
    if target.is_dir() or not target.parent.is_dir():
        raise ArgumentError(argument, "a file in a folder that exists", str(path))
    if not stat.S_ISREG(mode):
        raise ArgumentError(argument, "a regular file: a device, a pipe or a socket is not written to", str(path))
    return target


def _create(target: pathlib.Path) -> tuple[int, pathlib.Path]:
    """Returns (descriptor, path) of a new temporary file for a target: locked, with the permissions of the file that it
    is to replace.
    """
    permissions = stat.S_IMODE(target.stat().st_mode) if target.exists() else None
    if permissions is not None and not os.access(target, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(target))
    while True:
        temporary = target.with_name(f"{_stem(target)}{secrets.token_hex(4)}{_SUFFIX}")
        # Not by tempfile: it makes files that nobody else can read, and only the system can tell the umask without
        # changing it.
        handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), 0o666)
        _lock(handle, wait=True)
        if temporary.exists():  # else another writer took it for left over, before it was locked
            break
        os.close(handle)
    if permissions is not None:
        with contextlib.suppress(OSError):  # the file system has no permissions
            os.chmod(temporary, permissions)
    return handle, temporary


def _stem(target: pathlib.Path) -> str:
    """Returns what the names of a target's temporary files begin with."""
    name = target.name
    return f".{name if len(os.fsencode(name)) <= _LONGEST else hashlib.sha256(os.fsencode(name)).hexdigest()}."


def _remove_left_over(target: pathlib.Path) -> None:
    """Removes temporary files of this target whose writers are gone: a lock ends with the process that holds it."""
    if fcntl is None:
        return
    left_over = re.compile(re.escape(_stem(target)) + r"[0-9a-f]{8}" + re.escape(_SUFFIX))
    for name in os.listdir(target.parent):
        if left_over.fullmatch(name) is None:
            continue
        with contextlib.suppress(OSError):  # it is gone meanwhile, or somebody else's
            handle = os.open(target.with_name(name), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
            try:
                if _lock(handle):
                    os.unlink(target.with_name(name))
            finally:
                os.close(handle)


def _lock(handle: int, wait: bool = False) -> bool:
    """Locks an open file, where nobody else has it locked or, with `wait`, once nobody has; returns whether it did."""
    if fcntl is None:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError:  # somebody else has, or the file system knows no locks
        return False
    return True


@contextlib.contextmanager
def _saying(path: str | os.PathLike[str]) -> Iterator[None]:
    """Has the system's errors name the file that was asked for, and not the temporary one."""
    try:
        yield
    except OSError as error:
        if error.errno is None:
            raise
        raise type(error)(error.errno, error.strerror, os.fspath(path)) from None
