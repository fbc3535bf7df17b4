"""What takes a trace, or a compilation, to see is checked at first use: then a JAX that has changed it is the same
error, or the log says so.
"""

import functools
import logging
import re
import threading
import time
import types

import jax
import jax.ad_checkpoint
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

import jaxckpt
from jaxckpt import SAVE, ArgumentError, Policy, UnsupportedJaxError, _compat
from jaxckpt._compat import compiler, names, primitives
from jaxckpt.memory import assign
from jaxckpt.memory.report import measure
from jaxckpt.memory.targets import Target
from tests.helpers import gradient_executions

X = jnp.arange(4.0)


@pytest.fixture(autouse=True)
def first_use(monkeypatch):
    """As in a new process: nothing has been checked, before and after."""

    def forget():
        primitives.check_primitives.cache_clear()
        names._check_kept_names.cache_clear()
        names._name_template.cache_clear()
        compiler._bypassed.clear()

    forget()
    yield
    monkeypatch.undo()
    forget()


def tagged(x):
    return jnp.sin(jaxckpt.tag(jnp.sin(x), "inner")).sum()


def step(x):
    fun = lambda x: tagged(x)  # a new one: what is emitted for a function is remembered
    return jax.grad(jaxckpt.checkpoint(fun, policy=Policy({"inner": SAVE})))(x)


# ------------------------------------------------------------------------------------------------------ names of values


def rename_the_primitive(monkeypatch):
    """Values are named by a primitive that nobody knows."""
    other = _compat.Primitive("label")
    other.def_impl(lambda x, name: x)
    other.def_abstract_eval(lambda aval, name: aval)
    monkeypatch.setattr(jax.ad_checkpoint, "checkpoint_name", lambda x, name: other.bind(x, name=name))


def test_names_that_cannot_be_read_are_an_error(monkeypatch):
    rename_the_primitive(monkeypatch)
    with pytest.raises(UnsupportedJaxError, match="jaxckpt needs the primitive name to find the names of values"):
        jaxckpt.trace(tagged, X)
    with pytest.raises(UnsupportedJaxError):
        step(X)


def test_names_that_cannot_be_given_are_an_error(monkeypatch):
    rename_the_primitive(monkeypatch)
    with pytest.raises(UnsupportedJaxError, match=r"the operations \['label'\], in which no name can be read"):
        names._name_template(jax.typeof(X))


def test_names_that_a_checkpoint_does_not_keep_are_an_error(monkeypatch):
    loses = lambda *names, **more: jax.checkpoint_policies.nothing_saveable
    monkeypatch.setattr(jax.checkpoint_policies, "save_only_these_names", loses)
    with pytest.raises(
        UnsupportedJaxError, match=r"save_only_these_names .* is named and kept 2 times instead of once"
    ):
        step(X)
    monkeypatch.undo()
    np.testing.assert_allclose(step(X), jax.grad(tagged)(X), rtol=1e-6)
    assert gradient_executions(jaxckpt.checkpoint(tagged, policy=Policy({"inner": SAVE})), X)["sin"] == 2


def test_names_that_a_checkpoint_keeps_are_none():
    names._check_kept_names()
    assert names._check_kept_names.cache_info().currsize == 1


# ---------------------------------------------------------------------------------------------------------- primitives


def primitive_of(sample):
    """The primitive that a sample makes."""
    closed = jax.make_jaxpr(sample.make)(X, jnp.ones((4, 4)))
    eqns = list(_compat.open_jaxpr(closed).eqns)
    for eqn in eqns:
        eqns.extend(e for inner in _compat.held_jaxprs(eqn) for e in _compat.open_jaxpr(inner).eqns)
    return next(eqn.primitive for eqn in eqns if eqn.primitive.name in sample.names)


samples = pytest.mark.parametrize("sample", primitives.SAMPLES, ids=lambda sample: sample.names[0])


@samples
def test_a_primitive_of_another_name_is_an_error(sample, monkeypatch):
    monkeypatch.setattr(primitive_of(sample), "name", "renamed")
    with pytest.raises(UnsupportedJaxError, match=f"the primitive {sample.names[0]} to {sample.why}") as raised:
        jaxckpt.trace(jnp.sin, X)
    assert raised.value.found == "makes no operation of this name"


