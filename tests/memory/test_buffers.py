import dataclasses
import random
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

import jaxckpt
from jaxckpt import TargetError, UnreadableDumpError
from jaxckpt.memory import assign
from jaxckpt.memory import report as module
from jaxckpt.memory.buffers import Assignment, Buffer, Lifetime, Timeline
from jaxckpt.memory.dump import read_dump
from jaxckpt.memory.report import MemoryReport, measure
from tests.memory import chain, dumps

HERE = Path(__file__)
TARGETS = ["cpu", pytest.param("cuda:h100", marks=pytest.mark.cuda), pytest.param("tpu:v5e:2x2", marks=pytest.mark.tpu)]


def line_of(marker: str) -> str:
    """ "file.py:12" of the line of this file that ends with a comment."""
    (number,) = [i for i, line in enumerate(HERE.read_text().splitlines(), 1) if line.endswith(f"  # {marker}")]
    return f"{HERE}:{number}"


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("segment", [0, 4])
def test_the_most_live_bytes_are_the_reported_peak(target, segment):
    report = chain.report(target, segment)
    line = report.timeline()
    assert line.peak_bytes == pytest.approx(report.peak_bytes, rel=0.01)
    assert line.live_bytes[line.peak_position] == line.peak_bytes
    assert len(line.positions) == len(line.live_bytes) == len(line.labels)
    assert list(line.positions) == sorted(set(line.positions))
    # Arguments and outputs stand throughout.
    assert min(line.live_bytes) == pytest.approx(report.argument_bytes + report.output_bytes, rel=0.01)


@pytest.mark.parametrize("target", ["cpu", pytest.param("cuda:h100", marks=pytest.mark.cuda)])
def test_it_holds_for_loops_whose_carries_are_updated_in_place(target):
    # A scan and its transpose: values share places, are freed and taken again.
    def loss(ws, x):
        return jnp.sum(
            jax.lax.scan(lambda x, w: (jax.checkpoint(lambda x, w: x + jnp.tanh(x @ w))(x, w), None), x, ws)[0] ** 2
        )

    ws = jax.ShapeDtypeStruct((12, 256, 256), jnp.bfloat16)
    report = measure(jax.value_and_grad(loss), ws, jax.ShapeDtypeStruct((1024, 256), jnp.bfloat16), target=target)
    assert report.timeline().peak_bytes == pytest.approx(report.peak_bytes, rel=0.01)
    assert any("while" in label for label in report.timeline().labels)


def _branches(x, which):
    return jax.lax.switch(which, [lambda x: jnp.sin(x @ x).sum(), lambda x: x.sum(), lambda x: (x**3).sum()], x)


def _loop_of_unknown_length(x, least):
    return jax.lax.while_loop(lambda c: c[1].sum() < least, lambda c: (c[0] + 1, jnp.tanh(c[1] @ c[1])), (0, x))


def _twice_and_as_it_came(x, y):
    return x * 2, x * 2, y, jnp.ones((64, 64)), 3.0


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    "fun",
    [
        jax.grad(_branches), _loop_of_unknown_length, _twice_and_as_it_came,
        jax.jit(lambda x, y: (x + y, x.sum()), donate_argnums=0), lambda x, y: (), lambda x, y: (jnp.sort(x), y),
    ],
    ids=["branches", "while", "results", "donated", "nothing", "sort"],
)  # fmt: skip
def test_what_is_unusual_is_read_all_the_same(target, fun, caplog):
    """On a TPU the simulator frees a value from before a branch in each of them, and brings it to life again."""
    scalar = jnp.int32 if fun is not _loop_of_unknown_length else jnp.float32
    report = measure(
        fun, jax.ShapeDtypeStruct((512, 512), jnp.float32), jax.ShapeDtypeStruct((), scalar), target=target
    )
    assert not caplog.text
    assert report.timeline().peak_bytes >= report.argument_bytes + report.output_bytes - report.alias_bytes


def live_activations(report: MemoryReport) -> int:
    """How many temporaries of an activation's size are live at the peak."""
    return sum(b.kind == "temporary" and b.bytes == chain.ACTIVATION for b in report.largest(10_000))


