"""`jaxckpt targets`: what can be compiled for."""

from __future__ import annotations

import argparse

from jaxckpt.commands import output
from jaxckpt.commands.base import Command
from jaxckpt.memory.targets import targets
from jaxckpt.show import table


def _options(parser: argparse.ArgumentParser) -> None:
    del parser


def _run(options: argparse.Namespace) -> None:
    del options
    output.tell(table.targets_view(targets()))


COMMAND = Command(
    "list the targets that can be compiled for, and what to install for the others", _options, _run, takes_factory=False
)
