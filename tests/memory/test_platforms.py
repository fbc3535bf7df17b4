"""A chip is a row, a platform is a file: both are added here, and nothing else has to know of them."""

import dataclasses
import functools
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import jaxckpt
from jaxckpt import ArgumentError, Target, UnknownTargetError
from jaxckpt.core.lift import count_flops
from jaxckpt.core.liveness import FUSING, Fusing, estimate_peak
from jaxckpt.memory import targets
from jaxckpt.memory.cache import surroundings
from jaxckpt.memory.chips import CHIPS, Chip
from jaxckpt.memory.platforms import PLATFORMS, Place, add
from jaxckpt.memory.platforms.base import Figures
from jaxckpt.memory.platforms.cpu import Cpu
from jaxckpt.planner.frontier import cost_of
from jaxckpt.schedules.body import take_apart
from jaxckpt.schedules.budget import everything, working_bytes
from jaxckpt.schedules.pullback import backward

WS, X = [jnp.ones((32, 32))] * 12, jnp.ones((2048, 32))


def loss(ws, x):
    for w in ws:
        x = jnp.sin(jnp.tanh(x @ w))
    return jnp.sum(x)


STEP = jax.value_and_grad(loss)

# ---------------------------------------------------------------------------------------------------------------- a row


@pytest.fixture
def small_gpu(monkeypatch):
    row = CHIPS["h100"]
    gpu = dict(row.gpu) | {"name": "A smaller GPU", "cores": 66}
    monkeypatch.setitem(CHIPS, "h50", dataclasses.replace(row, kind="smaller", memory_bytes=2**35, gpu=gpu))


def test_a_row_is_a_target(small_gpu):
    target = Target("cuda:h50x4")
    assert (target.platform, target.count, target.local, target.memory_bytes) == ("cuda", 4, False, 2**35)
    assert "cuda:h50" in targets.known() and "cuda:h50" in str(jaxckpt.targets())
    with pytest.raises(UnknownTargetError):
        Target("tpu:h50")


@pytest.mark.parametrize("name", ["H100", "", "40", "h100:2", 3])
def test_a_rows_name_must_be_one_that_a_targets_name_can_have(name):
    with pytest.raises(ArgumentError, match="name must be a chip's name in lower case: letters, digits"):
        CHIPS[name] = CHIPS["h100"]
    assert name not in CHIPS
    with pytest.raises(ArgumentError, match="row must be a jaxckpt.memory.chips.Chip; got 80"):
        CHIPS["h80"] = 80


@pytest.mark.parametrize(
    ("figures", "said"),
    [
        ({"memory_bytes": -5}, "memory_bytes of a chip must be a number above 0; got -5"),
        ({"bandwidth": 0}, "bandwidth of a chip must be a number above 0; got 0"),
        ({"link_bandwidth": float("nan")}, "link_bandwidth of a chip must be a number above 0; got nan"),
        ({"flops": {}}, "flops of a chip must be a mapping from a dtype's name to FLOP/s, with float32; got {}"),
        ({"flops": {"float32": "fast"}}, r"flops\['float32'\] of a chip must be a number above 0; got 'fast'"),
        (
            {"gpu": {"cores": 3}},
            "gpu of a chip must be a mapping with name, capability, cores, .*, and no other name; ",
        ),
        ({"gpu": dict(CHIPS["h100"].gpu) | {"corecount": 66}}, "gpu of a chip must be a mapping with .*corecount"),
    ],
)
def test_a_rows_figures_are_checked(figures, said):
    with pytest.raises(ArgumentError, match=said):
        dataclasses.replace(CHIPS["h100"], **figures)


@pytest.mark.cuda
def test_a_gpu_without_properties_is_told(monkeypatch):
    monkeypatch.setitem(CHIPS, "empty", dataclasses.replace(CHIPS["h100"], kind="empty", gpu={}))
    with pytest.raises(ArgumentError, match="gpu of a chip must be a mapping with name, capability"):
        jaxckpt.measure(loss, WS, X, target="cuda:empty", generate_code=False)


@pytest.mark.cuda
@pytest.mark.parametrize("cached", [True, False])
def test_another_row_of_a_name_is_compiled_for_anew(cached, monkeypatch, tmp_path):
    """XLA for GPUs runs operations again where a program would not fit the chip's memory."""

    def grown(ws, x):
        for w in ws:
            x = x + jnp.tanh(x @ w) @ w.T
        return jnp.mean(x**2)

    args = [jax.ShapeDtypeStruct((256, 1024), jnp.float32)] * 8, jax.ShapeDtypeStruct((2048, 256), jnp.float32)
    peaks = []
    for mebibytes in (200, 60, 200):
        row = dataclasses.replace(CHIPS["h100"], kind="small", memory_bytes=mebibytes * 2**20)
        monkeypatch.setitem(CHIPS, "small", row)
        cache = tmp_path if cached else False
        report = jaxckpt.measure(
            jax.value_and_grad(grown), *args, target="cuda:small", generate_code=False, cache=cache
        )
        peaks.append(report.peak_bytes)
    assert peaks[0] == peaks[2] > 1.5 * peaks[1] and peaks[1] < 60 * 2**20


