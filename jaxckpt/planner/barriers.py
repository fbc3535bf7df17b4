"""What the barrier in front of a region costs: what crosses it is in memory.

Elsewhere the compiler computes cheap operations where their results are read, and writes only what a matmul, a
convolution or another kernel of its own reads. But no fusion reaches over a barrier. So the values that go into a
region are written, and so are their cotangents, which come out of its backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from jaxckpt.core.graph import Graph
from jaxckpt.planner.costs import Time, total


class Barriers:
    """The barriers in front of regions that start where stages do.

    Args:
      graph: the body that is planned.
      places: the operations that the stages start with, and one after the last.
      write: value -> what it takes to have it in memory; nothing where it is there anyway.
    """

    def __init__(self, graph: Graph, places: Sequence[int], write: Callable[[int], Time]) -> None:
        self._write = write
        self._made: dict[int, int] = {}  # value -> the stage that makes it
        self._used: dict[int, tuple[int, int]] = {}  # value -> the first and the last later stage that use it
        for stage in range(len(places) - 1):
            for op in graph.ops[places[stage] : places[stage + 1]]:
                self._made.update((index, stage) for index in op.outputs)
                for index in op.inputs:
                    if self._made.get(index, stage) < stage:
                        first, _ = self._used.get(index, (stage, stage))
                        self._used[index] = first, stage

    def time(
        self,
        start: int,
        stop: int,
        inputs: Iterable[int],
        cotangents: Mapping[int, Time],
        read_whole: Callable[[int], Collection[int]],
    ) -> Time:
        """Returns what the barrier in front of the stages start..stop adds, as one region.

        Args:
          start: the first stage.
          stop: the one after the last.
          inputs: the values that go in.
          cotangents: input -> what it takes to have its cotangent in memory.
          read_whole: stage -> those of its values whose cotangents it reads from memory in any case.
        """
        times = []
        for index in inputs:
            maker = self._made.get(index)
            if maker is None:  # an argument
                continue
            first, last = self._used.get(index, (start, start))
            if start <= first < stop:  # it is written once, however many regions it goes into
                times.append(self._write(index))
            # What several regions contribute to a cotangent is added up, and without barriers only the sum is written.
            alone = start <= first and last < stop
            if index in cotangents and not (alone and index in read_whole(maker)):
                times.append(cotangents[index])
        return total(times)