@pytest.mark.parametrize("target", ["cpu", pytest.param("tpu:v5e:2x2", marks=pytest.mark.tpu)])
def test_without_checkpoints_every_layers_activation_is_live_at_the_peak_and_with_them_a_few(target):
    plain, checkpointed = chain.report(target), chain.report(target, 4)
    assert chain.LAYERS - 1 <= live_activations(plain) <= chain.LAYERS + 4
    # One for each segment's input, and those of one segment. (On TPU weights prefetched to the chip come on top: of
    # another size.)
    assert live_activations(checkpointed) <= chain.LAYERS / 4 + 4 + 4


@pytest.mark.parametrize("target", ["cpu", pytest.param("cuda:h100", marks=pytest.mark.cuda)])
def test_the_plain_chain_rises_to_its_middle_and_falls_and_the_checkpointed_one_saws(target):
    plain, checkpointed = (chain.report(target, segment).timeline() for segment in (0, 4))
    peak = plain.peak_position / len(plain.positions)
    assert 0.2 < peak < 0.8
    base = min(plain.live_bytes)
    quarter = plain.live_bytes[round(plain.peak_position * 0.75)]
    assert base < quarter < plain.peak_bytes

    def rises(line: Timeline) -> int:
        """How often memory climbs by three layers' worth from a low."""
        count, low = 0, line.live_bytes[0]
        for live in line.live_bytes:
            low = min(low, live)
            if live - low >= 3 * chain.ACTIVATION:
                count, low = count + 1, live
        return count

    in_backward = [
        i for i, label in enumerate(checkpointed.labels) if "rematted_computation" in label and "dot_general" in label
    ]
    assert in_backward
    after = Timeline(*(tuple(x[in_backward[0] :]) for x in dataclasses.astuple(checkpointed)))
    after_plain = Timeline(*(tuple(x[plain.peak_position + 1 :]) for x in dataclasses.astuple(plain)))
    assert rises(after) >= 3  # each segment is computed again
    assert rises(after) > rises(after_plain)


@pytest.mark.parametrize("target", TARGETS)
def test_the_biggest_buffer_is_named_with_operation_and_line(target):
    # 64 MiB on the way from 512 KiB.
    x, w = jax.ShapeDtypeStruct((4096, 16), jnp.float32), jax.ShapeDtypeStruct((16, 4096), jnp.float32)

    def outer(x, w):
        big = jax.lax.optimization_barrier(x @ w)  # the outer product
        return jnp.sum(jnp.sin(big) @ big)

    report = measure(outer, x, w, target=target)
    size = report.largest(1)[0].bytes
    assert size in (64 * 2**20, 32 * 2**20)  # on TPU it may be kept as bfloat16, which is what its matmuls take
    named = [b for b in report.largest(10) if b.bytes == size and b.source == line_of("the outer product")]
    assert named, report.largest(10)
    assert named[0].kind == "temporary"
    assert named[0].operation.startswith("jit(outer)")
    assert named[0].operation.endswith("dot_general")
    assert named[0].shape in ("f32[4096,4096]", "bf16[4096,4096]")
    assert line_of("the outer product") in str(named[0])


def test_arguments_and_outputs_have_their_names_and_kinds():
    def fun(params, x):
        return {"y": jnp.sin(x) @ params["weights"]}

    report = measure(fun, {"weights": jnp.ones((64, 64))}, jnp.ones((512, 64)), target="cpu")
    of_kind = {kind: [b for b in report.largest(100) if b.kind == kind] for kind in ("argument", "output")}
    assert {(b.operation, b.bytes, b.shape) for b in of_kind["argument"]} == {
        ("params['weights']", 64 * 64 * 4, "f32[64,64]"),
        ("x", 512 * 64 * 4, "f32[512,64]"),
    }
    assert [(b.bytes, b.shape) for b in of_kind["output"]] == [(512 * 64 * 4, "f32[512,64]")]
    assert of_kind["output"][0].operation.endswith("dot_general")


def test_a_donated_argument_is_one_buffer():
    report = measure(jax.jit(lambda x: x * 2, donate_argnums=0), jnp.ones((1024, 1024)), target="cpu")
    assert [b.kind for b in report.largest(100) if b.bytes >= 2**20] == ["argument"]
    assert report.timeline().peak_bytes == report.peak_bytes


def test_the_source_is_the_users_line_and_not_a_librarys():
    linen = pytest.importorskip("flax.linen")

    class Model(linen.Module):  # type: ignore[name-defined]
        @linen.compact
        def __call__(self, x):
            return linen.Dense(4096)(x)  # a layer of flax

    model, x = Model(), jax.ShapeDtypeStruct((2048, 8), jnp.float32)
    params = jax.eval_shape(model.init, jax.random.key(0), x)
    report = measure(model.apply, params, x, target="cpu")
    assert report.largest(1)[0].source == line_of("a layer of flax")


