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


def test_squares_are_averaged_as_adam_does():
    parameter = torch.nn.Parameter(torch.zeros(5))
    adam, squares = torch.optim.Adam([parameter], betas=(0.9, 0.95)), scaling.Squares(5, 0.95)
    for step in range(1, 4):
        parameter.grad = torch.linspace(-1, 1, 5) * step
        squares.add(parameter.grad.square())
        adam.step()
        unbiased = adam.state[parameter]["exp_avg_sq"] / (1 - 0.95**step)
        assert torch.allclose(squares.average(), unbiased)


def test_a_row_has_its_mean():
    shapes = {"matrix": torch.Size((2, 3)), "vector": torch.Size((2,))}
    found = scaling.row_means(torch.tensor([1.0, 2, 3, 4, 5, 6, 7, 9]), shapes)
    assert found.tolist() == [2, 2, 2, 5, 5, 5, 8, 8]


def means(geometry: scaling.Geometry | None, steps: int = 1) -> scaling.ScaledMean:
    """After steps of a record whose gradient is large in the first row, and noise."""
    mean = scaling.ScaledMean(
        {"a": torch.Size((40, 100))}, geometry, noise_std=0.4, max_grad_norm=1.0, batch=4
    )
    first_N = torch.zeros(4000)
    first_N[:100] = 1.0
    for step in range(steps):
        for _ in range(4):
            assert mean.add(first_N)
        mean.take(bytes([step] * 32))
    return mean


def test_the_first_step_is_plain_and_later_ones_scale_by_what_was_released():
    plain, scaled_mean = means(None, 0), means(scaling.Geometry(0.1, 0.95), 0)
    for mean in (plain, scaled_mean):
        mean.add(torch.ones(4000))
    first, same = plain.take(bytes(32))["a"], scaled_mean.take(bytes(32))["a"]
    assert torch.equal(first, same)
    assert first.shape == (40, 100)
    assert plain.scale_N is None
    expected_N = scaling.scale_of(first.flatten().square(), 0.1 * 0.4 / 4)
    assert torch.allclose(scaled_mean.scale_N, expected_N)
    assert not torch.equal(plain.take(bytes(32))["a"], scaled_mean.take(bytes(32))["a"])


@pytest.mark.parametrize("by_row", [False, True])
def test_the_noise_that_is_taken_out_is_that_of_each_step_s_own_geometry(by_row):
    mean, noise = means(scaling.Geometry(0.1, 0.95, True, by_row), 0), 0.4 / 4
    first_N = mean.take(bytes(32))["a"].flatten()
    used_N = mean.scale_N
    second_N = mean.take(bytes([1] * 32))["a"].flatten()
    excess_N = 0.95 * (first_N.square() - noise**2)
    excess_N += second_N.square() - (noise / used_N).square()
    if by_row:
        excess_N = excess_N.view(40, 100).mean(1).repeat_interleave(100)
    expected_N = scaling.scale_of((excess_N / 1.95).clamp(min=0), 0.1 * noise)
    assert torch.allclose(mean.scale_N, expected_N, rtol=1e-3)


def test_by_rows_scales_tell_signal_from_noise():
    def of(**settings: bool) -> tuple[float, float]:
        """How much smaller the first row's scales are, and by how much the others' differ."""
        scale_N = means(scaling.Geometry(1.0, 0.95, True, **settings), 8).scale_N
        return (scale_N[100:].mean() / scale_N[:100].mean()).item(), scale_N[100:].std().item()

    (by_value, spread), (by_row, steady) = of(), of(by_row=True)
    assert min(by_value, by_row) > 1.3
    assert steady < 0.6 * spread


def test_all_runs_that_are_listed_were_run_with_one_noise_multiplier():
    told = {one["name"]: one for one in json.loads(scaled.results(DOCS).read_text())["runs"]}
    assert list(told) == [run.name for run in scaled.RUNS]
    assert len({one["privacy"]["noise_multiplier"] for one in told.values()}) == 1
    assert all(one["privacy"]["epsilon"] <= 8.0 for one in told.values())


def test_the_page_has_the_losses_of_the_runs():
    _, _, rest = (DOCS / "results.md").read_text().partition("### Scale-then-privatize")
    rows = [line.split("|") for line in rest.partition("###")[0].splitlines() if "|" in line]
    words = [word.strip() for row in rows for word in row]
    losses = [f"{one['loss']:.3f}" for one in scaled.read(scaled.results(DOCS)).values()]
    assert sorted(word for word in words if "." in word and len(word) == 5) == sorted(losses)
