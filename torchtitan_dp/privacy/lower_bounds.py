"""Lower bounds on epsilon from the successes of an attack, at a stated confidence.

Sources: Steinke, Nasr & Jagielski, "Privacy Auditing with One (1) Training Run" (NeurIPS 2023),
Theorem 5.2; Dong, Roth & Su, "Gaussian Differential Privacy" (2022), for mu; Clopper &
Pearson (1934) for a rate. Libraries with these bounds bring JAX, or need two trainings.

Guarantee:
    - Each returns more than the truth with probability at most 1 - confidence, for any attack:
      `one_run_epsilon` than epsilon, if the audited program is (epsilon, delta)-DP for the attacked
      units; `gaussian_mu` than mu, if it is mu-Gaussian-DP, and than `claimed_mu`, if it is one
      step of estimated norms, at sampling rate 1.
    - A bound above the claim is evidence of a fault; one below it proves nothing.
    - Assumptions: for `one_run_epsilon`, each canary's coin is fair, independent of all else and
      unknown to the attack, and the number of guesses was fixed in advance. For `gaussian_mu`,
      trials are independent and what counts as an error was fixed in advance.
"""

from typing import Any

import numpy as np
from scipy import special  # scipy.stats takes a second to import

from torchtitan_dp.privacy.losses import ratios
from torchtitan_dp.privacy.segments import Mechanism

_SCAN = 0.05  # epsilon is scanned upwards in steps of this, then refined
_PRECISION = 1e-4


def rate_upper_bound(errors: int, trials: int, confidence: float) -> float:
    """Compute Clopper and Pearson's one-sided upper bound on the probability of an error."""
    assert 0 <= errors <= trials, (errors, trials)
    assert 0 < confidence < 1
    if errors == trials:
        return 1.0
    return float(special.betaincinv(errors + 1, trials - errors, confidence))


def gaussian_mu(
    *, false_positives: int, negatives: int, false_negatives: int, positives: int, confidence: float
) -> float:
    """Bound mu from below: no mu-Gaussian-DP program lets a test do better than this one did.

    A test of "with" against "without" that is wrong with probabilities a and b shows
    mu >= Phi^-1(1 - a) - Phi^-1(b); both rates are bounded from above, each at half the risk.

    Args:
        false_positives: guesses of "with" in `negatives` trials without.
        false_negatives: guesses of "without" in `positives` trials with.
    """
    each = 1 - (1 - confidence) / 2
    positive_rate = rate_upper_bound(false_positives, negatives, each)
    negative_rate = rate_upper_bound(false_negatives, positives, each)
    if positive_rate == 1 or negative_rate == 1:
        return 0.0
    return max(0.0, float(-special.ndtri(positive_rate) - special.ndtri(negative_rate)))


def expected_mu(mu: float, trials: int, confidence: float) -> float:
    """Predict `gaussian_mu` for a mu-Gaussian-DP program after `trials` of each kind."""
    errors = round(trials * float(special.ndtr(-mu / 2)))
    terms: dict[str, Any] = {"negatives": trials, "positives": trials, "confidence": confidence}
    return gaussian_mu(false_positives=errors, false_negatives=errors, **terms)


def claimed_mu(mechanism: Mechanism, trials: int, confidence: float) -> float:
    """Return the mu that `gaussian_mu` of one whole step, or round of steps, exceeds with
    probability at most 1 - confidence.

    With exact norms it is 1 / sigma. With estimated ones the best test detects, at false alarms a,
    the share G(a) = E Phi(Phi^-1(a) + Z / sigma), Z of the envelope (`privacy.losses`), and
    misses 1 - G(a). No bound on a rate is below that of no error, e. So, unless a bound on a rate
    failed, gaussian_mu is at most the largest -Phi^-1(max(1 - G(a), e)) - Phi^-1(a) with a >= e.
    """
    sigma = mechanism.noise_multiplier
    if not mechanism.projections:
        return 1 / sigma
    shares = ratios(mechanism.projections)
    least = rate_upper_bound(0, trials, 1 - (1 - confidence) / 2)
    place = np.linspace(special.ndtri(least), -special.ndtri(least), 4001)  # Phi^-1(a)
    missed = special.ndtr(-(place[:, None] + shares.values / sigma)) @ shares.probabilities
    found = -special.ndtri(np.maximum(missed, least)) - place
    return float(found.max()) * (1 + 1e-4)  # between the places


def one_run_p_value(
    *, canaries: int, guesses: int, correct: int, epsilon: float, delta: float
) -> float:
    """Bound how likely so many correct guesses are if the program is (epsilon, delta)-DP.

    Steinke et al., Theorem 5.2: with W ~ Binomial(guesses, e^epsilon / (1 + e^epsilon)),

        P[at least v correct] <= P[W >= v] + 2 m delta max_i P[v - i <= W < v] / i.

    Args:
        canaries: m, each included by a fair coin of its own.
        guesses: the number guessed at, fixed in advance.
    """
    assert 0 <= correct <= guesses <= canaries, (correct, guesses, canaries)
    assert epsilon >= 0
    assert 0 <= delta <= 1
    accuracy = special.expit(epsilon)  # of randomized response, the best that epsilon-DP allows
    at_least = float(special.bdtrc(correct - 1, guesses, accuracy))
    if delta == 0 or correct == 0:
        return min(1.0, at_least)
    i = np.arange(1, correct + 1)
    just_below = special.bdtrc(correct - i - 1, guesses, accuracy) - at_least
    return min(1.0, at_least + 2 * canaries * delta * float(np.max(just_below / i)))


def one_run_epsilon(
    *, canaries: int, guesses: int, correct: int, delta: float, confidence: float
) -> float:
    """Find the epsilon up to which these guesses are too good to be believed; 0.0 if none is."""
    assert 0 < confidence < 1

    def rejected(epsilon: float) -> bool:
        p = one_run_p_value(
            canaries=canaries, guesses=guesses, correct=correct, epsilon=epsilon, delta=delta
        )
        return p <= 1 - confidence

    if not rejected(0.0):
        return 0.0
    low, high = 0.0, _SCAN
    while rejected(high):
        low, high = high, high + _SCAN
    while high - low > _PRECISION:
        middle = (low + high) / 2
        low, high = (middle, high) if rejected(middle) else (low, middle)
    return low
