import logging
import os
import subprocess
import sys
import threading

import pytest

from jaxckpt import _quiet
from jaxckpt._quiet import accelerator_visible, quiet


@pytest.fixture(autouse=True)
def no_accelerator(monkeypatch):
    monkeypatch.setattr(_quiet, "_DEVICES", ())


def test_what_native_code_writes_goes_to_the_log(capfd, caplog):
    with caplog.at_level(logging.DEBUG, logger="jaxckpt"), quiet():
        os.write(2, b"I0000 could not find drivers\n")
    os.write(2, b"after\n")
    assert capfd.readouterr().err == "after\n"
    assert "could not find drivers" in caplog.text
    assert {record.levelname for record in caplog.records} == {"DEBUG"}


def test_what_jax_logs_of_a_failing_plugin_goes_to_the_log(caplog, capfd):
    with caplog.at_level(logging.DEBUG, logger="jaxckpt"):
        with quiet():
            logging.getLogger("jax._src.xla_bridge").error("plugin %s failed", "xla_cuda12")
        assert [r.name for r in caplog.records] == ["jaxckpt"]
        assert "plugin xla_cuda12 failed" in caplog.text
        logging.getLogger("jax._src.xla_bridge").error("later")
    assert [r.name for r in caplog.records] == ["jaxckpt", "jax._src.xla_bridge"]


def test_exceptions_pass_and_standard_error_comes_back(capfd):
    with pytest.raises(RuntimeError, match="of the plugin"), quiet():
        raise RuntimeError("of the plugin")
    print("after", file=sys.stderr, flush=True)
    os.write(2, b"and after\n")
    assert "and after\n" in capfd.readouterr().err


def test_it_nests_and_threads_share_it(capfd):
    inside, done = threading.Event(), threading.Event()

    def other():
        with quiet():
            inside.set()
            done.wait(10)
            os.write(2, b"noise of the other\n")

    thread = threading.Thread(target=other)
    with quiet(), quiet():
        thread.start()
        assert inside.wait(10)
        os.write(2, b"noise\n")
    os.write(2, b"still the other's\n")  # the other one is not through
    done.set()
    thread.join()
    os.write(2, b"after\n")
    assert capfd.readouterr().err == "after\n"
    assert len(os.listdir("/proc/self/fd")) < 200


def test_the_level_of_the_native_log_is_put_back(monkeypatch):
    monkeypatch.setenv("TF_CPP_MIN_LOG_LEVEL", "1")
    with quiet():
        assert os.environ["TF_CPP_MIN_LOG_LEVEL"] == "3"
    assert os.environ["TF_CPP_MIN_LOG_LEVEL"] == "1"
    monkeypatch.setenv("TF_CPP_MIN_LOG_LEVEL", "0")  # somebody wants to see it all
    with quiet():
        assert os.environ["TF_CPP_MIN_LOG_LEVEL"] == "0"
    assert os.environ["TF_CPP_MIN_LOG_LEVEL"] == "0"


def test_where_an_accelerator_is_visible_nothing_is_diverted(monkeypatch, capfd):
    monkeypatch.setattr(_quiet, "_DEVICES", ("/dev/null",))
    with quiet():
        os.write(2, b"the driver is too old\n")
    assert capfd.readouterr().err == "the driver is too old\n"


# ------------------------------------------------------------------------------------------------ programs and commands
# In processes of their own, and as a shell starts them: without JAX_PLATFORMS, with the compilers of accelerators
# installed that are not here.

needs_none = pytest.mark.skipif(
    accelerator_visible(), reason="an accelerator is visible, and what its libraries say is wanted"
)
FACTORY = """
import jax, jax.numpy as jnp
def model(checkpoint=None, segment_size=1):
    block = (checkpoint or (lambda f: f))(lambda x, w: jnp.tanh(x @ w))
    def loss(ws, x):
        for w in ws:
            x = block(x, w)
        return jnp.mean(x)
    return loss, ([jax.ShapeDtypeStruct((16, 16), jnp.float32)] * 3, jax.ShapeDtypeStruct((256, 16), jnp.float32))
"""


def said(*argv, **variables):
    """What a program writes to standard error; an error if it fails."""
    environment = {
        name: value for name, value in os.environ.items() if name not in ("JAX_PLATFORMS", _quiet._LOG_LEVEL)
    }
    done = subprocess.run([sys.executable, *argv], env=environment | variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stderr


@needs_none
@pytest.mark.parametrize("variables", [{}, {"JAX_PLATFORMS": "cpu"}])
@pytest.mark.parametrize(
    "program",
    [
        "import jaxckpt, jax; jax.devices(); jax.numpy.ones(3) + 1",
        "import jaxckpt, jax.numpy as jnp; jnp.ones(3) + 1",
        "import jaxckpt, jax; jax.jit(lambda x: x + 1).lower(1.0).compile()",
    ],
)
def test_a_program_that_imports_jaxckpt_first_says_nothing(program, variables):
    assert said("-c", program, **variables) == ""


COMMANDS = [
    ["--version"],
    ["targets"],
    ["plan", "F", "--budget", "1GiB"],
    ["plan", "F", "--budget", "90KiB", "--no-verify"],
    ["compare", "F", "--variants", "none,dots"],
    ["measure", "F"],
    ["residuals", "F"],
    pytest.param(["measure", "F", "--target", "cuda:h100"], marks=pytest.mark.cuda),
    pytest.param(["measure", "F", "--target", "tpu:v5e:2x2"], marks=pytest.mark.tpu),
]


@needs_none
@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_every_command_says_nothing_but_its_report(command, tmp_path):
    (tmp_path / "factory.py").write_text(FACTORY)
    words = [f"{tmp_path}/factory.py:model" if word == "F" else word for word in command]
    assert said("-m", "jaxckpt.cli", *words) == ""


@needs_none
def test_what_is_said_at_the_start_is_in_the_log_and_backends_start_once():
    program = """
import logging, sys
logging.basicConfig(level=logging.DEBUG, stream=sys.stdout, format="%(name)s")
import jaxckpt, jax
from jax._src import xla_bridge
before = xla_bridge.backends
jax.devices()
assert xla_bridge.backends is not before, "what stands in for it goes once it has run"
jax.clear_caches()
assert jax.devices() == jax.devices()
"""
    assert said("-c", program) == ""


def test_backends_that_do_not_start_raise_as_they_do():
    program = """
import jaxckpt, jax
try:
    jax.devices()
except RuntimeError as error:
    assert "nowhere" in str(error)
else:
    raise AssertionError("there is no such platform")
"""
    assert said("-c", program, JAX_PLATFORMS="nowhere") == ""