@pytest.mark.parametrize(
    ("sample", "param"), [(sample, param) for sample in primitives.SAMPLES for param in sample.params]
)
def test_a_parameter_of_another_name_is_an_error(sample, param, monkeypatch):
    params = primitives.equation_params

    def renamed(eqn):
        found = params(eqn)
        return (
            {f"new_{k}" if k == param else k: v for k, v in found.items()}
            if eqn.primitive.name in sample.names
            else found
        )

    monkeypatch.setattr(primitives, "equation_params", renamed)
    with pytest.raises(UnsupportedJaxError, match=f"the primitive {sample.names[0]} .* and no {param}"):
        jaxckpt.trace(jnp.sin, X)


@pytest.mark.parametrize("sample", [s for s in primitives.SAMPLES if s.programs], ids=lambda sample: sample.names[0])
def test_programs_that_are_not_where_they_are_looked_for_are_an_error(sample, monkeypatch):
    inner = primitives.held_jaxprs
    hidden = lambda eqn: [] if eqn.primitive.name in sample.names else inner(eqn)
    monkeypatch.setattr(primitives, "held_jaxprs", hidden)
    with pytest.raises(
        UnsupportedJaxError, match=f"gives it 0 programs instead of {sample.programs}|makes no operation"
    ):
        jaxckpt.trace(jnp.sin, X)


def test_a_loop_of_another_name_does_not_run_without_its_schedule(monkeypatch):
    scan = next(sample for sample in primitives.SAMPLES if sample.names == ("scan",))
    monkeypatch.setattr(primitive_of(scan), "name", "loop")
    for schedule in ("sqrt", jaxckpt.Slots(2)):
        with pytest.raises(UnsupportedJaxError, match="find loops"):
            jaxckpt.scan(lambda c, x: (jnp.sin(c), x), X, None, length=4, schedule=schedule)


def test_a_loop_with_other_parameters_is_an_error():
    with pytest.raises(
        UnsupportedJaxError, match="the parameters of scan to tell the constants .* gives it length, tree"
    ):
        _compat.num_scan_consts_carry({"length": 3, "tree": None})


def test_keys_of_another_making_are_an_error():
    with pytest.raises(UnsupportedJaxError, match="the dtype of random keys"):
        _compat.key_implementation(np.dtype("float32"))


@pytest.mark.parametrize(
    "context",
    [
        lambda: jax.disable_jit(),
        lambda: jax.enable_x64(True),
        lambda: jax.numpy_dtype_promotion("strict"),
        lambda: jax.numpy_rank_promotion("raise"),
        lambda: jax.debug_nans(True),
        lambda: jax.checking_leaks(),
        lambda: jax.transfer_guard("disallow"),
        lambda: _compat.names.config.remat3(True),
        lambda: jax.sharding.use_abstract_mesh(AbstractMesh((2,), ("a",), (jax.sharding.AxisType.Explicit,))),
    ],
    ids=["disable_jit", "x64", "strict", "rank", "nans", "leaks", "transfers", "remat3", "mesh"],
)  # fmt: skip
def test_whatever_the_user_has_set_the_checks_find_nothing_amiss(context):
    with context():
        primitives.check_primitives()
        names._check_kept_names()


@pytest.mark.parametrize(
    "transform",
    [jax.jit, jax.vmap, lambda f: functools.partial(jax.lax.map, f), lambda f: lambda x: jax.jvp(f, (x,), (x,))],
    ids=["jit", "vmap", "map", "jvp"],
)
def test_wherever_they_are_traced_the_checks_find_nothing_amiss(transform):
    def check(x):
        primitives.check_primitives()
        names._check_kept_names()
        return jnp.sin(x)

    transform(check)(X)


def test_within_a_shard_map_the_checks_find_nothing_amiss():
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("a",))
    spec = PartitionSpec("a")

    def check(x):
        primitives.check_primitives()
        names._check_kept_names()
        return jnp.sin(x)

    jax.jit(jax.shard_map(check, mesh=mesh, in_specs=spec, out_specs=spec))(
        jax.device_put(X, NamedSharding(mesh, spec))
    )