def assignment(*lifetimes: Lifetime, standing: int = 100, length: int = 6) -> Assignment:
    whole = Buffer("p", standing, "u8[100]", "x", "", "argument")
    return Assignment((whole,), lifetimes, (), tuple(f"op{i}" for i in range(length)), 0, standing, 0, 0, 0, 0)


def temporary(size: int) -> Buffer:
    return Buffer(f"t{size}", size, f"u8[{size}]", "", "", "temporary")


def test_lifetimes_are_inclusive_and_add_up():
    a = assignment(Lifetime(1, 2, temporary(10)), Lifetime(2, 4, temporary(5)), Lifetime(4, 4, temporary(7)))
    assert a.timeline.live_bytes == (100, 110, 115, 105, 112, 100)
    assert a.timeline.peak_position == 2
    assert [b.bytes for b in a.largest(2)] == [100, 10]
    assert [b.bytes for b in a.live(4)] == [100, 7, 5]
    assert "peak 115 B at op2" in str(a.timeline)


def test_of_two_memories_the_timeline_is_of_the_fuller():
    a = assignment(Lifetime(1, 2, temporary(10)))
    b = dataclasses.replace(a, on_chip=(Lifetime(3, 4, temporary(40)),))
    assert (a.timeline.peak_bytes, a.on_chip_bytes, a.main_peak_bytes) == (110, 0, 110)
    assert (b.timeline.peak_bytes, b.on_chip_bytes, b.main_peak_bytes) == (140, 40, 110)


def test_what_is_no_program_is_an_error():
    with pytest.raises(UnreadableDumpError, match="XLA for cpu dumped.*It is not: "):
        read_dump(b"this is no protocol buffer", "cpu")


# ------------------------------------------------------------------------------------ dumps that cannot be read rightly


def figures(found: Assignment) -> tuple[int, ...]:
    return (
        found.timeline.peak_bytes, found.main_peak_bytes, found.on_chip_bytes, found.argument_bytes, found.output_bytes,
        found.alias_bytes, found.host_bytes,
    )  # fmt: skip


def platform(target: str) -> str:
    return target.partition(":")[0]


@pytest.mark.parametrize("target", TARGETS)
def test_a_dump_cut_short_anywhere_is_an_error(target):
    data = dumps.dump(target)
    ends = {0, 1, 2, 3, len(data) - 1, *random.Random(0).sample(range(len(data)), 60)}
    at = 0
    for number, wire, content in dumps.fields(data):  # and where a field ends, so that what is there is a message
        ends.add(at)
        at += len(dumps.joined([(number, wire, content)]))
    assert at == len(data)
    for end in ends:
        with pytest.raises(UnreadableDumpError, match="of the layout that this version of jaxckpt reads"):
            read_dump(data[:end], platform(target))


READ: dict[str, list[tuple[int, ...]]] = {
    "program and assignment": [(1,), (3,)],
    "module": [(1, 3), (1, 6), (1, 7)],
    "schedule": [(1, 7, 1), (1, 7, 1, 1), (1, 7, 1, 2), (1, 7, 1, 2, 1)],
    "computation": [(1, 3, 2), (1, 3, 5), (1, 3, 6)],
    "instruction": [(1, 3, 2, 1), (1, 3, 2, 2), (1, 3, 2, 3), (1, 3, 2, 35), (1, 3, 2, 38), (1, 3, 2, 3, 2)],
    "assignment": [(3, 1), (3, 3), (3, 4)],
    "value": [(3, 1, 1), (3, 1, 2), (3, 1, 3), (3, 1, 3, 4)],
    "allocation": [(3, 3, number) for number in (1, 2, 3, 5, 7, 9)] + [(3, 3, 9, 1), (3, 3, 9, 3)],
    "trace": [(3, 4, 1), (3, 4, 1, 1), (3, 4, 1, 2), (3, 4, 1, 4)],
}
"""What figures depend on."""
COSMETIC = {(1, 17), (1, 3, 2, 7), (1, 3, 2, 36), (1, 3, 2, 3, 3)}
"""Names and lines alone: the table of stack frames, metadata, operands, dimensions."""


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("what", READ)
def test_a_field_that_is_renumbered_or_missing_is_an_error(target, what):
    data = dumps.dump(target)
    for path in READ[what]:
        for number in (None, 900):
            changed = dumps.edited(data, path, number)
            assert changed != data
            with pytest.raises(UnreadableDumpError):
                read_dump(changed, platform(target))


