"""The plan of a run's privacy budget: the terms of its steps, which its first start fixes, and what
they spend with all that came before."""

import contextlib
import os
from dataclasses import dataclass, replace

from torchtitan_dp.checkpoint.terms import choose_noise, config_hash, settings_of
from torchtitan_dp.config import JobConfig
from torchtitan_dp.config.derived import trained, unit_word
from torchtitan_dp.ledger.lineage import (
    HeldOutLoss,
    History,
    Lineage,
    Settings,
    not_private,
    with_caveats,
)
from torchtitan_dp.ledger.log import Losable, RunLog
from torchtitan_dp.ledger.schema import PRIVACY_FILE, ledger_of, read_published_fields
from torchtitan_dp.ledger.spending import BY_RDP, counted_by, epsilon, inherited, spent
from torchtitan_dp.privacy import accounting, published_loss
from torchtitan_dp.privacy.segments import NONE, Mechanism


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
        return self.ledger.settings

    @property
    def private(self) -> bool:
        return self.ledger.private


def settle(config: JobConfig, units: int, history: History, terms: Settings | None) -> Plan:
    """Fix the noise, the rate and the epsilon of a run on so many training units; ValueError, one
    line. `terms` are those of its earlier steps, if any (`start.plan_start`)."""
    privacy, steps = config.privacy, config.training.steps
    warnings = _check_delta(config, units)
    sigma, column = choose_noise(config, units, inherited(history.ancestors), terms)
    settings = settings_of(config, units, sigma, column)
    if terms is not None:
        settings = settings.resumed(since=terms)
    _refuse_inside_round(config, settings, history.steps)
    loss = choose_loss(config, history if terms is not None else None)
    before = history.planned_steps  # 0: none
    if steps > before > 0:
        history = with_caveats(
            history,
            f"training.steps was raised from {before} to {steps} after the first start, which is "
            "assumed not to follow from results",
        )
    if sigma == 0:
        history = not_private(history, "privacy.noise_multiplier = 0")
        warnings.append("privacy.noise_multiplier = 0: the run is NOT private")
    if privacy.debug_seed is not None:
        history = not_private(history, "privacy.debug_seed was set: the noise can be redrawn")
        warnings.append("privacy.debug_seed is set: the run is NOT private")
    history = replace(
        history,
        planned_steps=max(steps, before),
        heldout_loss=loss,
        config_hash=config_hash(config),
    )
    log = RunLog(config.job.dump_folder)
    ledger = log.enter_lost(Lineage(**{**vars(history), "settings": settings}))
    if problem := log.undercounted(ledger):
        raise ValueError(_contradicted(config.job.dump_folder, problem))
    reached = _refuse_overspending(config, ledger, before)
    if ledger.composes and counted_by(ledger) != privacy.accountant:
        warnings.append(BY_RDP)
    stated = max(reached, epsilon(spent(ledger), settings, ledger.left))
    return Plan(ledger, steps, reached, stated, tuple(warnings))


def choose_loss(config: JobConfig, earlier: History | None) -> HeldOutLoss | None:
    """Return the terms of the held-out loss that a run publishes at its end; None if it publishes
    none. Those of an `earlier` start stay: ValueError, one line, if they changed, or if a second
    loss would spend more."""
    validation, asked = config.validation, config.validation.publish_epsilon
    delta = validation.publish_delta or config.privacy.delta
    assert delta is not None
    if earlier is None:
        if asked is None:
            return None
        try:
            noise = published_loss.noise_for(target_epsilon=asked, delta=delta)
        except ValueError:  # in words of another key
            raise ValueError(
                f"validation.publish_epsilon = {asked:g}: no usable noise spends it; try one near 1"
            ) from None
        return HeldOutLoss(noise, validation.publish_clip, delta, target_epsilon=asked)
    kept = earlier.heldout_loss
    before = (None,) * 3 if kept is None else (kept.target_epsilon, kept.delta, kept.clip)
    now = (None,) * 3 if asked is None else (asked, delta, validation.publish_clip)
    for key, new, old in zip(("epsilon", "delta", "clip"), now, before, strict=True):
        if new != old:
            raise ValueError(
                f"validation.publish_{key} = {new}: this run was started with {old}; set it back, "
                "or start afresh in another job.dump_folder"
            )
    if kept is not None and kept.noised is not None and kept.is_due(config.training.steps):
        raise ValueError(
            f"training.steps = {config.training.steps}: the held-out loss after step "
            f"{kept.noised.step} was published, which spent validation.publish_epsilon; set it "
            "back, or start another run from exported weights (checkpoint.initial_load_path)"
        )
    return kept


