"""The meaning of a run's epsilon for one person, as bounds on membership inference; and the
templates of what is written for people: a plan, an audit's result, a model card, a page.

Guarantee:
    An attacker who sees all outputs of the run, with any side knowledge and computing power, does
    no better than `Meaning` says at telling whether a person's data was trained on: upper bounds,
    float64's rounding allowed for, under the assumptions and for the neighbours of `accounting`'s
    epsilon. They follow from the privacy profile delta(epsilon) alone (proof: docs/proofs.md,
    "Membership from the profile"; Dong, Roth & Su 2022; Kairouz, Oh & Viswanath 2015).
    No filter of a template rounds a claim in its own favour: `up` is for epsilon, its consequences
    and q, `down` for sigma, and `exact` for delta and C.
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
from scipy.special import expit, log_ndtr, ndtr, ndtri

from torchtitan_dp.privacy.accounting import check_delta, percent, rounded_down, rounded_up
from torchtitan_dp.privacy.pld import gaussian_delta, is_one_gaussian, pld_profile
from torchtitan_dp.privacy.rdp import may_be_smaller, rdp_delta, rdp_epsilon
from torchtitan_dp.privacy.segments import GaussianSteps, Segment, composition

FALSE_ALARMS = (0.01, 0.001)
_POINTS = 2**13  # epsilons at which the profile is looked at
_ROUNDING = 1e-12  # relative: of closed formulas of this file, which lose far less


@dataclass(frozen=True)
class Meaning:
    """Upper bounds on the success of any attacker.

    Args:
        detected: pairs (false alarms, the largest share of members detected).
        posterior: from a prior of 50%, the largest posterior probability of the truth (a member,
            or not), but for a probability of `posterior_but_for` over the run's noise and draws.
    """

    detected: tuple[tuple[float, float], ...]
    posterior: float
    posterior_but_for: float

    def to_json(self) -> dict[str, Any]:
        return {
            "members_detected": [
                {"false_alarms": alarms, "at_most": share} for alarms, share in self.detected
            ],
            "posterior_from_half": self.posterior,
            "posterior_but_for": self.posterior_but_for,
        }

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> "Meaning":
        return cls(
            detected=tuple((d["false_alarms"], d["at_most"]) for d in fields["members_detected"]),
            posterior=fields["posterior_from_half"],
            posterior_but_for=fields["posterior_but_for"],
        )

    def sentences(self, unit: str, epsilon: float, delta: float) -> list[str]:
        """Return the bounds in plain English, each number rounded up: the attacks, a verdict on
        `epsilon`, and last the worst case, which (epsilon, delta) alone describes.

        >>> from torchtitan_dp.privacy.segments import Mechanism
        >>> bounds = meaning([Segment(Mechanism(2.0, 1.0), 4)], 1e-5)
        >>> for line in bounds.sentences("record", 4.377, 1e-5):
        ...     print(line)
        A membership-inference attack with 1% false positives detects at most 9.24% of training \
records; without the model, 1%.
        A membership-inference attack with 0.1% false positives detects at most 1.83% of training \
records; without the model, 0.1%.
        Verdict: a reasonable guarantee, by the scale of Ponomareva et al. (How to DP-fy ML, \
2023): epsilon up to 1 is strong, up to 10 reasonable, above that weak. Judge by the rates above; \
for weights of sensitive data that anybody may have, start at 1.
        Worst case, except with a probability of 1 in 100,000: no output is more than 79.6 \
