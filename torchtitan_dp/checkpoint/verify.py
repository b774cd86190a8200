"""A check that a run's `privacy.json`, log of steps and checkpoints agree.

Guarantee:
    `verify` reports a fault wherever `privacy.json`, `steps_executed.log` and the ledgers inside
    the checkpoints contradict each other, or an epsilon is below the spending of their steps. It
    cannot detect consistent edits of all of them.
"""

from torchtitan_dp.checkpoint.folder import (
    checkpoint_folders,
    finished_checkpoints,
    read_ledger,
    step_folder,
)
from torchtitan_dp.ledger import schema
from torchtitan_dp.ledger.account import published_heldout_epsilon
from torchtitan_dp.ledger.files import (
    PRIVACY_FILE,
    ledger_of,
    read_fingerprint,
    read_published_fields,
)
from torchtitan_dp.ledger.lineage import Lineage
from torchtitan_dp.ledger.log import EVALUATIONS_FILE, EXECUTED_FILE, RunLog
from torchtitan_dp.ledger.runs import Run
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
    if schema.is_release(published):
        raise ValueError(f"'{folder}' is a release: name the job.dump_folder of its run")
    if published["mechanism"] == NONE:
        raise ValueError(f"'{folder}' is a run without privacy: no epsilon covers it")
    held = [(step, at) for at in checkpoint_folders(folder) for step in finished_checkpoints(at)]
    stated, log = ledger_of(published), RunLog(folder)
    ledger = log.enter_lost(stated)
    run = Run(folder, ledger, read_fingerprint(folder))
    for step, at in held:
        check_checkpoint(run, log, step, step_folder(at, step))
    steps, losses = log.missing(ledger)
    if steps:
        run.faults.append(f"{EXECUTED_FILE} lacks {steps} of the steps of {PRIVACY_FILE}")
    if losses:
        run.faults.append(f"{EVALUATIONS_FILE} lacks {losses} of the losses of {PRIVACY_FILE}")
    if problem := log.undercounted(ledger):
        run.faults.append(problem)
    for name, found, recorded in (
        ("steps", ledger.steps_executed, stated.steps_executed),
        ("held-out losses", _evaluations(ledger), _evaluations(stated)),
    ):
        if found < recorded:
            run.faults.append(f"the logs lead to {found} {name}, but {PRIVACY_FILE} has {recorded}")
        elif found > recorded:
            run.notes.append(f"{name} were begun after {PRIVACY_FILE} was last written")
    _check_epsilon(run, "epsilon", published["epsilon"], run.epsilon)
    if not run.notes:
        _check_epsilon(run, "epsilon_executed", published["epsilon_executed"], run.epsilon_executed)
        _check_epsilon(run, "epsilon_planned", published["epsilon_planned"], run.epsilon_planned)
        found_losses = published_heldout_epsilon(ledger)
        _check_epsilon(run, "heldout_epsilon", published["heldout_epsilon"], found_losses)
    return run


def _evaluations(lineage: Lineage) -> int:
    losses = lineage.heldout_losses
    return 0 if losses is None else losses.lost + len(losses.losses)


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
        text = read_ledger(folder)
        if text is None:
            raise ValueError("there is none")
        kept = Lineage.from_json(text)
    except (ValueError, KeyError, TypeError) as error:
        run.faults.append(f"{name}: its ledger cannot be read ({error})")
        return
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
    elif kept.run == ledger.run and (change := kept.settings.changed(ledger.settings)):
        run.faults.append(f"{name}: its terms are not those of {PRIVACY_FILE}: {change}")
    if missing := log.missing(kept).steps:
        run.faults.append(f"{name}: {missing} of its steps are not in {EXECUTED_FILE}")
    for what, lost in (
        ("a caveat", set(kept.caveats) - set(ledger.caveats)),
        ("an ancestor", {a.run for a in set(kept.ancestors) - set(ledger.ancestors)}),
    ):
        if lost:
            run.faults.append(f"{PRIVACY_FILE}: lacks {what} of {name}: {min(lost)}")
