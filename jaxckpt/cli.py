"""The command `jaxckpt`: plan, compare, measure, residuals, targets.

Exit codes: 0 for success; 1 for an error of jaxckpt, printed in one line on standard error; 2 for wrong usage. Reports
go to standard output, and everything else to standard error. The table COMMANDS has the commands.
"""

from __future__ import annotations

import argparse
import ast
import functools
import json
import logging
import pathlib
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import jax
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

import jaxckpt
from jaxckpt import factories, policies
from jaxckpt._errors import ArgumentError, JaxckptError
from jaxckpt.core.files import check_writable, write_whole
from jaxckpt.memory.cache import FOLDER, OFF
from jaxckpt.memory.compare import check_differentiable, compare
from jaxckpt.memory.report import measure
from jaxckpt.memory.residuals import residuals
from jaxckpt.memory.targets import start_backend, target_of, targets
from jaxckpt.planner import problems
from jaxckpt.planner.budget import check_budget
from jaxckpt.planner.frontier import BUDGETS, sweep
from jaxckpt.planner.reports import report_of, sketch, timed
from jaxckpt.policies import LENIENT, Policy
from jaxckpt.show import html, plans, plot, table

FACTORY = """\
FACTORY is FILE.py:NAME or package.module:NAME, a function that returns
(fun, args): a loss and the tuple of its arguments (arrays or
jax.ShapeDtypeStruct). The first argument is differentiated. The function may
take `checkpoint`, a transform that it puts around each segment of
`segment_size` blocks.
"""
"""The argument of all commands but `targets`. Lines here and below fit in 80 columns."""

EXAMPLES: Mapping[str, str] = {
    "plan": """\
  jaxckpt plan benchmarks/models/gpt.py:gpt2 --budget 4GiB \\
      --target cuda:h100 --output plan.json
""",
    "compare": """\
  jaxckpt compare benchmarks/models/gpt.py:gpt2 --target cuda:h100 \\
      --plot gpt2.png
  jaxckpt compare train.py:model --policy 'mlp_*=save' \\
      --policy 'op(dot_general)=save, attention_*=offload'
""",
    "measure": """\
  jaxckpt measure train.py:model --target tpu:v5e:2x2 --variant segments:4
""",
    "residuals": """\
  jaxckpt residuals train.py:model --variant dots
""",
}


@dataclass(frozen=True)
class Command:
    """One command: its help text, its options, and the function that runs it."""

    help: str
    options: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], None]


# ------------------------------------------------------------------------------------------------------------- commands


def _plan_options(parser: argparse.ArgumentParser) -> None:
    _factory_options(parser)
    _add(
        parser,
        "--budget",
        metavar="BYTES",
        help="the most that the compiled peak may be: 4GiB, 60% (of the peak without a plan), or device (what is "
        "free on it now)",
    )
    _target_option(parser)
    _add(parser, "--solver", default="chain", metavar="NAME", help="the solver that finds the plan (default: chain)")
    _add(
        parser,
        "--costs",
        default="roofline",
        metavar="KIND",
        help="the source of seconds: roofline (the default); measured, on this machine; compiler, of a TPU",
    )
    _add(
        parser,
        "--ignore-checkpoints",
        action="store_true",
        help="plan as if the model had no checkpoints of its own; the plan takes them out",
    )
    _add(
        parser,
        "--tile",
        action="store_true",
        help="let stretches that need too much at once run tile by tile, where nothing fits or less time is taken",
    )
    _add(parser, "--no-verify", action="store_true", help="do not compile the plan; its peak is only predicted")
    _add(
        parser,
        "--frontier",
        action="store_true",
        help=f"also plan for {', '.join(BUDGETS)}, and compile checkpoints placed by hand",
    )
    _add(
        parser,
        "--time",
        action="store_true",
        help="also run the step with and without the plan, on this machine, on the factory's real data",
    )
    _add(
        parser, "--output", metavar="PLAN.json", help="write the plan to a file, for jaxckpt.Plan.load(...).apply(loss)"
    )
    _file_options(
        parser, "peak against recomputation, with the plan", "figures, regions, picture, timeline, largest buffers"
    )


