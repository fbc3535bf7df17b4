"""Finding a factory, calling it, and the variants of what it makes."""

import sys
import textwrap

import jax
import jax.numpy as jnp
import pytest

from jaxckpt import ArgumentError, FactoryError, factories, policies, variants

SHAPE = jax.ShapeDtypeStruct((4,), jnp.float32)


@pytest.fixture
def clean_imports():
    path, modules = list(sys.path), set(sys.modules)
    yield
    sys.path[:] = path
    for name in set(sys.modules) - modules:
        del sys.modules[name]


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(textwrap.dedent(text))
    return path


# ------------------------------------------------------------------------------------------------------------- finding


def test_a_file_in_a_package_is_imported_as_part_of_it(tmp_path, clean_imports):
    write(tmp_path / "zoo" / "__init__.py", "")
    write(tmp_path / "zoo" / "cats" / "__init__.py", "")
    write(tmp_path / "zoo" / "food.py", "MEAT = 7\n")
    file = write(tmp_path / "zoo" / "cats" / "lion.py", "from ..food import MEAT\ndef model(): return MEAT\n")
    found = factories.load(f"{file}:model")
    assert found() == 7
    assert found.__module__ == "zoo.cats.lion"
    assert factories.load("zoo.cats.lion:model") is found


def test_a_file_of_its_own_may_bear_the_name_of_an_installed_module_and_import_its_neighbour(tmp_path, clean_imports):
    write(tmp_path / "neighbour_of_json.py", "SIZE = 3\n")
    file = write(tmp_path / "json.py", "import neighbour_of_json\ndef model(): return neighbour_of_json.SIZE\n")
    import json

    assert factories.load(f"{file}:model")() == 3
    assert sys.modules["json"] is json


def test_a_package_that_is_already_imported_from_elsewhere_is_not_taken_for_the_file(tmp_path, clean_imports):
    for root in ("one", "two"):
        write(tmp_path / root / "twins" / "__init__.py", "")
        write(tmp_path / root / "twins" / "model.py", f"def model(): return {root!r}\n")
    assert factories.load(f"{tmp_path}/one/twins/model.py:model")() == "one"
    with pytest.raises(
        FactoryError, match=r"two/twins/model.py must be imported as the module twins.model\. .* imported from .*one"
    ):
        factories.load(f"{tmp_path}/two/twins/model.py:model")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("import no_such_module_at_all", r"Importing .*broken.py failed: ModuleNotFoundError: .*\(broken.py, line 1\)"),
        ("x = 1\ny = (", r"Importing .*broken.py failed: SyntaxError"),
        ("def modle(): pass", r"has no function 'model'. Did you mean 'modle'\?"),
        ("model = 3", r"broken.py:model must be a function that returns \(fun, args\); it is int: 3"),
    ],
)
def test_what_is_wrong_with_a_file_is_said(tmp_path, clean_imports, text, message):
    file = write(tmp_path / "broken.py", text)
    with pytest.raises(FactoryError, match=message):
        factories.load(f"{file}:model")
    assert ("broken" in sys.modules) == ("import" not in text and "y = (" not in text), "what fails leaves nothing"


def test_a_file_that_is_not_there_is_said_with_the_nearest(tmp_path):
    write(tmp_path / "train_gpt.py", "")
    with pytest.raises(FactoryError, match=r"no file .*train_gtp.py. Did you mean 'train_gpt.py'"):
        factories.load(f"{tmp_path}/train_gtp.py:model")


@pytest.mark.parametrize("spec", ["model", "model.py", ":model", "model.py:", ""])
def test_a_name_that_is_none_is_said(spec):
    with pytest.raises(FactoryError, match="FACTORY must be FILE.py:NAME or package.module:NAME"):
        factories.load(spec)


# ------------------------------------------------------------------------------------------------------------- calling


@pytest.mark.parametrize(
    ("made", "got"),
    [
        (3, "int: 3"),
        (None, "NoneType: None"),
        ((len, SHAPE), r"a tuple of 2: \(builtin_function_or_method, ShapeDtypeStruct\)"),
        ((SHAPE, len), r"a tuple of 2: \(ShapeDtypeStruct, builtin_function_or_method\)"),
        ((len, (SHAPE,), 1), r"a tuple of 3"),
    ],
)
def test_a_factory_that_returns_something_else(made, got):
    def model():
        return made

    with pytest.raises(FactoryError, match=rf"model must return \(fun, args\): .* It returned {got}"):
        factories.make(model)