def _refuse_inside_round(config: JobConfig, settings: Settings, steps: int) -> None:
    """Refuse, by ValueError, to start or to save inside a round of random allocation, whose key is
    gone after: each round of a lineage belongs to one start."""
    t, checkpoint = settings.mechanism.round_steps, config.checkpoint
    if steps % t and config.training.steps > steps:
        raise ValueError(
            f"training.steps = {config.training.steps}: these weights, after step {steps}, are "
            f"inside a round of {t} steps (privacy.sampling = 'allocation'), which ended there; "
            "start another run from exported weights (checkpoint.initial_load_path)"
        )
    if checkpoint.enable and checkpoint.interval % t:
        below = checkpoint.interval // t * t
        raise ValueError(
            f"checkpoint.interval = {checkpoint.interval}: with privacy.sampling = 'allocation' a "
            f"run goes on from the ends of rounds alone, here of {t} steps; set it to a multiple, "
            + " or ".join(f"{n}" for n in (below, below + t) if n)
        )


def _check_delta(config: JobConfig, units: int) -> list[str]:
    """Refuse, by ValueError, a delta that allows publishing whole units, and warn of one above a
    tenth of that. A private number of units gives a labelled warning; its public estimate decides.
    """
    delta, rate = config.privacy.delta, config.privacy.sample_rate
    assert delta is not None
    word = unit_word(config)
    bounds = {"": (1 / units, f"1 / number of training {word}s ({1 / units:.2g})")}
    if rate is not None:
        most = rate / config.training.global_batch_size
        source = f"privacy.sample_rate / training.global_batch_size ({most:.2g}), about 1 / number"
        bounds = {"": (most, f"{source} of {word}s"), "not private: ": bounds[""]}
    warnings: list[str] = []
    for label, (most, source) in bounds.items():
        given = f"{label}privacy.delta = {delta:g}"
        less = f"use a tenth of that, {accounting.rounded_down(most / 10, digits=2)}, or less"
        if _reaches(delta, most):
            mistake = f"must be below {source}, else one {word} may be published outright; {less}"
            if not label:
                raise ValueError(f"{given}: {mistake}")
            warnings.append(f"{given}: {mistake}")
        elif not warnings and not _reaches(most / 10, delta):
            chance = f"so epsilon may fail with a probability of 1 in {1 / delta:,.0f}"
            warnings.append(f"{given}: above a tenth of {source}, {chance}; {less}")
    return warnings


def _reaches(value: float, bound: float) -> bool:
    """Return whether a value is at least a bound, up to the rounding of how either was written."""
    return value >= bound * (1 - 1e-9)


def _refuse_overspending(config: JobConfig, ledger: Lineage, before: int) -> float:
    """Return the epsilon after a run's last step; raise ValueError if it is above the target.
    `before` is the most that training.steps was before this start; 0: there was none."""
    target, steps = config.privacy.target_epsilon, config.training.steps
    coming = max(steps - ledger.steps, 0)
    reached = epsilon(spent(ledger, lost=False), ledger.settings, coming)
    if target is not None and reached > target:
        key, fixed = f"privacy.target_epsilon = {target:g}", "its first start"
        if before not in (0, steps):
            key, fixed = f"training.steps = {steps}", f"training.steps = {before}"
        raise ValueError(
            f"{key}: this run's noise was fixed at {fixed}, and {steps} training.steps would spend "
            f"{accounting.rounded_up(reached)}; lower training.steps, raise "
            f"privacy.target_epsilon (now {target:g}), or take another job.dump_folder"
        )
    return reached


