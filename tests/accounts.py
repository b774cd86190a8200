"""An account as a start of the trainer opens it, for tests that have no trainer."""

from typing import Any

from torchtitan_dp.ledger import Account, ExecutedSteps, Ledger
from torchtitan_dp.ledger.settings import Settings
from torchtitan_dp.privacy.mechanism import EstimatedNorms, Mechanism, PoissonGaussian, Segment
from torchtitan_dp.privacy.segments import GaussianSteps


def account(ledger: Ledger, executed: ExecutedSteps, total_steps: int) -> Account:
    """Enter what the folder's logs know of lost steps into the ledger, and open its account."""
    executed.enter_lost(ledger)
    return Account(ledger, total_steps)


def mechanism(noise_multiplier: float, sample_rate: float, projections: int = 0) -> Mechanism:
    """The mechanism of exact norms, or of norms estimated from so many projections."""
    if projections:
        return EstimatedNorms(noise_multiplier, sample_rate, projections)
    return PoissonGaussian(noise_multiplier, sample_rate)


def steps_of(
    noise_multiplier: float, sample_rate: float, steps: int, projections: int = 0
) -> Segment:
    """So many steps of it, as a log records them."""
    return Segment(mechanism(noise_multiplier, sample_rate, projections).as_logged(), steps)


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
