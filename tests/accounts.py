"""An account as a start of the trainer opens it, for tests that have no trainer."""

import dataclasses
from typing import Any

from torchtitan_dp.ledger import Account, Lineage, Losable, RunLog
from torchtitan_dp.ledger.settings import Settings
from torchtitan_dp.privacy.mechanism import EstimatedNorms, Mechanism, PoissonGaussian, Segment
from torchtitan_dp.privacy.segments import GaussianSteps


def begun(
    lineage: Lineage, folder: Any, *, most: int = 10, steps: int = 0
) -> tuple[Lineage, RunLog]:
    """A start of the trainer that begins to train, and takes so many steps: `Trainer`'s own calls.
    Steps that the lineage has already were taken elsewhere, unless the folder's log has them."""
    log = RunLog(str(folder))
    taken = dataclasses.replace(
        lineage, step_names=" ".join(lineage.names()), start=log.new_start()
    )
    log.adopt(taken)
    lineage = log.enter_lost(taken)
    log.begin_start(lineage, Losable(most, most))
    for _ in range(steps):
        log.begin(lineage.steps + 1)
        lineage = dataclasses.replace(lineage, steps=lineage.steps + 1)
    return lineage, log


def ended(lineage: Lineage, folder: Any, *, steps: int = 0) -> Lineage:
    """The same, of a start that ends with all of its steps saved."""
    lineage, log = begun(lineage, folder, most=max(steps, 1), steps=steps)
    log.end_start(lineage.steps)
    return lineage


def publish(lineage: Lineage, folder: Any, total_steps: int = 0) -> dict[str, Any]:
    """Enter what the folder's logs know of lost steps, and write `privacy.json` there."""
    lineage = RunLog(str(folder)).enter_lost(lineage)
    return Account(lineage, total_steps).publish(lineage, str(folder))


def mechanism(noise_multiplier: float, sample_rate: float, projections: int = 0) -> Mechanism:
    """The mechanism of exact norms, or of norms estimated from so many projections."""
    if projections:
        return EstimatedNorms(noise_multiplier, sample_rate, projections, "hutchinson")
    return PoissonGaussian(noise_multiplier, sample_rate)


def steps_of(
    noise_multiplier: float, sample_rate: float, steps: int, projections: int = 0
) -> Segment:
    """So many steps of it."""
    return Segment(mechanism(noise_multiplier, sample_rate, projections), steps)


def gaussian_steps(
    noise_multiplier: float, sample_rate: float, steps: int, projections: int = 0
) -> GaussianSteps:
    """The same as accountants see them."""
    (found,) = mechanism(noise_multiplier, sample_rate, projections).composition(steps)
    return found


def with_terms(settings: Settings, **changes: Any) -> Settings:
    """Other terms, whether of the mechanism or beside it."""
    fields = settings.fields() | changes
    if "projections" in changes and "mechanism" not in changes:
        fields["mechanism"] = mechanism(1.0, 1.0, changes["projections"]).name
    return Settings.from_fields(fields)
