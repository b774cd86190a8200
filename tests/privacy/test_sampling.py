"""Draws: exactly Poisson, and dealt out whole; from SHAKE-256, exact, and of no other generator."""

import hashlib

import numpy as np
import pytest
import torch
from scipy import stats

from torchtitan_dp.privacy import sampling
from torchtitan_dp.privacy.sampling import choices, coins, deal, poisson_draw, uint64s, unit_normals


def key(number: int) -> bytes:
    return hashlib.sha256(f"sampling {number}".encode()).digest()


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


@pytest.fixture
def no_other_generator(monkeypatch):
    """Every other generator that a draw could come from fails."""

    def fail(*args: object, **kwargs: object) -> None:
        raise AssertionError("not SHAKE-256")

    for name in ("Philox", "default_rng", "PCG64"):
        monkeypatch.setattr(np.random, name, fail)
    monkeypatch.setattr("torchtitan_dp.gradients.norms.add_gaussian_noise_", fail)


@pytest.mark.parametrize("secure", [False, True])
@pytest.mark.parametrize("population, rate", [(40, 0.05), (40, 0.6), (12_000, 0.001)])
def test_sizes_are_binomial_and_units_alike(population, rate, secure, request):
    if secure:
        request.getfixturevalue("no_other_generator")
    steps = 3_000
    draws = [poisson_draw(key(step), population, rate, secure=secure) for step in range(steps)]
    assert all(draw.dtype == np.int64 and (np.diff(draw) > 0).all() for draw in draws)
    law = stats.binom(population, rate)
    edges = np.unique(law.ppf(np.linspace(0.02, 0.98, 12)))
    sizes, _ = np.histogram([len(draw) for draw in draws], [-1, *(edges + 0.5), population + 1])
    assert stats.chisquare(sizes, steps * np.diff(law.cdf([-1, *edges, population]))).pvalue > 1e-4
    found = np.bincount(np.concatenate(draws), minlength=population)
    statistic = ((found - steps * rate) ** 2 / (steps * rate * (1 - rate))).sum()
    assert 1e-4 < stats.chi2(population).sf(statistic) < 1 - 1e-4


def test_inclusions_of_pairs_of_records_and_of_steps_are_independent():
    steps, population, rate = 4_000, 60, 0.1
    table = np.zeros((steps, population))
    for step in range(steps):
        table[step, poisson_draw(key(step), population, rate)] = 1
    centred = (table - rate) / np.sqrt(rate * (1 - rate))
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


def test_128_bits_of_key_reach_the_draw():
    seen = set()
    base = int.from_bytes(key(0), "little")
    for bit in [None, *range(128)]:
        flipped = base if bit is None else base ^ (1 << bit)
        seen.add(poisson_draw(flipped.to_bytes(32, "little"), 10_000, 0.05).tobytes())
    assert len(seen) == 129


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


# --- SHAKE-256 ------------------------------------------------------------------------------------


def test_words_are_shake_256_of_key_purpose_and_position():
    domain = key(0) + b"\x04coin" + (7).to_bytes(16, "little")
    assert uint64s(key(0), "coin", 7, 3).tobytes() == hashlib.shake_256(domain).digest(24)
    others = {
        uint64s(key(k), purpose, position, 1).item()
        for k in (0, 1)
        for purpose in ("a", "b", "ab")
        for position in (0, 1, 2**64)
    }
    assert len(others) == 18


def test_a_coin_is_exact_and_never_above_the_rate(monkeypatch):
    def words(_: bytes, __: str, ___: int, count: int) -> np.ndarray:
        return np.array([0, 2**63 - 1, 2**63, 2**64 - 1], dtype=np.uint64)[:count]

    monkeypatch.setattr(sampling, "uint64s", words)
    assert coins(key(0), 4, 0.5).tolist() == [0, 1]
    assert coins(key(0), 4, 0.0).tolist() == []
    assert coins(key(0), 4, 1.0).tolist() == [0, 1, 2, 3]
    assert coins(key(0), 4, np.nextafter(0.5, 0)).tolist() == [0]
    assert coins(key(0), 4, 2.0**-65).tolist() == []  # rounded down


