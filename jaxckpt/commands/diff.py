"""`jaxckpt diff`: two plans from their files, side by side."""

from __future__ import annotations

import argparse
import difflib
import json
import pathlib
from collections.abc import Mapping, Sequence

from jaxckpt._errors import PlanMismatchError
from jaxckpt.commands import base, output, saved
from jaxckpt.commands.base import Command
from jaxckpt.core.plan import Plan
from jaxckpt.show.saved import difference_cells, difference_view
from jaxckpt.show.tree import plan_lines


def _options(parser: argparse.ArgumentParser) -> None:
    base.add(parser, "first", metavar="A.json", help="a file of `jaxckpt plan --output` or of Plan.save")
    base.add(parser, "second", metavar="B.json", help="another one")
    base.factory_options(parser, optional=True)
    base.add(parser, "--json", metavar="OUT.json", help="write the figures and the regions that differ as JSON")


def _run(options: argparse.Namespace) -> None:
    output.check_files(options)
    (first, one), (second, two) = saved.read(options.first), saved.read(options.second)
    names = pathlib.PurePath(options.first).name, pathlib.PurePath(options.second).name
    if names[0] == names[1]:
        names = str(options.first), str(options.second)
    gone, come = _regions(first, second)
    if first.fingerprint != second.fingerprint:
        lines = ["The plans are for different programs, so their regions cannot be compared."]
        lines += [] if options.factory is None else [_whose(options, {names[0]: first, names[1]: second})]
        gone, come = [], []
    elif options.factory is not None:
        trees = [plan_lines(plan, saved.graph_of(plan, options)) for plan in (first, second)]
        lines = ["Both plans do the same."] if first == second else _different(trees[0], trees[1], names)
    elif first == second:
        lines = ["Both plans do the same."]
    elif one is not None and two is not None:
        lines = _different(one.tree, two.tree, names)
    else:
        lines = [*(f"- {line}" for line in gone), *(f"+ {line}" for line in come)]
        lines.append("Give the model too, to see names and bytes: jaxckpt diff A.json B.json FACTORY.")
    cells = difference_cells(first.report, second.report)
    output.tell(difference_view(names, cells, lines, f"{names[0]} and {names[1]}"))
    content = {
        "same": first == second,
        "same_program": first.fingerprint == second.fingerprint,
        "first": None if first.report is None else first.report.to_json(),
        "second": None if second.report is None else second.report.to_json(),
        "only_in_first": gone,
        "only_in_second": come,
    }
    output.write(options.json, lambda: json.dumps(content, indent=1))


def _whose(options: argparse.Namespace, plans: Mapping[str, Plan]) -> str:
    """Returns a line that says which of some plans, for different programs, is for the model that was given.

    Raises:
      PlanMismatchError: none is.
    """
    for name, plan in plans.items():
        try:
            saved.graph_of(plan, options)
        except PlanMismatchError as error:
            refused = error
        else:
            return f"{options.factory} is the program of {name}."
    raise refused


def _different(one: Sequence[str], two: Sequence[str], names: tuple[str, str]) -> list[str]:
    """Returns the lines in which two trees differ, under the names of their plans."""
    lines = difflib.unified_diff(one, two, *names, n=0, lineterm="")
    return [line for line in lines if not line.startswith("@@")]


def _regions(first: Plan, second: Plan) -> tuple[list[str], list[str]]:
    """Returns a line for each region, loop and tile that only the first plan has, and for those of the second."""
    one, two = saved.regions_of(first), saved.regions_of(second)
    return [line for key, line in one.items() if key not in two], [line for key, line in two.items() if key not in one]


COMMAND = Command(
    "compare two plans from their files: figures, and regions that differ",
    _options,
    _run,
    """\
  jaxckpt diff plan60.json plan40.json
  jaxckpt diff plan60.json plan40.json my_train.py:make_step
""",
)
