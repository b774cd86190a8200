"""The plan of a run's privacy budget: the terms of its steps, which its first start fixes, and what
they spend with all that came before.

The noise follows from the share that each step has in the weights that a run exports (its workload
matrix), and so from public settings: the steps, the schedule of learning rates, momentum,
weight decay, and the average of weights where that is exported.
"""

import dataclasses
import hashlib
import json
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy import special

from torchtitan_dp.config import JobConfig
from torchtitan_dp.config.derived import (
    METHODS,
    ladder,
    mesh_degrees,
    privacy_unit,
    targets,
    trained,
    unit_word,
)
from torchtitan_dp.ledger.lineage import (
    LATER,
    HeldOutLoss,
    History,
    Lineage,
    Settings,
    not_private,
    with_caveats,
)
from torchtitan_dp.ledger.log import Losable, RunLog
from torchtitan_dp.ledger.schema import PRIVACY_FILE, kind, ledger_of, read_published_fields
from torchtitan_dp.ledger.spending import BY_RDP, counted_by, epsilon, inherited
from torchtitan_dp.privacy import accounting, published_loss
from torchtitan_dp.privacy.coefficients import INDEPENDENT, found_for
from torchtitan_dp.privacy.segments import NONE, Mechanism, Segment, mechanism_of


def settings_of(
    config: JobConfig, units: int, noise_multiplier: float, column: Sequence[float] | None = None
) -> Settings:
    """Return the terms of a configuration; ValueError: more units are expected in a step than there
    are.

    Args:
        units: number of training units. It is public where the rate follows from it, and then
            neighbours are data sets of as many units (`zero_out`).
        column: of correlated noise; by default that of `privacy.bands`, which is then a number.
    """
    privacy, batch = config.privacy, config.training.global_batch_size
    assert privacy.delta is not None
    rate, source = privacy.sample_rate, "privacy.sample_rate"
    units_are_public = rate is None
    if rate is None:
        word = unit_word(config)
        if batch > units:
            raise ValueError(
                f"training.global_batch_size = {batch}: more than the {units} training {word}s, so "
                f"the sample rate would exceed 1; use at most {units}"
            )
        rate = batch / units
        source = f"training.global_batch_size / number of training {word}s (which is public)"
    replicate, shard, _ = mesh_degrees(config)
    ranks = max(replicate, 1) * max(shard, 1)
    if column is None:
        assert privacy.noise == "independent" or privacy.bands != "auto"
        column = column_of(config, 1 if privacy.noise == "independent" else int(privacy.bands))
    asked = rate
    mechanism = mechanism_of(
        privacy,
        noise_multiplier=float(noise_multiplier),
        sample_rate=rate,
        estimates_norms=METHODS[privacy.gradient_method].estimates_norms,
        column=column,
    )
    rate = mechanism.sample_rate
    if privacy.sampling == "allocation":
        source = f"1 / {round(1 / rate)} steps of a round, the next to {source}"
    return Settings(
        mechanism,
        max_grad_norm=float(privacy.max_grad_norm),
        delta=privacy.delta,
        expected_batch_size=batch,
        accountant=privacy.accountant,
        sample_rate_source=source,
        neighbouring_relation="zero_out" if units_are_public else "add_remove",
        privacy_unit=privacy_unit(config),
        targets=targets(config),
        windows_per_draw=config.data.windows_per_draw,
        target_epsilon=privacy.target_epsilon,
        sampling=mechanism.sampling,
        clipping=privacy.clipping,
        clip_function=privacy.clip_function,
        secure_noise=privacy.secure_noise,
        trained=trained(config),
        units=units if units_are_public else None,
        # Each length of the ladder is dealt out by itself, rounded up.
        samples_per_rank=math.ceil(_most_drawn(batch * rate / asked) / ranks) + len(ladder(config)),
        ranks_added_up=ranks,
    )


def _most_drawn(expected: float) -> int:
    """Return a number of drawn units that one step in 1e9 exceeds: a binomial tail is below that of
    the Poisson distribution of the same mean (Anderson & Samuels 1967)."""
    most = math.ceil(special.pdtrik(1 - 1e-9, expected))
    return most - int(most > 0 and special.pdtr(most - 1, expected) >= 1 - 1e-9)


