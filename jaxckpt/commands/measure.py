"""`jaxckpt measure`: what takes the memory of one variant."""

from __future__ import annotations

import argparse
import json

from jaxckpt._errors import ArgumentError
from jaxckpt.commands import base, output
from jaxckpt.commands.base import Command
from jaxckpt.memory.report import measure
from jaxckpt.show import html, plot, table


def _options(parser: argparse.ArgumentParser) -> None:
    base.one_variant_options(parser)
    base.target_option(parser)
    base.add(
        parser,
        "--largest",
        type=int,
        default=10,
        metavar="N",
        help="the number of largest buffers at the peak to list (default: 10)",
    )
    base.add(
        parser,
        "--no-code",
        action="store_true",
        help="stop the compiler once it has assigned buffers (for a CPU or GPU, a half to a tenth of the time; for a "
        "large model on a TPU, seconds instead of minutes); reports all figures but the size of a TPU's program and the "
        "compiler's FLOPs",
    )
    base.file_options(
        parser, "live bytes over the schedule and the largest buffers", "figures, timeline, largest buffers"
    )


def _run(options: argparse.Namespace) -> None:
    output.check_files(options)
    if options.largest < 1:
        raise ArgumentError("--largest", "1 or more", options.largest)
    name, built = base.build_one(options)
    built.check(options.factory)
    with output.progress() as progress:
        progress(0, 1, f"compiling {name}")
        report = measure(
            built.made_step(name),
            *built.args,
            target=options.target,
            generate_code=not options.no_code,
            cache=options.cache,
        )
        progress(1, 1, "")
    output.tell(table.report_view(report, f"{options.factory}, {name}"), table.buffers_view(report, options.largest))
    output.tell(built.note())
    output.write(
        options.json,
        lambda: json.dumps({"factory": options.factory, "variant": name, **table.report_values(report)}, indent=1),
    )
    output.write(options.plot, lambda: plot.render(plot.report_figure(report), plot.check_suffix(options.plot)))
    output.write(options.html, lambda: html.report_page(report, f"{options.factory}, {name}"))


COMMAND = Command(
    "compile one variant and show what takes its memory",
    _options,
    _run,
    """\
  jaxckpt measure train.py:model --target tpu:v5e:2x2 --variant segments:4
""",
)
