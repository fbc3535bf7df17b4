"""`jaxckpt init`: writes a training file to start from."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from importlib import resources

from jaxckpt._errors import ArgumentError, nearest
from jaxckpt.commands import base, output
from jaxckpt.commands.base import Command
from jaxckpt.core.files import check_writable, write_whole

FRAMEWORKS: Mapping[str, str] = {
    "linen": "pip install 'jaxckpt[flax]'",
    "nnx": "pip install 'jaxckpt[flax]'",
    "equinox": "pip install equinox optax",
    "haiku": "pip install dm-haiku optax",
    "keras": "pip install keras optax",
}
"""Framework with a file in jaxckpt/templates -> what its file needs."""


def template(framework: str) -> str:
    """Returns the text of a framework's training file."""
    return (resources.files("jaxckpt") / "templates" / f"{framework}.py").read_text()


def _options(parser: argparse.ArgumentParser) -> None:
    base.add(
        parser,
        "framework",
        nargs="?",
        default="linen",
        metavar="FRAMEWORK",
        help=f"{', '.join(FRAMEWORKS)} (default: linen)",
    )
    base.add(parser, "file", nargs="?", metavar="FILE.py", help="the file to write (default: train_FRAMEWORK.py)")


def _run(options: argparse.Namespace) -> None:
    framework, file = options.framework, options.file
    if file is None and framework.endswith(".py"):
        framework, file = "linen", framework
    if framework not in FRAMEWORKS:
        rule = f"one of {', '.join(FRAMEWORKS)}"
        raise ArgumentError("FRAMEWORK", rule, framework, nearest(framework, FRAMEWORKS))
    file = file or f"train_{framework}.py"
    if not file.endswith(".py"):
        raise ArgumentError("FILE.py", "a Python file, NAME.py", file)
    check_writable(file, "FILE.py")
    text = template(framework).replace("FILE.py", file)
    try:
        with open(file, "x"):  # no other program's file is overwritten either
            pass
    except FileExistsError as error:
        raise ArgumentError("FILE.py", "a file that does not exist yet", file, "Nothing was overwritten.") from error
    write_whole(file, text)
    print(f"wrote {file}", file=sys.stderr)
    output.tell(
        f"{file} trains a small {framework} model with AdamW ({FRAMEWORKS[framework]}). Put your own model into it.\n"
        f"  jaxckpt plan {file}:make_step --budget 60%\n"
        f"  python {file}"
    )


COMMAND = Command(
    "write a training file to start from, with a plan for its training step",
    _options,
    _run,
    """\
  jaxckpt init nnx my_train.py
  jaxckpt plan my_train.py:make_step --budget 60%
""",
    takes_factory=False,
)
