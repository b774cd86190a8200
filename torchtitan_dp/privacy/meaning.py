"""The meaning of a run's epsilon for one person: bounds on membership inference.

Guarantee
---------
Call a person a member if their data was trained on, and take any two neighbouring data sets, one
with the member and one without. An attacker who sees all outputs of the run, or their results, with
any side knowledge and computing power, does no better than `Meaning` says. All
numbers are upper bounds, float64's rounding allowed for, under the same assumptions and for the
same neighbours as `accounting`'s epsilon.

They follow from the privacy profile delta(epsilon): the smallest delta such that the run is
(epsilon, delta)-DP in both directions. A point of it, for an event S with probability a without
the member and t with the member, says

    t <= e^epsilon a + delta(epsilon)   and   1 - a <= e^epsilon (1 - t) + delta(epsilon).

- `detected`: let S be "the attacker says: a member". At false alarms a, both inequalities bound
  the detections t, and each epsilon >= 0 gives a bound, of which the smallest holds (Dong, Roth &
  Su 2022, propositions 2.11 and 2.12; Kairouz, Oh & Viswanath 2015).
- `mu`: Gaussian DP but for a probability: t <= G(a) + mu_but_for for every test, where
  G(a) = Phi(Phi^-1(a) + mu) is what the best test of N(0, 1) against N(mu, 1) detects. By the same
  proposition G is the smallest of both bounds over all epsilon >= 0 with the Gaussian's own
  profile D(epsilon), since G's trade-off is symmetric. So delta(epsilon) <= D(epsilon) + x for all
  epsilon >= 0 is enough: it raises the first bound by x and the second by e^-epsilon x <= x.
  Gomez et al. 2025 propose to report such a mu. Without the exception only sqrt(sum of
  steps / sigma^2) holds (with probability q^steps the member is in every draw, which decides the
  far tail of the privacy loss); it is returned where it is smaller.
- `posterior`: let S be "the output is such that the posterior odds of a member are above e^L", from
  even odds. Then a < e^-L t, so t (1 - e^(epsilon - L)) <= delta(epsilon), and t is at most x
  for L = epsilon - ln(1 - delta(epsilon) / x), whichever epsilon is the best. The same holds of
  "not a member", without the member, by the other direction, and for somebody who sees only a part
  or a function of the output (the tail of the whole output's privacy loss does not: who sees less
  may reach a posterior more often). At q = 1, in closed form, e^L = x / Phi(Phi^-1(x) - mu).
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

import numpy as np
from scipy.special import expit, log_expit, log_ndtr, ndtr, ndtri, ndtri_exp

from torchtitan_dp.privacy.accounting import check_delta, percent, rounded_up
from torchtitan_dp.privacy.pld import gaussian_delta, is_one_gaussian, pld_profile
from torchtitan_dp.privacy.rdp import rdp_delta, rdp_epsilon
from torchtitan_dp.privacy.segments import GaussianSteps, Segment, composition

FALSE_ALARMS = (0.01, 0.001)
_POINTS = 2**13  # epsilons at which the profile is looked at
_ROUNDING = 1e-12  # relative: of closed formulas of this file, which lose far less


@dataclass(frozen=True)
class Meaning:
    """Upper bounds on the success of any attacker.

    Args:
        mu: the run is mu-Gaussian-DP but for a probability of `mu_but_for`; inf: no bound.
        mu_but_for: 0.0 if there is no exception.
        detected: pairs (false alarms, the largest share of members detected).
        posterior: from a prior of 50%, the largest posterior probability of the truth (a member,
            or not), but for a probability of `posterior_but_for` over the run's noise and draws.
    """

    mu: float
    mu_but_for: float
    detected: tuple[tuple[float, float], ...]
    posterior: float
    posterior_but_for: float

    def to_json(self) -> dict[str, Any]:
        """Return plain values for `json.dumps`, with None for an infinite mu."""
        return {
            "gaussian_dp_mu": self.mu if math.isfinite(self.mu) else None,
            "gaussian_dp_but_for": self.mu_but_for,
            "members_detected": [
                {"false_alarms": alarms, "at_most": share} for alarms, share in self.detected
            ],
            "posterior_from_half": self.posterior,
            "posterior_but_for": self.posterior_but_for,
        }

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> "Meaning":
        """Read what `to_json` gave."""
        mu = fields["gaussian_dp_mu"]
        return cls(
            mu=math.inf if mu is None else mu,
            mu_but_for=fields["gaussian_dp_but_for"],
            detected=tuple((d["false_alarms"], d["at_most"]) for d in fields["members_detected"]),
            posterior=fields["posterior_from_half"],
            posterior_but_for=fields["posterior_but_for"],
        )

    def sentences(self, unit: str = "record") -> list[str]:
        """Return the bounds in plain English, each number rounded up.

        >>> from torchtitan_dp.privacy.mechanism import PoissonGaussian
        >>> for line in meaning([Segment(PoissonGaussian(2.0, 1.0), 4)], 1e-5).sentences():
        ...     print(line)
        A membership-inference attack with 1% false positives detects at most 9.24% of training \