times (e^epsilon) as likely with the record as without it, and an attacker who starts at 50% that \
it was used reaches at most 99.4% certainty. Only the rarest outputs tell so much; if they must \
not, choose epsilon up to 1.
        """
        if self.posterior == 1.0 == min(share for _, share in self.detected):
            return [f"Nothing bounds a membership-inference attack on a {unit}: there is no noise."]
        word = "strong" if epsilon <= 1 else "reasonable" if epsilon <= 10 else "weak"
        luck = max(delta, self.posterior_but_for)
        choice = ". Only the rarest outputs tell so much; if they must not, choose epsilon up to 1"
        start = "for weights of sensitive data that anybody may have, start at 1."
        return [
            *(
                f"A membership-inference attack with {percent(alarms)} false positives detects at "
                f"most {percent(share)} of training {unit}s; without the model, {percent(alarms)}."
                for alarms, share in self.detected
            ),
            f"Verdict: a {word} guarantee, by the scale of Ponomareva et al. (How to DP-fy ML, "
            "2023): epsilon up to 1 is strong, up to 10 reasonable, above that weak."
            f"{f' Judge by the rates above; {start}' * (epsilon > 1)}",
            f"Worst case, except with a probability of 1 in {int(1 / Decimal(repr(luck))):,}: no "
            f"output is more than {e_to_the(epsilon)} times (e^epsilon) as likely with the {unit} "
            "as without it, and an attacker who starts at 50% that it was used reaches at most "
            f"{percent(self.posterior)} certainty{choice * (epsilon > 1)}.",
        ]


def e_to_the(epsilon: float) -> str:
    """Write e^epsilon, rounded up to three digits or to a power of ten."""
    if epsilon < 20:
        return rounded_up(math.exp(epsilon), digits=3)
    return f"10^{math.ceil(epsilon / math.log(10))}"


def meaning(segments: Sequence[Segment], delta: float) -> Meaning:
    """Compute what an attacker can learn from a model after these segments.

    The smallest of three upper bounds: PLD, RDP where `accounting.compose` asks it, and the
    Gaussian trade-off as if every unit were in every draw (Dong et al. 2022). `delta` is the
    probability of the exceptions to the worst case. Without noise every rate is 1.

    Raises:
        ValueError: `delta` is not in (0, 1).
    """
    check_delta(delta)
    return _meaning(composition(segments), delta)


@functools.lru_cache(maxsize=64)
def _meaning(segments: tuple[GaussianSteps, ...], delta: float) -> Meaning:
    if not segments:
        return Meaning(tuple((a, a) for a in FALSE_ALARMS), 0.5, 0.0)
    if segments[0].noise_multiplier == 0:  # they are sorted
        return Meaning(tuple((a, 1.0) for a in FALSE_ALARMS), 1.0, 0.0)
    # It holds without any exception, as if every unit were in every draw.
    mu = _up(math.sqrt(sum(s.steps / s.least_noise**2 for s in segments)))
    if is_one_gaussian(segments):  # its exact trade-off
        log_odds = math.log(delta) - float(log_ndtr(ndtri(delta) - mu))
        detected = tuple((a, min(_up(float(ndtr(ndtri(a) + mu))), 1.0)) for a in FALSE_ALARMS)
        return Meaning(detected, _from_odds(log_odds), delta)
    # The profile: the smallest bound on delta at epsilons that rise to where it is far below delta.
    top = rdp_epsilon(segments, 1e-3 * min(delta, 1e-3)) + 1e-12
    epsilons = np.union1d(np.linspace(0, top, _POINTS), np.geomspace(1e-6 * top, top, _POINTS))
    profile, rounding = gaussian_delta(mu, epsilons)
    profile += rounding
    if (by_pld := pld_profile(segments, delta)) is not None:
        profile = np.minimum(profile, by_pld.at(epsilons))
    if by_pld is None or may_be_smaller(segments):
        profile = np.minimum(profile, rdp_delta(segments, epsilons))
    profile = np.minimum.accumulate(np.clip(np.nan_to_num(profile, nan=1.0), 0.0, 1.0))
    detected = tuple((a, _detected(epsilons, profile, a)) for a in FALSE_ALARMS)
    if not (below := profile < delta).any():
        return Meaning(detected, 1.0, delta)
    log_odds = float((epsilons[below] - np.log1p(-profile[below] / delta)).min())
    return Meaning(detected, _from_odds(log_odds), delta)


def _detected(epsilons: np.ndarray, profile: np.ndarray, alarms: float) -> float:
    """Bound the detections at a rate of false alarms, from above."""
    first = np.exp(np.minimum(epsilons, 700.0)) * alarms + profile  # beyond 700 more than 1, anyway
    second = 1 - np.exp(-epsilons) * np.maximum(1 - profile - alarms, 0.0)
    return min(_up(float(min(first.min(), second.min()))), 1.0)


def _from_odds(log_odds: float) -> float:
    """Return the probability of these odds, never rounded down."""
    return min(1.0, float(expit(log_odds)) + 2.0**-50)


def _up(value: float) -> float:
    return value * (1 + _ROUNDING)


def templates(*folders: Path, html: bool = False) -> jinja2.Environment:
    """Load the templates of these folders; HTML is escaped."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(folders),
        undefined=jinja2.StrictUndefined,
        autoescape=html,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=not html,
    )
    environment.filters |= {
        "up": rounded_up,
        "down": rounded_down,
        "exact": exact,
        "grouped": "{:,}".format,
        "percent": "{:.1%}".format,
        "sentence": lambda text: f"{text[:1].upper()}{text[1:]}.",
    }
    return environment


def exact(value: float) -> str:
    """Write a number with as many digits as it has.

    >>> exact(1e-5), exact(1.2345649e-06), exact(1.0), exact(0.1)
    ('1e-05', '1.2345649e-06', '1', '0.1')
    """
    short = f"{value:g}"
    return short if float(short) == value else repr(value)