def config_hash(config: JobConfig) -> str:
    """Return the SHA-256 of the configuration without the paths of records and outputs."""
    sections = dataclasses.asdict(config)
    sections["training"].pop("dataset_path")
    sections["job"].pop("dump_folder")
    sections["job"].pop("config_file")
    return hashlib.sha256(json.dumps(sections, sort_keys=True, default=str).encode()).hexdigest()


AS_GOOD = 1.1
"""Fewer bands whose noise is at most this much more are preferred: less is kept in memory, and each
step is less noisy."""


def column_of(config: JobConfig, bands: int) -> tuple[float, ...]:
    """Find the coefficients of so many bands for the weights that this run exports."""
    return INDEPENDENT if bands == 1 else found_for(shares_of_steps(config), bands)


def choose_noise(
    config: JobConfig, units: int, spent: Sequence[Segment], earlier: Settings | None
) -> tuple[float, tuple[float, ...]]:
    """Return the configuration's noise, the resumed run's, or the least that meets the target
    beside the steps `spent` behind the initial weights; and its column. Those of `earlier` steps
    are read, never found again: the schedule, or the processor, may be another."""
    privacy = config.privacy
    kept = INDEPENDENT if earlier is None else earlier.mechanism.column
    if privacy.noise == "independent":
        bands = 1
    elif privacy.bands != "auto":
        bands = privacy.bands
    elif earlier is not None:
        bands = len(kept)
    else:
        bands = best_of(noise_by_bands(config, units, spent))
    column = kept if bands == len(kept) else column_of(config, bands)
    if privacy.noise_multiplier is not None:
        return privacy.noise_multiplier, column
    if earlier is not None:
        return earlier.mechanism.noise_multiplier, column
    return _least_noise(config, units, column, spent, config.training.steps), column


def _least_noise(
    config: JobConfig, units: int, column: Sequence[float], spent: Sequence[Segment], steps: int
) -> float:
    privacy = config.privacy
    assert privacy.target_epsilon is not None
    assert privacy.delta is not None
    return accounting.noise_for(
        settings_of(config, units, 0.0, column).mechanism,
        steps,
        target_epsilon=privacy.target_epsilon,
        delta=privacy.delta,
        accountant=privacy.accountant,
        before=spent,
    )


