"""A check that a run's `privacy.json`, log of steps and checkpoints agree.

Guarantee:
    `verify` reports a fault wherever `privacy.json`, `steps_executed.log` and the ledgers inside
    the checkpoints contradict each other, or an epsilon is below the spending of their steps. It
    cannot detect consistent edits of all of them.
"""

from collections.abc import Sequence

from torchtitan_dp.checkpoint.folder import (
    checkpoint_folders,
    finished_checkpoints,
    read_ledger,
    step_folder,
)
from torchtitan_dp.ledger import schema
from torchtitan_dp.ledger.account import heldout_epsilon
from torchtitan_dp.ledger.executed import EVALUATIONS_FILE, EXECUTED_FILE, ExecutedSteps
from torchtitan_dp.ledger.files import (
    PRIVACY_FILE,
    ledger_of,
    read_fingerprint,
    read_published_fields,
)
from torchtitan_dp.ledger.lineage import Ledger
from torchtitan_dp.ledger.runs import Run
from torchtitan_dp.ledger.settings import RunSegment
from torchtitan_dp.privacy.mechanism import NoMechanism

_TERMS = schema.names(schema.Origin.SETTINGS)
_SLACK = 1e-6  # relative: of the accountants' arithmetic on another machine


def verify(folder: str) -> Run:
    """Read a run's folder and compare its files with each other.

    Raises:
        ValueError: one line, if there is no run, or a file of it cannot be read.
    """
    published = read_published_fields(folder)  # before the log, which a live run lengthens
    if published is None:
        raise ValueError(f"'{folder}' has no {PRIVACY_FILE}: name the job.dump_folder of a run")
    if schema.is_release(published):
        raise ValueError(f"'{folder}' is a release: name the job.dump_folder of its run")
    if published["mechanism"] == NoMechanism.name:
        raise ValueError(f"'{folder}' is a run without privacy: no epsilon covers it")
    ledger, executed = ledger_of(published), ExecutedSteps(folder)
    begun = [*ledger.taken(), *executed.begun(ledger.settings)]
    run = Run(folder, ledger, begun, read_fingerprint(folder))
    for checkpoints in checkpoint_folders(folder):
        for step in finished_checkpoints(checkpoints):
            check_checkpoint(run, step, step_folder(checkpoints, step))
    terms = ledger.settings.fields()
    for name in (*_TERMS, *(ledger.settings.mechanism.fields().keys() - set(_TERMS))):
        term = terms[name]
        if published.get(name, term) != term:  # an older file lacks some: their defaults
            run.faults.append(f"{PRIVACY_FILE}: {name} is not that of its last segment")
    if missing := executed.missing(ledger.taken()):
        run.faults.append(f"{EXECUTED_FILE} lacks {missing} of the steps of {PRIVACY_FILE}")
    if missing := executed.missing((), ledger.evaluated()):
        run.faults.append(f"{EVALUATIONS_FILE} lacks {missing} of the losses of {PRIVACY_FILE}")
    lost_losses = _lost_evaluations(ledger)
    executed.enter_lost(ledger, also=run.begun)
    found, recorded = ledger.steps_executed, published["steps_executed"]
    if found < recorded:
        run.faults.append(
            f"{EXECUTED_FILE} leads to {found} steps, but {PRIVACY_FILE} has {recorded}"
        )
    elif found > recorded:
        run.notes.append(f"steps were begun after {PRIVACY_FILE} was last written")
    _check_epsilon(run, "epsilon", published["epsilon"], run.epsilon)
    if _lost_evaluations(ledger) < lost_losses:
        run.faults.append(f"{EVALUATIONS_FILE} lacks lost evaluations that {PRIVACY_FILE} counts")
    if found <= recorded and _lost_evaluations(ledger) == lost_losses:
        stated = published.get("heldout_epsilon")
        _check_epsilon(run, "heldout_epsilon", stated, heldout_epsilon(ledger))
    if found <= recorded:
        _check_epsilon(run, "epsilon_executed", published["epsilon_executed"], run.epsilon_executed)
        _check_epsilon(run, "epsilon_planned", published["epsilon_planned"], run.epsilon_planned)
    return run


def _lost_evaluations(ledger: Ledger) -> int:
    return 0 if ledger.heldout_losses is None else ledger.heldout_losses.lost


def _check_epsilon(run: Run, name: str, stated: float | None, found: float | None) -> None:
    """Add to `run.faults` an epsilon below the spending; a curve's next point may be above."""
    if (stated is None) != (found is None):
        run.faults.append(f"{PRIVACY_FILE}: {name} = {stated}, but the ledger gives {found}")
    elif stated is not None and found is not None and stated < found * (1 - _SLACK):
        run.faults.append(f"{PRIVACY_FILE}: {name} = {stated:.6g}, but its steps spend {found:.6g}")


def check_checkpoint(run: Run, step: int, folder: str) -> None:
    """Add to `run.faults` where a checkpoint's ledger contradicts `privacy.json`."""
    name, ledger = f"checkpoint step-{step}", run.ledger
    try:
        text = read_ledger(folder)
        if text is None:
            raise ValueError("there is none")
        kept = Ledger.from_json(text)
    except (ValueError, KeyError, TypeError) as error:
        run.faults.append(f"{name}: its ledger cannot be read ({error})")
        return
    run.begun.extend(kept.taken())  # the log may lack some
    if kept.run != ledger.run:
        run.faults.append(f"{name}: is of another run, {kept.run}")
    if kept.steps != step:
        run.faults.append(f"{name}: its ledger counts {kept.steps} steps")
    if ledger.private and not kept.private:
        run.faults.append(f"{name}: is not private, but {PRIVACY_FILE} is")
    if kept.planned_steps > ledger.planned_steps:
        run.faults.append(f"{name}: was planned for more steps than {PRIVACY_FILE} has")
    if kept.steps > ledger.steps:
        run.faults.append(f"{name}: is further than the {ledger.steps} steps of {PRIVACY_FILE}")
    elif kept.run == ledger.run and not _begins_as(ledger.segments(), kept.segments()):
        run.faults.append(
            f"{name}: its steps were taken on other terms than those in {PRIVACY_FILE}"
        )
    for what, lost in (
        ("a caveat", set(kept.caveats) - set(ledger.caveats)),
        ("an ancestor", {a.run for a in set(kept.ancestors) - set(ledger.ancestors)}),
    ):
        if lost:
            run.faults.append(f"{PRIVACY_FILE}: lacks {what} of {name}: {min(lost)}")


def _begins_as(whole: Sequence[RunSegment], part: Sequence[RunSegment]) -> bool:
    """Return whether the first steps of `whole` were taken on the terms of `part`."""
    whole, part = ([s for s in run if s.steps > 0] for run in (whole, part))
    if len(part) > len(whole):
        return False
    pairs = list(zip(part, whole, strict=False))
    return all(ours.settings.same_segment(theirs.settings) for ours, theirs in pairs) and (
        all(ours.steps == theirs.steps for ours, theirs in pairs[:-1])
        and all(ours.steps <= theirs.steps for ours, theirs in pairs[-1:])
    )