def test_they_are_made_once_and_take_a_few_milliseconds():
    for check in (primitives.check_primitives, names._check_kept_names):
        check()
        check.cache_clear()
        start = time.perf_counter()
        check()
        assert time.perf_counter() - start < 1.0
        assert check.cache_info().misses == 1
        check()
        assert check.cache_info().misses == 1


# ------------------------------------------------------------------------------------------------------------ compilers


def bypass(monkeypatch):
    """JAX compiles without the function that is replaced for the moment of a request."""
    compile_ = compiler.compiler.backend_compile_and_load
    calls = []

    def compile_or_get_cached(backend, module, devices, options, callbacks, executable_devices, *rest):
        calls.append(module)
        return compile_(backend, module, executable_devices, options, callbacks)

    monkeypatch.setattr(compiler.compiler, "compile_or_get_cached", compile_or_get_cached)
    return calls


def test_a_compile_call_that_is_bypassed_is_an_error_once_compiled_and_then_at_once(monkeypatch):
    calls = bypass(monkeypatch)
    for fun in (jnp.sin, jnp.cos):
        with pytest.raises(UnsupportedJaxError, match="backend_compile_and_load .* compiles without calling it"):
            _compat.compile_request(jax.jit(fun).lower(X), {})
    assert len(calls) == 1
    assert compiler.compiler.backend_compile_and_load.__module__ == "jax._src.compiler", "JAX's own again"


def test_where_it_is_bypassed_the_compiler_goes_on_to_the_end_and_the_log_says_so(monkeypatch, caplog):
    bypass(monkeypatch)
    with caplog.at_level(logging.WARNING, "jaxckpt"):
        assert assign.assign(jax.jit(jnp.sin).lower(X), {}, Target("cpu")) is None
    assert "runs to the end" in caplog.text and "backend_compile_and_load" in caplog.text


@pytest.mark.tpu
def test_where_it_is_bypassed_the_figures_are_those_of_the_whole_compilation(monkeypatch, caplog):
    x = jax.ShapeDtypeStruct((256, 256), jnp.float32)
    fun = jax.value_and_grad(lambda x: jnp.sum(jnp.sin(x @ x) @ x))
    whole = measure(fun, x, target="tpu:v5e:2x2")
    assert measure(fun, x, target="tpu:v5e:2x2", generate_code=False).stopped
    bypass(monkeypatch)
    found = measure(fun, x, target="tpu:v5e:2x2", generate_code=False)
    assert {**found.to_json(), "compile_seconds": 0} == {**whole.to_json(), "compile_seconds": 0}
    assert found.code_bytes is not None
    assert "runs to the end" in caplog.text


def test_a_cache_that_is_used_all_the_same_is_an_error(monkeypatch):
    cache = compiler.cache
    before = cache._cache_checked, cache._cache_used
    monkeypatch.setattr(cache, "is_cache_used", lambda backend: True)
    for _ in range(2):
        with pytest.raises(UnsupportedJaxError, match="_cache_used to compile in earnest"):
            measure(jnp.sin, X, target="cpu")
    assert (cache._cache_checked, cache._cache_used) == before
    monkeypatch.undo()
    assert measure(jnp.sin, X, target="cpu").peak_bytes == 32


@pytest.mark.parametrize("missing", compiler._FIGURES)
def test_a_compiler_that_does_not_say_a_figure_is_an_error(missing, monkeypatch):
    class Stats:
        """A compiler's figures, but for one."""

    for name in compiler._FIGURES:
        if name != missing:
            setattr(Stats, name, 0)
    monkeypatch.setattr(jax.stages.Compiled, "memory_analysis", lambda self: Stats())
    with pytest.raises(UnsupportedJaxError, match=rf"memory_analysis\(\)\.{missing} to measure memory"):
        measure(jnp.sin, X, target="cpu")


def test_a_compiler_without_figures_is_an_error(monkeypatch):
    monkeypatch.setattr(jax.stages.Compiled, "memory_analysis", lambda self: None)
    with pytest.raises(UnsupportedJaxError, match="says nothing of it"):
        measure(jnp.sin, X, target="cpu")


def test_an_option_of_ours_that_xla_does_not_know_is_an_error(monkeypatch):
    renamed = lambda folder: {"xla_no_such_dump": folder}
    monkeypatch.setattr(compiler, "dump_options", renamed)
    monkeypatch.setattr(_compat, "dump_options", renamed)
    with pytest.raises(UnsupportedJaxError, match="XLA's option xla_no_such_dump to measure memory") as raised:
        measure(jnp.sin, X, target="cpu")
    assert isinstance(raised.value.__cause__, jax.errors.JaxRuntimeError)