def noise_by_bands(
    config: JobConfig, units: int, spent: Sequence[Segment]
) -> dict[int, tuple[float, float]]:
    """Return, by the number of bands, sigma and the noise in the exported weights for the target
    epsilon: of 1, 2, 4, … rounds, as far as the rate allows."""
    steps, shares = max(config.training.steps, 1), shares_of_steps(config)
    rate = settings_of(config, units, 0.0, INDEPENDENT).mechanism.sample_rate
    of_rounds = {-(-steps // 2**power) for power in range(steps.bit_length() + 1)}
    found = {}
    for bands in sorted({min(bands, math.floor(1 / rate)) for bands in of_rounds}):
        column = found_for(shares, bands)
        sigma = _least_noise(config, units, column, spent, steps)
        mechanism = settings_of(config, units, sigma, column).mechanism
        found[bands] = (sigma, mechanism.noise_in_weights(shares))
    return found


def best_of(found: dict[int, tuple[float, float]]) -> int:
    """Return the bands of `noise_by_bands` with least noise in the weights, or fewer, as good."""
    least = min(in_weights for _, in_weights in found.values())
    return min(bands for bands, (_, in_weights) in found.items() if in_weights <= AS_GOOD * least)


_COUPLED = "Adam"  # adds the decay to the gradient: a share of it that depends on gradients


def shares_of_steps(config: JobConfig) -> tuple[float, ...]:
    """Return a_1, …, a_n: by how much noise in the gradient of step t moves the exported weights,
    relative to other steps.

    Where β is the momentum, λ the weight decay and η_s the rate of step s, the optimizers
    (`optimizer.MomentumSGD`, AdamW) do

        m_s = β m_{s-1} + (1 - β) g_s        w_s = (1 - λ η_s) w_{s-1} - η_s m_s / (1 - β^s)

    but for a divisor, AdamW's root of the second moment, which is taken to be constant: with DP it
    is next to nothing but the size of a step's noise. The exported weights are Σ e_s w_s: the last
    ones, or the average of `models.ema`.
    """
    optimizer = config.optimizer
    beta = optimizer.beta1
    decay = 0.0 if optimizer.name == _COUPLED else optimizer.weight_decay
    exported, after, moment = 1.0, 0.0, 0.0  # Π d_r of later averages; Σ e_s …; Σ β^… …
    steps, factor = max(config.training.steps, 1), schedule(config)
    next_rate, shares = 0.0, np.zeros(steps)
    for step in range(steps, 0, -1):
        kept = min(config.ema.decay, step / (9 + step)) if config.ema.enable else 0.0
        rate = optimizer.lr * factor(step - 1)
        after = exported * (1 - kept) + (1 - decay * next_rate) * after
        exported, next_rate = exported * kept, rate
        moment = rate * after / (1 - beta**step) + beta * moment
        shares[step - 1] = moment
    return tuple((shares / (np.abs(shares).max() or 1.0)).tolist())


def schedule(config: JobConfig) -> Callable[[int], float]:
    """Return TorchTitan's factor of the learning rate, by the number of steps before."""
    import torch

    import torchtitan_dp.distributed  # noqa: F401  lets TorchTitan import without a GPU

    # isort: split
    from torchtitan.components.lr_scheduler import build_lr_schedulers

    settings, steps = config.lr_scheduler, config.training.steps
    total = max(settings.total_steps or steps, 1)
    warmup = min(settings.warmup_steps, total)  # as TorchTitan does, with a warning
    decays = settings.decay_ratio and min(settings.decay_ratio, 1 - warmup / total)
    settings = replace(settings, warmup_steps=warmup, total_steps=total, decay_ratio=decays)
    one = torch.optim.SGD([torch.zeros(())], lr=1.0)
    schedulers = build_lr_schedulers([one], settings, total)  # type: ignore[arg-type]
    (factor,) = schedulers.schedulers[0].lr_lambdas  # type: ignore[attr-defined]
    return factor  # type: ignore[no-any-return]


def expected_rounds(records: int, rate: float, slots: int) -> float:
    """Compute E ceil(n / slots) for n ~ Binomial(records, rate).

    >>> expected_rounds(10, 1.0, 4)
    3.0
    """
    mean, deviation = records * rate, math.sqrt(records * rate * (1 - rate))
    first, last = int(mean - 12 * deviation - 1), int(mean + 12 * deviation + 1)
    certain = max(first, 0) // slots  # rounds; another one follows where n exceeds what they hold
    full = np.arange(certain, min(last, records - 1) // slots + 1) * slots
    # P[n > full]; `bdtrc` takes fewer than 2^31 records.
    return certain + float(special.betainc(full + 1.0, records - full, rate).sum())


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
        raised = f"training.steps was raised from {before} to {steps} {LATER}"
        history = with_caveats(history, raised)
        warnings.append(raised)
    if sigma == 0:
        history = not_private(history, "privacy.noise_multiplier = 0")
        warnings.append("privacy.noise_multiplier = 0: the run is NOT private")
    if privacy.debug_seed is not None:
        if terms is not None and history.private:
            raise ValueError(
                f"privacy.debug_seed = {privacy.debug_seed}: this run is private, and would not be "
                "any more; remove it, or name another job.dump_folder"
            )
        history = not_private(history, "privacy.debug_seed was set: the noise can be redrawn")
        warnings.append("privacy.debug_seed is set: the run is NOT private")
    history = replace(
        history,
        planned_steps=max(steps, before),
        heldout_loss=loss,
        config_hash=config_hash(config),
    )
    ledger = Lineage(**{**vars(history), "settings": settings})
    if os.path.isdir(folder := config.job.dump_folder):
        log = RunLog(folder)
        ledger = log.enter_lost(ledger)
        if problem := log.undercounted(ledger):
            raise ValueError(_contradicted(folder, problem))
    target = privacy.target_epsilon
    reached = epsilon(ledger, max(steps - ledger.steps, 0), lost=False)
    if target is not None and reached > target:
        raise ValueError(
            f"privacy.target_epsilon = {target:g}: this run's noise was fixed at its first start, "
            f"and {steps} training.steps would spend {accounting.rounded_up(reached)}; lower "
            "training.steps, raise privacy.target_epsilon, or take another job.dump_folder"
        )
    if ledger.composes and counted_by(ledger) != privacy.accountant:
        warnings.append(BY_RDP)
    return Plan(ledger, steps, reached, max(reached, epsilon(ledger, ledger.left)), tuple(warnings))


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
        raise ValueError(
            f"checkpoint.interval = {checkpoint.interval}: with privacy.sampling = 'allocation' a "
            f"run goes on from the ends of rounds alone, here of {t} steps; set it to a multiple"
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
        if mistake := _publishes_one(given, delta, most, source, word):
            if not label:
                raise ValueError(mistake)
            warnings.append(mistake)
        elif not warnings and delta * (1 - 1e-9) > most / 10:
            warnings.append(
                f"{given}: above a tenth of {source}, so epsilon may fail with a probability of 1 "
                f"in {1 / delta:,.0f}; use {accounting.rounded_down(most / 10, digits=2)} or less"
            )
    return warnings


def _publishes_one(given: str, delta: float, most: float, source: str, one: str) -> str:
    """Return the mistake of a delta of at least 1 / number, up to the rounding of how either was
    written; or ""."""
    if delta < most * (1 - 1e-9):
        return ""
    return (
        f"{given}: must be below {source}, else one {one} may be published outright; use a tenth "
        f"of that, {accounting.rounded_down(most / 10, digits=2)}, or less"
    )


def losable(config: JobConfig) -> Losable:
    """Return the steps that a start of this configuration can lose: all since the last checkpoint,
    and since the one before where that may have been under way."""
    steps, checkpoint = max(config.training.steps, 1), config.checkpoint
    if not checkpoint.enable:
        return Losable(steps, steps)
    under_way = 1 if checkpoint.async_mode == "disabled" else 2
    return Losable(min(under_way * checkpoint.interval, steps), min(checkpoint.interval, steps))


def after_crash(plan: Plan, config: JobConfig) -> tuple[int, float]:
    """Return the steps that a crash of this start counts at most, and the epsilon to state then."""
    lost = plan.settings.mechanism.in_whole_periods(losable(config).most)
    ledger = replace(plan.ledger, lost=plan.ledger.lost + lost)
    return lost, epsilon(ledger, ledger.left)


def earlier_ledger(folder: str) -> Lineage | None:
    """Return the ledger of the steps that ran in this folder; None if none did. ValueError: steps
    were begun whose terms, or whose number, are no longer known."""
    if not os.path.isdir(folder):
        return None
    log, published = RunLog(folder), read_published_fields(folder)
    if published is None:
        if log.count == 0:
            return None
        raise ValueError(
            f"job.dump_folder = '{folder}': {log.count} steps were begun here, but {PRIVACY_FILE}, "
            "which records their terms, is missing; restore it, or use another folder"
        )
    if (what := kind(published)) != "a run":
        raise ValueError(f"job.dump_folder = '{folder}': it is {what}; name another folder")
    stated = ledger_of(published)
    ledger = log.enter_lost(stated)
    if problem := log.lacks(stated) or log.undercounted(ledger):
        raise ValueError(_contradicted(folder, problem))
    return ledger if log.count > 0 else None


def _contradicted(folder: str, problem: str) -> str:
    return f"job.dump_folder = '{folder}': {problem}; restore both, or use another folder"


def refuse_deltas(config: JobConfig, heldout: int, people: int | None) -> None:
    """Refuse, by ValueError, a delta at which a whole held-out unit might be published, or the
    content of one of so many people, several of whom may be in one unit."""
    validation, delta, word = config.validation, config.privacy.delta, unit_word(config)
    assert delta is not None
    found = []
    if validation.publish_epsilon is not None:
        of_loss = validation.publish_delta or delta
        found.append(("validation.publish_delta", of_loss, heldout, f"held-out {word}s", word))
    if people is not None:
        found.append(("privacy.delta", delta, people, "owners", "person's records"))
    for key, given, count, of, one in found:
        most = 1 / max(count, 1)
        source = f"1 / number of {of} ({most:.2g})"
        if mistake := _publishes_one(f"{key} = {given:g}", given, most, source, one):
            raise ValueError(mistake)


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
    published = read_published_fields(folder)
    is_other = published is not None and published["mechanism"] != NONE
    if is_other or RunLog(folder).count > 0:
        raise ValueError(
            f"privacy.enable = false: job.dump_folder = '{folder}' has a private run; name another"
        )
