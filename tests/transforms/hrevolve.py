"""Makes the figures of `benchmarks.slots.ORACLE` again, with another package's schedules:

    python -m venv /tmp/oracle && /tmp/oracle/bin/pip install checkpoint-schedules==1.0.4
    /tmp/oracle/bin/python tests/transforms/hrevolve.py 100 1000     # all of them where no lengths are given

The package fills a table: 1,000 iterations take ten seconds, and 10,007 about an hour. The script needs neither JAX nor
jaxckpt, and checkpoint-schedules is no dependency of the tests.
"""

from __future__ import annotations

import ast
import pathlib
import sys

SLOTS = pathlib.Path(__file__).parents[2] / "benchmarks" / "slots.py"


def oracle() -> dict[tuple[int, int, int], tuple[int, int, int]]:
    """Returns the figures that are committed, without importing the benchmark."""
    for node in ast.parse(SLOTS.read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "ORACLE":
            return ast.literal_eval(node.value)
    raise LookupError(f"{SLOTS} has no ORACLE")


def counted(length: int, slots: int, host: int) -> tuple[int, int, int]:
    """Returns (iterations that run, writes to the host, reads from it) of a whole schedule."""
    import checkpoint_schedules as package

    steps = writes = reads = 0
    for action in package.HRevolve(length, slots, host, uf=1, ub=1, wd=2, rd=2):
        if isinstance(action, package.Forward):
            steps += action.n1 - action.n0
            writes += action.write_ics and action.storage == package.StorageType.DISK
        elif isinstance(action, (package.Copy, package.Move)):
            reads += action.from_storage == package.StorageType.DISK
        elif isinstance(action, package.EndReverse):
            break
    return steps, writes, reads


def main() -> None:
    """Prints the figures beside those that are committed."""
    lengths = set(map(int, sys.argv[1:]))
    for case, said in oracle().items():
        if lengths and case[0] not in lengths:
            continue
        found = counted(*case)
        print(case, found, "as committed" if found == said else f"committed: {said}", flush=True)


if __name__ == "__main__":
    main()
