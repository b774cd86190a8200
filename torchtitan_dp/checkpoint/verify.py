"""A check that a run's `privacy.json`, its logs and its checkpoints agree.

Guarantee:
    `verify` reports a fault wherever `privacy.json`, the logs and the ledgers inside the
    checkpoints contradict each other, or an epsilon is below the spending of their steps. It
    cannot detect consistent edits of all of them.
"""

from torchtitan_dp.checkpoint.folder import (
    checkpoint_folders,
    finished_checkpoints,
    read_ledger,
    step_folder,
)
from torchtitan_dp.ledger.lineage import Lineage
from torchtitan_dp.ledger.log import EXECUTED_FILE, STARTS_FILE, RunLog, read_fingerprint
from torchtitan_dp.ledger.schema import (
    PRIVACY_FILE,
    is_release,
    ledger_of,
    read_published_fields,
)
from torchtitan_dp.ledger.spending import Run, heldout_epsilon
from torchtitan_dp.privacy.segments import NONE

_SLACK = 1e-6  # relative: of the accountants' arithmetic on another machine


def verify(folder: str) -> Run:
    """Read a run's folder and compare its files with each other.

    Raises:
        ValueError: one line, if there is no run, or a file of it cannot be read.
    """
    published = read_published_fields(folder)  # before the log, which a live run lengthens
    if published is None:
        raise ValueError(f"'{folder}' has no {PRIVACY_FILE}: name the job.dump_folder of a run")
    if is_release(published):
        raise ValueError(f"'{folder}' is a release: name the job.dump_folder of its run")
    if published["mechanism"] == NONE:
        raise ValueError(f"'{folder}' is a run without privacy: no epsilon covers it")
    held = [(step, at) for at in checkpoint_folders(folder) for step in finished_checkpoints(at)]
    stated, log = ledger_of(published), RunLog(folder)
    ledger = log.enter_lost(stated)
    run = Run(folder, ledger, read_fingerprint(folder))
    for step, at in held:
        check_checkpoint(run, log, step, step_folder(at, step))
    if lacking := log.lacks(stated):
        run.faults.append(lacking)
    elif ledger.steps_executed > stated.steps_executed or log.losses > _losses(stated):
        run.notes.append(f"steps or a held-out loss were begun after {PRIVACY_FILE} was written")
    if problem := log.undercounted(ledger):
        run.faults.append(problem)
    _check_epsilon(run, "epsilon", published["epsilon"], run.epsilon)
    if not run.notes:
        _check_epsilon(run, "epsilon_executed", published["epsilon_executed"], run.epsilon_executed)
        _check_epsilon(run, "epsilon_planned", published["epsilon_planned"], run.epsilon_planned)
        of_losses = heldout_epsilon(ledger) if ledger.private else None
        _check_epsilon(run, "heldout_epsilon", published["heldout_epsilon"], of_losses)
    return run


def _losses(lineage: Lineage) -> int:
    return 0 if lineage.heldout_loss is None else lineage.heldout_loss.begun


def _check_epsilon(run: Run, name: str, stated: float | None, found: float | None) -> None:
    """Add to `run.faults` an epsilon below the spending; a curve's next point may be above."""
    if (stated is None) != (found is None):
        run.faults.append(f"{PRIVACY_FILE}: {name} = {stated}, but the ledger gives {found}")
    elif stated is not None and found is not None and stated < found * (1 - _SLACK):
        run.faults.append(f"{PRIVACY_FILE}: {name} = {stated:.6g}, but its steps spend {found:.6g}")


def check_checkpoint(run: Run, log: RunLog, step: int, folder: str) -> None:
    """Add to `run.faults` where a checkpoint's ledger contradicts `privacy.json` or the logs."""
    name, ledger = f"checkpoint step-{step}", run.ledger
    try:
        kept = read_ledger(folder)
    except ValueError as error:
        run.faults.append(f"{name}: {error}")
        return
    if not log.knows(kept.start):
        run.faults.append(f"{name}: was saved by a start that {STARTS_FILE} lacks")
    if kept.run != ledger.run:
        run.faults.append(f"{name}: is of another run, {kept.run}")
    if kept.steps != step:
        run.faults.append(f"{name}: its ledger counts {kept.steps} steps")
    if kept.steps > log.count:
        run.faults.append(f"{name}: {EXECUTED_FILE} has {log.count} steps")
    if ledger.private and not kept.private:
        run.faults.append(f"{name}: is not private, but {PRIVACY_FILE} is")
    if kept.planned_steps > ledger.planned_steps:
        run.faults.append(f"{name}: was planned for more steps than {PRIVACY_FILE} has")
    if kept.steps > ledger.steps:
        run.faults.append(f"{name}: is further than the {ledger.steps} steps of {PRIVACY_FILE}")
    elif kept.run == ledger.run and (change := kept.settings.changed(ledger.settings)):
        run.faults.append(f"{name}: its terms are not those of {PRIVACY_FILE}: {change}")
    for what, lost in (
        ("a caveat", set(kept.caveats) - set(ledger.caveats)),
        ("an ancestor", {a.run for a in set(kept.ancestors) - set(ledger.ancestors)}),
    ):
        if lost:
            run.faults.append(f"{PRIVACY_FILE}: lacks {what} of {name}: {min(lost)}")
