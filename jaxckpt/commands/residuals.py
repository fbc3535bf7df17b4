"""`jaxckpt residuals`: what is kept for the backward pass."""

from __future__ import annotations

import argparse
import functools
import json

from jaxckpt.commands import base, output
from jaxckpt.commands.base import Command
from jaxckpt.memory.residuals import residuals
from jaxckpt.planner.observe import observe
from jaxckpt.planner.shards import is_sharded, laid_out
from jaxckpt.show import table

GLOBAL = "The arguments lie over several devices. These are the bytes of whole arrays, of all devices together."


def _options(parser: argparse.ArgumentParser) -> None:
    base.one_variant_options(parser)
    base.add(parser, "--all", action="store_true", help="list all arrays, not only the largest 30")
    base.add(parser, "--json", metavar="OUT.json", help="write the list as JSON")


def _run(options: argparse.Namespace) -> None:
    output.check_files(options)
    name, built = base.build_one(options)
    fun, args = built.functions[name], built.args
    if built.step is None:
        report, divided = residuals(fun, *args), is_sharded(args)
    else:
        built.check(options.factory)
        seen = observe(fun, built.step, args)
        report = seen.run(lambda: residuals(functools.partial(seen.fun, **seen.kwargs), *seen.args))
        divided = seen.mapped is None and is_sharded(laid_out(args, seen.shardings))
    output.tell(table.residuals_view(report, None if options.all else 30), GLOBAL if divided else "", built.note())
    output.write(options.json, lambda: json.dumps(report.to_json(), indent=1))


COMMAND = Command(
    "list the arrays that differentiation keeps for the backward pass",
    _options,
    _run,
    """\
  jaxckpt residuals train.py:model --variant dots
""",
)
