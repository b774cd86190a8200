"""An account as a start of the trainer opens it, for tests that have no trainer."""

import dataclasses
import json
import math
import os
from pathlib import Path
from typing import Any

from torchtitan_dp.ledger import Lineage, Losable, RunLog
from torchtitan_dp.ledger.lineage import Settings
from torchtitan_dp.ledger.schema import described, released, write_published
from torchtitan_dp.ledger.spending import epsilon as epsilon_of
from torchtitan_dp.privacy.accounting import compose, noise_for
from torchtitan_dp.privacy.segments import GaussianSteps, Mechanism, Segment


def opened(lineage: Lineage, log: RunLog, loses: Losable) -> Lineage:
    """The account of a start that loaded these weights and is about to train."""
    lineage = log.enter_lost(lineage)
    return dataclasses.replace(lineage, start=log.begin_start(lineage, loses))


def begun(lineage: Lineage, folder: Any, steps: int = 0, *, loses: int = 10) -> Lineage:
    """The account after a start that takes so many steps and is killed, or still runs."""
    log = RunLog(str(folder))
    return taken(opened(lineage, log, Losable(loses, loses)), log, steps)


def ended(lineage: Lineage, folder: Any, steps: int = 0) -> Lineage:
    """The account after a start that takes so many steps and saves them all."""
    log, most = RunLog(str(folder)), max(steps, 1)
    lineage = taken(opened(lineage, log, Losable(most, most)), log, steps)
    log.end_start(lineage.steps)
    return lineage


def taken(lineage: Lineage, log: RunLog, steps: int) -> Lineage:
    """The account after so many further steps of a start."""
    for _ in range(steps):
        log.begin_step(lineage.steps + 1)
        lineage = dataclasses.replace(lineage, steps=lineage.steps + 1)
    return lineage


def _epsilons(lineage: Lineage) -> tuple[float, float, float]:
    if not lineage.composes:
        return math.inf, math.inf, math.inf
    taken = epsilon_of(lineage, lost=False)
    return taken, epsilon_of(lineage), epsilon_of(lineage, lineage.left)


def publish(lineage: Lineage, folder: Any) -> dict[str, Any]:
    """Write a folder's `privacy.json`, with what its logs know of lost steps. Of steps that they
    lack a start is logged that took them."""
    os.makedirs(folder, exist_ok=True)
    log = RunLog(str(folder))
    if (lacking := lineage.steps - log.count) > 0:
        at = dataclasses.replace(lineage, steps=log.count, heldout_loss=None)
        lineage = dataclasses.replace(lineage, start=ended(at, folder, lacking).start)
    return write(RunLog(str(folder)).enter_lost(lineage), folder)


def write(lineage: Lineage, folder: Any) -> dict[str, Any]:
    """Write a folder's `privacy.json`, as its start does."""
    content = described(lineage, *_epsilons(lineage))
    write_published(str(folder), content)
    return content


def edit(folder: Any, **changes: Any) -> None:
    """Write other values into a folder's `privacy.json`; `...` takes a key away."""
    path = Path(folder, "privacy.json")
    content = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in content.items() if value is not ...}))


def export(lineage: Lineage, folder: Any) -> dict[str, Any]:
    """Write the `privacy.json` of exported weights."""
    os.makedirs(folder, exist_ok=True)
    content = released(lineage, *_epsilons(lineage)[1:])
    write_published(str(folder), content)
    return content


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
