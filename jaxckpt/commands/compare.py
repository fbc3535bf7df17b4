"""`jaxckpt compare`: variants of a model, side by side."""

from __future__ import annotations

import argparse
import json

from jaxckpt import variants
from jaxckpt.commands import base, output
from jaxckpt.commands.base import Command
from jaxckpt.memory.compare import compare
from jaxckpt.memory.targets import target_of
from jaxckpt.show import html, plot, table


def _options(parser: argparse.ArgumentParser) -> None:
    base.factory_options(parser)
    base.target_option(parser)
    base.add(
        parser,
        "--variants",
        metavar="A,B,...",
        default="",
        help=f"the variants to compare, in this order: {', '.join(v.name for v in variants.STANDARD)}, or "
        f"segments:N (default: all)",
    )
    base.policy_option(parser, "add a variant with this policy; may be given several times")
    base.add(
        parser,
        "--time",
        action="store_true",
        help="also run the step of each variant on this machine's backend, on the factory's real data",
    )
    base.file_options(parser, "memory against recomputation", "table, picture, timelines, largest buffers")


def _run(options: argparse.Namespace) -> None:
    output.check_files(options)
    loaded = base.load(options)
    names = [name.strip() for name in options.variants.split(",") if name.strip()]
    chosen = variants.variants_for(loaded[0], base.policies_of(options.policy), names)
    target_of(options.target)  # raises for an unknown target before the model is built, which may take a while
    built = base.build(options, loaded, chosen, real=options.time)
    built.check(options.factory)
    with output.progress() as progress:
        comparison = compare(
            built.functions,
            *built.args,
            target=options.target,
            step=built.step_or_gradient,
            time=options.time,
            cache=options.cache,
            progress=progress,
        )
    output.tell(
        table.comparison_view(comparison), built.note() if names else variants.without(loaded[0]) or built.note()
    )
    output.write(options.json, lambda: json.dumps({"factory": options.factory, **comparison.to_json()}, indent=1))
    output.write(options.plot, lambda: plot.render(plot.comparison_figure(comparison), plot.check_suffix(options.plot)))
    output.write(options.html, lambda: html.comparison_page(comparison))


COMMAND = Command(
    "compile variants of a model and compare memory, recomputation and time",
    _options,
    _run,
    """\
  jaxckpt compare gpt2 --target cuda:h100 --plot gpt2.png
  jaxckpt compare train.py:model --policy 'mlp_*=save' \\
      --policy 'op(dot_general)=save, attention_*=offload'
""",
)
