"""The steps of a run as accountants see them: Poisson-subsampled Gaussians, and nothing else.

Guarantee
---------
`merged` changes nothing about what the steps spend: their order is irrelevant to composition, steps
that draw nobody or are infinitely noisy spend nothing, and Gaussian mechanisms without sampling, of
exact norms, compose exactly into one, whose 1 / sigma^2 is the sum of theirs. `dp_event` lists
every step once, so that an accountant of another program, given the event and delta, bounds the
same run.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torchtitan_dp.privacy.randomized import Ratios

_EVENTS = "dp_accounting.dp_event"


@dataclass(frozen=True)
class GaussianSteps:
    """Steps of the Poisson-subsampled Gaussian mechanism, on the same terms.

    Args:
        noise_multiplier: sigma, the noise's standard deviation over C; 0 means no privacy.
        sample_rate: q, the probability with which each unit is drawn at each step.
        steps: their number.
        ratios: the distribution of what a drawn unit adds, over C; None: at most 1.
    """

    noise_multiplier: float
    sample_rate: float
    steps: int
    ratios: Ratios | None = None

    @property
    def least_noise(self) -> float:
        """The noise over the most that a unit can ever add: sigma, where norms are exact."""
        return self.noise_multiplier / (1.0 if self.ratios is None else self.ratios.largest)

    @property
    def order(self) -> tuple[float, float, int, float]:
        """The key that steps are sorted by: the least noise first, exact norms first."""
        rarity = 0.0 if self.ratios is None else 1 / self.ratios.largest
        return self.noise_multiplier, self.sample_rate, self.steps, rarity


def merged(steps: Iterable[GaussianSteps]) -> tuple[GaussianSteps, ...]:
    """Merge steps into the fewest that spend the same, sorted.

    >>> merged([GaussianSteps(2.0, 0.1, 5), GaussianSteps(1.0, 1.0, 4), GaussianSteps(2.0, 0.1, 7)])
    (GaussianSteps(noise_multiplier=0.5, sample_rate=1.0, steps=1, ratios=None), \
GaussianSteps(noise_multiplier=2.0, sample_rate=0.1, steps=12, ratios=None))
    """
    counts: dict[tuple[float, float, Ratios | None], int] = {}
    precision = 0.0  # 1 / sigma^2 of all steps without sampling
    for part in steps:
        sigma, q, ratios = part.noise_multiplier, part.sample_rate, part.ratios
        if part.steps == 0 or q == 0 or sigma == math.inf:
            continue
        if q == 1 and sigma > 0 and ratios is None:
            precision += part.steps / sigma**2
        else:
            counts[sigma, q, ratios] = counts.get((sigma, q, ratios), 0) + part.steps
    if precision > 0:
        counts[1 / math.sqrt(precision), 1.0, None] = 1
    fewest = [
        GaussianSteps(sigma, q, count, ratios) for (sigma, q, ratios), count in counts.items()
    ]
    return tuple(sorted(fewest, key=lambda part: part.order))


def fft_noise(parts: Sequence[GaussianSteps]) -> float:
    """Bound what float64 may add to or take from delta in the powers of Fourier transforms."""
    return sum(part.steps for part in parts) * 4e-15


def dp_event(parts: Sequence[GaussianSteps]) -> dict[str, Any] | None:
    """Return merged steps as a `dp_accounting.DpEvent`, the fields of `to_named_tuple` in a dict.

    Returns:
        A `ComposedDpEvent` of a `SelfComposedDpEvent` for all steps on the same terms, of Poisson
        sampled Gaussian events whose noise is in units of C, or, where norms were estimated, of
        mixtures of Gaussians, sampling included; None if a step has no noise.

    >>> event = dp_event([GaussianSteps(2.0, 0.1, 5)])["events"][0]
    >>> event["class_name"], event["count"], event["event"]["event"]["noise_multiplier"]
    ('SelfComposedDpEvent', 5, 2.0)
    """
    if any(part.noise_multiplier == 0 for part in parts):
        return None
    return _event("ComposedDpEvent", events=[_steps(part) for part in parts])


def _steps(part: GaussianSteps) -> dict[str, Any]:
    if part.ratios is not None:
        return _event("SelfComposedDpEvent", event=_mixture(part, part.ratios), count=part.steps)
    gaussian = _event("GaussianDpEvent", noise_multiplier=part.noise_multiplier)
    step = _event("PoissonSampledDpEvent", sampling_probability=part.sample_rate, event=gaussian)
    return _event("SelfComposedDpEvent", event=step, count=part.steps)


def _mixture(part: GaussianSteps, ratios: Ratios) -> dict[str, Any]:
    q = part.sample_rate
    absent = ([0.0], [1 - q]) if q < 1 else ([], [])
    return _event(
        "MixtureOfGaussiansDpEvent",
        standard_deviation=part.noise_multiplier,
        sensitivities=[*absent[0], *ratios.values.tolist()],
        sampling_probs=[*absent[1], *(q * ratios.probabilities).tolist()],
    )


def _event(name: str, **fields: Any) -> dict[str, Any]:
    return {"module_name": _EVENTS, "class_name": name, **fields}
