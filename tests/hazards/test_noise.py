"""Hazards of noise and of the update, on real meshes: rows 8, 9, 10, 12, 14, 16, 36 and 64. What
noise is at a position, and rows 11, 39 and 40, are held by tests/privacy."""

import math

import pytest
import torch

from tests import build
from tests.processes.ranks import on_ranks
from torchtitan_dp.gradients.optimizer import DPOptimizer
from torchtitan_dp.privacy.banded import NoiseChain, StepNoise
from torchtitan_dp.privacy.coefficients import cut_off
from torchtitan_dp.privacy.keys import RootKey

KEY = bytes(range(32))


def private(built, inner, *, sigma=1.0, C=1.0, batch=1.0):
    terms = {"noise_multiplier": sigma, "max_grad_norm": C, "expected_batch_size": batch}
    return DPOptimizer(inner, built.parameters, **terms)


def noise_of(degrees, microbatches=0, key=KEY, *, C=1.0, **terms):
    """The whole gradients, by name, that the inner optimizer sees, for padding samples only."""
    built = build.build(degrees, max_grad_norm=C)

    class Recorder(torch.optim.SGD):
        def step(self, closure=None):
            self.seen = {n: p.grad.full_tensor().clone() for n, p in built.parameters.items()}

    recorder = Recorder(list(built.parameters.values()), lr=0.0)
    dp = private(built, recorder, C=C, **terms)
    tokens_NT, labels_NT = build.data(samples=1)
    for _ in range(microbatches):
        loss_1 = built.losses(tokens_NT, torch.full_like(labels_NT, -100))
        built.gradients.accumulate_clipped(loss_1, torch.tensor([True]))
    dp.step(built.gradients.clipped_sum.take(), StepNoise(key))
    return recorder.seen


def flat(gradients: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.cat([gradients[n].flatten() for n in sorted(gradients)]).double()


def scaled_noise_of(degrees, microbatches):
    return noise_of(degrees, microbatches, sigma=1.5, C=0.5, batch=4.0)


@pytest.mark.thorough_cases("(1, 1, 2)-0", "(1, 1, 2)-3", "(2, 1, 2)-0", "(2, 1, 2)-3")
@pytest.mark.parametrize("microbatches", [0, 1, 3, 8])
@pytest.mark.parametrize("degrees", [(1, 1, 1), (1, 1, 2), (1, 2, 2), (2, 1, 2)], ids=str)
def test_row08_variance_is_sigma_C_over_batch(degrees, microbatches):
    """Chi-squared, at 5 standard deviations, whatever the ranks and the microbatches."""
    for gradients in on_ranks(math.prod(degrees), scaled_noise_of, degrees, microbatches):
        z = flat(gradients) / (1.5 * 0.5 / 4)
        assert abs(z.square().sum().item() - z.numel()) < 5 * math.sqrt(2 * z.numel())
        assert abs(z.mean().item()) < 5 / math.sqrt(z.numel())


def test_row09_no_run_of_noise_occurs_twice():
    other = bytes(reversed(KEY))
    gradients = [flat(on_ranks(4, noise_of, (1, 2, 2), 0, key)[0]) for key in (KEY, other)]
    runs = torch.cat(gradients).unfold(0, 4, 1)
    assert len(torch.unique(runs, dim=0)) == len(runs)
    first, second = gradients
    correlation = torch.corrcoef(torch.stack([first, second]))[0, 1].item()
    assert abs(correlation) < 5 / math.sqrt(len(first))


def test_row12_noise_is_bit_identical_on_every_mesh():
    meshes = [(1, 1, 1), (1, 1, 2), (1, 2, 1), (2, 1, 1), (1, 1, 4), (1, 2, 2), (2, 1, 2)]
    alone, *others = [on_ranks(math.prod(d), noise_of, d, 1)[0] for d in meshes]
    for other in others:
        assert all(torch.equal(alone[name], other[name]) for name in alone)


def correlated_noise_of(degrees):
    """The noise of a few steps of a chain of 8 bands, without any sample."""
    built, found = build.build(degrees), {}
    sgd = torch.optim.SGD(list(built.parameters.values()), lr=1.0)
    dp, chain = private(built, sgd), NoiseChain(RootKey(KEY).stream("noise"), cut_off(8))
    for step in range(1, 65):
        if step in (1, 2, 20, 64):
            for parameter in built.parameters.values():
                parameter.data.zero_()  # so that the update is the noise, bit by bit
        dp.step(built.gradients.clipped_sum.take(), chain.take(step))
        if step in (1, 2, 20, 64):
            found |= {f"{step} {n}": -p.full_tensor() for n, p in built.parameters.items()}
        built.gradients.clipped_sum.reset()
    return found


def test_row64_correlated_noise_is_bit_identical_on_every_mesh():
    """Of 64 steps, four: each has noise of all keys before it."""
    meshes = [(1, 1, 1), (1, 1, 2), (1, 1, 4), (1, 2, 2), (2, 1, 2)]
    alone, *others = [on_ranks(math.prod(d), correlated_noise_of, d)[0] for d in meshes]
    for other in others:
        assert all(torch.equal(alone[name], other[name]) for name in alone)
    first, last = (flat({n: g for n, g in alone.items() if n.startswith(s)}) for s in ("1 ", "2 "))
    correlation = torch.corrcoef(torch.stack([first, last]))[0, 1].item()
    assert correlation == pytest.approx(-0.5 / math.sqrt(1.25), abs=0.02)


def hashes_after_steps(degrees):
    built = build.build(degrees)
    dp = private(built, torch.optim.AdamW(list(built.parameters.values()), lr=1e-2), batch=2.0)
    for step in range(5):
        built.accumulate(*build.data(samples=3, seed=step))
        dp.step(built.gradients.clipped_sum.take(), StepNoise(bytes([step]) * 32))
        built.gradients.clipped_sum.reset()
    return [p.to_local().double().sum().item() for p in built.model.parameters()]


def test_row10_replicas_stay_identical():
    ranks = on_ranks(4, hashes_after_steps, (2, 1, 2))
    assert ranks[0] == ranks[2]
    assert ranks[1] == ranks[3]
    assert ranks[0] != ranks[1]  # different shards: the test would see a difference


def update_of(degrees, samples, batch):
    """The gradient handed on without noise, and the clipped sum."""
    built = build.build(degrees)
    sgd = torch.optim.SGD(list(built.parameters.values()), lr=1.0)
    before = {n: p.full_tensor().clone() for n, p in built.parameters.items()}
    dp = private(built, sgd, sigma=0.0, batch=batch)
    built.accumulate(*build.data(samples=samples))
    dp.step(built.gradients.clipped_sum.take(), StepNoise(KEY))
    moved = {n: before[n] - p.full_tensor() for n, p in built.parameters.items()}
    reference = build.reference_gradients(build.reference_model(), *build.data(samples=samples))
    expected = {n: g / batch for n, g in build.reference_sum(reference, 1.0).items()}
    return build.relative_error(moved, expected)


@pytest.mark.parametrize("samples", [1, 3])
@pytest.mark.parametrize("degrees", [(1, 1, 2), (2, 1, 2)], ids=str)
def test_row14_the_divisor_is_the_expected_batch(degrees, samples):
    """Draws of 1 and of 3 samples are both divided by 5."""
    assert max(on_ranks(math.prod(degrees), update_of, degrees, samples, 5)) < 1e-4