def test_a_large_population_is_the_same_whole_and_in_chunks(monkeypatch):
    whole = [coins(key(0), n, 0.3) for n in (0, 1, 1000, 2048, 2049)]
    assert [len(draw) for draw in whole[:1]] == [0]
    monkeypatch.setattr(sampling, "_CHUNK", 1024)
    found = coins(key(0), 2049, 0.3)
    first = coins(key(0), 1024, 0.3)
    assert np.array_equal(found[found < 1024], first)
    # The coins of one chunk say nothing of those of another.
    second = found[(found >= 1024) & (found < 2048)] - 1024
    assert abs(len(np.intersect1d(first, second)) - 0.09 * 1024) < 5 * np.sqrt(1024 * 0.09)
    assert (np.diff(found) > 0).all()
    assert abs(len(found) - 0.3 * 2049) < 5 * np.sqrt(2049 * 0.21)


def test_choices_have_their_laws(no_other_generator):
    each = [choices(key(1), position, secure=True) for position in range(6_000)]
    assert stats.kstest(np.concatenate([one.random(3) for one in each]), "uniform").pvalue > 1e-4
    numbers = np.bincount([one.integers(7) for one in each], minlength=7)
    assert stats.chisquare(numbers).pvalue > 1e-4
    picks = np.array([one.choice(5, size=2, replace=False) for one in each])
    assert (picks[:, 0] != picks[:, 1]).all()
    pairs = np.bincount(picks[:, 0] * 5 + picks[:, 1], minlength=25)
    assert stats.chisquare(pairs[pairs > 0]).pvalue > 1e-4
    assert (pairs > 0).sum() == 20
    assert sorted(each[0].choice(5, size=5, replace=False)) == [0, 1, 2, 3, 4]


def test_choices_are_those_of_the_position_alone_and_begin_anew():
    first, again = (choices(key(1), 3, secure=True) for _ in range(2))
    assert first.random(4).tolist() == again.random(4).tolist()
    assert first.integers(100) == again.integers(100)
    # More of them begin as fewer do, as numpy's do.
    assert choices(key(1), 3, secure=True).random(2).tolist() == (
        choices(key(1), 3, secure=True).random(4)[:2].tolist()
    )


def test_an_integer_is_rejected_where_it_would_be_skewed(monkeypatch):
    words = iter([2**64 - 1, 2**64 - 2, 5])
    one = choices(key(1), 0, secure=True)
    monkeypatch.setattr(one, "_words", lambda _: np.array([next(words)], dtype=np.uint64))
    assert one.integers(3) == (2**64 - 2) % 3  # of 2^64 = 1 modulo 3 the last word is one too many
    assert one.integers(3) == 2


@pytest.mark.parametrize("count", [1, 2, 7, 20_000])
def test_normals(count):
    found = unit_normals(key(2), "layers.0.w", 5, count)
    assert found.shape == (count,)
    assert found.dtype == np.float32
    assert len(set(found.tolist())) > 0.99 * count
    if count > 100:
        assert stats.kstest(found, "norm").pvalue > 1e-4
        assert abs(np.corrcoef(found[: count // 2], found[count // 2 :])[0, 1]) < 0.04


def test_projections_of_units_and_layers_are_independent(no_other_generator):
    from torchtitan_dp.gradients.norms import RandomizedNorms
    from torchtitan_dp.gradients.operands import Products

    norms = RandomizedNorms(8, "hutchinson", None, capped=True, secure=True)
    norms.start_step(key(3))
    norms.start_microbatch([4, 9, -1])
    left = torch.zeros(3, 5, 4)
    factors = [Products(left, torch.zeros(3, 5, 6))]
    drawn = [norms._draw(name, "tail", factors, 400) for name in ("a", "b")]
    rows = torch.cat(drawn).flatten(1)
    assert (torch.corrcoef(rows) - torch.eye(6)).abs().max() < 5 / 400**0.5 / 8**0.5
    assert rows.var().item() == pytest.approx(1 / 8, rel=0.05)
    norms.start_step(key(3))
    norms.start_microbatch([9])
    one = [Products(left[:1], left[:1])]
    assert torch.equal(norms._draw("a", "tail", one, 400)[0], drawn[0][1])
