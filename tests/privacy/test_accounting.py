"""Accounting: right numbers, bounds that never flatter, targets that are never overshot; of each
accountant by its own library, called directly, and all against each other (row 37)."""

import contextlib
import logging
import math
import warnings

import numpy as np
import pytest
from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent
from dp_accounting.pld import PLDAccountant, privacy_loss_distribution
from opacus.accountants import PRVAccountant, RDPAccountant
from scipy import optimize
from scipy.stats import norm

from tests.accounts import epsilon, gaussian_steps, noise_multiplier, steps_of
from torchtitan_dp.privacy import pld, rdp
from torchtitan_dp.privacy.accounting import compose, counted_by

REFERENCE = {"noise_multiplier": 1.0, "sample_rate": 0.01, "steps": 1_000, "delta": 1e-5}
NOISE = [(0.6, 1e-5), (0.8, 1e-6), (1.0, 1e-5), (1.5, 1e-7), (2.0, 1e-5), (4.0, 1e-6)]
SAMPLING = [(0.001, 2_000), (0.004, 1_000), (0.01, 1_000), (0.05, 200), (0.3, 20)]
GRID = [(sigma, q, steps, delta) for sigma, delta in NOISE for q, steps in SAMPLING]


@pytest.fixture(autouse=True)
def _no_warnings():
    """What Opacus would print to the user fails the test."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


@contextlib.contextmanager
def called_directly():
    """What the libraries say then is theirs."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@called_directly()
def google(sigma: float, q: float, steps: int, delta: float, interval: float) -> float:
    accountant = PLDAccountant(value_discretization_interval=interval)
    accountant.compose(PoissonSampledDpEvent(q, GaussianDpEvent(sigma)), steps)
    return accountant.get_epsilon(delta)


@called_directly()
def by_opacus(sigma: float, q: float, steps: int, delta: float) -> float:
    accountant = RDPAccountant()
    accountant.history = [(sigma, q, steps)]
    return accountant.get_epsilon(delta, alphas=[a for a in rdp.ORDERS if a < 900])


@called_directly()
def upper_end(history: list[tuple[float, float, int]], delta: float) -> float:
    """Of PRV's error bar, by Opacus: privacy loss random variables (Gopi, Lee & Wutschitz 2021)."""
    accountant = PRVAccountant()
    accountant.history = history
    return accountant.get_epsilon(delta, eps_error=0.01)


@pytest.mark.thorough_cases("*-1e-06", "1.0-*", "1.5-*")
@pytest.mark.slow
@pytest.mark.parametrize("sigma, q, steps, delta", GRID)
def test_hazard_37_every_accountant_is_its_library_and_none_flatters(sigma, q, steps, delta):
    segments = (gaussian_steps(sigma, q, steps),)
    loose = rdp.rdp_epsilon(segments, delta)
    tight = pld.pld_epsilon(segments, delta)  # each before the minimum with RDP is taken
    assert tight <= loose
    assert tight <= upper_end([(sigma, q, steps)], delta) <= tight + 0.011

    expected = by_opacus(sigma, q, steps, delta)
    assert expected * (1 - 1e-12) <= loose <= expected * (1 + 1e-6)
    interval = min(q / sigma**2 / 20, 1e-3)  # about a twentieth of a step's loss
    assert tight == pytest.approx(google(sigma, q, steps, delta, interval), rel=1e-3)

    query = {"noise_multiplier": sigma, "sample_rate": q, "steps": steps, "delta": delta}
    assert epsilon(**query, accountant="rdp") == loose
    assert epsilon(**query, accountant="pld") == min(loose, tight)


def test_pld_takes_the_worse_of_both_directions():
    """Each by itself, through the library's private parts."""
    one = privacy_loss_distribution.from_gaussian_mechanism(
        1.0, sampling_prob=0.3, value_discretization_interval=1e-3
    )
    total = one.self_compose(3)
    both = [pmf.get_epsilon_for_delta(1e-5) for pmf in (total._pmf_remove, total._pmf_add)]
    assert min(both) < 0.9 * max(both)
    told = pld.pld_epsilon((gaussian_steps(1.0, 0.3, 3),), 1e-5)
    assert told == pytest.approx(max(both), rel=1e-3)


@pytest.mark.parametrize("mu, delta", [(1e-6, 1e-5), (0.1, 1e-5), (1.0, 1e-9), (40.0, 1e-6)])
def test_without_sampling_pld_is_the_exact_gaussian_and_not_below(mu, delta):
    def excess(eps: float) -> float:
        return norm.sf(eps / mu - mu / 2) - math.exp(eps + norm.logcdf(-mu / 2 - eps / mu)) - delta

    exact = optimize.brentq(excess, 0, 2_000, xtol=1e-14) if excess(0) > 0 else 0.0
    query = {"noise_multiplier": 10 / mu, "sample_rate": 1.0, "steps": 100, "delta": delta}
    spent = epsilon(**query, accountant="pld")
    assert exact <= spent + 1e-13
    assert spent == pytest.approx(exact, rel=1e-6, abs=1e-6)