def test_a_keyword_that_the_factory_does_not_take_and_a_factory_that_fails():
    def model(checkpoint=None, *, layers=3):
        raise ValueError("layers must be even\n  got 3.")

    with pytest.raises(FactoryError, match=r"model takes no argument 'layer'. Did you mean 'layers'\?"):
        factories.make(model, layer=3)
    with pytest.raises(
        FactoryError,
        match=r"model\(layers=3\) failed: ValueError: layers must be even got 3 \(test_factories.py, line \d+\).",
    ):
        factories.make(model, layers=3)


# ------------------------------------------------------------------------------------------------------------ variants


def names(found):
    return [variant.name for variant in found]


def full(checkpoint=None, segment_size=1): ...
def blocks_only(checkpoint=None): ...
def bare(): ...


def test_every_factory_gets_the_variants_that_its_parameters_allow():
    everything = names(variants.variants_for(full))
    assert everything[:3] == ["none", "whole", "nothing (segments:1)"]
    assert {"segments:2", "segments:4", "segments:sqrt"} | set(policies.PRESETS) - {"nothing"} <= set(everything)
    assert names(variants.variants_for(blocks_only)) == [n for n in everything if not n.startswith("segments:")]
    assert names(variants.variants_for(bare)) == ["none", "whole"]


def test_variants_are_chosen_by_name_alias_or_any_segment_and_the_users_come_on_top():
    own = {"mlp_*=save": policies.parse("mlp_*=save")}
    chosen = variants.variants_for(full, own, ["segments:7", "nothing", "none", "none"])
    assert names(chosen) == ["segments:7", "nothing (segments:1)", "none", "mlp_*=save"]
    assert chosen[0].segment_size == 7
    assert variants.variants_for(bare, own)[-1].where == "whole"


@pytest.mark.parametrize("name", ["segmnts:2", "segments:0", "segments:-1", "segments:two", "dot"])
def test_a_variant_that_is_none(name):
    with pytest.raises(ArgumentError, match=r"variants must be names of variants; got .*\. (Did you mean|There are) '"):
        variants.variants_for(full, None, [name])


def test_building_hands_the_factory_what_it_takes():
    calls = []

    def model(checkpoint=None, segment_size=1, *, real=False, layers=2):
        calls.append((checkpoint is not None, segment_size, real, layers))
        return (lambda x: x.sum()), (SHAPE,)

    chosen = variants.variants_for(model, None, ["none", "dots", "segments:sqrt", "whole"])
    built = variants.build(model, chosen, real=True, settings={"layers": 5})
    functions, args = built.functions, built.args
    assert list(functions) == ["none", "dots", "segments:sqrt", "whole"]
    assert args == (SHAPE,)
    assert calls == [(False, 1, True, 5), (True, 1, False, 5), (True, "sqrt", False, 5), (False, 1, False, 5)]


def test_whole_puts_one_checkpoint_around_everything():
    built = variants.build(lambda: ((lambda x: jnp.sin(x).sum()), (SHAPE,)), variants.variants_for(bare))
    functions, args = built.functions, built.args
    primitives = {name: str(jax.make_jaxpr(fun)(*args)) for name, fun in functions.items()}
    checkpointed = {name: "differentiated=" in text for name, text in primitives.items()}
    assert checkpointed == {"none": False, "whole": True}


def test_arguments_that_depend_on_the_checkpoint_are_an_error():
    def renames(checkpoint=None):
        return (lambda p: p.popitem()[1].sum()), ({"CheckpointBlock_0" if checkpoint else "Block_0": SHAPE},)

    with pytest.raises(
        FactoryError, match=r"same structure .* differ between 'none' and 'dots'.*Use jaxckpt.flax.checkpoint, which"
    ):
        variants.build(renames, variants.variants_for(renames, None, ["none", "dots"]))


@pytest.mark.parametrize("key", ["checkpoint", "segment_size"])
def test_what_variants_vary_cannot_be_set(key):
    with pytest.raises(ArgumentError, match=rf"set must be without '{key}'.* Choose variants instead"):
        variants.build(full, variants.variants_for(full), settings={key: 3})


def test_a_factorys_own_default_for_checkpoint_stands():
    def factory(checkpoint=lambda fun: fun):
        block = checkpoint(lambda w, x: jnp.tanh(x @ w))
        return (lambda w, x: jnp.sum(block(w, x))), (jnp.eye(4), jnp.ones((2, 4)))

    built = variants.build(factory, variants.variants_for(factory))
    functions, args = built.functions, built.args
    assert {"none", "whole"} <= functions.keys()
    assert float(functions["none"](*args)) == float(functions["whole"](*args))
