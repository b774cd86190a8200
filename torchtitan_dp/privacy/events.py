"""The steps of a run as an event of Google's dp-accounting, in plain JSON.

Guarantee
---------
`dp_event` lists every given step once, with its noise and its sampling rate, so that an
accountant of another program, given the event and delta, bounds the same run.
"""

from collections.abc import Sequence
from typing import Any

from torchtitan_dp.privacy.envelope import ratios
from torchtitan_dp.privacy.segments import Segment

_MODULE = "dp_accounting.dp_event"


def dp_event(segments: Sequence[Segment]) -> dict[str, Any] | None:
    """Return what `dp_accounting.DpEvent.to_named_tuple` gives for these steps, as a dictionary.

    Args:
        segments: planned segments on the same data.

    Returns:
        A `ComposedDpEvent` of one `SelfComposedDpEvent` for each segment with steps, of Poisson
        sampled Gaussian events whose noise is in units of C, or, where norms were estimated, of
        mixtures of Gaussians, which hold the sampling; None if a step has no noise, for which
        dp-accounting has no event.

    >>> event = dp_event([Segment(2.0, 0.1, 5)])["events"][0]
    >>> event["class_name"], event["count"], event["event"]["event"]["noise_multiplier"]
    ('SelfComposedDpEvent', 5, 2.0)
    """
    taken = [segment for segment in segments if segment.steps > 0]
    if any(segment.noise_multiplier == 0 for segment in taken):
        return None
    return _event("ComposedDpEvent", events=[_steps(segment) for segment in taken])


def _steps(segment: Segment) -> dict[str, Any]:
    if segment.projections:
        return _event("SelfComposedDpEvent", event=_mixture(segment), count=segment.steps)
    gaussian = _event("GaussianDpEvent", noise_multiplier=segment.noise_multiplier)
    step = _event("PoissonSampledDpEvent", sampling_probability=segment.sample_rate, event=gaussian)
    return _event("SelfComposedDpEvent", event=step, count=segment.steps)


def _mixture(segment: Segment) -> dict[str, Any]:
    q, envelope = segment.sample_rate, ratios(segment.projections)
    absent = ([0.0], [1 - q]) if q < 1 else ([], [])
    return _event(
        "MixtureOfGaussiansDpEvent",
        standard_deviation=segment.noise_multiplier,
        sensitivities=[*absent[0], *envelope.values.tolist()],
        sampling_probs=[*absent[1], *(q * envelope.probabilities).tolist()],
    )


def _event(name: str, **fields: Any) -> dict[str, Any]:
    return {"module_name": _MODULE, "class_name": name, **fields}
