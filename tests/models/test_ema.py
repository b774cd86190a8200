"""The average of weights: the formula, where it begins, and what it leaves as it was."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.nn as nn

from tests.build import config
from torchtitan_dp.checkpoint import manager, safe_load
from torchtitan_dp.checkpoint.folder import AVERAGE, read_decay, states_to_save
from torchtitan_dp.checkpoint.start import Start, own_checkpoint, refuse_another_decay
from torchtitan_dp.models.ema import WeightAverage, ema_of

SHAPES = {"a": (5, 3), "b": (7,)}


def parameters(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return {n: nn.Parameter(torch.randn(s, generator=generator)) for n, s in SHAPES.items()}


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


def test_it_reaches_back_over_a_tenth_of_the_steps():
    """As the documents say: how many steps old the weights in it are, on average."""
    weight = nn.Parameter(torch.zeros(()))
    average = WeightAverage({"w": weight}, 0.9999)
    for number in range(1, 2001):
        weight.data.fill_(number)
        average.update()
    assert 2000 - average.state_dict()["weights"]["w"].item() == pytest.approx(200, rel=0.05)


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


def saved(place, states):
    """A checkpoint of these alone."""
    dcp.save(states, checkpoint_id=place / "step-10", no_dist=True)
    return own_checkpoint(str(place), 10)


def test_a_run_resumes_with_the_decay_that_it_began_with_alone(begun, tmp_path):
    start = saved(tmp_path, states_to_save(begun, 0.99))
    assert read_decay(start.place, default=0.5) == 0.99
    refuse_another_decay(config("--ema.enable", "--ema.decay=0.99"), start)
    found = WeightAverage(parameters(9), 0.99)
    safe_load.load({AVERAGE: found}, start.place, no_dist=True)
    found.begin()
    assert found.updates == begun.updates == 10
    for name, value in begun.state_dict()["weights"].items():
        assert torch.equal(found.state_dict()["weights"][name], value)
    with pytest.raises(ValueError, match=r"^ema\.decay = 0\.95: ") as refused:
        refuse_another_decay(config("--ema.enable", "--ema.decay=0.95"), start)
    assert f"the average in {start.place} has 0.99; set it back" in str(refused.value)
    assert "another job.dump_folder" in str(refused.value)
    assert "\n" not in str(refused.value)
    refuse_another_decay(config("--ema.decay=0.95"), start)  # it is not continued
    refuse_another_decay(config("--ema.enable", "--ema.decay=0.95"), Start())


@pytest.mark.parametrize(
    "decays", ["", "{}x", "[1]", "{}", "null", '"a"', "[" * 100_000, "NaN", "1.0", "-0.5"]
)
def test_a_damaged_decay_is_one_line(begun, tmp_path, decays):
    """A start leaves it to the load, which finds damage, and may go back further."""
    start = saved(tmp_path, {AVERAGE: begun.state_dict() | {"decays": decays}})
    with pytest.raises(ValueError, match=r"^the ema.decay in .*step-10 cannot be read: ") as error:
        read_decay(start.place, default=0.5)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 500
    refuse_another_decay(config("--ema.enable"), start)


def test_an_older_checkpoint_that_a_load_goes_back_to_is_compared_too(begun, tmp_path, monkeypatch):
    older = saved(tmp_path, {AVERAGE: begun.state_dict() | {"decays": "0.99"}})
    other = config("--ema.enable", "--ema.decay=0.95")
    monkeypatch.setattr(manager, "confirmed", lambda *_: older)
    with pytest.raises(SystemExit, match=r"^error: ema\.decay = 0\.95: "):
        manager.Checkpointer._load(SimpleNamespace(_config=other, start=None, folder=""), -1)


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
