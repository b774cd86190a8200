"""Scale-then-privatize, one-process: its sensitivity, its noise, and that s = 1 is plain DP-SGD."""

import json
from pathlib import Path

import pytest
import torch

from scripts.experiments import scaled, scaling

DOCS = Path(__file__).parent.parent / "docs"
PARTS = {"a": 3000, "b": 1001}
N = sum(PARTS.values())


def gradients() -> list[torch.Tensor]:
    """Long ones, a short one, one that is no number, and one that is large in few places."""
    generator = torch.Generator().manual_seed(0)
    found = [torch.randn(N, generator=generator) * size for size in (1.0, 5.0, 1e-4)]
    few = torch.zeros(N)
    few[:7] = 3.0
    return [*found, few, torch.full((N,), torch.nan)]


def geometry() -> torch.Tensor:
    """Scales that differ by a thousand."""
    return torch.logspace(-1.5, 1.5, N)


def mean_of(scale_N: torch.Tensor | None, noise_std: float) -> torch.Tensor:
    total_N = torch.zeros(N)
    for gradient_N in gradients():
        scaling.add_clipped_(total_N, gradient_N.clone(), scale_N, max_grad_norm=1.0)
    return scaling.noised_mean(
        total_N, PARTS, scale_N, noise_std=noise_std, key=bytes(32), batch=4
    ).clone()


def test_where_all_scales_are_one_it_is_plain_dp_sgd_bit_for_bit():
    plain_N = mean_of(None, noise_std=0.4)
    assert torch.equal(mean_of(torch.ones(N), noise_std=0.4), plain_N)
    assert not torch.equal(mean_of(geometry(), noise_std=0.4), plain_N)


def test_a_record_moves_the_sum_by_at_most_the_bound_in_the_scaled_geometry():
    for gradient_N in gradients():
        total_N = torch.zeros(N)
        scaling.add_clipped_(total_N, gradient_N.clone(), geometry(), max_grad_norm=0.5)
        length = (gradient_N * geometry()).norm().item()
        expected = 0.0 if length != length else min(length, 0.5)
        assert total_N.double().norm().item() <= 0.5
        assert total_N.norm().item() == pytest.approx(expected, rel=1e-4)
        if expected == 0.5:  # its direction, in that geometry, is kept
            assert torch.allclose(total_N, gradient_N * geometry() * (0.5 / length), rtol=1e-4)


def test_noise_is_added_before_the_scales_are_undone():
    none_N = torch.zeros(N)
    arguments = {"noise_std": 2.0, "key": bytes(32), "batch": 4}
    plain_N = scaling.noised_mean(none_N.clone(), PARTS, None, **arguments)
    assert plain_N.std().item() == pytest.approx(0.5, rel=0.1)
    undone_N = scaling.noised_mean(none_N.clone(), PARTS, geometry(), **arguments)
    assert torch.allclose(undone_N * geometry(), plain_N)
    assert len(set(plain_N.tolist())) > 0.99 * N  # of each part its own


def test_scales_are_one_at_first_and_keep_the_length_of_the_noise():
    assert torch.equal(scaling.scale_of(torch.zeros(N), 0.01), torch.ones(N))
    squares_N = torch.rand(N, generator=torch.Generator().manual_seed(1))
    for floor in (1e-3, 0.1, 10.0):
        scale_N = scaling.scale_of(squares_N, floor)
        assert scale_N.square().reciprocal().mean().item() == pytest.approx(1, rel=1e-4)
        order = squares_N.argsort()
        assert (scale_N[order].diff() <= 0).all()  # what is large is scaled down
        expected = (squares_N[0].sqrt() + floor) / (squares_N[1].sqrt() + floor)
        assert (scale_N[1] / scale_N[0]).item() == pytest.approx(expected.item(), rel=1e-4)
    assert torch.allclose(scaling.scale_of(squares_N, 1e4), torch.ones(N), atol=1e-3)


def test_squares_are_averaged_and_the_noise_can_be_taken_out():
    with_noise, without = (scaling.Squares(N, beta=0.9, subtract_noise=s) for s in (False, True))
    assert torch.equal(with_noise.average(), torch.zeros(N))
    generator = torch.Generator().manual_seed(2)
    noise_std_N = torch.linspace(0.5, 1.0, N)
    signal_N = torch.where(torch.arange(N) < 10, 3.0, 0.0)
    for _ in range(300):
        mean_N = signal_N + noise_std_N * torch.randn(N, generator=generator)
        with_noise.add(mean_N, noise_std_N.square())
        without.add(mean_N, noise_std_N.square())
    expected = (noise_std_N.square() + signal_N.square()).mean().item()
    assert with_noise.average().mean().item() == pytest.approx(expected, rel=0.05)
    assert (without.average() >= 0).all()
    assert without.average()[:10].mean().item() == pytest.approx(9, rel=0.3)
    assert without.average()[10:].mean() < 0.2 * with_noise.average()[10:].mean()
    once = scaling.Squares(1, beta=0.9, subtract_noise=False)
    once.add(torch.tensor([2.0]), torch.ones(1))
    assert once.average().item() == pytest.approx(4.0)  # as Adam's, not a tenth of it


def test_all_runs_that_are_listed_were_run_with_one_noise_multiplier():
    told = {one["name"]: one for one in json.loads(scaled.results(DOCS).read_text())["runs"]}
    assert list(told) == [run.name for run in scaled.RUNS]
    assert len({one["privacy"]["noise_multiplier"] for one in told.values()}) == 1
    assert all(one["privacy"]["epsilon"] <= 8.0 for one in told.values())