def test_hazard_37_unlike_segments_are_close_below_prv():
    history = [(1.0, 0.01, 600), (1.4, 0.02, 300), (20.0, 1.0, 9)]
    segments = [steps_of(*part) for part in history]
    loose, tight = (compose(segments, delta=1e-5, accountant=name) for name in ("rdp", "pld"))
    assert tight < upper_end(history, 1e-5) < min(tight + 0.011, loose)


@pytest.mark.parametrize("sigma, steps, delta", [(0.03, 1_000, 1e-5), (0.02, 10, 1e-9)])
def test_where_plds_numbers_cannot_be_had_rdp_counts_and_it_is_said(caplog, sigma, steps, delta):
    query = {"noise_multiplier": sigma, "sample_rate": 0.01, "steps": steps, "delta": delta}
    with caplog.at_level(logging.INFO, logger=pld.__name__):
        fallen = epsilon(**query, accountant="pld")
    assert fallen == epsilon(**query, accountant="rdp")
    assert "PLD" in caplog.text
    assert counted_by([steps_of(sigma, 0.01, steps)], delta=delta, accountant="pld") == "rdp"


@pytest.mark.parametrize("wrong", [math.nan, -math.inf, math.inf, -1e-3])
def test_a_failing_pld_never_gives_a_smaller_number(monkeypatch, wrong):
    pld.pld_epsilon.cache_clear()
    monkeypatch.setattr(pld, "_attempts", lambda *_: [(wrong, None)])
    assert epsilon(**REFERENCE, accountant="pld") == epsilon(**REFERENCE, accountant="rdp")
    pld.pld_epsilon.cache_clear()


@pytest.mark.parametrize("accountant", ["rdp", "pld"])
def test_more_steps_more_sampling_less_noise_and_less_delta_spend_more(accountant):
    base = epsilon(**REFERENCE, accountant=accountant)
    for change in ({"steps": 1_200}, {"sample_rate": 0.012}, {"noise_multiplier": 0.9}):
        assert epsilon(**{**REFERENCE, **change}, accountant=accountant) > base
    assert epsilon(**{**REFERENCE, "delta": 1e-6}, accountant=accountant) > base


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
    assert 0.999 * target <= epsilon(noise_multiplier=sigma, **query) <= target


def test_no_steps_need_no_noise():
    query = {"delta": 1e-5, "sample_rate": 0.1, "accountant": "pld"}
    assert noise_multiplier(target_epsilon=1.0, steps=0, **query) == 0.0


@pytest.mark.parametrize(
    "target, message",
    [
        (1e-6, "noise multiplier above"),
        (1e12, "hardly any noise"),
        *((senseless, "") for senseless in (0.0, -1.0, math.inf, math.nan)),
    ],
)
def test_senseless_and_unreachable_targets_name_the_key(target, message):
    query = {"delta": 1e-5, "sample_rate": 1.0, "steps": 100, "accountant": "rdp"}
    with pytest.raises(ValueError, match=rf"privacy\.target_epsilon = .*{message}") as caught:
        noise_multiplier(target_epsilon=target, **query)
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


def test_reference_values():
    assert epsilon(**REFERENCE, accountant="rdp") == pytest.approx(2.1014, abs=1e-3)
    assert epsilon(**REFERENCE, accountant="pld") == pytest.approx(1.82824, rel=2e-4)


@pytest.mark.parametrize("sigma, steps, delta", [(1.0, 10**7, 1e-9), (1.0, 1_000, 1e-200)])
def test_many_steps_and_the_smallest_deltas_are_counted_by_pld(sigma, steps, delta):
    query = {"noise_multiplier": sigma, "sample_rate": 0.01, "steps": steps, "delta": delta}
    assert epsilon(**query, accountant="pld") < 0.999 * epsilon(**query, accountant="rdp")
    assert counted_by([steps_of(sigma, 0.01, steps)], delta=delta, accountant="pld") == "pld"


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


@pytest.mark.parametrize(
    "sigma, q", [(0.5, 0.01), (0.5, 0.3), (1.0, 0.1), (1.0, 0.9), (3.0, 0.5), (2.0, 1.0)]
)
def test_one_step_against_the_exact_value(sigma, q):
    exact = exact_one_step(sigma, q, 1e-5)
    query = {"noise_multiplier": sigma, "sample_rate": q, "steps": 1, "delta": 1e-5}
    assert exact <= epsilon(**query, accountant="pld") <= exact * 1.006 + 1e-4
    assert epsilon(**query, accountant="rdp") >= exact