def losable(config: JobConfig) -> Losable:
    """Return the steps that a start of this configuration can lose: all since the last checkpoint,
    and since the one before where that may have been under way."""
    steps, checkpoint = max(config.training.steps, 1), config.checkpoint
    if not checkpoint.enable:
        return Losable(steps, steps)
    under_way = 1 if checkpoint.async_mode == "disabled" else 2
    return Losable(min(under_way * checkpoint.interval, steps), min(checkpoint.interval, steps))


def earlier_ledger(folder: str) -> Lineage | None:
    """Return the ledger of the steps that ran in this folder; None if none did. ValueError: steps
    were begun whose terms, or whose number, are no longer known."""
    log, published = RunLog(folder), read_published_fields(folder)
    if _is_baseline(folder):
        raise ValueError(
            f"privacy.enable = true: job.dump_folder = '{folder}' is that of a run without "
            "privacy, whose weights cannot become private; give this one its own job.dump_folder"
        )
    if published is None:
        if log.count == 0:
            return None
        raise ValueError(
            f"job.dump_folder = '{folder}': {log.count} steps were begun here, but {PRIVACY_FILE}, "
            "which records their terms, is missing; restore it, or use another folder"
        )
    if published["audit"] is not None:
        raise ValueError(f"job.dump_folder = '{folder}': audited, so never private; name another")
    stated = ledger_of(published)
    ledger = log.enter_lost(stated)
    if problem := log.lacks(stated) or log.undercounted(ledger):
        raise ValueError(_contradicted(folder, problem))
    return ledger if log.count > 0 else None


def _contradicted(folder: str, problem: str) -> str:
    return f"job.dump_folder = '{folder}': {problem}; restore both, or use another folder"


def refuse_delta_of_loss(config: JobConfig, heldout: int) -> None:
    """Refuse, by ValueError, a delta at which a whole held-out unit might be published."""
    validation = config.validation
    delta, key = validation.publish_delta, "validation.publish_delta"
    if delta is None:
        delta, key = config.privacy.delta, "validation.publish_delta (unset: privacy.delta)"
    assert delta is not None
    if validation.publish_epsilon is not None and delta * heldout >= 1:
        word = unit_word(config)
        raise ValueError(
            f"{key} = {delta:g}: must be below 1 / number of held-out {word}s ({1 / heldout:.2g}), "
            f"else one {word} may be published outright; use a tenth of that, "
            f"{accounting.rounded_down(0.1 / heldout, digits=2)}, or less"
        )


def baseline_ledger(config: JobConfig, units: int) -> Lineage:
    """Return the ledger of a run without privacy on so many training units."""
    batch = config.training.global_batch_size
    settings = Settings(
        Mechanism(0.0, min(max(batch, 1) / units, 1.0), private=False),
        max_grad_norm=0.0,  # none
        delta=config.privacy.delta or 0.0,
        expected_batch_size=batch,
        accountant=config.privacy.accountant,
        sample_rate_source="shuffled batches of one size",
        neighbouring_relation="none",
        sampling="shuffled",
        clipping="none",
        clip_function="none",
        trained=trained(config),
    )
    why = "trained without privacy (privacy.enable = false)"
    return not_private(Lineage(settings, planned_steps=config.training.steps), why)


def refuse_private_folder(folder: str) -> None:
    """Refuse to train without privacy in a private run's folder, by ValueError: its `privacy.json`
    would no longer cover the weights."""
    is_there = os.path.exists(os.path.join(folder, PRIVACY_FILE))
    if (is_there and not _is_baseline(folder)) or RunLog(folder).count > 0:
        raise ValueError(
            f"privacy.enable = false: job.dump_folder = '{folder}' has a private run; name another"
        )


def _is_baseline(folder: str) -> bool:
    """Return whether its `privacy.json` is of a run without privacy; one that is broken is not."""
    with contextlib.suppress(ValueError):
        published = read_published_fields(folder)
        return published is not None and published["mechanism"] == NONE
    return False