@pytest.mark.parametrize(("name", "like"), [("h100-40", "h100"), ("v5e-half", "v5e")])
def test_a_rows_name_may_have_a_hyphen(name, like, monkeypatch):
    monkeypatch.setitem(CHIPS, name, dataclasses.replace(CHIPS[like], kind="another", memory_bytes=2**35))
    target = Target(f"{CHIPS[like].platform}:{name}")
    assert target.memory_bytes == 2**35 and name in str(jaxckpt.targets())


@pytest.mark.parametrize("name", ["cuda:h100x99999999", "tpu:v5e:9999x9999"])
def test_a_target_of_more_devices_than_there_can_be_is_refused_at_once(name):
    with pytest.raises(UnknownTargetError, match="there is no target"):
        Target(name)


def test_a_row_is_planned_for_without_its_compiler(monkeypatch):
    """A chip with a tenth of the memory bandwidth and of the rates: the same memory, ten times the seconds."""
    row = CHIPS["h100"]
    rates = {name: rate / 10 for name, rate in row.flops.items()}
    monkeypatch.setitem(CHIPS, "h10", dataclasses.replace(row, kind="slow", flops=rates, bandwidth=row.bandwidth / 10))
    budget = int(0.5 * jaxckpt.plan(loss, WS, X, budget="10GiB", target="cuda:h10", verify=False).predicted.peak_bytes)
    plan = jaxckpt.plan(loss, WS, X, budget=budget, target="cuda:h10", verify=False)
    assert plan.target == "cuda:h10" and plan.regions and plan.predicted.peak_bytes <= budget
    slow, fast = (cost_of(jax.value_and_grad(plan.apply(loss)), (WS, X), name) for name in ("cuda:h10", "cuda:h100"))
    assert slow[0] == fast[0] > count_flops(STEP, WS, X)
    assert slow[1] == pytest.approx(10 * fast[1])


@pytest.mark.cuda
def test_a_row_is_compiled_for(small_gpu):
    report = jaxckpt.measure(STEP, WS, X, target="cuda:h50")
    assert "A smaller GPU" in Target("cuda:h50").devices[0].device_kind
    assert report.temp_bytes > X.nbytes
    plan = jaxckpt.plan(loss, WS, X, budget="70%", target="cuda:h50")
    assert plan.measured_bytes <= 0.7 * report.peak_bytes


@pytest.mark.cuda
@pytest.mark.parametrize("name", ["cuda:b200", "cuda:gb200"])
def test_the_compiler_knows_blackwell(name):
    target = Target(name)
    (kind,) = {device.device_kind for device in target.devices}
    matching = [chip for chip, row in CHIPS.items() if row.platform == "cuda" and re.search(row.kind, kind)]
    assert matching == [name.split(":")[1]]
    assert jaxckpt.measure(STEP, WS, X, target=target).temp_bytes > X.nbytes
    assert target.flops["bfloat16"] > 2 * Target("cuda:h100").flops["bfloat16"]


def test_figures_of_gpus_agree_with_each_other():
    """Twice the rate for half the bits; what is on the chip is far less than what is beside it; both bandwidths are
    one.
    """
    for name, row in CHIPS.items():
        if row.platform == "cuda":
            assert row.flops["bfloat16"] == pytest.approx(2 * row.flops["float32"], rel=0.01), name
            assert row.gpu["cores"] * row.gpu["shared"] * 1024 + row.gpu["l2"] * 2**20 < row.memory_bytes / 200, name
            assert row.gpu["bandwidth"] == pytest.approx(row.bandwidth, rel=0.05), name


# ----------------------------------------------------------------------------------------------------------- a platform


class Toy(Cpu):
    """A device that fuses as a GPU does and is emulated by the CPU's compiler; one kibibyte goes to its runtime."""

    name = "toy"
    backend = "toy"
    lowering = "cpu"
    fusing = Fusing(stores_shared=False)

    def __init__(self):
        self.asked = []

    def parse(self, text):
        found = re.fullmatch(r"(\w+)", text)
        return Place(text, found[1], 1) if found else None

    def devices(self, place):
        self.asked.append(place)
        return tuple(jax.devices("cpu"))[:1]

    def own_options(self, local):
        self.asked.append("options")
        return {}

    def peak_bytes(self, figures, timeline):
        return super().peak_bytes(figures, timeline) + 1024


@pytest.fixture
def toy(monkeypatch):
    for table in (PLATFORMS, FUSING):
        monkeypatch.setitem(table, "toy", None)  # so that what is added is taken away again
    platform = Toy()
    add(platform)
    rates = dict.fromkeys(("float32", "bfloat16"), 1e12)
    monkeypatch.setitem(CHIPS, "one", Chip("toy", "toy", 2**30, rates, 1e11, 1e10, 1e10))
    monkeypatch.setattr(targets, "_devices", functools.cache(targets._devices.__wrapped__))
    return platform


