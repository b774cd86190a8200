"""The columns that are found for runs: their objective, and the noise that they leave in weights,
of six runs by the closed form, and by the optimizers themselves on noise alone."""

import itertools

import numpy as np
import pytest
import torch

from tests import build
from torchtitan_dp.checkpoint.plan import shares_of_steps
from torchtitan_dp.gradients.optimizer import MomentumSGD
from torchtitan_dp.models.ema import WeightAverage
from torchtitan_dp.privacy.banded import NoiseChain
from torchtitan_dp.privacy.coefficients import (
    column_norm,
    cut_off,
    found_for,
    noise_in_step,
    noise_in_weights,
)
from torchtitan_dp.privacy.keys import RootKey
from torchtitan_dp.privacy.noise import add_gaussian_noise_

VALUES = 20_000


def run(steps: int, *options: str, name: str = "MomentumSGD"):
    return build.config(
        *(f"--training.steps={steps}", f"--optimizer.name={name}", "--optimizer.lr=0.01"),
        *("--lr_scheduler.warmup_steps=10", *options),
    )


def factor(config, step: int) -> float:
    """The linear warm-up and decay of TorchTitan, as its documentation has it."""
    warmup, steps = config.lr_scheduler.warmup_steps, config.training.steps
    if step <= warmup:
        return step / warmup
    return 1 - max(0, step - warmup - 1) / (steps - warmup)


def trained(config, gradients) -> torch.Tensor:
    """The weights that a run exports, from 0, by these gradients."""
    weight = torch.nn.Parameter(torch.zeros(VALUES))
    settings = config.optimizer
    terms = {"betas": (settings.beta1, settings.beta2), "weight_decay": settings.weight_decay}
    kind = {"MomentumSGD": MomentumSGD, "AdamW": torch.optim.AdamW}[settings.name]
    optimizer = kind([weight], lr=settings.lr, **terms)
    average = WeightAverage({"w": weight}, config.ema.decay) if config.ema.enable else None
    for step, gradient in enumerate(gradients, start=1):
        optimizer.param_groups[0]["lr"] = settings.lr * factor(config, step)
        weight.grad = gradient
        optimizer.step()
        if average is not None:
            average.update()
    return weight.detach() if average is None else average.state_dict()["weights"]["w"]


def gradients_of(column, steps: int, signal: float = 0.0):
    """A chain's noise for sigma = 1, beside a signal of one sign in each half of the values."""
    chain, std = NoiseChain(RootKey(bytes(32)).stream("noise"), column), column_norm(column)
    for step in range(1, steps + 1):
        noise, flat = chain.take(step), torch.full((VALUES,), signal)
        flat[VALUES // 2 :] *= -1
        terms = {"std": std, "key": noise.key, "name": "w", "start": 0}
        noise.add_to(flat, "w", lambda x, terms=terms: add_gaussian_noise_(x, **terms))
        yield flat


@pytest.mark.parametrize("ema", [(), ("--ema.enable", "--ema.decay=0.9")], ids=["last", "average"])
@pytest.mark.parametrize("beta", [0.0, 0.9])
@pytest.mark.parametrize("schedule", [(), ("--lr_scheduler.total_steps=40",)])
def test_the_shares_are_those_of_the_optimizer(beta, ema, schedule):
    """Weights by one gradient alone, in each step of 24, with a decay that shows."""
    options = (f"--optimizer.beta1={beta}", "--optimizer.weight_decay=5", *ema)
    config = run(24, *options)
    moved = []
    for step in range(24):
        gradients = (torch.full((VALUES,), float(step == at)) for at in range(24))
        moved.append(-trained(config, gradients)[0].item())
    assert np.allclose(shares_of_steps(config), np.array(moved) / max(moved), rtol=1e-4)
    longer = run(24, *options, *schedule)
    assert (shares_of_steps(longer) == shares_of_steps(config)) == (not schedule)


def test_a_warm_up_longer_than_the_run_is_cut_as_torchtitan_cuts_it():
    late = ("--lr_scheduler.warmup_steps=200", "--lr_scheduler.decay_ratio=0.5")
    shares = shares_of_steps(run(5, *late, "--optimizer.beta1=0", "--optimizer.weight_decay=0"))
    assert shares == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])


@pytest.mark.parametrize("steps, bands", [*itertools.product((160, 400, 1_000), (4, 16))])
def test_a_found_column_leaves_less_noise_at_equal_epsilon(steps, bands):
    """Epsilon has the bands and sigma alone, so that shares of one sigma compare. At 16 bands at
    least 7% less, and a step's noise is at most twice as large."""
    config = run(steps)
    shares = shares_of_steps(config)
    column, before = found_for(shares, bands), cut_off(bands)
    assert column == found_for(shares, bands)
    assert column[0] == 1.0
    assert len(column) == bands
    less = noise_in_weights(column, shares) / noise_in_weights(before, shares)
    assert less < 0.93
    assert noise_in_step(column, steps) < 2 * noise_in_step(before, steps)
    found, cut = (trained(config, gradients_of(c, steps)).std() for c in (column, before))
    assert (found / cut).item() == pytest.approx(less, rel=0.02)
    alone = trained(config, gradients_of((1.0,), steps)).std()
    assert (found / alone).item() == pytest.approx(noise_in_weights(column, shares), rel=0.03)
