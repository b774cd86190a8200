"""The terms on which a run trains, fixed at its first start: noise, sampling rate, budget.

From the configuration, the number of records, and what the run's folder and its initial weights
have spent already.
"""

import dataclasses
import hashlib
import json
import os
from dataclasses import dataclass

from torch.distributed.checkpoint import CheckpointException

from torchtitan_dp.checkpoint.folder import (
    checkpoint_folder,
    checkpoint_folders,
    newest_whole_checkpoint,
    read_ledger,
    resumes,
    step_folder,
)
from torchtitan_dp.config import JobConfig
from torchtitan_dp.config.units import unit_word
from torchtitan_dp.ledger.baseline import refuse_baseline_folder
from torchtitan_dp.ledger.files import (
    EXECUTED_FILE,
    PRIVACY_FILE,
    ExecutedSteps,
    ledger_of,
    read_published_fields,
)
from torchtitan_dp.ledger.initial import start_from
from torchtitan_dp.ledger.lineage import Ledger, fix_budget
from torchtitan_dp.ledger.settings import Settings, settings_of
from torchtitan_dp.ledger.starts import union
from torchtitan_dp.privacy import accounting

_DRAWN = (
    "machines compared the records of each draw, not all of them (data.verify_records = 'drawn'): "
    "the ranks of one machine are assumed to read the same files"
)


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


def make_plan(config: JobConfig, records: int, before: Ledger | None) -> Plan:
    """Noise, sampling rate and epsilon of a run.

    Args:
        records: number of training records, or units.
        before: the ledger of what already ran in this folder, whose noise and rate are kept,
            unless `privacy.new_segment` is set.

    Raises:
        ValueError: one line for the user.
    """
    privacy, steps = config.privacy, config.training.steps
    assert privacy.delta is not None
    warnings = _refuse_delta(config, records)
    ledger = Ledger(
        settings_of(config, records), planned_steps=steps, config_hash=config_hash(config)
    )
    if config.data.verify_records == "drawn":
        ledger.add_caveat(_DRAWN)
    if before is not None:
        _refuse_to_leave_checkpoints(config)
        ledger.inherit(before, privacy.new_segment)
    if not resumes(config):
        start_from(ledger, config)
        if before is not None:  # its weights are lost: what goes on from here is no step old
            before = dataclasses.replace(before)
            before.rewind()
    else:  # from these weights, which may be older than the folder's account
        before = _newest_weights(config) or before
    sigma = _noise_multiplier(config, ledger, before)
    ledger.settings = dataclasses.replace(ledger.settings, noise_multiplier=float(sigma))
    if before is None:
        ledger.budget = fix_budget(ledger.settings, steps, ledger.before())
    else:
        ledger.resume_from(before, privacy.new_segment)
    epsilon = refuse_overspending(config, ledger)
    if sigma == 0:
        ledger.mark_not_private("privacy.noise_multiplier = 0")
        warnings.append("privacy.noise_multiplier = 0: the run is NOT private")
    if privacy.debug_seed is not None:
        ledger.mark_not_private("privacy.debug_seed was set: the noise can be redrawn")
        warnings.append("privacy.debug_seed is set: the run is NOT private")
    return Plan(ledger, steps, epsilon, tuple(warnings))


def _refuse_delta(config: JobConfig, records: int) -> list[str]:
    """Refuse a delta that allows publishing whole units; a warning where their number is private.

    Raises:
        ValueError: one line; only where the number of units is public.
    """
    delta, rate = config.privacy.delta, config.privacy.sample_rate
    assert delta is not None
    if rate is not None and delta >= (most := rate / config.training.global_batch_size):
        raise ValueError(
            f"privacy.delta = {delta:g}: at least privacy.sample_rate / training.global_batch_size "
            f"({most:.2g}), about 1 / number of {unit_word(config)}s, which allows publishing a "
            f"{unit_word(config)} outright; use a tenth of that or less"
        )
    if delta < 1 / records:
        return []
    problem = (
        f"privacy.delta = {delta:g}: at least 1 / number of training {unit_word(config)}s "
        f"({1 / records:.2g}), which allows publishing a {unit_word(config)} outright; use a "
        "tenth of that or less"
    )
    if config.privacy.sample_rate is None:
        raise ValueError(problem)
    return [f"not private: {problem}"]


