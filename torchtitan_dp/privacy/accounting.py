"""From noise and steps to (epsilon, delta), and from a target epsilon to the noise.

Guarantee:
    - `compose` is an upper bound for optimizer steps, empty draws included, of the Poisson-
      subsampled Gaussian mechanism, and of those that it dominates (`segments`), also when each
      step is chosen after seeing the ones before. Segments go one after the other on the same data;
      their mechanisms and steps were all fixed before training ("planned").
    - Neighbours are `add_remove` (one unit more or less; needs a public sample rate and divisor)
      and `zero_out` (one unit's content replaced by an empty unit; the number of units is public),
      with the same epsilon. Replacing one unit by another is *not* covered.
    - `pld`, the default, is tight and pessimistic by construction (`pld`). `rdp` is looser. Its
      bound counts too where PLD's numbers cannot be had, and for rounds of random allocation where
      it is smaller: `counted_by` names the one that counted.
"""

import bisect
import math
from collections.abc import Callable, Sequence
from decimal import ROUND_CEILING, ROUND_FLOOR, Context, Decimal
from typing import Literal, get_args

from torchtitan_dp.privacy.pld import pld_epsilon
from torchtitan_dp.privacy.rdp import may_be_smaller, rdp_epsilon
from torchtitan_dp.privacy.segments import Mechanism, Segment, composition

Accountant = Literal["rdp", "pld"]

MAX_NOISE_MULTIPLIER = 1e4
_MIN_NOISE_MULTIPLIER = 1e-4
_AIM = 0.9995  # of the target: the middle of [0.999, 1]
_TOLERANCE = 0.00049  # of an excess, around it
_POINTS: dict[Accountant, int] = {"pld": 50, "rdp": 100}  # of a curve, evenly spaced


def compose(segments: Sequence[Segment], *, delta: float, accountant: Accountant) -> float:
    """Compute the epsilon that segments spend, one after the other on the same data.

    Args:
        delta: in (0, 1); epsilon holds except with this probability.
        accountant: "pld" composes the privacy-loss distribution (Koskela et al. 2020; Doroshenko et
            al. 2022), "rdp" Rényi divergences (Mironov 2017). With "pld", RDP's bound counts where
            it is the smaller one or PLD has none; `counted_by` says which counted.

    Returns:
        An upper bound, rounding included (docs/proofs.md): 0.0 without steps, inf if one has no
        noise.

    Raises:
        ValueError: `delta` is not in (0, 1), or the accountant is unknown.
    """
    return _bound(segments, delta, accountant)[0]


def counted_by(segments: Sequence[Segment], *, delta: float, accountant: Accountant) -> Accountant:
    """Return the accountant whose bound `compose` returns: "rdp" also in the place of "pld"."""
    return _bound(segments, delta, accountant)[1]


def _bound(
    segments: Sequence[Segment], delta: float, accountant: Accountant
) -> tuple[float, Accountant]:
    """Return the bound that counts, and its accountant."""
    check_delta(delta)
    if accountant not in get_args(Accountant):
        raise ValueError(f"privacy.accountant = {accountant!r} is none of {get_args(Accountant)}")
    merged = composition(segments)
    if not merged or merged[0].noise_multiplier == 0:  # they are sorted
        return (math.inf if merged else 0.0), accountant
    bound = pld_epsilon(merged, delta) if accountant == "pld" else math.inf
    if bound < math.inf and not may_be_smaller(merged):
        return bound, "pld"
    loose = rdp_epsilon(merged, delta)
    return (bound, "pld") if bound <= loose else (loose, "rdp")


def noise_for(
    mechanism: Mechanism,
    steps: int,
    *,
    target_epsilon: float,
    delta: float,
    accountant: Accountant,
    before: Sequence[Segment] = (),
) -> float:
    """Find the sigma that spends at least 99.9% of `target_epsilon` in `steps` steps, never more.

    Args:
        mechanism: of the steps to come; its own `noise_multiplier` does not count.
        before: planned segments that ran on the same data; the target includes them.

    Returns:
        sigma; 0.0 if nothing more is ever spent.

    Raises:
        ValueError: `before` alone exceeds the target, or no sigma up to 1e4 reaches it.
    """
    Segment(mechanism, steps)  # checks their number
    if not 0 < target_epsilon < math.inf:
        raise ValueError(f"privacy.target_epsilon = {target_epsilon}: must be positive and finite")
    already = compose(before, delta=delta, accountant=accountant)
    if already > target_epsilon:
        raise ValueError(
            f"privacy.target_epsilon = {target_epsilon}: {already:.4g} was spent before "
            "this run began; raise it"
        )
    if steps == 0 or mechanism.sample_rate == 0:
        return 0.0

    def root(coming: Mechanism, start: float) -> float:
        def excess(log_sigma: float) -> float:  # falls with sigma
            steps_to_come = Segment(coming.with_noise(math.exp(log_sigma)), steps)
            spent = compose([*before, steps_to_come], delta=delta, accountant=accountant)
            return math.log(max(spent, 1e-300) / (_AIM * target_epsilon))

        return _root(excess, start, target_epsilon)

    start = 0.0
    if mechanism.round_steps > 1:  # a round takes seconds: begin where Poisson sampling ends
        start = root(Mechanism(1.0, mechanism.sample_rate), start)
    return math.exp(root(mechanism, start))