def test_an_option_of_the_users_that_xla_does_not_know_is_an_argument_error_and_not_jaxs_lack():
    with pytest.raises(ArgumentError, match="xla_no_such_option") as raised:
        measure(jnp.sin, X, target="cpu", compiler_options={"xla_no_such_option": 1})
    assert isinstance(raised.value.__cause__, jax.errors.JaxRuntimeError)


def test_other_threads_compile_while_a_request_is_made_and_bypassed(monkeypatch):
    bypass(monkeypatch)
    values = []
    thread = threading.Thread(target=lambda: values.append(float(jax.jit(lambda x: jnp.cos(x) + 41.0)(0.0))))
    with pytest.raises(UnsupportedJaxError):
        _compat.compile_request(jax.jit(jnp.sin).lower(X), {})
    thread.start()
    thread.join()
    assert values == [42.0]


# ----------------------------------------------------------------------------------------------------------------- flax


def test_random_numbers_of_unrolled_layers_that_flax_draws_in_another_way_are_an_error(monkeypatch):
    pytest.importorskip("flax")
    from flax.core import scope

    from jaxckpt._compat import flax as compat_flax
    from jaxckpt.flax import linen_streams

    check = compat_flax._check_word
    check.cache_clear()
    compat_flax.check_word(linen_streams._word)
    check.cache_clear()
    fold = scope._fold_in_static
    monkeypatch.setattr(scope, "_fold_in_static", lambda rng, data: fold(rng, ("salt", *data)))
    with pytest.raises(UnsupportedJaxError, match=r"draw the random numbers of unrolled layers\. flax") as raised:
        compat_flax.check_word(linen_streams._word)
    assert raised.value.package == "flax"
    check.cache_clear()


def test_a_flax_that_does_not_mark_wrapped_methods_is_an_error(monkeypatch):
    pytest.importorskip("flax")
    from flax.linen import module

    from jaxckpt._compat import flax as compat_flax

    monkeypatch.setattr(module, "wrap_method_once", lambda fun: lambda *args: fun(*args))
    with pytest.raises(UnsupportedJaxError, match=re.escape("flax.linen.module.wrap_method_once")):
        compat_flax.probe(())


def test_a_lowered_program_that_does_not_tell_its_devices():
    with pytest.raises(UnsupportedJaxError, match="_lowering._device_list"):
        _compat.lowered_devices(object())
    lowered = jax.jit(jnp.sin).lower(1.0)
    assert _compat.lowered_devices(lowered) == tuple(jax.devices()[:1])


def test_a_program_that_does_not_tell_what_jit_was_given():
    with pytest.raises(UnsupportedJaxError, match="_lowering._compiler_options_kvs"):
        _compat.own_options(object())
    jitted = jax.jit(jnp.sin, compiler_options={"xla_backend_optimization_level": 1}, donate_argnums=0)
    assert _compat.own_options(jitted.lower(1.0)) == (("xla_backend_optimization_level", 1),)
    traced = jitted.trace(1.0)
    assert "('donated_invars', (True,))" in _compat.jit_settings(traced) and _compat.jit_settings(object()) == ""
    traced._params = {}
    with pytest.raises(UnsupportedJaxError, match="_params of traced"):
        _compat.jit_settings(traced)


def test_a_mapped_function_with_other_parameters_is_an_error():
    mesh = jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("d")
    (eqn,) = jax.make_jaxpr(jax.shard_map(jnp.sin, mesh=mesh, in_specs=spec, out_specs=spec))(X).eqns
    assert jax.eval_shape(_compat.mapped_as(eqn, lambda x: [x]), X)[0].shape == X.shape
    assert _compat.run_mapped(eqn, lambda: jax.lax.axis_size("d")) == 1
    params = {name: value for name, value in eqn.params.items() if name != "newly_manual_axes"}
    with pytest.raises(UnsupportedJaxError, match="newly_manual_axes of jax.shard_map .* inside of it"):
        _compat.mapped_as(types.SimpleNamespace(params=params), jnp.sin)
