"""A plan with its report shows itself: as a picture, as a page, in a notebook."""

import jax.numpy as jnp
import pytest

import jaxckpt
from jaxckpt.core.plan import Plan
from jaxckpt.show import plans


@pytest.fixture(scope="module")
def compiled():
    """A plan whose step, and the step as it is, were compiled."""

    def loss(ws, x):
        for w in ws:
            x = jnp.tanh(x @ w)
        return jnp.mean(x)

    return jaxckpt.plan(loss, [jnp.eye(16)] * 6, jnp.ones((256, 16)), budget="70%", target="cpu")


def test_a_plan_has_the_live_bytes_of_the_step_with_it_and_without(compiled, tmp_path):
    steps = plans.steps_of(compiled.report)
    assert list(steps) == ["without a plan", "planned"]
    assert steps["planned"].peak_bytes == compiled.measured_bytes < compiled.unplanned_bytes
    assert steps["without a plan"].peak_bytes == compiled.unplanned_bytes
    _, below = plans.plan_report_figure(compiled.report).axes
    names = [text.get_text().split(":")[0] for text in below.get_legend().get_texts()]
    assert names == ["without a plan", "planned"]
    tops = [max(line.get_ydata()) for line in below.lines if len(line.get_ydata()) > 1]
    assert len(tops) == 2 and tops[1] < tops[0]
    compiled.plot(tmp_path / "plan.svg")
    assert "Live bytes over the step" in (tmp_path / "plan.svg").read_text()


def test_a_plan_writes_a_page_of_its_own_and_shows_in_a_notebook(compiled, tmp_path):
    compiled.to_html(tmp_path / "plan.html")
    written = (tmp_path / "plan.html").read_text()
    for heading in ("Peaks", "Every buffer over the step", "What is kept where", "Largest buffers at the peak"):
        assert f"<h2>{heading}</h2>" in written
    assert written.count("<img") == 1 and "http" not in written.replace("http://www.w3.org", "")
    shown = compiled._repr_html_()
    assert shown == compiled.report._repr_html_() and shown.count("<img") == 1 and "keeps" in shown
    loaded = Plan.from_json(compiled.to_json())  # what the compiler said is not saved, only its peaks
    assert "<img" not in loaded._repr_html_() and str(loaded.report) == str(compiled.report)


def test_a_plan_without_a_report_says_so(tmp_path):
    plan = Plan((), "<x>")
    assert plan._repr_html_() == "<pre>Plan for the program &lt;x&gt;</pre>"
    for write in (plan.plot, plan.to_html):
        with pytest.raises(jaxckpt.ArgumentError, match="plan must be one with a report"):
            write(tmp_path / "plan.png")
