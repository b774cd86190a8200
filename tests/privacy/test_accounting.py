"""Accounting: right numbers, bounds that never flatter, and targets that are never overshot."""

import math
import warnings

import numpy as np
import pytest
from opacus.accountants import RDPAccountant
from scipy import optimize
from scipy.stats import norm

from torchtitan_dp.privacy import pld, rdp
from torchtitan_dp.privacy.accounting import epsilon, noise_multiplier

REFERENCE = {"noise_multiplier": 1.0, "sample_rate": 0.01, "steps": 1_000, "delta": 1e-5}
GRID = [
    (0.5, 0.001, 3_000),
    (0.8, 0.01, 1_000),
    (1.0, 0.01, 1_000),
    (1.0, 0.1, 50),
    (2.0, 0.02, 10_000),
    (5.0, 0.5, 100),
    (20.0, 1.0, 1_000),
]


@pytest.fixture(autouse=True)
def _no_warnings():
    """Whatever Opacus would print to the user fails the test."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def exact_one_step(sigma: float, q: float, delta: float) -> float:
    """Epsilon of one step, the worse of both directions, by quadrature and root finding."""
    nodes, weights = np.polynomial.legendre.leggauss(8)
    edges = np.linspace(-12 * sigma, 1 + 12 * sigma, 20_001)
    half = np.diff(edges)[:, None] / 2
    x = edges[:-1, None] + half * (1 + nodes)
    absent = norm.pdf(x, 0, sigma)
    present = (1 - q) * absent + q * norm.pdf(x, 1, sigma)

    def excess(eps: float, first: np.ndarray, second: np.ndarray) -> float:
        return float((half * weights * np.maximum(0, first - math.exp(eps) * second)).sum()) - delta

    return max(
        optimize.brentq(excess, 0, 30, args=pair) if excess(0, *pair) > 0 else 0.0
        for pair in ((present, absent), (absent, present))
    )


@pytest.mark.slow
@pytest.mark.parametrize("sigma, q, steps", GRID)
def test_rdp_is_opacus_rdp_or_tighter_only_by_its_wider_orders(sigma, q, steps):
    opacus = RDPAccountant()
    opacus.history = [(sigma, q, steps)]
    alphas = [a for a in rdp.ORDERS if a < 900]
    expected = opacus.get_epsilon(1e-5, alphas=alphas)
    ours = epsilon(noise_multiplier=sigma, sample_rate=q, steps=steps, delta=1e-5, accountant="rdp")
    assert ours == pytest.approx(expected, rel=1e-6)
    assert ours >= expected * (1 - 1e-12)


@pytest.mark.parametrize(
    "sigma, q", [(0.5, 0.01), (0.5, 0.3), (1.0, 0.1), (1.0, 0.9), (3.0, 0.5), (2.0, 1.0)]
)
def test_one_step_against_the_exact_value(sigma, q):
    exact = exact_one_step(sigma, q, 1e-5)
    query = {"noise_multiplier": sigma, "sample_rate": q, "steps": 1, "delta": 1e-5}
    assert exact <= epsilon(**query, accountant="pld") <= exact * 1.006 + 1e-4
    assert epsilon(**query, accountant="rdp") >= exact


@pytest.mark.parametrize("accountant", ["rdp", "pld"])
def test_more_steps_more_sampling_less_noise_and_less_delta_spend_more(accountant):
    base = epsilon(**REFERENCE, accountant=accountant)
    for change in ({"steps": 1_200}, {"sample_rate": 0.012}, {"noise_multiplier": 0.9}):
        assert epsilon(**{**REFERENCE, **change}, accountant=accountant) > base
    assert epsilon(**{**REFERENCE, "delta": 1e-6}, accountant=accountant) > base


@pytest.mark.parametrize("accountant", ["rdp", "pld"])
def test_edges(accountant):
    assert epsilon(**{**REFERENCE, "steps": 0}, accountant=accountant) == 0.0
    assert epsilon(**{**REFERENCE, "sample_rate": 0.0}, accountant=accountant) == 0.0
    assert epsilon(**{**REFERENCE, "noise_multiplier": 0.0}, accountant=accountant) == math.inf
    assert epsilon(**{**REFERENCE, "steps": 0, "noise_multiplier": 0.0}, accountant="rdp") == 0.0
    tiny = epsilon(**{**REFERENCE, "sample_rate": 1e-7}, accountant=accountant)
    assert 0.0 <= tiny < 1.0


TARGETS = [
    (0.5, 0.01, 1_000, "rdp"),
    (1.0, 0.001, 20_000, "rdp"),
    (3.0, 1.0, 10, "rdp"),
    (50.0, 0.1, 100, "rdp"),
    (0.05, 0.001, 500, "pld"),
    (1.0, 0.01, 1_000, "pld"),
    (8.0, 0.0141, 40, "pld"),
    (8.0, 1.0, 100, "pld"),
    (200.0, 0.1, 300, "pld"),
]


@pytest.mark.parametrize("target, q, steps, accountant", TARGETS)
def test_hazard_38_sigma_never_overshoots_the_target(target, q, steps, accountant):
    query = {"sample_rate": q, "steps": steps, "delta": 1e-6, "accountant": accountant}
    sigma = noise_multiplier(target_epsilon=target, **query)
    spent = epsilon(noise_multiplier=sigma, **query)
    assert 0.99 * target <= spent <= target


def test_no_steps_need_no_noise():
    assert (
        noise_multiplier(target_epsilon=1.0, delta=1e-5, sample_rate=0.1, steps=0, accountant="pld")
        == 0.0
    )


@pytest.mark.parametrize(
    "target, message", [(1e-6, "noise multiplier above"), (1e12, "hardly any noise")]
)
def test_unreachable_targets_name_the_key(target, message):
    with pytest.raises(ValueError, match=rf"privacy\.target_epsilon = .*{message}") as caught:
        noise_multiplier(
            target_epsilon=target, delta=1e-5, sample_rate=1.0, steps=100, accountant="rdp"
        )
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "change, key",
    [
        ({"noise_multiplier": -1.0}, "privacy.noise_multiplier"),
        ({"noise_multiplier": math.nan}, "privacy.noise_multiplier"),
        ({"sample_rate": 1.5}, "privacy.sample_rate"),
        ({"steps": -1}, "training.steps"),
        ({"delta": 0.0}, "privacy.delta"),
        ({"delta": 1.0}, "privacy.delta"),
        ({"accountant": "gdp"}, "privacy.accountant"),
    ],
)
def test_mistakes_name_the_key(change, key):
    with pytest.raises(ValueError, match=key):
        epsilon(**{**REFERENCE, "accountant": "rdp", **change})


@pytest.mark.parametrize("target", [0.0, -1.0, math.inf, math.nan])
def test_a_senseless_target_is_refused(target):
    with pytest.raises(ValueError, match=r"privacy\.target_epsilon"):
        noise_multiplier(
            target_epsilon=target, delta=1e-5, sample_rate=0.1, steps=10, accountant="rdp"
        )


def test_a_second_query_is_cached():
    pld.pld_epsilon.cache_clear()
    first = epsilon(**REFERENCE, accountant="pld")
    assert epsilon(**REFERENCE, accountant="pld") == first
    assert pld.pld_epsilon.cache_info()[:2] == (1, 1)  # hits, misses
