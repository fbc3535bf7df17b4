import logging
import os
import sys
import threading

import pytest

from jaxckpt import _quiet
from jaxckpt._quiet import quiet


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
