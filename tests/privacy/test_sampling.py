"""Sampling: exactly Poisson, and dealt out whole."""

import hashlib

import numpy as np
import pytest
from scipy import stats

from torchtitan_dp.privacy import noise
from torchtitan_dp.privacy.keys import RootKey
from torchtitan_dp.privacy.sampling import deal, poisson_draw


def key(number: int) -> bytes:
    return hashlib.sha256(f"sampling {number}".encode()).digest()


def inclusions(steps: int, population: int, rate: float) -> np.ndarray:
    """0/1, shape (steps, population)."""
    table = np.zeros((steps, population), dtype=np.int64)
    for step in range(steps):
        table[step, poisson_draw(key(step), population, rate)] = 1
    return table


def test_a_draw_is_a_sorted_set_of_indices_and_repeats_by_key():
    for step in range(50):
        draw = poisson_draw(key(step), 1_000, 0.1)
        assert draw.dtype == np.int64
        assert (np.diff(draw) > 0).all()
        assert draw.min() >= 0
        assert draw.max() < 1_000
        assert np.array_equal(draw, poisson_draw(key(step), 1_000, 0.1))


def test_rates_0_and_1_and_no_population():
    for population in (0, 1, 7, 20_000):
        assert poisson_draw(key(0), population, 0.0).shape == (0,)
        assert np.array_equal(poisson_draw(key(0), population, 1.0), np.arange(population))
        assert poisson_draw(key(0), population, 0.0).dtype == np.int64


@pytest.mark.parametrize("rate", [-1e-9, 1.0000001, float("nan")])
def test_a_rate_that_is_no_probability_is_refused(rate):
    with pytest.raises(ValueError, match=r"privacy\.sample_rate"):
        poisson_draw(key(0), 10, rate)


@pytest.mark.parametrize("population, rate", [(40, 0.05), (40, 0.6), (12_000, 0.001)])
def test_sizes_are_binomial(population, rate):
    steps = 3_000
    sizes = [len(poisson_draw(key(step), population, rate)) for step in range(steps)]
    law = stats.binom(population, rate)
    edges = np.unique(law.ppf(np.linspace(0.02, 0.98, 12)))
    counts, _ = np.histogram(sizes, [-1, *(edges + 0.5), population + 1])
    expected = steps * np.diff(law.cdf([-1, *edges, population]))
    assert stats.chisquare(counts, expected).pvalue > 1e-4


def test_inclusions_are_uniform_and_independent_over_records_and_steps():
    steps, population, rate = 4_000, 60, 0.1
    table = inclusions(steps, population, rate)
    variance = rate * (1 - rate)
    # one record over the steps: each count Binomial(steps, rate)
    per_record = ((table.sum(0) - steps * rate) ** 2 / (steps * variance)).sum()
    assert stats.chi2(population).ppf(1e-4) < per_record < stats.chi2(population).ppf(1 - 1e-4)
    # one step over the records: shuffling or a fixed batch size would give 0 variance
    per_step = ((table.sum(1) - population * rate) ** 2 / (population * variance)).sum()
    assert stats.chi2(steps).ppf(1e-4) < per_step < stats.chi2(steps).ppf(1 - 1e-4)
    # pairs of records in a step, and of steps for a record
    centred = (table - rate) / np.sqrt(variance)
    records = centred.T @ centred / np.sqrt(steps)
    assert abs(records[np.triu_indices(population, 1)]).max() < 5
    for lag in (1, 2, 7):
        together = (centred[:-lag] * centred[lag:]).sum() / np.sqrt((steps - lag) * population)
        assert abs(together) < 4


def test_expected_inclusions_at_one_in_ten_million():
    """From the arithmetic: the law drawn from has mean N * q; then by Monte Carlo."""
    population, rate = 10**9, 1e-7
    asked = []

    class Recorder(np.random.Generator):
        def binomial(self, n, p, size=None):
            asked.append((n, p))
            return super().binomial(n, p, size)

    original, np.random.Generator = np.random.Generator, Recorder
    try:
        poisson_draw(key(0), population, rate)
    finally:
        np.random.Generator = original
    ((n, p),) = asked
    assert n * p == pytest.approx(100.0, rel=1e-3)
    assert type(p) is float
    # 10,000 draws of mean 100: the standard error of the mean is 0.1%, so allow four of it
    total = sum(len(poisson_draw(key(step), population, rate)) for step in range(10_000))
    assert abs(total - 1e6) < 4 * 1e3


def test_small_mean_is_mostly_empty():
    empty = sum(len(poisson_draw(key(step), 10**6, 1e-7)) == 0 for step in range(5_000))
    assert stats.binomtest(empty, 5_000, (1 - 1e-7) ** 10**6).pvalue > 1e-4


def test_large_rates_and_populations_stay_in_range():
    draw = poisson_draw(key(1), 300_000, 0.7)
    assert len(np.unique(draw)) == len(draw)
    assert abs(len(draw) - 210_000) < 5 * np.sqrt(300_000 * 0.21)


def test_128_bits_of_key_reach_the_draw():
    seen = set()
    base = int.from_bytes(key(0), "little")
    for bit in [None, *range(128)]:
        flipped = base if bit is None else base ^ (1 << bit)
        seen.add(poisson_draw(flipped.to_bytes(32, "little"), 10_000, 0.05).tobytes())
    assert len(seen) == 129


def test_inclusion_and_noise_are_unrelated():
    root = RootKey(key(0))
    sampling, noises = root.stream("sampling"), root.stream("noise")
    steps, population = 300, 400
    included = np.zeros((steps, population))
    values = np.zeros((steps, population))
    for step in range(steps):
        included[step, poisson_draw(sampling.take(step), population, 0.3)] = 1
        values[step] = noise.standard_normal(noises.take(step), "w", 0, population).numpy()
    size = np.sqrt(steps * population)
    assert abs(np.corrcoef(included.ravel(), values.ravel())[0, 1]) * size < 4
    assert abs(np.corrcoef(included.sum(1), values.sum(1))[0, 1]) * np.sqrt(steps) < 4


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("batch_size", [1, 2, 3])
def test_dealing_covers_each_drawn_record_once(ranks, batch_size):
    for n in range(30):
        draw = np.arange(n, dtype=np.int64) * 5
        hands = [deal(draw, ranks=ranks, rank=rank, batch_size=batch_size) for rank in range(ranks)]
        assert {len(hand) for hand in hands} == {-(-n // (ranks * batch_size))}
        slots = [micro for hand in hands for micro in hand]
        assert all(micro.shape == (batch_size,) and micro.dtype == np.int64 for micro in slots)
        every = np.concatenate([*slots, np.empty(0, dtype=np.int64)])
        assert sorted(every[every >= 0].tolist()) == draw.tolist()
        assert (every[every < 0] == -1).all()


def test_drawn_is_processed_for_200_draws():
    for step in range(200):
        draw = poisson_draw(key(step), 500, 0.02)
        dealt = [deal(draw, ranks=3, rank=rank, batch_size=2) for rank in range(3)]
        flat = [int(i) for hand in dealt for micro in hand for i in micro if i >= 0]
        assert sorted(flat) == draw.tolist()
