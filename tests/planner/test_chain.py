"""What a solution costs, by hand."""

from jaxckpt.planner.chain import Candidate, Carried, Chain, Drop, Keep, Segment, SolutionCost, cost, covers


def test_the_simulator_counts_gradients_from_when_they_are_written():
    segments = {
        (0, 1): Segment(1.0, 10, 100, (Candidate(5, 0.0, 7),)),
        (1, 2): Segment(1.0, 10, 50, (Candidate(20, 0.0, 3),)),
        (0, 2): Segment(2.0, 10, 150, ()),
    }
    chain = Chain(2, segments, (Carried(10, 0, (1,)),))
    # forward: 10 + 5, then + 20; backward of the second: 15 + 20 + 3; of the first: 5 + 7 + 50; all gradients: 150
    assert cost(chain, (Keep(0, 1, 0), Keep(1, 2, 0))).peak == 150
    light = Chain(
        2, {k: Segment(s.forward_time, s.forward_work, 0, s.candidates) for k, s in segments.items()}, chain.carried
    )
    assert cost(light, (Keep(0, 1, 0), Keep(1, 2, 0))).peak == 38
    assert cost(light, (Drop(0, 1, (Keep(0, 1, 0),)), Keep(1, 2, 0))) == SolutionCost(1.0, 33)


def test_a_dropped_stretch_keeps_only_what_later_stages_of_its_own_run_use():
    """The value of stage 0 that stage 2 uses is held through a Drop of 0..2 at the top, and not by the run of 0..2
    itself.
    """
    segments = {
        (start, stop): Segment(1.0, 0, 0, (Candidate(0, 0.0, 1),) if stop == start + 1 else ())
        for start in range(3)
        for stop in range(start + 1, 4)
    }
    chain = Chain(3, segments, (Carried(10, 0, (2,)),))
    assert [chain.output(0, j, 3) for j in (1, 2)] == [10, 10]
    assert chain.output(0, 1, 2) == 0
    assert cost(chain, (Keep(0, 1, 0), Keep(1, 2, 0), Keep(2, 3, 0))) == SolutionCost(0.0, 11)
    # a later use may need it later than an earlier one
    twice = Chain(3, segments, (Carried(10, 0, (1, 2)),))
    assert [twice.output(0, 1, stop) for stop in (2, 3)] == [10, 10]


def test_schedules_with_gaps_or_overlaps_do_not_cover():
    one = (Candidate(0, 0.0, 1),)
    chain = Chain(2, {(a, b): Segment(1.0, 0, 0, one) for a, b in ((0, 1), (1, 2), (0, 2))})
    assert covers(chain, (Keep(0, 1, 0), Keep(1, 2, 0)))
    assert covers(chain, (Drop(0, 1, (Keep(0, 1, 0),)), Keep(1, 2, 0)))
    assert not covers(chain, (Keep(1, 2, 0),))
    assert not covers(chain, (Keep(0, 1, 0),))
    assert not covers(chain, (Keep(0, 1, 0), Keep(0, 2, 0)))
    assert not covers(chain, (Drop(0, 1, ()), Keep(1, 2, 0)))
    assert not covers(chain, (Keep(0, 1, 0), Keep(1, 2, 1))) and not covers(chain, (Keep(0, 1, -1), Keep(1, 2, 0)))
    assert not covers(chain, (Keep(0, 1, 0), Keep(1, 3, 0)))
    assert not any(covers(chain, odd) for odd in (None, 3, "stages", [None], (Drop(0, 2, "x"),)))