def refuse_overspending(config: JobConfig, ledger: Ledger) -> float:
    """The epsilon that a run will have spent at its last step.

    Raises:
        ValueError: it is above the target, or above the budget that adaptive segments have.
    """
    privacy, steps = config.privacy, config.training.steps
    epsilon = ledger.epsilon(max(steps, ledger.steps))
    if privacy.target_epsilon is not None and epsilon > privacy.target_epsilon:
        raise ValueError(
            f"privacy.target_epsilon = {privacy.target_epsilon:g}: this run's noise was fixed at "
            f"its first start, and {steps} training.steps would spend "
            f"{accounting.rounded_up(epsilon)}; lower training.steps, raise the target, or "
            "start afresh in another job.dump_folder"
        )
    if not ledger.adaptive or ledger.budget is None:
        return epsilon
    # What was chosen may depend on lost and abandoned steps as well: the filter counts them.
    executed = ExecutedSteps(config.job.dump_folder)
    if unlogged := executed.unlogged(ledger.stretches()):
        raise ValueError(
            f"privacy.new_segment = 'adaptive': {unlogged} steps of these weights were taken in "
            f"another folder and came without its {EXECUTED_FILE}, so that the filter cannot count "
            "what was lost there; copy that whole job.dump_folder, or start afresh"
        )
    begun = executed.stretches(ledger.settings)
    spent = union([*ledger.stretches_before(), *ledger.stretches(), *begun])
    to_come = ledger.settings.spending(max(steps - ledger.steps, 0))
    epsilon = max(epsilon, ledger.compose([*spent, to_come]))
    if epsilon > ledger.budget.epsilon:
        raise ValueError(
            f"privacy.new_segment = 'adaptive': {steps} training.steps would spend "
            f"{accounting.rounded_up(epsilon)} by the filter, more than the "
            f"{ledger.budget.epsilon:.4g} fixed at the first start; lower training.steps, "
            "or raise privacy.noise_multiplier"
        )
    return epsilon


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
        if privacy.new_segment is None or terms.same_terms(before.settings, targets_too=True):
            return kept
        if privacy.new_segment == "adaptive":
            raise ValueError(
                "privacy.new_segment = 'adaptive' with privacy.target_epsilon: the filter's budget "
                "was fixed at the first start; set privacy.noise_multiplier instead"
            )
        steps -= before.steps
        spent = [*spent, *(segment.spending() for segment in before.segments())]
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
        ValueError: if steps were begun whose terms, or whose number, are no longer known.
    """
    refuse_baseline_folder(folder)
    begun = ExecutedSteps(folder).count
    said = read_published_fields(folder)
    if said is None:
        if begun == 0:
            return None
        raise ValueError(
            f"job.dump_folder = '{folder}': {begun} steps were begun here, but {PRIVACY_FILE}, "
            "which says on what terms, is gone; restore it, or use another folder"
        )
    if said["audit"] is not None:
        raise ValueError(
            f"job.dump_folder = '{folder}' holds an audited run, whose weights nothing makes "
            "private; give this one its own job.dump_folder"
        )
    told = said["steps_executed"]
    if begun < told:
        raise ValueError(
            f"job.dump_folder = '{folder}': {told} steps were begun here, of which {EXECUTED_FILE} "
            f"has only {begun}; restore it as the run wrote it, or use another folder"
        )
    return ledger_of(said) if begun > 0 else None


def _newest_weights(config: JobConfig) -> Ledger | None:
    """The ledger of the newest checkpoint; None where it is damaged, for a start to find out."""
    folder = checkpoint_folder(config)
    try:
        text = read_ledger(step_folder(folder, newest_whole_checkpoint(folder)))
        return None if text is None else Ledger.from_json(text)
    except (ValueError, KeyError, TypeError, CheckpointException):
        return None


def _refuse_to_leave_checkpoints(config: JobConfig) -> None:
    """`privacy.json` speaks for all checkpoints of its folder: weights must go on from them."""
    held = checkpoint_folders(config.job.dump_folder)
    if not held or resumes(config):
        return
    name = os.path.basename(held[0])
    key, value = "checkpoint.folder", f"'{config.checkpoint.folder}'"
    if not config.checkpoint.enable:
        key, value = "checkpoint.enable", "false"
    raise ValueError(
        f"{key} = {value}: this run has checkpoints in '{name}', from which it goes on; set it "
        "back, or start afresh in another job.dump_folder"
    )


def config_hash(config: JobConfig) -> str:
    """SHA-256, hex, of what is trained and how; not of where private records or outputs lie."""
    sections = dataclasses.asdict(config)
    sections["training"].pop("dataset_path")
    sections["job"].pop("dump_folder")
    sections["job"].pop("config_file")
    text = json.dumps(sections, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()
