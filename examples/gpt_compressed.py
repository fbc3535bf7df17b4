"""Trains the GPT of gpt_text.py with activations kept in fewer bits, and compares the losses with exact ones.

    python examples/gpt_compressed.py                             # 5 forms, 3 seeds, 500 steps: a quarter of an hour
    python examples/gpt_compressed.py --output results            # a table and a picture

`exact` saves the same four values of each block as they are, so the forms differ in nothing but bits. The forward pass
of each form is exact; its gradients are not.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import platform
import statistics

import common
import gpt_text
import jax
import numpy as np

import jaxckpt

LAST = 50
"""A final loss is the mean of so many last steps."""
SIZES = ["--layers=3", "--width=96", "--heads=3", "--tokens=64", "--batch=16"]


def train(form, seed, steps):
    """Returns (losses, bytes that differentiation keeps) of a training."""
    flags = [*SIZES, f"--steps={steps}", f"--seed={seed}", "--budget=none", f"--compress={form}"]
    options = gpt_text.PARSER.parse_args(flags)
    loss, (state, *batch), step_of = gpt_text.make_step(options)
    kept = jaxckpt.residuals(loss, state.params, *(each[0] for each in batch), jax.random.key(0)).kept_bytes
    run = common.Run(options, step_of(loss), state, *batch)
    for number in run.steps():
        state, value = run.step(state, *gpt_text.batch_of(options, number))
        run.record(value, state)
    return run.losses, kept


def final(losses):
    """Returns the mean of the last losses."""
    return statistics.fmean(losses[-LAST:])


def table(found):
    """Returns what came out as a table in Markdown: a row for each form."""
    lines = ["| kept as | kept for the backward pass | final loss | relative to exact, each seed | mean |"]
    lines.append("|---|--:|--:|--:|--:|")
    for form, runs in found["losses"].items():
        ratios = [final(run) / final(exact) - 1 for run, exact in zip(runs, found["losses"]["exact"], strict=True)]
        each = "" if form == "exact" else ", ".join(f"{ratio:+.2%}" for ratio in ratios)
        mean = "" if form == "exact" else f"{statistics.fmean(ratios):+.2%}"
        kept = f"{found['kept'][form] / 2**20:.2f} MiB, {found['kept'][form] / found['kept']['exact']:.0%}"
        name = "`SAVE` (exact)" if form == "exact" else f'`compress("{form}")`'
        lines.append(f"| {name} | {kept} | {statistics.fmean(map(final, runs)):.4f} | {each} | {mean} |")
    return "\n".join(lines)


def picture(found, path):
    """Draws the losses of all forms, and their distance from the exact ones; both are means over 25 steps and seeds."""
    from matplotlib.figure import Figure

    def smooth(runs):
        mean = np.mean(runs, axis=0)
        return np.convolve(mean, np.ones(25) / 25, mode="valid")

    figure = Figure(figsize=(9, 3.4), layout="constrained")
    curves, distance = figure.subplots(1, 2)
    exact = smooth(found["losses"]["exact"])
    steps = np.arange(25, 25 + len(exact))
    colors = {
        "exact": "#b8c2cc",
        "bfloat16": "#0072b2",
        "float8_e4m3fn": "#009e73",
        "int8": "#cc79a7",
        "int4": "#d55e00",
    }
    for form, runs in found["losses"].items():
        curves.plot(steps, smooth(runs), color=colors[form], lw=5 if form == "exact" else 1.2, label=form)
        if form != "exact":
            distance.plot(steps, 100 * (smooth(runs) / exact - 1), color=colors[form], lw=1.2, label=form)
    curves.set(xlabel="step", ylabel="loss", title="loss, mean of 25 steps and 3 seeds")
    distance.set(xlabel="step", ylabel="%", title="relative to exact")
    distance.axhline(0, color="#b8c2cc", zorder=0)
    curves.legend(frameon=False)
    for axes in (curves, distance):
        axes.spines[["top", "right"]].set_visible(False)
        axes.title.set_fontsize(10)
    figure.savefig(path, dpi=110)


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=common.positive, default=500, help="of each training (500)")
    parser.add_argument("--seeds", type=common.positive, default=3, help="how many (3)")
    parser.add_argument("--output", type=pathlib.Path, default=".", metavar="FOLDER", help="of table and picture (.)")
    options = parser.parse_args(argv)
    if options.steps < LAST:
        parser.error(f"--steps must be at least {LAST}, over which a final loss is the mean; got {options.steps}.")
    found = {"losses": {form: [] for form in gpt_text.FORMS}, "kept": {}}
    for seed in range(options.seeds):
        for form in gpt_text.FORMS:
            losses, found["kept"][form] = train(form, seed, options.steps)
            found["losses"][form].append(losses)
            print(f"seed {seed}  {form:14}  final loss {final(losses):.4f}", flush=True)
    kept = found["kept"]
    assert kept["exact"] > kept["bfloat16"] > max(kept["float8_e4m3fn"], kept["int8"]) > kept["int4"], kept
    options.output.mkdir(parents=True, exist_ok=True)
    found["about"] = f"jax {jax.__version__}, Python {platform.python_version()}, {options.steps} steps"
    page = f"# examples/gpt_compressed.py\n\n{table(found)}\n\n![Losses by what is kept](gpt_compressed.png)\n\n"
    page += f"`python examples/gpt_compressed.py`: 3 blocks of width 96, 16 sequences of 64 bytes, {found['about']}.\n"
    (options.output / "gpt_compressed.md").write_text(page)
    (options.output / "gpt_compressed.json").write_text(json.dumps(found) + "\n")
    picture(found, options.output / "gpt_compressed.png")
    print(table(found))


if __name__ == "__main__":
    main()
