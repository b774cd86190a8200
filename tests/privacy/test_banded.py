"""Correlated noise: its covariance, what an attacker of a whole chain learns, chains and groups.
Rows 58, 62 and 63; row 64, equal noise on every mesh, is in tests/hazards."""

import itertools
import math
import pickle

import dp_accounting
import numpy as np
import pytest
import torch
from dp_accounting.pld import PLDAccountant

from torchtitan_dp.privacy.banded import NoiseChain, StepNoise
from torchtitan_dp.privacy.coefficients import INDEPENDENT, column_norm, cut_off, found_for
from torchtitan_dp.privacy.keys import RootKey
from torchtitan_dp.privacy.noise import add_gaussian_noise_
from torchtitan_dp.privacy.sampling import groups_of, poisson_draw
from torchtitan_dp.privacy.segments import Mechanism

SIGMA, POSITIONS = 1.5, 200_000


def matrix(values: list[float], steps: int) -> np.ndarray:
    """The lower triangular Toeplitz matrix of a first column."""
    full = np.zeros((steps, steps))
    for k, value in enumerate(values[:steps]):
        full += np.diag(np.full(steps - k, value), -k)
    return full


def columns(*bands: int) -> list[tuple[float, ...]]:
    """Cut off, found for the sum of 100 steps, and by chance, of any norm and sign."""
    rng = np.random.default_rng(0)
    found = [make for b in bands for make in (cut_off(b), found_for((1.0,) * 100, b))]
    return found + [(1.0, *rng.normal(scale=0.4, size=b - 1).tolist()) for b in bands]


def of(bands: int) -> tuple[float, ...]:
    return found_for((1.0,) * 100, bands)


def add(noise: StepNoise, flat: torch.Tensor, std: float = 1.0, name: str = "w") -> None:
    noise.add_to(
        flat, name, lambda x: add_gaussian_noise_(x, std=std, key=noise.key, name=name, start=0)
    )


def chain(
    column: tuple[float, ...], steps: int, root: RootKey, first: int = 1, positions: int = POSITIONS
) -> np.ndarray:
    """The noise that a chain adds at each step: (steps, positions), in units of the clip norm."""
    mechanism = Mechanism(SIGMA, 0.01, column=column)
    keys, rows = NoiseChain(root.stream("noise"), mechanism.column), []
    for step in range(first, first + steps):
        flat = torch.zeros(positions)
        add(keys.take(step), flat, mechanism.noise_of_step)
        rows.append(flat.double().numpy())
    return np.stack(rows)


@pytest.mark.parametrize("column", columns(2, 3, 5, 16))
def test_row63_for_any_column_noise_is_that_drawn_again_and_a_unit_moves_the_norm(column):
    """w = ‖c‖ C⁻¹ z, z drawn by itself from the steps' keys, up to the stated rounding of z; and
    what a draw changes of C x is at most ‖c‖ long, with equality where no row is cut short."""
    steps, positions, stream = 24, 500, RootKey(bytes(32)).stream("noise")
    mechanism = Mechanism(SIGMA, 0.01, column=column)
    noise = chain(column, steps, RootKey(bytes(32)), positions=positions)
    drawn = torch.zeros(steps, positions)
    for step, z in enumerate(drawn, start=1):
        key, std = stream.take(step), mechanism.noise_of_step
        add_gaussian_noise_(z, std=std, key=key, name="w", start=0)
    toeplitz = matrix(list(column), steps)
    rounded = (len(column) + 1) * 2.0**-23 * (np.abs(toeplitz) @ np.abs(noise))
    assert (np.abs(toeplitz @ noise - drawn.double().numpy()) <= rounded).all()
    moved = np.linalg.norm(toeplitz, axis=0)  # by a draw in each step
    norm = mechanism.noise_of_step / SIGMA
    assert moved.max() <= norm * (1 + 1e-12)
    assert np.allclose(moved[: steps - len(column) + 1], norm)


@pytest.mark.parametrize("column", [cut_off(2), *columns(4), of(16)])
def test_noise_has_the_covariance_of_the_chain(column):
    steps = len(column) + 6
    noise = chain(column, steps, RootKey(bytes(32)))
    inverted = np.linalg.inv(matrix(list(column), steps))
    expected = (SIGMA * column_norm(column)) ** 2 * inverted @ inverted.T
    found = noise @ noise.T / POSITIONS
    variances = np.diag(expected)
    spread = np.sqrt((np.outer(variances, variances) + expected**2) / POSITIONS)
    assert (np.abs(found - expected) < 5 * spread).all()


