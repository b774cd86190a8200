"""Accounting: right numbers, bounds that never flatter, and targets that are never overshot."""

import math
import warnings

import numpy as np
import pytest
from opacus.accountants import RDPAccountant
from opacus.accountants.analysis import prv as opacus_prv
from scipy import optimize
from scipy.stats import norm

from tests.accounts import gaussian_steps
from torchtitan_dp.privacy import prv, rdp
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


def exact_gaussian(sigma: float, delta: float) -> float:
    """Balle & Wang 2018: the Gaussian mechanism, exactly."""
    mu = 1 / sigma

    def excess(eps: float) -> float:
        far = math.exp(eps + norm.logcdf(-mu / 2 - eps / mu))
        return float(norm.cdf(mu / 2 - eps / mu)) - far - delta

    return optimize.brentq(excess, 0, 200)


def test_reference_values():
    assert epsilon(**REFERENCE, accountant="rdp") == pytest.approx(2.1014, abs=1e-3)
    # Google's PLD: 1.828; the error bar adds at most 0.01 and epsilon / 200
    assert 1.828 <= epsilon(**REFERENCE, accountant="prv") <= 1.828 + 0.01


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


@pytest.mark.parametrize("delta", [1e-5, 1e-7])
@pytest.mark.parametrize("sigma, q, steps", GRID)
def test_rdp_is_never_below_prv(sigma, q, steps, delta):
    if q == 1:
        sigma, steps = sigma / math.sqrt(steps), 1
    segments = (gaussian_steps(sigma, q, steps),)
    tight = prv.prv_epsilon(segments, delta)  # before the minimum is taken
    loose = rdp.rdp_epsilon(segments, delta)
    assert 0 < tight <= loose < 2 * tight + 1


@pytest.mark.parametrize(
    "sigma, q", [(0.5, 0.01), (0.5, 0.3), (1.0, 0.1), (1.0, 0.9), (3.0, 0.5), (2.0, 1.0)]
)
def test_one_step_against_the_exact_value(sigma, q):
    exact = exact_one_step(sigma, q, 1e-5)
    query = {"noise_multiplier": sigma, "sample_rate": q, "steps": 1, "delta": 1e-5}
    tight = epsilon(**query, accountant="prv")
    assert exact <= tight <= exact * 1.006 + 1e-4
    assert epsilon(**query, accountant="rdp") >= exact


@pytest.mark.parametrize("sigma, steps", [(1.0, 1), (30.0, 1_000), (300.0, 10_000), (5.0, 400)])
def test_every_record_at_every_step_against_the_exact_gaussian(sigma, steps):
    exact = exact_gaussian(sigma / math.sqrt(steps), 1e-6)
    query = {"noise_multiplier": sigma, "sample_rate": 1.0, "steps": steps, "delta": 1e-6}
    assert exact <= epsilon(**query, accountant="prv") <= exact * 1.006 + 1e-4
    assert epsilon(**query, accountant="rdp") >= exact


def test_prv_reports_the_upper_end_of_a_narrow_error_bar(monkeypatch):
    asked = []
    compute = opacus_prv.DiscretePRV.compute_epsilon

    def spy(self, delta, delta_error, eps_error):
        low, middle, high = compute(self, delta, delta_error, eps_error)
        asked.append((delta_error, eps_error, low, middle, high))
        return low, middle, high

    monkeypatch.setattr(opacus_prv.DiscretePRV, "compute_epsilon", spy)
    prv.prv_epsilon.cache_clear()
    spent = prv.prv_epsilon((gaussian_steps(1.0, 0.01, 1_000),), 1e-5)
    delta_error, eps_error, low, middle, high = asked[-1]
    assert low < middle < high == spent
    assert high - middle >= eps_error
    assert eps_error < spent / 200
    assert delta_error < 1e-5 / 500


class _AddedPRV:
    """The privacy loss in the other direction: unit absent against present."""

    def __init__(self, q: float, sigma: float) -> None:
        self.q, self.sigma = q, sigma

    def cdf(self, t):
        reached = np.exp(-np.asarray(t)) + self.q - 1
        z = np.log(np.where(reached > 0, reached / self.q, 1.0))
        above = norm.sf(self.sigma * z + 1 / (2 * self.sigma))
        return np.where(reached > 0, above, 1.0)