@pytest.mark.parametrize("target", TARGETS)
def test_whatever_field_is_renumbered_or_missing_no_figure_is_another(target):
    """Of all fields that there are, read or not, three levels deep."""
    data = dumps.dump(target)
    whole = figures(read_dump(data, platform(target)))
    assert whole[0] > 0
    outcomes = {}
    for path in sorted(dumps.paths(data, 3)):
        try:
            outcomes[path] = figures(read_dump(dumps.edited(data, path, 900), platform(target)))
        except UnreadableDumpError:
            continue
    assert {path: found for path, found in outcomes.items() if found != whole} == {}
    assert (1, 17) in outcomes


@pytest.mark.parametrize("target", TARGETS)
def test_whatever_field_is_emptied_no_figure_is_another(target):
    """Among them: no schedule, no allocations, no events, no instructions, sizes of 0."""
    data = dumps.dump(target)
    whole = figures(read_dump(data, platform(target)))
    outcomes, refused = {}, set()
    for path in sorted(dumps.paths(data, 3)):
        try:
            outcomes[path] = figures(read_dump(dumps.emptied(data, path), platform(target)))
        except UnreadableDumpError:
            refused.add(path)
    assert {path: found for path, found in outcomes.items() if found != whole} == {}
    assert refused >= {(1,), (3,), (1, 3), (1, 7), (1, 7, 1), (3, 1), (3, 3), (3, 4), (3, 1, 2), (3, 3, 2), (3, 4, 1)}


@pytest.mark.parametrize("target", TARGETS)
def test_the_schedule_of_a_loop_that_is_missing_is_an_error_or_changes_no_figure(target):
    """Computations that a kernel is made of have none; the body of a loop has one."""
    data = dumps.dump(target)
    whole = figures(read_dump(data, platform(target)))
    (program,) = [content for number, _, content in dumps.fields(data) if number == 1]
    parts = list(dumps.fields(program))
    (at,) = [place for place, part in enumerate(parts) if part[0] == 7]
    schedules = list(dumps.fields(parts[at][2]))
    assert len(schedules) > 1
    refused = 0
    for place in range(len(schedules)):
        less = dumps.joined(schedules[:place] + schedules[place + 1 :])
        changed = [*parts[:at], (7, 2, less), *parts[at + 1 :]]
        rest = [part for part in dumps.fields(data) if part[0] != 1]
        try:
            found = read_dump(dumps.joined([(1, 2, dumps.joined(changed)), *rest]), platform(target))
        except UnreadableDumpError:
            refused += 1
        else:
            assert figures(found) == whole
    assert refused >= 2


@pytest.mark.parametrize("target", TARGETS)
def test_a_program_with_arguments_and_no_results_has_a_peak_or_is_an_error(target, monkeypatch):
    """What is left out where nothing is computed: the arguments alone say what there must be."""
    dumped, seen = module.largest_dump, []
    monkeypatch.setattr(module, "largest_dump", lambda *args: seen.append(dumped(*args)) or seen[-1])
    x = jax.ShapeDtypeStruct((512, 512), jnp.float32)
    report = measure(jax.jit(lambda x: (), keep_unused=True), x, target=target)
    assert report.peak_bytes >= x.size * 4
    (data,) = seen
    for path in ((3,), (3, 1), (3, 3)):
        for changed in (dumps.edited(data, path, None), dumps.emptied(data, path)):
            with pytest.raises(UnreadableDumpError):
                read_dump(changed, platform(target))


@pytest.mark.parametrize("target", TARGETS)
def test_lines_and_names_that_are_missing_change_no_figure(target):
    data = dumps.dump(target)
    whole = figures(read_dump(data, platform(target)))
    for path in COSMETIC:
        assert figures(read_dump(dumps.edited(data, path, None), platform(target))) == whole


@pytest.mark.parametrize("target", TARGETS)
def test_one_allocation_or_value_or_event_that_is_missing_is_an_error(target):
    data = dumps.dump(target)
    (program,), (assigned,) = ([c for n, _, c in dumps.fields(data) if n == number] for number in (1, 3))
    parts = list(dumps.fields(assigned))
    for number in (1, 3):
        for place in [place for place, part in enumerate(parts) if part[0] == number][::5]:
            less = dumps.joined(parts[:place] + parts[place + 1 :])
            with pytest.raises(UnreadableDumpError):
                read_dump(dumps.joined([(1, 2, program), (3, 2, less)]), platform(target))


