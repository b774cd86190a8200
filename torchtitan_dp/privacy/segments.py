"""A run as a sequence of segments: so many steps with the same noise, sample rate and norms.

Guarantee
---------
`merged` changes nothing about what the segments spend: their order is irrelevant to composition,
steps that draw nobody or are infinitely noisy spend nothing, and Gaussian mechanisms without
sampling, of exact norms, compose exactly into one, whose 1 / sigma^2 is the sum of theirs.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torchtitan_dp.privacy.envelope import FEWEST, MOST, largest_ratio


@dataclass(frozen=True, order=True)
class Segment:
    """Describes `steps` optimizer steps on the same data and with the same neighbouring relation.

    Args:
        noise_multiplier: sigma, the noise's standard deviation over C; 0 means no privacy.
        sample_rate: q, the probability with which each unit is drawn at each step.
        steps: optimizer steps.
        projections: k, that a gradient's norm is estimated from (`randomized`); 0: norms are exact.

    Raises:
        ValueError: a value is out of its range.
    """

    noise_multiplier: float
    sample_rate: float
    steps: int
    projections: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.sample_rate <= 1:
            raise ValueError(
                f"privacy.sample_rate = {self.sample_rate} is not a probability; choose one "
                "between 0 and 1"
            )
        if self.steps < 0:
            raise ValueError(f"training.steps = {self.steps} is negative; choose 0 or more")
        if not self.noise_multiplier >= 0:
            raise ValueError(
                f"privacy.noise_multiplier = {self.noise_multiplier} is negative; choose 0 or more"
            )
        if self.projections and not FEWEST <= self.projections <= MOST:
            raise ValueError(
                f"privacy.projections = {self.projections}: choose {FEWEST} to {MOST}; 32 is usual"
            )

    @property
    def terms(self) -> tuple[float, float, int]:
        """The spending of one of these steps: noise multiplier, sample rate and projections."""
        return self.noise_multiplier, self.sample_rate, self.projections

    @property
    def least_noise(self) -> float:
        """Return the noise over the most that a unit can ever add: sigma, where norms are exact."""
        return self.noise_multiplier / largest_ratio(self.projections)


def merged(segments: Sequence[Segment]) -> tuple[Segment, ...]:
    """Merge segments into the fewest that spend the same, sorted: for computing, and to look
    results up by.

    >>> merged([Segment(2.0, 0.1, 5), Segment(1.0, 1.0, 4), Segment(2.0, 0.1, 7)])
    (Segment(noise_multiplier=0.5, sample_rate=1.0, steps=1, projections=0), \
Segment(noise_multiplier=2.0, sample_rate=0.1, steps=12, projections=0))
    """
    steps: dict[tuple[float, float, int], int] = {}
    precision = 0.0  # 1 / sigma^2 of all steps without sampling
    for segment in segments:
        sigma, q, k = segment.noise_multiplier, segment.sample_rate, segment.projections
        if segment.steps == 0 or q == 0 or sigma == math.inf:
            continue
        if q == 1 and sigma > 0 and k == 0:
            precision += segment.steps / sigma**2
        else:
            steps[sigma, q, k] = steps.get((sigma, q, k), 0) + segment.steps
    if precision > 0:
        steps[1 / math.sqrt(precision), 1.0, 0] = 1
    return tuple(sorted(Segment(sigma, q, count, k) for (sigma, q, k), count in steps.items()))


def fft_noise(segments: Sequence[Segment]) -> float:
    """Bound what float64 may add to or take from delta in the powers of Fourier transforms."""
    return sum(segment.steps for segment in segments) * 4e-15
