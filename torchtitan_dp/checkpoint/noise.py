"""The noise of a run: its multiplier, and the bands that correlate it over steps.

Both are fixed at a run's first start.
"""

import math

from torchtitan_dp.checkpoint.terms import settings_of
from torchtitan_dp.config import JobConfig
from torchtitan_dp.ledger.lineage import Ancestor, Ledger, taken_by
from torchtitan_dp.ledger.settings import union
from torchtitan_dp.privacy import accounting
from torchtitan_dp.privacy.mechanism import Segment

AS_GOOD = 1.02
"""Fewer bands whose noise is at most this much more are preferred: each step is less noisy."""


def choose_noise(
    config: JobConfig, units: int, ancestors: list[Ancestor], before: Ledger | None
) -> tuple[float, int]:
    """Return the configuration's noise, the resumed run's, or the least that meets the target; and
    its bands.

    Args:
        ancestors: the runs that the initial weights come from, whose steps count as well.
        before: the ledger of this run's own weights, if it resumes.
    """
    privacy = config.privacy
    spent = union(taken_by(ancestors))
    if privacy.noise == "independent":
        bands = 1
    elif privacy.bands != "auto":
        bands = privacy.bands
    elif before is not None:
        bands = before.settings.bands
    else:
        bands = best_bands(config, units, spent)
    return _noise_multiplier(config, units, bands, spent, before), bands


def _noise_multiplier(
    config: JobConfig, units: int, bands: int, spent: list[Segment], before: Ledger | None
) -> float:
    """Return the configuration's noise, the resumed run's, or the least that meets the target."""
    privacy = config.privacy
    if privacy.noise_multiplier is not None:
        return privacy.noise_multiplier
    steps = config.training.steps
    if before is not None:
        kept = before.settings.mechanism.noise_multiplier
        terms = settings_of(config, units, kept, bands)
        if privacy.new_segment is None or terms.same_terms(before.settings, targets_too=True):
            return kept
        steps -= before.steps
        spent = [*spent, *before.own()]
        if steps <= 0:
            return kept
    return _least_noise(config, units, bands, spent, steps)


def _least_noise(
    config: JobConfig, units: int, bands: int, spent: list[Segment], steps: int
) -> float:
    """Find the noise multiplier that meets the target."""
    privacy = config.privacy
    assert privacy.target_epsilon is not None
    assert privacy.delta is not None
    return accounting.noise_for(
        settings_of(config, units, 0.0, bands).mechanism,
        steps,
        target_epsilon=privacy.target_epsilon,
        delta=privacy.delta,
        accountant=privacy.accountant,
        before=spent,
    )


def noise_by_bands(
    config: JobConfig, units: int, spent: list[Segment]
) -> dict[int, tuple[float, float, float]]:
    """Return, by the number of bands, sigma and the noise of a step and of the run's sum
    (`Mechanism.noise_of_run`), all for the target epsilon: of 1, 2, 4, … rounds, as far as the
    rate allows."""
    steps = max(config.training.steps, 1)
    rate = settings_of(config, units, 0.0, 1).mechanism.sample_rate
    of_rounds = {-(-steps // 2**power) for power in range(steps.bit_length() + 1)}
    found = {}
    for bands in sorted({min(bands, math.floor(1 / rate)) for bands in of_rounds}):
        sigma = _least_noise(config, units, bands, spent, steps)
        mechanism = settings_of(config, units, sigma, bands).mechanism
        found[bands] = (sigma, *mechanism.noise_of_run(steps))
    return found


def best_bands(config: JobConfig, units: int, spent: list[Segment]) -> int:
    """Return the bands of the least noise in the sum of all updates, or fewer that are as good."""
    return best_of(noise_by_bands(config, units, spent))


def best_of(found: dict[int, tuple[float, float, float]]) -> int:
    """Return the best bands of `noise_by_bands`."""
    least = min(in_sum for _, _, in_sum in found.values())
    return min(bands for bands, (*_, in_sum) in found.items() if in_sum <= AS_GOOD * least)