def _plan(options: argparse.Namespace) -> None:
    _check_files(options)
    if options.budget is None and not options.frontier:
        raise ArgumentError("--budget", "given, such as 4GiB or 60%", None, "Or ask for --frontier.")
    if options.budget is None and options.output is not None:
        raise ArgumentError("--output", "given with --budget", options.output, "A frontier has many plans.")
    if options.budget is not None:
        check_budget(options.budget)
    factory = factories.load(options.factory)
    target = target_of(options.target)
    if options.time and not target.local:
        raise ArgumentError("--time", "for a plan for this machine", target.name, "Only this machine can run the step.")
    none = factories.variants_for(factory, chosen=["none"])
    functions, args = factories.build(factory, none, real=options.time, settings=_settings(options.set))
    fun, verify, solver = functions["none"], not options.no_verify, options.solver
    check_differentiable(options.factory, fun, args)
    found, swept = None, None
    with _progress() as progress:
        problem = problems.problem_of(
            fun,
            *args,
            target=target,
            costs=options.costs,
            respect_checkpoints=not options.ignore_checkpoints,
            tile=options.tile,
            cache=options.cache,
            progress=progress,
        )
        if options.budget is not None:
            found = report_of(problem, options.budget, verify=verify, solver=solver, progress=progress)
            if options.time:
                found = timed(found, problem, progress)
        if options.frontier:
            others = _by_hand(factory, options)
            swept = sweep(problem, BUDGETS, verify=verify, solver=solver, others=others, progress=progress)
        elif found is not None and (options.plot or options.html):
            progress(0, 1, "predicting other budgets")
            swept = sketch(found, problem, solver=solver)
    title = f"{options.factory} on {target.name}"
    content: dict[str, Any] = {"factory": options.factory}
    if found is not None:
        _print(plans.plan_view(found, problem.graph, f"Plan for {title}"))
        _write(options.output, found.plan.to_json)
        content |= found.to_json()
    if options.frontier and swept is not None:
        _print(plans.frontier_view(swept))
        content["frontier"] = swept.to_json()
    _write(options.json, lambda: json.dumps(content, indent=1))
    if swept is not None:
        page = plans.frontier_page
        if found is not None:
            page = functools.partial(plans.plan_page, found, problem.graph, unplanned=problem.known_unplanned)
        drawn = f"Memory against recomputation, {pathlib.PurePath(options.factory).name} on {target.name}"
        _write(
            options.plot,
            lambda: plot.render(plans.frontier_figure(swept, found, title=drawn), plot.check_suffix(options.plot)),
        )
        _write(options.html, lambda: page(frontier=swept, title=f"Plan for {title}"))


def _by_hand(factory: factories.Factory, options: argparse.Namespace) -> dict[str, Callable[..., Any]]:
    """Returns name -> function with checkpoints around its blocks, for the variants that the factory can have."""
    variants = [variant for variant in factories.variants_for(factory) if variant.where == "blocks"]
    return factories.build(factory, variants, settings=_settings(options.set))[0] if variants else {}


def _compare_options(parser: argparse.ArgumentParser) -> None:
    _factory_options(parser)
    _target_option(parser)
    _add(
        parser,
        "--variants",
        metavar="A,B,...",
        default="",
        help=f"the variants to compare, in this order: {', '.join(v.name for v in factories.STANDARD)}, or "
        f"segments:N (default: all)",
    )
    _policy_option(parser, "add a variant with this policy; may be given several times")
    _add(
        parser,
        "--time",
        action="store_true",
        help="also run the step of each variant on this machine's backend, on the factory's real data",
    )
    _file_options(parser, "memory against recomputation", "table, picture, timelines, largest buffers")


def _compare(options: argparse.Namespace) -> None:
    _check_files(options)
    factory = factories.load(options.factory)
    chosen = [name.strip() for name in options.variants.split(",") if name.strip()]
    variants = factories.variants_for(factory, _policies(options.policy), chosen)
    target_of(options.target)  # raises for an unknown target before the model is built, which may take a while
    functions, args = factories.build(factory, variants, real=options.time, settings=_settings(options.set))
    with _progress() as progress:
        comparison = compare(
            functions, *args, target=options.target, time=options.time, cache=options.cache, progress=progress
        )
    _print(table.comparison_view(comparison))
    _write(options.json, lambda: json.dumps({"factory": options.factory, **comparison.to_json()}, indent=1))
    _write(options.plot, lambda: plot.render(plot.comparison_figure(comparison), plot.check_suffix(options.plot)))
    _write(options.html, lambda: html.comparison_page(comparison))


