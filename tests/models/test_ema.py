"""The average of weights: the formula, where it begins, and what it leaves as it was."""

import functools
import logging

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.nn as nn

from tests.build import config
from torchtitan_dp.checkpoint import safe_load
from torchtitan_dp.checkpoint.average import (
    AVERAGE,
    DECAYS,
    UNRECORDED,
    Decay,
    WithoutDecays,
    decays_from_json,
    decays_in_words,
    has_decays,
)
from torchtitan_dp.models.ema import WeightAverage, ema_of
from torchtitan_dp.release.__main__ import read_decays

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
        average.update(t + 1)
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
        average.update(number)
    assert 2000 - average.state_dict()["weights"]["w"].item() == pytest.approx(200, rel=0.05)


def test_it_begins_with_what_was_loaded():
    """The model's weights are loaded after it was made; later ones are not begun with."""
    weights = parameters()
    average = WeightAverage(weights, 0.9)
    step(weights, 1)
    average.begin()
    assert torch.equal(average.state_dict()["weights"]["a"], weights["a"])
    average.update(1)
    step(weights, 2)
    average.begin()
    assert torch.equal(average.state_dict()["weights"]["a"], parameters(1)["a"])


def saved(average, folder, *, without=()):
    """A checkpoint of it, alone: or as it was before some of what it holds was kept."""
    held = {name: value for name, value in average.state_dict().items() if name not in without}
    dcp.save({AVERAGE: held}, checkpoint_id=folder, no_dist=True)
    return str(folder)


def resumed(folder, decay, updates=3):
    """An average that goes on from a checkpoint, and has made as many steps more."""
    average = WeightAverage(parameters(9), decay)
    state = average if has_decays(folder) else WithoutDecays(average)
    safe_load.load({AVERAGE: state}, folder, no_dist=True)
    average.begin()
    first = average.updates + 1
    for number in range(first, first + updates):
        average.update(number)
    return average


@pytest.fixture
def begun():
    """Of ten steps."""
    average = WeightAverage(parameters(), 0.99)
    for number in range(1, 11):
        average.update(number)
    return average


def test_checkpoints_say_which_decay_held_from_which_step_on(begun, tmp_path, caplog):
    caplog.set_level(logging.INFO)
    first = saved(begun, tmp_path / "1")
    assert read_decays(first) == (Decay(0.99, 1),)
    again = resumed(first, 0.99)
    assert again.decays == (Decay(0.99, 1),)
    assert "ema.decay" not in caplog.text
    changed = resumed(first, 0.95)
    assert "ema.decay = 0.95 from here on, and until here: 0.99" in caplog.text
    second = saved(changed, tmp_path / "2")
    assert read_decays(second) == (Decay(0.99, 1), Decay(0.95, 11))
    third = saved(resumed(second, 0.99), tmp_path / "3")
    expected = "0.99 until step 10, 0.95 until step 13, 0.99 after"
    assert decays_in_words(read_decays(third)) == expected


@pytest.mark.parametrize("decay", [0.99, 0.95])
def test_checkpoints_of_before_decays_were_kept_are_gone_on_with(begun, tmp_path, decay, caplog):
    """It is not made up what they were made by."""
    caplog.set_level(logging.INFO)
    old = saved(begun, tmp_path / "old", without=(DECAYS,))
    assert read_decays(old) == UNRECORDED
    average = resumed(old, decay, updates=0)
    for name, value in begun.state_dict()["weights"].items():
        assert torch.equal(average.state_dict()["weights"][name], value)
    assert average.updates == 10
    assert f"ema.decay = {decay:g} from here on, and until here: not recorded" in caplog.text
    average.update(11)
    read = read_decays(saved(average, tmp_path / "new"))
    assert decays_in_words(read) == f"not recorded until step 10, {decay:g} after"


@pytest.mark.parametrize(
    "text", ["", "{}x", "[1]", '[["a", 1]]', "[[0.9, null]]", "[[0.9, Infinity]]", "[" * 100_000]
)
def test_damaged_decays_are_one_line(text):
    with pytest.raises(ValueError, match="the decays of an average cannot be read"):
        decays_from_json(text)


@pytest.mark.parametrize(
    "text",
    [
        "[[NaN, 1]]",
        "[[1.0, 1]]",
        "[[-0.5, 1]]",
        "[[0.9, 0]]",
        "[[0.9, -1]]",
        "[[0.9, 5], [0.8, 5]]",
    ],
)
def test_decays_that_cannot_be_are_one_line(text):
    with pytest.raises(ValueError, match="these are no decays of an average"):
        decays_from_json(text)


def test_weights_and_average_are_given_back_bit_by_bit():
    weights = parameters()
    average = WeightAverage(weights, 0.9)
    step(weights, 1)
    average.update(1)
    held = {name: value.clone() for name, value in average.state_dict()["weights"].items()}

    def fail():
        with average.in_place_of_weights():
            assert all(torch.equal(weights[name], value) for name, value in held.items())
            for refused in (functools.partial(average.update, 2), average.state_dict):
                with pytest.raises(AssertionError, match="the model holds averages"):
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


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("--ema.decay=1", "ema.decay = 1.0: must be at least 0 and below 1"),
        ("--ema.decay=nan", "ema.decay = nan: must be"),
        ("--training.dtype=bfloat16", "training.dtype = 'bfloat16': averages are of fp32"),
        ("--checkpoint.async_mode=async_with_pinned_mem", "'async_with_pinned_mem': validation"),
    ],
)
def test_what_cannot_be_averaged_is_refused_in_one_line(option, said):
    config(option, "--privacy.no-enable")  # without an average it is nobody's concern
    with pytest.raises(ValueError, match=r"ema\.(decay|enable) = ") as error:
        config(option, "--privacy.no-enable", "--ema.enable")
    assert said in str(error.value)
    assert "\n" not in str(error.value)
