"""The terms on which a run trains, fixed at its first start: noise and sampling rate.

They follow from the configuration, the number of units, and the earlier spending in the ledgers of
the run's folder and its initial weights.
"""

import bisect
import os
from dataclasses import dataclass, replace

from torchtitan_dp.checkpoint.initial import InitialWeights, refuse_baseline_folder, with_initial
from torchtitan_dp.checkpoint.terms import (
    choose_losses,
    choose_noise,
    config_hash,
    refuse_more_losses,
    settings_of,
)
from torchtitan_dp.config import JobConfig
from torchtitan_dp.config.derived import unit_word
from torchtitan_dp.ledger.files import (
    PRIVACY_FILE,
    TRIAL_FILE,
    ledger_of,
    read_published_fields,
)
from torchtitan_dp.ledger.lineage import TRIAL, Lineage, inherited, resumed, rewound
from torchtitan_dp.ledger.log import (
    EVALUATIONS_FILE,
    EXECUTED_FILE,
    STARTS_FILE,
    Losable,
    RunLog,
)
from torchtitan_dp.ledger.settings import Settings
from torchtitan_dp.ledger.spending import BY_RDP, compose, counted_by, initial_steps, spending
from torchtitan_dp.ledger.spending import epsilon as epsilon_of
from torchtitan_dp.privacy import accounting
from torchtitan_dp.privacy.coefficients import INDEPENDENT
from torchtitan_dp.privacy.segments import steps_in_a_row


@dataclass(frozen=True)
class Plan:
    """The terms and the spending of a planned run."""

    ledger: Lineage
    steps: int
    epsilon: float  # after `steps`, all earlier ones included
    epsilon_stated: float  # at its end, by the card of a release: lost steps included
    warnings: tuple[str, ...]

    @property
    def settings(self) -> Settings:
        """The terms of the steps to come."""
        return self.ledger.settings

    @property
    def private(self) -> bool:
        """Whether the weights will be private."""
        return self.ledger.private


def make_plan(
    config: JobConfig,
    units: int,
    earlier: Lineage | None = None,
    weights: Lineage | None = None,
    initial: InitialWeights | None = None,
) -> Plan:
    """Fix the noise, the sampling rate and the epsilon of a run.

    Args:
        units: number of training units.
        earlier: the ledger of this folder's earlier steps, whose terms are kept.
        weights: ledger of the weights to resume from, which may be older than `earlier`; None if
            the run has no weights yet.
        initial: the weights of another run that this one starts from, if any.

    Raises:
        ValueError: one line for the user.
    """
    privacy, steps = config.privacy, config.training.steps
    warnings = _check_delta(config, units)
    if weights is None and earlier is not None:  # they are lost: terms stay, steps start anew
        weights = rewound(earlier)
    start = Lineage(
        settings_of(config, units, 0.0, INDEPENDENT),
        planned_steps=steps,
        config_hash=config_hash(config),
    )
    if os.path.exists(os.path.join(config.job.dump_folder, TRIAL_FILE)):
        start = start.with_caveats(TRIAL)
    ledger = start if earlier is None else inherited(start, earlier)
    ledger = with_initial(ledger, config, initial)
    sigma, column = choose_noise(config, units, initial_steps(ledger), weights)
    ledger = replace(
        ledger,
        settings=settings_of(config, units, sigma, column),
        heldout_losses=choose_losses(config, earlier or weights),
    )
    if weights is not None:
        ledger = resumed(ledger, weights)
    if earlier is not None:
        log = RunLog(config.job.dump_folder)
        ledger = log.enter_lost(ledger)
        if problem := log.undercounted(ledger):
            raise ValueError(_unlike(config.job.dump_folder, problem))
    refuse_more_losses(config, ledger)
    _refuse_interval(config, ledger.settings)
    epsilon = refuse_overspending(
        config, ledger, begun_with=weights.planned_steps if weights else None
    )
    stated = max(epsilon, compose(ledger, spending(ledger, lost=True, planned=True)))
    if ledger.composes and counted_by(ledger) != privacy.accountant:
        warnings.append(BY_RDP)
    if sigma == 0:
        ledger = ledger.marked_not_private("privacy.noise_multiplier = 0")
        warnings.append("privacy.noise_multiplier = 0: the run is NOT private")
    if privacy.debug_seed is not None:
        ledger = ledger.marked_not_private("privacy.debug_seed was set: the noise can be redrawn")
        warnings.append("privacy.debug_seed is set: the run is NOT private")
    return Plan(ledger, steps, epsilon, stated, tuple(warnings))


def steps_within(plan: Plan, target_epsilon: float) -> int | None:
    """Return the most `training.steps` at which a release states at most the target, lost steps
    included; None if too much is spent already."""
    ledger = plan.ledger
    begun = spending(ledger, lost=True, planned=False)

    def exceeds(steps: int) -> bool:
        coming = steps_in_a_row(
            ledger.settings.mechanism, ledger.steps + 1, steps - ledger.steps, ledger.run
        )
        return compose(ledger, [*begun, *coming]) > target_epsilon

    tried = range(ledger.steps, plan.steps + 1)
    found = bisect.bisect_left(tried, True, key=exceeds)
    return tried[found - 1] if found else None


def _refuse_interval(config: JobConfig, settings: Settings) -> None:
    """Refuse, by ValueError, checkpoints inside rounds, from which no run goes on."""
    t, checkpoint = settings.mechanism.round_steps, config.checkpoint
    if t > 1 and checkpoint.enable_first_step_checkpoint:
        raise ValueError(
            "checkpoint.enable_first_step_checkpoint = True: with privacy.sampling = 'allocation' "
            "no run goes on from a step inside a round; set it to false"
        )
    if checkpoint.enable and not checkpoint.load_only and checkpoint.interval % t:
        below = checkpoint.interval // t * t
        raise ValueError(
            f"checkpoint.interval = {checkpoint.interval}: with privacy.sampling = 'allocation' a "
            f"run goes on from the ends of rounds alone, here of {t} steps; set it to a multiple, "
            + " or ".join(f"{n}" for n in (below, below + t) if n)
        )