@pytest.mark.parametrize(
    "column, steps", [(cut_off(2), 6), (of(4), 12), (cut_off(16), 16), (of(16), 32)]
)
def test_row63_the_best_attack_on_a_chain_reaches_what_its_rounds_claim(column, steps):
    """A unit that adds C whenever its group is drawn from, against the likelihood ratio of all
    steps: 200,000 positions see sigma off by a hundredth. A column that the chain's end cuts short
    gives less away."""
    bands, toeplitz = len(column), matrix(list(column), steps)
    whitened = toeplitz @ chain(column, steps, RootKey(bytes(32)))
    for group in range(bands):
        drawn = np.arange(1, steps + 1) % bands == group
        signal = toeplitz @ drawn
        mu = (signal @ signal) / (signal @ whitened).std()
        claimed = math.sqrt(drawn.sum()) / SIGMA
        assert mu <= claimed * 1.01
        if group == 1 % bands:
            assert mu == pytest.approx(claimed, rel=0.01)


def deltas(sigma, epsilons):
    """What the best attack proves of delta, by 200,000 lives of a run: steps 1 to 8, of which 5 to
    8 were lost and taken again by a second start, whose last is 12. A unit may be in 1, 5, 5, 9."""
    bands, rate, ratios = 4, 0.5, []
    column = of(bands)
    c = np.array(column)
    for is_member in (False, True):
        ratio = np.zeros(POSITIONS)
        for start, first in ((1, 1), (2, 5)):
            root = RootKey(bytes([10 * start + is_member]) * 32)
            noise = chain(column, 8, root, first) * sigma / SIGMA
            draws, drawn = root.stream("sampling"), np.zeros((8, POSITIONS))
            for row in (0, 4):
                drawn[row, poisson_draw(draws.take(first + row), POSITIONS, rate)] = is_member
            white = matrix(list(column), 8) @ (drawn + noise)
            for row in (0, 4):
                seen = c @ white[row : row + 4] / (c @ c)
                ratio += np.log1p(rate * np.expm1((seen - 0.5) / SIGMA**2))
        ratios.append(ratio)
    without, member = (np.array([(r > e).mean() for e in epsilons]) for r in ratios)
    spread = np.sqrt((member + np.exp(2 * epsilons) * without) / POSITIONS)
    return member - np.exp(epsilons) * without, spread


@pytest.mark.parametrize("sigma", [SIGMA, SIGMA / 1.1])
def test_row63_the_best_attack_on_draws_over_a_crash_proves_what_is_stated(sigma):
    epsilons = np.array([0.0, 0.3, 0.6, 1.0])
    found, spread = deltas(sigma, epsilons)
    step = dp_accounting.PoissonSampledDpEvent(0.5, dp_accounting.GaussianDpEvent(SIGMA))
    accountant = PLDAccountant(dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE, 1e-4)
    accountant.compose(dp_accounting.SelfComposedDpEvent(step, 4))
    excess = (found - [accountant.get_delta(e) for e in epsilons]) / spread
    assert (np.abs(excess) < 5).all() if sigma == SIGMA else (excess > 5).any(), excess


def test_row62_a_chain_after_a_load_has_new_noise():
    first = chain(of(4), 6, RootKey.from_debug_seed(1))
    second = chain(of(4), 6, RootKey.from_os(), first=7)
    across = np.corrcoef(np.concatenate([first, second]))[:6, 6:]
    assert np.abs(across).max() < 5 / math.sqrt(POSITIONS)
    assert np.abs(np.corrcoef(first)[0, 1]) > 0.3


def test_one_band_is_independent_noise():
    root = RootKey(bytes(32))
    keys, stream = NoiseChain(root.stream("noise"), INDEPENDENT), RootKey(bytes(32)).stream("noise")
    for step in (1, 2, 9):
        noise, flat, other = keys.take(step), torch.ones(70), torch.ones(70)
        add(noise, flat)
        add_gaussian_noise_(other, std=1.0, key=stream.take(step), name="w", start=0)
        assert not noise.is_correlated
        assert flat.equal(other)