records.
        A membership-inference attack with 0.1% false positives detects at most 1.83% of training \
records.
        An attacker who gives the membership of a record even odds is at most 99.4% sure of it \
after seeing the model, except with a probability of 1 in 100,000.
        To detect the membership of a record is at least as hard as to distinguish N(0, 1) from \
N(1, 1) by one draw (1-Gaussian-DP).
        """
        if self.mu == math.inf:
            return [f"Nothing bounds a membership-inference attack on a {unit}: there is no noise."]
        lines = [
            f"A membership-inference attack with {percent(alarms)} false positives detects at most "
            f"{percent(share)} of training {unit}s."
            for alarms, share in self.detected
        ]
        lines.append(
            f"An attacker who gives the membership of a {unit} even odds is at most "
            f"{percent(self.posterior)} sure of it after seeing the "
            f"model{_except_for(self.posterior_but_for)}."
        )
        exception, mu = _except_for(self.mu_but_for), rounded_up(self.mu, digits=3)
        lines.append(
            f"To detect the membership of a {unit} is at least as hard as to distinguish N(0, 1) "
            f"from N({mu}, 1) by one draw{exception} ({mu}-Gaussian-DP)."
            if self.mu > 0
            else f"No test of the membership of a {unit} beats guessing{exception}."
        )
        return lines


def meaning(segments: Sequence[Segment], delta: float) -> Meaning:
    """Compute what planned segments mean, composed by PLD, RDP, and the Gaussian without sampling.

    Args:
        delta: in (0, 1), else ValueError: the probability of the exceptions.

    Returns:
        Upper bounds; without noise mu is inf, the rest 1.

    >>> from torchtitan_dp.privacy.mechanism import PoissonGaussian
    >>> run = meaning([Segment(PoissonGaussian(1.0, 0.01), 1_000)], 1e-5)
    >>> round(run.mu, 2), [round(share, 3) for _, share in run.detected], round(run.posterior, 3)
    (0.45, [0.029, 0.004], 0.903)
    """
    check_delta(delta)
    return _meaning(composition(segments), delta)


@functools.lru_cache(maxsize=64)
def _meaning(segments: tuple[GaussianSteps, ...], delta: float) -> Meaning:
    if not segments:
        return Meaning(0.0, 0.0, tuple((a, a) for a in FALSE_ALARMS), 0.5, 0.0)
    if segments[0].noise_multiplier == 0:  # they are sorted
        return Meaning(math.inf, 0.0, tuple((a, 1.0) for a in FALSE_ALARMS), 1.0, 0.0)
    unsampled = _unsampled_mu(segments)
    if is_one_gaussian(segments):
        return _gaussian(unsampled, delta)
    epsilons = _epsilons(segments, delta)
    profile = _profile(segments, delta, epsilons)
    mu = math.inf
    if profile[-1] <= delta:
        last = float(epsilons[np.argmax(profile <= delta)])
        mu = min(_up(_mu(segments, delta, last)), _mu_of_pair(last))
    return Meaning(
        mu=min(mu, unsampled),
        mu_but_for=delta if mu < unsampled else 0.0,
        detected=tuple((a, _detected(epsilons, profile, a)) for a in FALSE_ALARMS),
        posterior=_posterior(epsilons, profile, delta),
        posterior_but_for=delta,
    )


def _gaussian(mu: float, delta: float) -> Meaning:
    """Compute the exact meaning of the Gaussian mechanism."""
    log_odds = math.log(delta) - float(log_ndtr(ndtri(delta) - _up(mu)))
    return Meaning(
        mu=mu,
        mu_but_for=0.0,
        detected=tuple((a, min(_up(float(ndtr(ndtri(a) + _up(mu)))), 1.0)) for a in FALSE_ALARMS),
        posterior=_from_odds(log_odds),
        posterior_but_for=delta,
    )


def _unsampled_mu(segments: Sequence[GaussianSteps]) -> float:
    """Return the mu that holds without any exception, as if every unit were in every draw."""
    return math.sqrt(sum(s.steps / s.least_noise**2 for s in segments))


def _epsilons(segments: tuple[GaussianSteps, ...], delta: float) -> np.ndarray:
    """Choose where to look at the profile: rising, from 0 to where it is far below delta."""
    top = rdp_epsilon(segments, 1e-3 * min(delta, 1e-3)) + 1e-12
    return np.union1d(np.linspace(0, top, _POINTS), np.geomspace(1e-6 * top, top, _POINTS))


def _profile(segments: tuple[GaussianSteps, ...], delta: float, epsilons: np.ndarray) -> np.ndarray:
    """Return the smallest available bound on delta(epsilon) at each epsilon, falling."""
    best, rounding = gaussian_delta(_up(_unsampled_mu(segments)), epsilons)
    best = np.minimum(best + rounding, rdp_delta(segments, epsilons))
    by_pld = pld_profile(segments, delta)
    if by_pld is not None:
        best = np.minimum(best, by_pld.at(epsilons))
    return np.minimum.accumulate(np.clip(np.nan_to_num(best, nan=1.0), 0.0, 1.0))


def _detected(epsilons: np.ndarray, profile: np.ndarray, alarms: float) -> float:
    """Bound the detections at a rate of false alarms."""
    first = np.exp(np.minimum(epsilons, 700.0)) * alarms + profile  # beyond 700 more than 1, anyway
    second = 1 - np.exp(-epsilons) * np.maximum(1 - profile - alarms, 0.0)
    return min(_up(float(min(first.min(), second.min()))), 1.0)


def _posterior(epsilons: np.ndarray, profile: np.ndarray, but_for: float) -> float:
    """Bound the posterior from even odds, but for a probability; it is 1.0 if there is no bound."""
    below = profile < but_for
    if not below.any() or but_for >= 1:
        return 1.0
    log_odds = epsilons[below] - np.log1p(-profile[below] / but_for)
    return _from_odds(float(log_odds.min()))


def _mu(segments: tuple[GaussianSteps, ...], delta: float, last: float) -> float:
    """Find the least mu whose Gaussian's profile, plus delta, is nowhere below the run's.

    Checked for all epsilons by finitely many: profiles fall, so between two neighbouring points
    the run's is at most its left value, and the Gaussian's at least its right one. From `last` on,
    the run's profile is at most delta.
    """
    epsilons = np.linspace(0, last, 2 * _POINTS)
    needed = (_profile(segments, delta, epsilons) - delta)[:-1]
    right = epsilons[1:][needed > 0]
    needed = needed[needed > 0]
    if len(needed) == 0:
        return 0.0

    def enough(mu: float) -> bool:
        value, rounding = gaussian_delta(mu, right)
        return bool((value - rounding >= needed).all())

    low, high = 0.0, 1e-9
    while not enough(high):
        low, high = high, 2 * high
        if high > 1e9:
            return math.inf
    while high - low > 1e-6 * high:
        middle = (low + high) / 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high


def _mu_of_pair(epsilon: float) -> float:
    """Return the mu that one pair (epsilon, delta) gives, but for delta.

    A pair's trade-off is, but for delta, at least that of (epsilon, 0), which is two straight lines
    that meet where both errors are 1 / (1 + e^epsilon). The Gaussian whose trade-off passes through
    that corner lies below both, since it is convex: Phi(mu / 2) = e^epsilon / (1 + e^epsilon).
    """
    return _up(max(-2 * float(ndtri_exp(log_expit(-epsilon))), 0.0))


def _from_odds(log_odds: float) -> float:
    """Return the probability of these odds, never rounded down."""
    return min(1.0, float(expit(log_odds)) + 2.0**-50)


def _up(value: float) -> float:
    return value * (1 + _ROUNDING)


def _except_for(probability: float) -> str:
    """Return a probability as one in so many, rounded up."""
    if probability == 0:
        return ""
    many = int(1 / Decimal(repr(probability)))
    return f", except with a probability of 1 in {many:,}"