def _measure_options(parser: argparse.ArgumentParser) -> None:
    _one_variant_options(parser)
    _target_option(parser)
    _add(
        parser,
        "--largest",
        type=int,
        default=10,
        metavar="N",
        help="the number of largest buffers at the peak to list (default: 10)",
    )
    _add(
        parser,
        "--no-code",
        action="store_true",
        help="for a TPU that is not in this machine: stop the compiler once it has assigned buffers (for a large "
        "model, seconds instead of "
        "minutes); reports all figures but the size of the program and the compiler's FLOPs",
    )
    _file_options(parser, "live bytes over the schedule and the largest buffers", "figures, timeline, largest buffers")


def _measure(options: argparse.Namespace) -> None:
    _check_files(options)
    if options.largest < 1:
        raise ArgumentError("--largest", "1 or more", options.largest)
    factory = factories.load(options.factory)
    target_of(options.target)
    name, fun, args = _one_variant(factory, options)
    check_differentiable(name, fun, args)
    with _progress() as progress:
        progress(0, 1, f"compiling {name}")
        report = measure(
            jax.value_and_grad(fun),
            *args,
            target=options.target,
            generate_code=not options.no_code,
            cache=options.cache,
        )
        progress(1, 1, "")
    _print(table.report_view(report, f"{options.factory}, {name}"), table.buffers_view(report, options.largest))
    _write(
        options.json,
        lambda: json.dumps({"factory": options.factory, "variant": name, **table.report_values(report)}, indent=1),
    )
    _write(options.plot, lambda: plot.render(plot.report_figure(report), plot.check_suffix(options.plot)))
    _write(options.html, lambda: html.report_page(report, f"{options.factory}, {name}"))


def _residuals_options(parser: argparse.ArgumentParser) -> None:
    _one_variant_options(parser)
    _add(parser, "--all", action="store_true", help="list all arrays, not only the largest 30")
    _add(parser, "--json", metavar="OUT.json", help="write the list as JSON")


def _residuals(options: argparse.Namespace) -> None:
    _check_files(options)
    factory = factories.load(options.factory)
    _, fun, args = _one_variant(factory, options)
    report = residuals(fun, *args)
    _print(table.residuals_view(report, None if options.all else 30))
    _write(options.json, lambda: json.dumps(report.to_json(), indent=1))


def _no_options(parser: argparse.ArgumentParser) -> None:
    del parser


def _targets(options: argparse.Namespace) -> None:
    _print(table.targets_view(targets()))


COMMANDS: Mapping[str, Command] = {
    "plan": Command(
        "find the cheapest plan within a budget of bytes, and prove it with the compiler", _plan_options, _plan
    ),
    "compare": Command(
        "compile variants of a model and compare memory, recomputation and time", _compare_options, _compare
    ),
    "measure": Command("compile one variant and show what takes its memory", _measure_options, _measure),
    "residuals": Command(
        "list the arrays that differentiation keeps for the backward pass", _residuals_options, _residuals
    ),
    "targets": Command(
        "list the targets that can be compiled for, and what to install for the others", _no_options, _targets
    ),
}


# -------------------------------------------------------------------------------------------------------------- options


def _add(parser: argparse.ArgumentParser, *names: str, help: str, **settings: Any) -> None:
    """Adds an option whose help is plain text."""
    parser.add_argument(*names, help=_escaped(help), **settings)


def _escaped(help: str) -> str:
    return help.replace("%", "%%")  # argparse formats the text


def _factory_options(parser: argparse.ArgumentParser) -> None:
    _add(parser, "factory", metavar="FACTORY", help="FILE.py:NAME or package.module:NAME")
    _add(
        parser,
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="a keyword argument for the factory, such as layers=24",
    )


def _one_variant_options(parser: argparse.ArgumentParser) -> None:
    _factory_options(parser)
    _add(
        parser,
        "--variant",
        default="none",
        metavar="NAME",
        help="how to checkpoint the model: none (the default), whole, dots, segments:4 ...",
    )
    _policy_option(parser, "checkpoint each block with this policy instead of --variant")


def _target_option(parser: argparse.ArgumentParser) -> None:
    _add(
        parser,
        "--target",
        metavar="TARGET",
        help="the hardware to compile for, such as cuda:h100 (see `jaxckpt targets`; default: this machine)",
    )
    _add(
        parser,
        "--cache",
        metavar="FOLDER",
        help=f"where compilers' results are stored, so that no program is compiled twice; '{OFF}' for nowhere (default: "
        f"${FOLDER}, else this machine's folder for caches)",
    )