def test_a_platform_is_known_by_its_name(toy):
    target = Target("TOY:one")
    assert (target.name, target.platform, target.count, target.memory_bytes) == ("toy:one", "toy", 1, 2**30)
    assert [name for name in targets.known() if name.startswith("toy")] == ["toy", "toy:one"]
    assert not toy.asked, "a name touches no device"
    for name in ("toy:two", "toy:h100", "toy:one:2", "cuda:one"):
        with pytest.raises(UnknownTargetError, match="there is no target"):
            Target(name)


def test_a_platform_compiles_measures_and_plans_in_its_own_way(toy):
    report, local = (jaxckpt.measure(STEP, WS, X, target=name) for name in ("toy:one", "cpu"))
    assert toy.asked == [Place("one", "one", 1), "options"]
    assert report.peak_bytes == local.peak_bytes + 1024 and report.target == "toy:one"
    assert report.timeline().peak_bytes > X.nbytes
    plan = jaxckpt.plan(loss, WS, X, budget="70%", target="toy:one")
    assert plan.target == "toy:one" and plan.measured_bytes <= 0.7 * report.peak_bytes
    assert jaxckpt.compiler_options("toy:one") == jaxckpt.compiler_options("cpu")


def test_the_versions_and_variables_of_its_compiler_decide_what_is_stored(toy, monkeypatch):
    before = surroundings()
    assert {"libtpu", "LIBTPU_INIT_ARGS", "jax-cuda12-pjrt"} <= before.keys()
    toy.packages, toy.variables = ("numpy",), ("TOY_FLAGS",)
    assert surroundings().keys() - before.keys() == {"numpy", "TOY_FLAGS"} and surroundings()["numpy"]
    monkeypatch.setenv("TOY_FLAGS", "--fast")
    assert surroundings()["TOY_FLAGS"] == "--fast"


def test_a_platform_says_how_its_compiler_fuses(toy):
    estimates = {name: estimate_peak(used_twice, X, platform=name) for name in ("cpu", "cuda", "toy")}
    assert estimates["toy"] == estimates["cuda"] < estimates["cpu"]


def test_a_platform_says_what_else_its_compiler_takes_in_scans(toy):
    def multiplied(c, x):
        return c @ x, None

    args = jnp.ones((1024, 1024), jnp.bfloat16), jnp.ones((2, 1024, 1024), jnp.bfloat16)
    body = take_apart(multiplied, *args, None, False, 1).body
    needed = lambda: working_bytes(body, backward(body, everything(body), None, defer=False))
    before = needed()
    toy.fusing = Fusing(split_cores=1024)
    add(toy)
    # The result has 64 tiles. Over 1,024 cores it is the sum of 16 parts; over an H100's, of 2.
    split = needed()
    assert split >= before + 13 * 2 * 1024 * 1024
    toy.fusing = Fusing(split_cores=1024, widens_floats=True)
    add(toy)
    assert needed() > 1.8 * split, "four bytes an element where there were two"


def used_twice(x):
    y = jnp.sin(x)
    return jnp.sum(y), jnp.sum(y * y)


# -------------------------------------------------------------------------------------------------------- what they say


def test_peaks_are_read_as_each_platform_means_them():
    def found(host):
        return Figures(argument=100, output=40, temp=60, alias=10, peak=170, host=host)

    peaks = {
        name: [platform.peak_bytes(found(host), timeline) for host, timeline in ((0, None), (8, 155), (8, None))]
        for name, platform in PLATFORMS.items()
    }
    assert peaks == {"cpu": [190, 190, 190], "cuda": [170, 190, 190], "tpu": [170, 155, 190]}
    assert {name: platform.temp_bytes(found(0), 170) for name, platform in PLATFORMS.items()} == {
        "cpu": 60,
        "cuda": 60,
        "tpu": 40,
    }
    assert [PLATFORMS[name].space(3) for name in ("cpu", "cuda", "tpu")] == [0, 0, 3]


def test_a_refusal_is_read_as_tpu_compilers_write_it():
    needed = PLATFORMS["tpu"].needed_bytes
    assert needed("RESOURCE_EXHAUSTED: ... Ran out of memory in memory space hbm. Used 256.00G of 15.75G hbm.") == 2**38
    assert needed("RESOURCE_EXHAUSTED: ... program (2.50M) exceeds available HBM (15.75G)") == 2.5 * 2**20
    assert needed("RESOURCE_EXHAUSTED: no figures") is None


def test_no_other_file_asks_which_platform_it_is():
    root = Path(jaxckpt.__file__).parent
    asks = re.compile(r"platform\w* (?:[!=]=|(?:not )?in) [\"'(\[{]|[\"'] [!=]= [\w.]*platform")
    asking = [
        str(path.relative_to(root))
        for path in root.rglob("*.py")
        if asks.search(path.read_text())
        and not {"_compat", "_compat.py", "platforms"} & set(path.relative_to(root).parts)
    ]
    # `for platform in ("cpu", "cuda")` asks both.
    assert [name for name in asking if name != "schedules/budget.py"] == []