def test_what_is_another_kind_of_content_is_an_error():
    data = dumps.dump("cpu")
    for path, number in (((3, 1), 4), ((3, 4), 1), ((1, 6), 3), ((1, 3), 6), ((1,), 3)):
        with pytest.raises(UnreadableDumpError):
            read_dump(dumps.edited(data, path, number), "cpu")


# ------------------------------------------------------------------------------- and what a report makes of such a dump


@pytest.mark.parametrize("target", TARGETS)
def test_a_dump_that_contradicts_the_compilers_figures_is_an_error(target, monkeypatch):
    other = dumps.dump(target, layers=6)
    monkeypatch.setattr(module, "largest_dump", lambda *_: other)
    with pytest.raises(UnreadableDumpError, match="argument bytes are"):
        measure(jax.value_and_grad(dumps.loss), *dumps.arguments(), target=target)


@pytest.mark.parametrize("content", [None, b"cut", "whole"])
@pytest.mark.parametrize("target", ["cpu", pytest.param("cuda:h100", marks=pytest.mark.cuda)])
def test_a_compiler_that_says_a_peak_of_0_is_an_error(target, content, monkeypatch):
    """Whether its dump can be read or not."""
    x = jax.ShapeDtypeStruct((512, 512), jnp.float32)
    stats = module._compat.memory_stats
    silent = lambda compiled: SimpleNamespace(
        **{name: 0 for name in dir(stats(compiled)) if name.endswith("_in_bytes")}
    )
    monkeypatch.setattr(module._compat, "memory_stats", silent)
    if content != "whole":
        monkeypatch.setattr(module, "largest_dump", lambda *_: content)
    with pytest.raises(UnreadableDumpError):
        measure(lambda x: jnp.sin(x) @ x, x, target=target)


@pytest.mark.cuda
def test_a_compiler_that_leaves_out_its_peak_is_an_error(monkeypatch):
    stats = module._compat.memory_stats

    def without(compiled):
        said = stats(compiled)
        return SimpleNamespace(
            **{n: getattr(said, n) for n in dir(said) if n.endswith("_in_bytes")} | {"peak_memory_in_bytes": 0}
        )

    monkeypatch.setattr(module._compat, "memory_stats", without)
    with pytest.raises(UnreadableDumpError, match="peak of 0 bytes"):
        measure(lambda x: jnp.sin(x) @ x, jax.ShapeDtypeStruct((512, 512), jnp.float32), target="cuda:h100")


def test_a_program_of_nothing_has_a_peak_of_0():
    assert measure(lambda: (), target="cpu").peak_bytes == 0


@pytest.mark.parametrize("content", [None, b"", b"cut"])
def test_where_the_figures_are_the_compilers_own_an_unreadable_dump_costs_the_timeline_alone(
    monkeypatch, caplog, content
):
    step, args = jax.value_and_grad(dumps.loss), dumps.arguments()
    whole = measure(step, *args, target="cpu")
    monkeypatch.setattr(module, "largest_dump", lambda *_: content)
    report = measure(step, *args, target="cpu")
    assert report.peak_bytes == whole.peak_bytes > 0
    assert "no timeline" in caplog.text
    with pytest.raises(TargetError, match="gave no buffer assignment"):
        report.timeline()


@pytest.mark.tpu
@pytest.mark.parametrize("content", [None, b"", "half"])
def test_where_figures_are_read_from_it_an_unreadable_dump_is_an_error(monkeypatch, content):
    target = "tpu:v5e:2x2"
    step, args = jax.value_and_grad(dumps.loss), dumps.arguments()
    data = dumps.dump(target)
    content = data[: len(data) // 2] if content == "half" else content
    monkeypatch.setattr(module, "largest_dump", lambda *_: content)
    with pytest.raises(UnreadableDumpError):
        measure(step, *args, target=target)
    if content is not None:  # and of a compiler that is stopped
        monkeypatch.setattr(assign, "assign", lambda *_: assign.Assigned(content, 0.1))
        with pytest.raises(UnreadableDumpError):
            measure(step, *args, target=target, generate_code=False)
        with pytest.raises(UnreadableDumpError):
            jaxckpt.plan(dumps.loss, *args, budget="60%", target=target)