def test_keys_are_taken_once_and_shown_to_nobody():
    keys = NoiseChain(RootKey(bytes(32)).stream("noise"), of(4))
    noise = keys.take(1)
    with pytest.raises(RuntimeError, match="spent"):
        keys.take(1)
    assert repr(keys) == "<NoiseChain: secret>"
    assert repr(noise) == "<StepNoise: secret>"
    for secret in (keys, noise):
        with pytest.raises(TypeError, match="never pickled"):
            pickle.dumps(secret)


@pytest.mark.parametrize("fails_at", ["v", "w"])
def test_row62_a_chain_ends_with_a_step_that_failed(fails_at):
    """Noise of half a step is never built upon, in the parameter that failed or in any other."""
    keys = NoiseChain(RootKey(bytes(32)).stream("noise"), of(4))
    noise = keys.take(1)
    for name in "uvw":
        add(noise, torch.zeros(9), name=name)
    noise = keys.take(2)

    def fail(_: torch.Tensor) -> None:
        raise MemoryError

    for name in "uvw"[: "uvw".index(fails_at)]:
        add(noise, torch.zeros(9), name=name)
    with pytest.raises(MemoryError):
        noise.add_to(torch.zeros(9), fails_at, fail)
    later = keys.take(3)
    for name in "uvw"["uvw".index(fails_at) :]:
        for again in (noise, later) if name == fails_at else (later,):
            flat = torch.zeros(9)
            with pytest.raises(RuntimeError, match=f"{name} lacks the noise of a failed step"):
                add(again, flat, name=name)
            assert not flat.any()


def test_row62_a_steps_noise_is_added_once():
    keys, flat = NoiseChain(RootKey(bytes(32)).stream("noise"), of(4)), torch.zeros(9)
    for noise in (keys.take(1), keys.take(2)):
        add(noise, flat)
    with pytest.raises(RuntimeError, match="w lacks the noise"):
        add(noise, flat)


def test_row63_kept_noise_never_sees_a_gradient():
    """The noise of each step is the same, bit by bit, for any clipped sums."""
    found = []
    for size in (0.0, 1e4):
        keys, rows = NoiseChain(RootKey(bytes(32)).stream("noise"), of(4)), []
        for step in range(1, 8):
            flat = torch.full((50,), size if step % 2 else 0.0)
            add(keys.take(step), flat)
            rows.append(flat)
        found.append(torch.stack(rows[1::2]))  # the steps without a sum
    assert found[0].equal(found[1])


def test_row58_a_chain_leaves_out_no_step():
    """Its rows would no longer be as far apart as the steps."""
    keys = NoiseChain(RootKey(bytes(32)).stream("noise"), of(4))
    keys.take(7)
    keys.take(8)
    with pytest.raises(RuntimeError, match=r"step 10 .* follows step 8"):
        keys.take(10)


def test_row58_no_unit_is_drawn_twice_within_a_band_over_a_resume_too():
    bands, rate = 8, 0.02
    rng = np.random.default_rng(0)
    groups = groups_of(rng.integers(0, 2**63, 500).astype(np.uint64), bands)
    assert sorted(itertools.chain(*groups)) == list(range(500))
    last = np.full(500, -bands)
    draws = np.zeros(500)
    for step in range(1, 2_001):
        stream = RootKey(bytes([1 + step // 777]) * 32).stream("sampling")  # starts at 777, 1554
        group = groups[step % bands]
        drawn = group[poisson_draw(stream.take(step), len(group), bands * rate)]
        assert (step - last[drawn] >= bands).all()
        last[drawn] = step
        draws[drawn] += 1
    spread = math.sqrt(2_000 * rate * (1 - bands * rate) / 500)
    assert abs(draws.mean() - 2_000 * rate) < 5 * spread


def test_row58_a_units_group_is_its_own():
    """Another unit more or less moves nobody to another group."""
    hashes = np.random.default_rng(1).integers(0, 2**63, 300).astype(np.uint64)
    of_all = {int(hashes[i]): g for g, group in enumerate(groups_of(hashes, 8)) for i in group}
    fewer = hashes[np.arange(300) % 7 != 0]
    for g, group in enumerate(groups_of(fewer, 8)):
        assert all(of_all[int(fewer[i])] == g for i in group)
