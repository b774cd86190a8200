"""The average of weights: the formula, where it begins, and what it leaves as it was."""

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.nn as nn

from tests.build import config
from torchtitan_dp.checkpoint.folder import AVERAGE, load
from torchtitan_dp.models.ema import WeightAverage, ema_of


def parameters(seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = {"a": (5, 3), "b": (7,)}
    return {n: nn.Parameter(torch.randn(s, generator=generator)) for n, s in shapes.items()}


@torch.no_grad()
def step(weights, number):
    """Weights that are those of no other step."""
    for parameter, other in zip(weights.values(), parameters(number).values(), strict=True):
        parameter.copy_(other)


@pytest.mark.parametrize("decay", [0.0, 0.15, 0.9999])
def test_it_is_a_loop_of_the_formula(decay):
    weights = parameters()
    average = WeightAverage(weights, decay)
    expected = {name: p.detach().double() for name, p in weights.items()}
    for t in range(30):
        step(weights, t + 1)
        average.update()
        d = min(decay, (1 + t) / (10 + t))
        expected = {n: d * e + (1 - d) * weights[n].detach() for n, e in expected.items()}
    for name, found in average.state_dict()["weights"].items():
        assert found.dtype == torch.float32
        torch.testing.assert_close(found.double(), expected[name], rtol=1e-5, atol=1e-6)
    assert average.updates == 30


def test_it_begins_with_what_was_loaded():
    """The model's weights are loaded after it was made; later ones are not begun with."""
    weights = parameters()
    average = WeightAverage(weights, 0.9)
    for number in (1, 2):
        step(weights, number)
        average.begin()
        assert torch.equal(average.state_dict()["weights"]["a"], parameters(1)["a"])
        if number == 1:
            average.update()


@pytest.fixture
def begun():
    """Of ten steps, by 0.99."""
    average = WeightAverage(parameters(), 0.99)
    for _ in range(10):
        average.update()
    return average


def test_a_resumed_run_continues_it(begun, tmp_path):
    (tmp_path / "checkpoint").mkdir(mode=0o700)
    step = str(tmp_path / "checkpoint" / "step-10")
    dcp.save({AVERAGE: begun}, checkpoint_id=step, no_dist=True)
    found = WeightAverage(parameters(9), 0.99)
    load({AVERAGE: found}, step, no_dist=True)
    found.begin()
    assert found.updates == begun.updates == 10
    for name, value in begun.state_dict()["weights"].items():
        assert torch.equal(found.state_dict()["weights"][name], value)


def test_weights_and_average_are_given_back_bit_by_bit():
    weights = parameters()
    average = WeightAverage(weights, 0.9)
    step(weights, 1)
    average.update()
    held = {name: value.clone() for name, value in average.state_dict()["weights"].items()}

    def fail():
        with average.in_place_of_weights():
            assert all(torch.equal(weights[name], value) for name, value in held.items())
            for refused in (average.update, average.state_dict):
                with pytest.raises(AssertionError, match="the model has averages"):
                    refused()
            raise KeyError("stop")

    with pytest.raises(KeyError, match="stop"):
        fail()
    for name, parameter in parameters(1).items():
        assert torch.equal(weights[name], parameter)
        assert torch.equal(average.state_dict()["weights"][name], held[name])


def test_it_is_of_what_is_trained():
    layers = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, bias=False))
    layers[0].requires_grad_(False)
    assert ema_of(config(), layers) is None
    average = ema_of(config("--ema.enable", "--ema.decay=0.5"), layers)
    assert list(average.state_dict()["weights"]) == ["1.weight"]
