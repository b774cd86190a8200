"""An account as a start of the trainer opens it, for tests that have no trainer."""

import dataclasses
from typing import Any

from torchtitan_dp.ledger import Account, Lineage, Losable, RunLog
from torchtitan_dp.ledger.settings import Settings
from torchtitan_dp.privacy.accounting import compose, noise_for
from torchtitan_dp.privacy.segments import GaussianSteps, Mechanism, Segment


def opened(lineage: Lineage, log: RunLog) -> Lineage:
    """The account of a start that loaded these weights, as the trainer opens it. Steps that the
    log lacks were taken elsewhere."""
    names = " ".join(lineage.names())
    return log.opened(dataclasses.replace(lineage, step_names=names, start=log.new_start()))


def begun(lineage: Lineage, folder: Any, steps: int = 0, *, loses: int = 10) -> Lineage:
    """The account after a start that takes so many steps and is killed, or still runs."""
    log = RunLog(str(folder))
    lineage = opened(lineage, log)
    log.begin_start(lineage, Losable(loses, loses))
    return taken(lineage, log, steps)


def ended(lineage: Lineage, folder: Any, steps: int = 0) -> Lineage:
    """The account after a start that takes so many steps and saves them all."""
    log = RunLog(str(folder))
    lineage = opened(lineage, log)
    log.begin_start(lineage, Losable(max(steps, 1), max(steps, 1)))
    lineage = taken(lineage, log, steps)
    log.end_start(lineage.steps)
    return lineage


def taken(lineage: Lineage, log: RunLog, steps: int) -> Lineage:
    """The account after so many further steps of a start."""
    for _ in range(steps):
        log.begin_step(lineage.steps + 1)
        lineage = dataclasses.replace(lineage, steps=lineage.steps + 1)
    return lineage


def publish(lineage: Lineage, folder: Any, total_steps: int = 0) -> dict[str, Any]:
    """Write a folder's `privacy.json`, with what its logs know of lost steps. Steps that they lack
    were taken elsewhere."""
    log = RunLog(str(folder))
    log.adopt(lineage)
    lineage = log.enter_lost(lineage)
    return Account(lineage, total_steps).publish(lineage, str(folder))


def mechanism(noise_multiplier: float, sample_rate: float, projections: int = 0) -> Mechanism:
    """The mechanism of exact norms, or of norms estimated from so many projections."""
    if projections:
        return Mechanism(
            noise_multiplier, sample_rate, projections=projections, norm_estimator="hutchinson"
        )
    return Mechanism(noise_multiplier, sample_rate)


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


def epsilon(*, noise_multiplier: float, sample_rate: float, steps: int, **query: Any) -> float:
    """What so many steps spend, by `delta` and `accountant`."""
    return compose([steps_of(noise_multiplier, sample_rate, steps)], **query)


def noise_multiplier(*, sample_rate: float, steps: int, **query: Any) -> float:
    """The noise with which they spend `target_epsilon`."""
    return noise_for(Mechanism(1.0, sample_rate), steps, **query)


def with_terms(settings: Settings, **changes: Any) -> Settings:
    """Other terms, whether of the mechanism or beside it."""
    fields = settings.fields() | changes
    if "projections" in changes and "mechanism" not in changes:
        fields["mechanism"] = mechanism(1.0, 1.0, changes["projections"]).name
    return Settings.from_fields(fields)