@pytest.mark.parametrize("sigma, q, steps", [case for case in GRID if case[1] < 1])
def test_the_other_direction_spends_no_more(sigma, q, steps):
    delta, error = 1e-5, 0.01
    segments = (gaussian_steps(sigma, q, steps),)
    loss, mesh = prv._prv_domain(segments, delta, error)
    domain = opacus_prv.Domain.create_aligned(-loss, loss, mesh)
    cut = opacus_prv.TruncatedPrivacyRandomVariable(_AddedPRV(q, sigma), domain.t_min, domain.t_max)
    total = opacus_prv.compose_heterogeneous([opacus_prv.discretize(cut, domain)], [steps])
    other, _, _ = total.compute_epsilon(delta, delta / 1000, error)
    assert 0 < other + error < prv.prv_epsilon(segments, delta)


@pytest.mark.parametrize("accountant", ["rdp", "prv", "pld"])
def test_more_steps_more_sampling_less_noise_and_less_delta_spend_more(accountant):
    base = epsilon(**REFERENCE, accountant=accountant)
    for change in ({"steps": 1_200}, {"sample_rate": 0.012}, {"noise_multiplier": 0.9}):
        assert epsilon(**{**REFERENCE, **change}, accountant=accountant) > base
    assert epsilon(**{**REFERENCE, "delta": 1e-6}, accountant=accountant) > base


@pytest.mark.parametrize("accountant", ["rdp", "prv", "pld"])
def test_edges(accountant):
    assert epsilon(**{**REFERENCE, "steps": 0}, accountant=accountant) == 0.0
    assert epsilon(**{**REFERENCE, "sample_rate": 0.0}, accountant=accountant) == 0.0
    assert epsilon(**{**REFERENCE, "noise_multiplier": 0.0}, accountant=accountant) == math.inf
    assert epsilon(**{**REFERENCE, "steps": 0, "noise_multiplier": 0.0}, accountant="rdp") == 0.0
    tiny = epsilon(**{**REFERENCE, "sample_rate": 1e-7}, accountant=accountant)
    assert 0.0 <= tiny < 1.0


def test_prv_out_of_its_depth_is_rdps_bound(caplog):
    query = {"noise_multiplier": 0.31, "sample_rate": 0.9, "steps": 90_000, "delta": 1e-5}
    with caplog.at_level("INFO", logger=prv.__name__):
        fallen = epsilon(**query, accountant="prv")
    assert fallen == epsilon(**query, accountant="rdp") > 1e4
    assert "PRV" in caplog.text


def test_a_failing_prv_never_gives_a_smaller_number(monkeypatch):
    for wrong in (math.nan, -math.inf, math.inf):
        prv.prv_epsilon.cache_clear()
        monkeypatch.setattr(prv, "_prv_compose", lambda *_, wrong=wrong: wrong)
        assert epsilon(**REFERENCE, accountant="prv") == epsilon(**REFERENCE, accountant="rdp")
    prv.prv_epsilon.cache_clear()


TARGETS = [
    (0.2, 0.001, 2_000, "prv"),
    (0.5, 0.01, 1_000, "rdp"),
    (1.0, 0.01, 1_000, "prv"),
    (1.0, 0.001, 20_000, "rdp"),
    (3.0, 0.05, 400, "prv"),
    (3.0, 1.0, 10, "rdp"),
    (8.0, 0.002, 5_000, "prv"),
    (8.0, 1.0, 1_000, "prv"),
    (50.0, 0.1, 100, "rdp"),
    (200.0, 0.1, 300, "prv"),
]


@pytest.mark.thorough_cases("*-prv")
@pytest.mark.parametrize("target, q, steps, accountant", TARGETS)
def test_sigma_never_overshoots_the_target(target, q, steps, accountant):
    query = {"sample_rate": q, "steps": steps, "delta": 1e-6, "accountant": accountant}
    sigma = noise_multiplier(target_epsilon=target, **query)
    spent = epsilon(noise_multiplier=sigma, **query)
    assert 0.99 * target <= spent <= target


def test_no_steps_need_no_noise():
    assert (
        noise_multiplier(target_epsilon=1.0, delta=1e-5, sample_rate=0.1, steps=0, accountant="prv")
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


def test_a_second_query_is_cached(monkeypatch):
    computed, compute = [], prv._prv_compose

    def spy(*query):
        computed.append(query)
        return compute(*query)

    monkeypatch.setattr(prv, "_prv_compose", spy)
    prv.prv_epsilon.cache_clear()
    first = epsilon(**REFERENCE, accountant="prv")
    count = len(computed)
    assert count > 0
    assert epsilon(**REFERENCE, accountant="prv") == first
    assert len(computed) == count
