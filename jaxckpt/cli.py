"""The command `jaxckpt`: plan, compare, measure, residuals, init, show, diff, targets.

Exit codes: 0 for success; 1 for an error of jaxckpt, printed in one line on standard error; 2 for wrong usage. Reports
go to standard output, and everything else to standard error: what a model's file prints, too. The table COMMANDS has
the commands.
"""

from __future__ import annotations

import argparse
import logging
import re
import sys
from collections.abc import Mapping, Sequence
from typing import NoReturn

import jax

import jaxckpt
from jaxckpt._errors import JaxckptError, nearest
from jaxckpt.commands import compare, diff, init, measure, output, plan, residuals, show, targets
from jaxckpt.commands.base import FACTORY, Command, escaped
from jaxckpt.policies import LENIENT

COMMANDS: Mapping[str, Command] = {
    "plan": plan.COMMAND,
    "compare": compare.COMMAND,
    "measure": measure.COMMAND,
    "residuals": residuals.COMMAND,
    "init": init.COMMAND,
    "show": show.COMMAND,
    "diff": diff.COMMAND,
    "targets": targets.COMMAND,
}


class _Parser(argparse.ArgumentParser):
    """A parser whose errors name the nearest of what it takes."""

    known: Sequence[str] = ()
    """Commands, and options of all of them."""

    def error(self, message: str) -> NoReturn:
        wrong = _WRONG.search(message)
        name = wrong[1].partition("=")[0] if wrong else ""
        hint = nearest(name, [each for each in self.known if each.startswith("-") == name.startswith("-")])
        super().error(f"{message}. {hint}" if hint else message)


_WRONG = re.compile(r"(?:argument COMMAND: invalid choice: '|unrecognized arguments: )([^' ]+)")
"""What argparse says of a command or an option that there is not."""

_OPTION = re.compile(r"--[a-z-]+")


def parser() -> argparse.ArgumentParser:
    """Returns the parser of the command line."""
    top = _Parser(
        prog="jaxckpt",
        description="Gradient checkpointing for JAX: what it saves and costs, from compiled programs.",
        epilog=f"{FACTORY}\n{''.join(command.examples for command in COMMANDS.values())}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    top.add_argument("--version", action="version", version=f"jaxckpt {jaxckpt.__version__}, jax {jax.__version__}")
    top.add_argument(
        "-v",
        "--verbose",
        action="store_true",
        help="log each step, and show the traceback of errors of jaxckpt; those of your code have theirs",
    )
    commands = top.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, command in COMMANDS.items():
        sub = commands.add_parser(
            name,
            help=escaped(command.help),
            description=f"{command.help[0].upper()}{command.help[1:]}.",
            epilog="\n".join(filter(None, (FACTORY if command.takes_factory else "", command.examples))),
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        command.options(sub)
    options = {option for sub in commands.choices.values() for option in _OPTION.findall(sub.format_help())}
    top.known = [*COMMANDS, *sorted(options)]
    return top


def _joined(argv: Sequence[str]) -> list[str]:
    """Returns the words, with a value such as "-5GiB" joined to its option. Otherwise argparse takes the value for an
    option.
    """
    words: list[str] = []
    for word in argv:
        if _NEGATIVE.match(word) and words and words[-1].startswith("--") and "=" not in words[-1]:
            words[-1] += f"={word}"
        else:
            words.append(word)
    return words


_NEGATIVE = re.compile(r"-\.?\d")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit code; wrong usage exits with 2."""
    options = parser().parse_args(_joined(sys.argv[1:] if argv is None else argv))
    if options.verbose:
        logging.basicConfig(format="%(name)s: %(message)s")
        logging.getLogger("jaxckpt").setLevel(logging.DEBUG)
    try:
        with output.reports_alone():
            COMMANDS[options.command].run(options)
    except (JaxckptError, OSError) as error:
        if options.verbose:
            raise
        print(f"jaxckpt: error: {' '.join(str(error).removesuffix(LENIENT).split())}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("jaxckpt: interrupted", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
