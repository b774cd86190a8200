"""The steps of a run as an event of Google's dp-accounting, in plain JSON.

Guarantee
---------
`dp_event` lists every given step once, with its noise and its sampling rate, so that an
accountant of another program, given the event and delta, bounds the same run.
"""

from collections.abc import Iterable
from typing import Any

from torchtitan_dp.privacy.envelope import Ratios
from torchtitan_dp.privacy.mechanism import Segment, composition
from torchtitan_dp.privacy.segments import GaussianSteps

_MODULE = "dp_accounting.dp_event"


def dp_event(segments: Iterable[Segment]) -> dict[str, Any] | None:
    """Return what `dp_accounting.DpEvent.to_named_tuple` gives for these steps, as a dictionary.

    Args:
        segments: planned segments on the same data.

    Returns:
        A `ComposedDpEvent` of one `SelfComposedDpEvent` for all steps on the same terms, of Poisson
        sampled Gaussian events whose noise is in units of C, or, where norms were estimated, of
        mixtures of Gaussians, which hold the sampling; None if a step has no noise, for which
        dp-accounting has no event.

    >>> from torchtitan_dp.privacy.mechanism import PoissonGaussian
    >>> event = dp_event([Segment(PoissonGaussian(2.0, 0.1), 5)])["events"][0]
    >>> event["class_name"], event["count"], event["event"]["event"]["noise_multiplier"]
    ('SelfComposedDpEvent', 5, 2.0)
    """
    parts = composition(segments)
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
    return {"module_name": _MODULE, "class_name": name, **fields}