def _check_delta(config: JobConfig, units: int) -> list[str]:
    """Refuse a delta that allows publishing whole units, and warn of one above a tenth of that.

    Where the number of units is private, the public estimate of it decides, and the number itself
    gives a warning that is labelled.

    Raises:
        ValueError: one line; by public numbers alone.
    """
    delta, rate = config.privacy.delta, config.privacy.sample_rate
    assert delta is not None
    word = unit_word(config)
    bounds = [("", 1 / units, f"1 / number of training {word}s ({1 / units:.2g})")]
    if rate is not None:
        most = rate / config.training.global_batch_size
        source = "privacy.sample_rate / training.global_batch_size"
        public = ("", most, f"{source} ({most:.2g}), about 1 / number of {word}s")
        bounds = [public, ("not private: ", *bounds[0][1:])]
    warnings: list[str] = []
    for label, most, source in bounds:
        given = f"{label}privacy.delta = {delta:g}"
        less = f"use a tenth of that, {accounting.rounded_down(most / 10, digits=2)}, or less"
        if _reaches(delta, most):
            mistake = (
                f"{given}: at least {source}, which allows publishing a {word} outright; {less}"
            )
            if not label:
                raise ValueError(mistake)
            warnings.append(mistake)
        elif not warnings and not _reaches(most / 10, delta):
            chance = f"so epsilon may fail with a probability of 1 in {1 / delta:,.0f}"
            warnings.append(f"{given}: above a tenth of {source}, {chance}; {less}")
    return warnings


def _reaches(value: float, bound: float) -> bool:
    """Return whether a value is at least a bound, up to the rounding of how either was written.

    >>> _reaches(16 / 81 / 16, 1 / 81), _reaches(0.0123, 1 / 81)
    (True, False)
    """
    return value >= bound * (1 - 1e-9)


def refuse_overspending(config: JobConfig, ledger: Lineage, begun_with: int | None = None) -> float:
    """Return the epsilon after a run's last step; raise ValueError if it is above the target.

    Args:
        begun_with: the `training.steps` of this run's last start, if there was one.
    """
    privacy, steps = config.privacy, config.training.steps
    epsilon = epsilon_of(ledger, max(steps, ledger.steps))
    if privacy.target_epsilon is not None and epsilon > privacy.target_epsilon:
        spends = f"would spend {accounting.rounded_up(epsilon)}"
        if begun_with not in (None, steps):
            raise ValueError(
                f"training.steps = {steps}: this run was started with {begun_with}, for which its "
                f"noise was fixed, and more {spends}; set it back, raise privacy.target_epsilon "
                f"(now {privacy.target_epsilon:g}), or start afresh in another job.dump_folder"
            )
        raise ValueError(
            f"privacy.target_epsilon = {privacy.target_epsilon:g}: this run's noise was fixed at "
            f"its first start, and {steps} training.steps {spends}; lower training.steps, raise "
            "the target, or start afresh in another job.dump_folder"
        )
    return epsilon


def losable(config: JobConfig) -> Losable:
    """Return the steps that a start of this configuration can lose: all since the last checkpoint,
    and since the one before where that may have been under way."""
    steps, checkpoint = max(config.training.steps, 1), config.checkpoint
    if not checkpoint.enable or checkpoint.load_only:
        return Losable(steps, steps)
    interval = checkpoint.interval
    most = interval if checkpoint.async_mode == "disabled" else 2 * interval
    return Losable(min(most, steps), min(interval, steps))


def earlier_ledger(folder: str) -> Lineage | None:
    """Return the ledger of the steps that ran in this folder; None if none did.

    Raises:
        ValueError: if steps were begun whose terms, or whose number, are no longer known.
    """
    refuse_baseline_folder(folder)
    log = RunLog(folder)
    published = read_published_fields(folder)
    if published is None:
        if log.count == 0:
            return None
        raise ValueError(
            f"job.dump_folder = '{folder}': {log.count} steps were begun here, but {PRIVACY_FILE}, "
            "which records their terms, is missing; restore it, or use another folder"
        )
    if published["audit"] is not None:
        raise ValueError(
            f"job.dump_folder = '{folder}' is that of an audited run, whose weights cannot become "
            "private; give this one its own job.dump_folder"
        )
    stated = ledger_of(published)
    ledger = log.enter_lost(stated)
    counted, losses = stated.heldout_losses, ledger.heldout_losses
    fewer = counted is not None and losses is not None and losses.lost < counted.lost
    missing = log.missing(ledger)
    if fewer or missing.evaluations:
        raise ValueError(
            f"job.dump_folder = '{folder}': {EVALUATIONS_FILE} lacks held-out losses that "
            f"{PRIVACY_FILE} counts; restore it as the run wrote it, or use another folder"
        )
    problem = log.undercounted(ledger)
    if missing.steps or ledger.lost < stated.lost:
        problem = (
            f"{EXECUTED_FILE} or {STARTS_FILE} lacks steps or crashes that {PRIVACY_FILE} counts "
            f"({stated.steps_executed} steps)"
        )
    if problem:
        raise ValueError(_unlike(folder, problem))
    return ledger if log.count > 0 else None


def _unlike(folder: str, problem: str) -> str:
    """Word the refusal of logs that contradict each other or `privacy.json`."""
    return (
        f"job.dump_folder = '{folder}': {problem}; restore both as the run wrote them, or use "
        "another folder"
    )
