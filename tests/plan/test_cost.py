"""What a step is expected to take, and how long at a stated rate."""

import pytest

from tests import build
from torchtitan_dp.models.hugging_face import shape
from torchtitan_dp.plan.cost import step_cost


def cost(mode, tflops):
    config = build.config(f"--activation_checkpoint.mode={mode}", degrees=(1, 1, 2))
    return step_cost(config, shape(config), records=10, rate=0.4, tflops=tflops)


def test_no_time_without_a_rate():
    assert cost("none", None).seconds_per_step is None
    assert "stated" not in cost("none", None).describe()


@pytest.mark.parametrize("mode, factor", [("none", 1), ("full", 4 / 3)])
def test_time_at_a_stated_rate(mode, factor):
    found = cost(mode, 2.0)
    assert found.tokens_per_step == pytest.approx(4 * build.T, rel=1e-6)
    expected = factor * found.flops_per_step / (2 * 2e12)  # two devices
    assert found.seconds_per_step == pytest.approx(expected)
    assert f"{expected:.3g} s" in found.describe()