def _root(excess: Callable[[float], float], start: float, target_epsilon: float) -> float:
    """Find a log sigma whose excess is next to 0, by secants within a bracket: the side that does
    not overshoot, even where epsilon jumps."""
    floor, ceiling = math.log(_MIN_NOISE_MULTIPLIER), math.log(MAX_NOISE_MULTIPLIER)
    too_little, enough = (floor - 1, math.inf), (ceiling + 1, -math.inf)  # noise: the bracket
    at, last, stride = start, None, 0.5
    while abs((found := (at, excess(at)))[1]) > _TOLERANCE:
        if found[1] > 0:
            too_little = found
        else:
            enough = found
        width = enough[0] - too_little[0]
        if width <= 1e-7:
            return enough[0]
        if at == ceiling and found[1] > 0:
            raise ValueError(
                f"privacy.target_epsilon = {target_epsilon} needs a noise multiplier above "
                f"{MAX_NOISE_MULTIPLIER:g}; raise it, or lower training.steps or the sample rate"
            )
        if at == floor and found[1] < 0:
            raise ValueError(
                f"privacy.target_epsilon = {target_epsilon} takes hardly any noise; lower it"
            )
        # Epsilon falls about as 1 / sigma^2, but less where most was spent before.
        slope = -2.0 if last is None else (found[1] - last[1]) / (found[0] - last[0])
        ahead = -found[1] / slope if slope < 0 else math.copysign(math.inf, found[1])
        last = found
        at = min(max(at + min(max(ahead, -stride), stride), floor), ceiling)
        stride *= 2
        if not too_little[0] < at < enough[0]:  # a secant that jumps back: bisect
            at = too_little[0] + width / 2
    return at


class EpsilonCurve:
    """A bound on a run's epsilon after each number of its steps, computed ahead at a few points.

    Guarantee:
        `at(steps)` is at least what `steps` steps spend: what is spent only grows, so a bound at
        the next computed point, or at any later one, is one here too.
    """

    def __init__(
        self,
        before: Sequence[Segment],
        mechanism: Mechanism,
        *,
        delta: float,
        accountant: Accountant,
        total_steps: int,
        first_step: int = 0,
    ) -> None:
        """Args:
        before: planned segments that ran on the same data; they count from step 0.
        mechanism, total_steps: of the segment to come.
        first_step: the smallest number of steps to be asked for. Earlier points are left out;
            the others do not depend on it.
        """
        self._before, self._mechanism = tuple(before), mechanism
        self._delta, self._accountant = delta, accountant
        parts = max(1, min(_POINTS[accountant], total_steps))
        even = sorted({0, *(-(-total_steps * i // parts) for i in range(1, parts + 1))})
        self._steps = [step for step in even if step >= first_step] or [first_step]
        self._epsilons = [self._compute(steps) for steps in self._steps]
        for i in range(len(self._epsilons) - 1, 0, -1):  # two bounds may cross by their roundings
            self._epsilons[i - 1] = min(self._epsilons[i - 1], self._epsilons[i])

    def at(self, steps: int) -> float:
        """Return an upper bound on epsilon after `steps` steps; beyond `total_steps` it is computed
        on demand, exactly there, and kept."""
        i = bisect.bisect_left(self._steps, steps)
        if i == len(self._steps):
            self._steps.append(steps)
            self._epsilons.append(max(self._compute(steps), self._epsilons[-1]))
        return self._epsilons[i]

    def _compute(self, steps: int) -> float:
        coming = Segment(self._mechanism, steps)
        return compose([*self._before, coming], delta=self._delta, accountant=self._accountant)


def check_delta(delta: float) -> None:
    """Raise ValueError unless delta is a probability between 0 and 1."""
    if not 0 < delta < 1:
        raise ValueError(f"privacy.delta = {delta} is outside (0, 1); choose less than 1 / records")


def rounded_up(value: float, digits: int = 5) -> str:
    """Round an upper bound up, to so many significant digits.

    >>> rounded_up(7.961201), rounded_up(0.5), rounded_up(123456.0), rounded_up(2.6001, digits=3)
    ('7.9613', '0.5', '123460', '2.61')
    """
    return _rounded(value, digits, ROUND_CEILING)


def rounded_down(value: float, digits: int = 5) -> str:
    """Round a lower bound down, to so many significant digits.

    >>> rounded_down(0.45812367), rounded_down(2.0), rounded_down(0.458126, digits=6)
    ('0.45812', '2', '0.458126')
    """
    return _rounded(value, digits, ROUND_FLOOR)


def _rounded(value: float, digits: int, rounding: str) -> str:
    if not math.isfinite(value):
        return f"{value}"
    text = f"{Context(prec=digits, rounding=rounding).create_decimal(repr(value)):f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def percent(share: float) -> str:
    """Round a probability up, with enough digits to differ from 100%.

    >>> percent(0.3652), percent(0.999637), percent(0.001), percent(0.5), percent(1.0)
    ('36.6%', '99.97%', '0.1%', '50%', '100%')
    """
    exact = Decimal(repr(share)) * 100
    if 90 < exact < 100:
        digits = max(1, -(100 - exact).adjusted())
        return f"{exact.quantize(Decimal(1).scaleb(-digits), rounding=ROUND_CEILING):f}%"
    return rounded_up(float(exact), digits=3) + "%"
