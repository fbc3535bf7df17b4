"""Slots on two levels: do iterations run and carries move as often as the optimum says, and what does a compiler take?

    python -m benchmarks.slots                       # minutes; writes results/slots.*

For (iterations, device slots, host slots): iterations and transfers are counted on the CPU as they happen, by callbacks
in the body and where carries are read from and written to host slots. They are held against HRevolve of the package
checkpoint-schedules at the same costs. Its dynamic program is quadratic in the iterations and in pure Python; for the
longest scan its table was filled with NumPy, and its own decisions were followed. Then the programs of runs of one
iteration are compiled for an H100 that need not be there, with carries of 32 KiB, and an LSTM.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp

import jaxckpt
from benchmarks import reporting
from benchmarks.scan import count as count_steps
from benchmarks.scan import problem
from jaxckpt.core.units import format_bytes
from jaxckpt.schedules import Slots, carries
from jaxckpt.show.table import markdown

ORACLE = {(100, 3, 10): (335, 10, 10), (1000, 10, 50): (3322, 50, 50), (10007, 32, 256): (30729, 256, 256)}
"""(iterations, device slots, host slots) -> (iterations that run, writes to the host, reads from it), of
checkpoint-schedules 1.0.4, HRevolve(iterations, device slots, host slots, uf=1, ub=1, wd=2, rd=2): the linearising runs
are among the iterations.
"""
TRANSFER = 2.0


def counted(length: int, slots: int, host: int) -> dict[str, int]:
    """Returns how often the body ran and carries moved in a gradient, counted as it happened."""
    count = {"iterations": 0, "writes": 0, "reads": 0}

    def note(name: str) -> None:
        count[name] += 1

    def noting(name: str, f: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            jax.debug.callback(functools.partial(note, name))
            return f(*args)

        return run

    @jax.custom_jvp
    def square(c: Any) -> Any:
        jax.debug.callback(functools.partial(note, "iterations"))
        return c**2

    square.defjvp(lambda primals, tangents: (square(*primals), 2 * primals[0] * tangents[0]))

    def loss(c: Any) -> Any:
        schedule = Slots(slots, host=host, transfer=TRANSFER, run_length=1)
        return jnp.sum(jaxckpt.scan(lambda c, _: (jnp.sin(square(c)), None), c, length=length, schedule=schedule)[0])

    with (
        mock.patch.object(carries, "write_row", noting("writes", carries.write_row)),
        mock.patch.object(carries, "read_row", noting("reads", carries.read_row)),
    ):
        jax.block_until_ready(jax.jit(jax.grad(loss))(jnp.ones(3)))
    jax.effects_barrier()
    return count


def compiled(length: int, schedule: Any, target: str = "cuda:h100") -> dict[str, int]:
    """Returns bytes of the compiled value and gradients of an LSTM with carries of 32 KiB; the ys are not used."""
    lstm = problem("lstm", 8)
    xs = jax.ShapeDtypeStruct((length, *lstm.xs.shape[1:]), lstm.xs.dtype)

    def loss(weights: Any, init: Any, xs: Any) -> Any:
        last, _ = jaxckpt.scan(lambda c, x: (lstm.step(weights, c, x), None), init, xs, schedule=schedule)
        return jnp.sum(last[0] ** 2)

    report = jaxckpt.measure(jax.value_and_grad(loss, argnums=(0, 1)), lstm.weights, lstm.init, xs, target=target)
    # The compiler's figure for temporaries has those in host memory in it; the peak is the device's.
    device = report.peak_bytes - report.argument_bytes - report.output_bytes + report.alias_bytes
    return {"temporaries": device, "host_bytes": report.host_bytes, "carry": lstm.carry_bytes}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--no-save", action="store_true", help="print only")
    parser.add_argument("--only", type=int, help="scans of so many iterations only")
    options = parser.parse_args()
    rows, found = [], []
    for (length, slots, host), oracle in ORACLE.items():
        if options.only not in (None, length):
            continue
        count = counted(length, slots, host)
        # The forward pass runs to the end, which the oracle leaves out: its last iteration is linearised at once.
        count["iterations"] -= 1
        bytes_ = compiled(length, Slots(slots, host=host, transfer=TRANSFER, run_length=1))
        found.append({"length": length, "slots": slots, "host": host, **count, "oracle": oracle, **bytes_})
        moved = [f"{count[name]:,} ({said:,})" for name, said in zip(("iterations", "writes", "reads"), oracle)]
        sizes = [format_bytes(bytes_["temporaries"]), format_bytes(bytes_["host_bytes"])]
        rows.append([f"{length:,}", str(slots), str(host), *moved, *sizes])
        print(found[-1], flush=True)
    heads = ["iterations", "device slots", "host slots", "run, less one (oracle)", "writes (oracle)", "reads (oracle)"]
    text = markdown([*heads, "H100 device temporaries", "H100 host"], rows)
    if options.only in (None, 10007):
        lengthy = 10007
        for schedule in (Slots(32), Slots(32, host=1024), Slots(32, host=1024, run_length=10)):
            bytes_ = compiled(lengthy, schedule)
            run = lambda f, init, xs, length, schedule=schedule: jaxckpt.scan(f, init, xs, length, schedule=schedule)
            runs = count_steps(problem("lstm", lengthy, batch=1), lengthy, run)
            found.append({"length": lengthy, "schedule": repr(schedule), "runs": runs, **bytes_})
            print(found[-1], flush=True)
            text += (
                f"\nLSTM of {lengthy:,} iterations, {schedule!r}: device temporaries "
                f"{format_bytes(bytes_['temporaries'])}, host {format_bytes(bytes_['host_bytes'])}; "
                f"{runs:,} runs of the body, {runs / lengthy:.4f} for an iteration, counted with one row a batch.\n"
            )
    print(text)
    if not options.no_save:
        reporting.save("slots", f"# Slots on two levels\n\n{text}", found)


if __name__ == "__main__":
    main()