def _policy_option(parser: argparse.ArgumentParser, what: str) -> None:
    _add(
        parser,
        "--policy",
        action="append",
        default=[],
        metavar="RULES",
        help=f"{what}: a preset ({', '.join(policies.PRESETS)}) or rules such as 'mlp_*=save, op(dot_general)=offload'",
    )


def _file_options(parser: argparse.ArgumentParser, picture: str, page: str) -> None:
    _add(parser, "--plot", metavar="OUT.png", help=f"write a picture: {picture}; also .svg and .pdf")
    _add(parser, "--json", metavar="OUT.json", help="write all figures as JSON")
    _add(parser, "--html", metavar="OUT.html", help=f"write one self-contained page: {page}")


def _policies(texts: Sequence[str]) -> dict[str, Policy]:
    return {text: policies.parse(text) for text in texts}


def _settings(texts: Sequence[str]) -> dict[str, Any]:
    """Returns the settings of --set: Python literals as values, everything else as strings."""
    settings = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals or not key.strip().isidentifier():
            raise ArgumentError("--set", "KEY=VALUE, with a keyword argument's name", text)
        try:
            settings[key.strip()] = ast.literal_eval(value.strip())
        except (ValueError, SyntaxError):
            settings[key.strip()] = value.strip()
    return settings


def _one_variant(
    factory: factories.Factory, options: argparse.Namespace
) -> tuple[str, Callable[..., Any], tuple[Any, ...]]:
    if len(options.policy) > 1:
        raise ArgumentError(
            "--policy", "given once here", options.policy, "Put all rules into one policy, with commas between them."
        )
    added = _policies(options.policy)
    (variant,) = factories.variants_for(factory, added, list(added) or [options.variant])
    functions, args = factories.build(factory, [variant], settings=_settings(options.set))
    return variant.name, functions[variant.name], args


# -------------------------------------------------------------------------------------------------------- input, output


def _check_files(options: argparse.Namespace) -> None:
    """Raises for files that cannot be written, before the minutes of compiling."""
    for option in ("plot", "json", "html", "output"):
        path = getattr(options, option, None)
        if path is None:
            continue
        check_writable(path, f"--{option}")
        if option == "plot":
            plot.check_suffix(path)
        if option == "html" and options.command != "measure":  # whose page has no pictures of matplotlib
            plot.require_matplotlib()


def _write(path: str | None, content: Callable[[], str | bytes]) -> None:
    if path is not None:
        write_whole(path, content())
        print(f"wrote {path}", file=sys.stderr)


def _print(*parts: Any) -> None:
    """Prints tables and sentences as wide as the terminal, or as `table.WIDTH` without a terminal."""
    console = Console(highlight=False)
    console.width = max(console.width, table.LEAST_WIDTH)
    for part in filter(None, parts):
        shown = Text(part) if isinstance(part, str) else part
        if console.is_terminal:
            console.print(shown)
        else:
            print(table.to_text(shown))


@contextmanager
def _progress() -> Iterator[Callable[[int, int, str], None]]:
    """Yields the function that gets the progress. It draws a bar on standard error, and removes it at the end; without
    a terminal, nothing.
    """
    console = Console(stderr=True)
    columns = (
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}", markup=False),
    )
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=None)
        yield lambda done, total, what: bar.update(task, completed=done, total=total, description=what)


def parser() -> argparse.ArgumentParser:
    """Returns the parser of the command line."""
    top = argparse.ArgumentParser(
        prog="jaxckpt",
        description="Gradient checkpointing for JAX: what it saves and costs, from compiled programs.",
        epilog=f"{FACTORY}\n{''.join(EXAMPLES.values())}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    top.add_argument("--version", action="version", version=f"jaxckpt {jaxckpt.__version__}, jax {jax.__version__}")
    top.add_argument("-v", "--verbose", action="store_true", help="log each step, and show the traceback of an error")
    commands = top.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, command in COMMANDS.items():
        sub = commands.add_parser(
            name,
            help=_escaped(command.help),
            description=f"{command.help[0].upper()}{command.help[1:]}.",
            epilog=f"{FACTORY}\n{EXAMPLES[name]}" if name in EXAMPLES else None,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        command.options(sub)
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
        start_backend()  # before a factory does, and without the messages of compilers for absent devices
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
