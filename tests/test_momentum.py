"""Momentum SGD in units of the noise: its steps, its refusals, and its state in a checkpoint."""

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.optim import AdamW

from tests import build
from tests.processes.ranks import on_ranks
from torchtitan_dp.checkpoint.start import Start, own_checkpoint, refuse_another_optimizer
from torchtitan_dp.gradients.optimizer import MomentumSGD

LR, NOISE_STD = 0.02, 0.3


def _weights() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(shape, generator=generator).double() for shape in ((4, 3), (5,))]


def _stepped(optimizer: torch.optim.Optimizer, weights: list[torch.Tensor], steps: int) -> None:
    generator = torch.Generator().manual_seed(2)
    for _ in range(steps):
        for weight in weights:
            weight.grad = torch.randn(weight.shape, generator=generator).double()
        optimizer.step()


def test_steps_are_adamws_with_the_noise_in_the_place_of_its_second_moment() -> None:
    """AdamW with a very large eps divides by eps alone."""
    mine, adamws = _weights(), _weights()
    settings = {"betas": (0.9, 0.95), "weight_decay": 0.0}
    momentum = MomentumSGD(mine, lr=LR, noise_std=NOISE_STD, **settings)  # type: ignore[arg-type]
    eps = 1e9
    _stepped(momentum, mine, 5)
    _stepped(AdamW(adamws, lr=LR * eps / NOISE_STD, eps=eps, **settings), adamws, 5)  # type: ignore[arg-type]
    for found, expected, before in zip(mine, adamws, _weights(), strict=True):
        assert (expected - before).abs().max() > LR
        torch.testing.assert_close(found, expected, rtol=1e-7, atol=0)


def test_weights_decay_by_themselves() -> None:
    (weight,) = weights = [torch.full((3,), 2.0)]
    optimizer = MomentumSGD(weights, lr=0.1, weight_decay=0.5)
    weight.grad = torch.zeros(3)
    optimizer.step()
    torch.testing.assert_close(weight, torch.full((3,), 2.0 * (1 - 0.1 * 0.5)))


def unit_of_a_step() -> list[float]:
    """What a `MomentumSGD` divides by, in two steps of noise 0.5, C = 3 and a batch of 10."""
    built, units = build.build(max_grad_norm=3.0), []
    for noise_of_step in (None, 0.7):  # with correlated noise a key's is another
        inner = MomentumSGD(built.parameters.values(), lr=LR)
        built.step.optimizer(
            inner, noise_multiplier=0.5, expected_batch_size=10, noise_of_step=noise_of_step
        )
        units.append(inner.noise_std)
    return units


def test_the_noise_is_that_of_the_mean_gradient() -> None:
    assert on_ranks(1, unit_of_a_step) == [[pytest.approx(0.15)] * 2]


def test_a_state_that_is_loaded_goes_on() -> None:
    one, other = _weights(), _weights()
    whole, first = MomentumSGD(one, lr=LR), MomentumSGD(other, lr=LR)
    _stepped(whole, one, 3)
    _stepped(first, other, 3)
    second = MomentumSGD(other, lr=LR)
    second.load_state_dict(first.state_dict())
    _stepped(whole, one, 2)
    _stepped(second, other, 2)
    for found, expected in zip(other, one, strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize(
    ("earlier", "kept", "name", "other"),
    [
        ("AdamW", ("exp_avg", "exp_avg_sq"), "AdamW", "MomentumSGD"),
        ("MomentumSGD", ("exp_avg",), "MomentumSGD", "Adam"),
    ],
)
def test_a_run_goes_on_with_the_optimizer_that_it_began_with(tmp_path, earlier, kept, name, other):
    state = {f"optimizer.state.weight.{key}": torch.ones(2) for key in kept}
    dcp.save(state, checkpoint_id=tmp_path / "step-10", no_dist=True)
    start = own_checkpoint(str(tmp_path), 10)
    refuse_another_optimizer(build.config(f"--optimizer.name={name}"), start)
    line = rf"^optimizer.name = '{other}': .* is of '{earlier}'; set it back"
    with pytest.raises(ValueError, match=line):
        refuse_another_optimizer(build.config(f"--optimizer.name={other}"), start)
    refuse_another_optimizer(build.config(f"--optimizer.name={other}"), Start())


@pytest.mark.parametrize("without", ["--privacy.no-enable", "--privacy.noise_multiplier=0"])
def test_without_noise_there_is_no_unit(without):
    with pytest.raises(ValueError, match=r"^optimizer.name = 'MomentumSGD': .* use 'AdamW'$"):
        build.config("--optimizer.name=MomentumSGD", without)
