"""Epsilon over the steps of a run, computed ahead at a few points: a query never delays a step.

Guarantee
---------
`EpsilonCurve.at(steps)` is at least what `steps` steps spend: what is spent only grows, so a bound
at the next computed point, or at any later one, holds here too. At a computed point, and hence at
`total_steps`, it is that point's own value, or a smaller one of a later point.
"""

import bisect
from collections.abc import Sequence

from torchtitan_dp.privacy.accounting import Accountant, compose
from torchtitan_dp.privacy.mechanism import Mechanism, Segment

_POINTS: dict[Accountant, int] = {"pld": 20, "rdp": 100}


class EpsilonCurve:
    """The epsilon of a run after each number of its steps.

    >>> from torchtitan_dp.privacy.mechanism import PoissonGaussian
    >>> coming = PoissonGaussian(1.0, 0.01)
    >>> curve = EpsilonCurve((), coming, delta=1e-5, accountant="rdp", total_steps=1_000)
    >>> round(curve.at(1_000), 3), curve.at(949) == curve.at(950) < curve.at(951)
    (2.101, True)
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
        points: int | None = None,
    ) -> None:
        """
        Args:
            before: planned segments that ran on the same data; they count from step 0.
            mechanism, total_steps: of the segment to come.
            first_step: of the queries. Computed points do not depend on it, but those before it
                are left out.
            points: the number of evenly spaced points that are computed now, `total_steps` the
                last. The default takes a few seconds at most.

        Raises:
            ValueError: a value is out of its range.
        """
        points = _POINTS[accountant] if points is None else points
        assert points >= 1
        self._before = tuple(before)
        self._mechanism = mechanism
        self._delta, self._accountant = delta, accountant
        parts = max(1, min(points, total_steps))
        even = sorted({0, *(-(-total_steps * i // parts) for i in range(1, parts + 1))})
        self._steps = [step for step in even if step >= first_step] or [first_step]
        self._epsilons = [self._compute(steps) for steps in self._steps]
        for i in range(len(self._epsilons) - 1, 0, -1):  # two bounds may cross by their roundings
            self._epsilons[i - 1] = min(self._epsilons[i - 1], self._epsilons[i])

    def at(self, steps: int) -> float:
        """Return an upper bound on epsilon after `steps` steps: that of the next computed point.

        Beyond `total_steps` it is computed on demand, exactly there, and kept.
        """
        i = bisect.bisect_left(self._steps, steps)
        if i == len(self._steps):
            self._steps.append(steps)
            self._epsilons.append(max(self._compute(steps), self._epsilons[-1]))
        return self._epsilons[i]

    def points(self) -> list[tuple[int, float]]:
        """Return the computed points: (steps, epsilon), rising in both."""
        return list(zip(self._steps, self._epsilons, strict=True))

    def _compute(self, steps: int) -> float:
        coming = Segment(self._mechanism, steps)
        return compose([*self._before, coming], delta=self._delta, accountant=self._accountant)
