"""Files written whole or not at all."""

from __future__ import annotations

import os
import pathlib
import tempfile

from jaxckpt._errors import ArgumentError


def write_whole(path: str | os.PathLike[str], content: str | bytes) -> None:
    """Writes a file by way of a temporary one beside it, which then takes its name: a failure leaves what was there before.

    Raises:
      ArgumentError: the folder does not exist, or `path` is a folder.
      OSError: the disk is full, or the folder is not writable.
    """
    target = pathlib.Path(path)
    if target.is_dir() or not target.parent.is_dir():
        raise ArgumentError("path", "a file in a folder that exists", str(path))
    data = content.encode() if isinstance(content, str) else content
    handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(temporary, 0o666 & ~umask)  # mkstemp makes files that nobody else can read
        os.replace(temporary, target)
    except BaseException:
        os.unlink(temporary)
        raise
