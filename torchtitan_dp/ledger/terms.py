"""The terms on which a run trains, fixed at its first start: noise, sampling rate, budget.

From the configuration, the number of records, and what the run's folder and its initial weights
have spent already.
"""

import dataclasses
import hashlib
import json
import os
from dataclasses import dataclass

from torchtitan_dp.config import JobConfig
from torchtitan_dp.data.opening import noun, privacy_unit
from torchtitan_dp.ledger.files import PRIVACY_FILE, ExecutedSteps, read_published
from torchtitan_dp.ledger.initial import start_from
from torchtitan_dp.ledger.lineage import Ledger, Settings, fix_budget
from torchtitan_dp.privacy import accounting


@dataclass(frozen=True)
class Plan:
    """What a run spends."""

    ledger: Ledger
    steps: int
    epsilon: float  # after `steps`, all that came before included
    warnings: tuple[str, ...]

    @property
    def settings(self) -> Settings:
        return self.ledger.settings

    @property
    def private(self) -> bool:
        return self.ledger.private


def make_plan(config: JobConfig, records: int, before: Ledger | None, fingerprint: str) -> Plan:
    """Noise, sampling rate and epsilon of a run.

    Args:
        records: number of training records, or units.
        before: the ledger of the run that this one resumes, whose noise and rate are kept, unless
            `privacy.new_segment` is set.
        fingerprint: of the records.

    Raises:
        ValueError: one line for the user.
    """
    privacy, steps = config.privacy, config.training.steps
    assert privacy.delta is not None
    warnings = []
    if privacy.delta >= 1 / records:
        warnings.append(
            f"privacy.delta = {privacy.delta:g} is at least 1 / number of {noun(config)}s "
            f"({1 / records:.2g}): such a delta allows publishing a {noun(config)} outright; use "
            "less"
        )
    ledger = Ledger(settings_of(config, records), config_hash=config_hash(config))
    if before is None:
        start_from(ledger, config, fingerprint)
    else:
        ledger.inherit(before)
    sigma = _noise_multiplier(config, ledger, before)
    ledger.settings = dataclasses.replace(ledger.settings, noise_multiplier=float(sigma))
    if before is None:
        ledger.budget = fix_budget(ledger.settings, steps, ledger.before())
    else:
        ledger.go_on_from(before, privacy.new_segment)
    epsilon = ledger.epsilon(max(steps, ledger.steps))
    if privacy.target_epsilon is not None and epsilon > privacy.target_epsilon:
        raise ValueError(
            f"privacy.target_epsilon = {privacy.target_epsilon:g}: this run's noise was fixed at "
            f"its first start, and {steps} training.steps would spend {epsilon:.4g}; lower "
            "training.steps, raise the target, or start afresh in another job.dump_folder"
        )
    if ledger.adaptive and ledger.budget is not None and epsilon > ledger.budget.epsilon:
        raise ValueError(
            f"privacy.new_segment = 'adaptive': {steps} training.steps would spend {epsilon:.4g} "
            f"by the filter, more than the {ledger.budget.epsilon:.4g} fixed at the first start; "
            "lower training.steps, or raise privacy.noise_multiplier"
        )
    if sigma == 0:
        ledger.mark_not_private("privacy.noise_multiplier = 0")
        warnings.append("privacy.noise_multiplier = 0: the run is NOT private")
    if privacy.debug_seed is not None:
        ledger.mark_not_private("privacy.debug_seed was set: the noise can be redrawn")
        warnings.append("privacy.debug_seed is set: the run is NOT private")
    return Plan(ledger, steps, epsilon, tuple(warnings))


def settings_of(config: JobConfig, records: int) -> Settings:
    """All that the configuration says of the guarantee, but for noise that follows from epsilon."""
    privacy, batch = config.privacy, config.training.global_batch_size
    if privacy.sample_rate is not None:
        rate, source, relation = privacy.sample_rate, "privacy.sample_rate", "add_remove"
    else:
        rate, relation = batch / records, "zero_out"
        source = f"training.global_batch_size / number of training {noun(config)}s"
        source += " (which is public)"
        if rate > 1:
            raise ValueError(
                f"training.global_batch_size = {batch}: more than the {records} training "
                f"{noun(config)}s, so the sample rate would exceed 1; use at most {records}"
            )
    assert privacy.delta is not None
    return Settings(
        noise_multiplier=privacy.noise_multiplier or 0.0,
        sample_rate=rate,
        max_grad_norm=float(privacy.max_grad_norm),
        delta=privacy.delta,
        expected_batch_size=batch,
        accountant=privacy.accountant,
        sample_rate_source=source,
        neighbouring_relation=relation,
        privacy_unit=privacy_unit(config),
        target_epsilon=privacy.target_epsilon,
    )


def _noise_multiplier(config: JobConfig, ledger: Ledger, before: Ledger | None) -> float:
    """The configuration's, the resumed run's, or what the target leaves for the coming steps."""
    privacy = config.privacy
    if privacy.noise_multiplier is not None:
        return privacy.noise_multiplier
    assert privacy.target_epsilon is not None
    steps, spent = config.training.steps, ledger.before()
    if before is not None:
        kept = before.settings.noise_multiplier
        terms = dataclasses.replace(ledger.settings, noise_multiplier=kept)
        if privacy.new_segment is None or terms.is_as(before.settings, targets_too=True):
            return kept
        if privacy.new_segment == "adaptive":
            raise ValueError(
                "privacy.new_segment = 'adaptive' with privacy.target_epsilon: the filter's budget "
                "was fixed at the first start; set privacy.noise_multiplier instead"
            )
        steps -= before.steps
        spent = [*spent, *(segment.mechanism() for segment in before.segments())]
        if steps <= 0:
            return kept
    return accounting.noise_multiplier(
        target_epsilon=privacy.target_epsilon,
        delta=ledger.settings.delta,
        sample_rate=ledger.settings.sample_rate,
        steps=steps,
        accountant=ledger.settings.accountant,
        before=spent,
    )


def earlier_ledger(folder: str) -> Ledger | None:
    """The ledger of what already ran in this folder; None if nothing did.

    Raises:
        ValueError: if steps were begun whose terms are no longer known.
    """
    begun = ExecutedSteps(folder).count
    if begun == 0:
        return None
    ledger = read_published(folder)
    if ledger is None:
        raise ValueError(
            f"job.dump_folder = '{folder}': {begun} steps were begun here, but {PRIVACY_FILE}, "
            "which says on what terms, is gone; restore it, or use another folder"
        )
    return ledger


def refuse_private_folder(folder: str) -> None:
    """Raises ValueError if a private run lives here: one without privacy would go on from its
    weights beside a `privacy.json` that no longer holds."""
    if os.path.exists(os.path.join(folder, PRIVACY_FILE)) or ExecutedSteps(folder).count > 0:
        raise ValueError(
            f"privacy.enable = false: job.dump_folder = '{folder}' holds a private run; give this "
            "one its own job.dump_folder"
        )


def config_hash(config: JobConfig) -> str:
    """SHA-256, hex, of what is trained and how; not of where private records or outputs lie."""
    sections = dataclasses.asdict(config)
    sections["training"].pop("dataset_path")
    sections["job"].pop("dump_folder")
    text = json.dumps(sections, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()
