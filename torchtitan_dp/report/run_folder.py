"""A run's folder, as far as it can be read: settings, ledger, lock, checkpoints, scalars, status.

Nothing is written, and the run may be training meanwhile. A missing or damaged `privacy.json` is
refused; what else is missing becomes a note.
"""

import datetime
import itertools
import math
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from torchtitan_dp.base.process import FAULT_FILE, is_locked
from torchtitan_dp.checkpoint.folder import newest_finished_checkpoint, step_folder, verify
from torchtitan_dp.config import JobConfig
from torchtitan_dp.config.load import read_config
from torchtitan_dp.ledger import Lineage, schema
from torchtitan_dp.ledger.log import read_description
from torchtitan_dp.ledger.schema import ledger_of
from torchtitan_dp.ledger.spending import assumptions
from torchtitan_dp.privacy.accounting import rounded_up
from torchtitan_dp.privacy.segments import NONE

_EVENTS = "events.out.tfevents."
_OTHER_NAMES = {"loss_metrics/global_avg_loss": "loss"}  # TorchTitan's, of the baseline
SECONDS = "a step's time, s"  # no scalar of the run's: from the times of its logged steps

Points = list[tuple[int, float]]
"""A scalar's values by step, in order."""


@dataclass
class RunFolder:
    """The content of a run's folder, and what follows from it."""

    path: Path
    published: dict[str, Any]  # privacy.json
    ledger: Lineage
    alive: bool
    checkpoint: str  # the newest whole one, in words
    scalars: dict[str, Points]
    config: JobConfig | None = None  # checked, for one process
    epsilon: float | None = None
    epsilon_executed: float | None = None
    epsilon_planned: float | None = None
    caveats: list[str] = field(default_factory=list)
    assumptions: list[str] = field(default_factory=list)
    ended_by: str = ""  # the line of the fault that ended its last start
    faults: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    records: list[str] = field(default_factory=list)  # lines about them

    @property
    def with_privacy(self) -> bool:
        """Whether it trains with DP-SGD at all, if only as a test that is not private."""
        return bool(self.published["mechanism"] != NONE)

    @property
    def private(self) -> bool:
        return self.ledger.private and bool(self.published["private"]) and self.with_privacy

    @property
    def total(self) -> int:
        return self.ledger.planned_steps or (self.config.training.steps if self.config else 0)


def open_run(folder: str) -> RunFolder:
    """Read a run's folder.

    Raises:
        ValueError: one line; there is no run, or its `privacy.json` cannot be read.
    """
    path, notes = Path(folder), list[str]()
    published = schema.read_run(folder)
    config = None
    try:
        config = read_config(folder)
    except ValueError as error:
        notes.append(str(error))
    scalars = read_scalars(path / (config.metrics.save_tb_folder if config else "tb"))
    if not scalars:
        notes.append(
            "no scalars were found: TensorBoard was off (metrics.enable_tensorboard), no step was "
            "logged yet, or its files are damaged"
        )
    checkpoints = str(path / (config.checkpoint.folder if config else "checkpoint"))
    newest, checkpoint = newest_finished_checkpoint(checkpoints), ""
    if newest >= 0:
        saved = os.path.getmtime(step_folder(checkpoints, newest))
        when = datetime.datetime.fromtimestamp(saved, datetime.timezone.utc)
        checkpoint = f"step {newest:,}, {when:%Y-%m-%d %H:%M} UTC"
    run = RunFolder(
        path=path,
        published=published,
        ledger=ledger_of(published),
        alive=is_locked(str(path)),
        checkpoint=checkpoint,
        scalars=scalars,
        config=config,
        caveats=list(published["caveats"]),
        assumptions=list(published["assumptions"]),
        notes=notes,
        records=read_description(folder),
    )
    if (fault := path / FAULT_FILE).exists():
        run.ended_by = fault.read_text(encoding="utf-8").strip().removeprefix("error: ")
    if run.with_privacy:
        _set_epsilons(run)
    return run


def _set_epsilons(run: RunFolder) -> None:
    """Set epsilons, caveats and faults: of a run that is training as published at its last logged
    step; of one that ended as `verify` finds them, since steps after its checkpoint are lost, and
    what was published is of the next point of a curve."""
    names = ("epsilon", "epsilon_executed", "epsilon_planned")
    verified = verify(str(run.path))
    run.faults = verified.faults
    is_over = not run.alive and not run.faults
    for name in names:
        setattr(run, name, getattr(verified, name) if is_over else run.published[name])
    if is_over:
        run.ledger = verified.ledger
        run.caveats = verified.caveats()
        run.assumptions = assumptions(run.ledger)


def read_scalars(folder: Path) -> dict[str, Points]:
    """Read the scalars of a run from all event files below a folder, by name without the section.

    Each start writes a file. Where starts overlap, since a crash lost steps, the later one's values
    count. The end of a file that a crash or damage left unreadable is left out.
    """
    found: dict[str, dict[int, float]] = {}
    files = [path for path in folder.rglob(f"{_EVENTS}*") if path.is_file()]
    for path in sorted(files, key=lambda one: one.name):  # by the second of their start
        # No reservoir sampling.
        events = EventAccumulator(str(path), {"scalars": 0}, purge_orphaned_data=False).Reload()
        start = {tag: events.Scalars(tag) for tag in events.Tags()["scalars"]}
        first = min((event.step for values in start.values() for event in values), default=0)
        for values in found.values():
            for step in [step for step in values if step >= first and start]:
                del values[step]
        for tag, logged in start.items():
            name = tag.removeprefix("not_private/").removeprefix("private_to_publish/")
            name, logged = _OTHER_NAMES.get(name, name), sorted(logged, key=lambda one: one.step)
            found.setdefault(name, {}).update((event.step, event.value) for event in logged)
            if name == "loss":
                found.setdefault(SECONDS, {}).update(
                    (now.step, (now.wall_time - then.wall_time) / (now.step - then.step))
                    for then, now in itertools.pairwise(logged)
                    if now.step > then.step
                )
    return {name: sorted(values.items()) for name, values in found.items()}


class Row(NamedTuple):
    """A fact on the run, and whether it may be published."""

    name: str
    value: str
    public: bool


def status_rows(run: RunFolder) -> list[Row]:
    asked = run.config.training.steps if run.config else run.total
    step, finished = run.ledger.steps, run.ledger.steps >= asked > 0
    if run.alive:
        step = max([step, *(at for at, _ in run.scalars.get("epsilon", []))])
        state = "alive: a process has the folder's lock"
    elif run.ended_by:
        state = f"stopped: {run.ended_by}"
    elif finished:
        fewer = f": {asked:,} steps, of {run.total:,} once planned" if asked < run.total else ""
        state = f"finished{fewer}"
    else:
        newest = run.checkpoint.rpartition(", ")[0]
        state = f"stopped; the same command goes on from {newest or 'the start: no checkpoint'}"
    rows = [Row("state", state, False), Row("step", f"{step:,} of {run.total:,}", True)]
    if not run.private:
        why = "; ".join(run.caveats) or "it trains without privacy"
        rows.append(Row("privacy", f"NOT private: {why}", True))
    rows += epsilon_rows(run)
    if run.alive and not finished:
        seconds = sorted(s for _, s in finite(run.scalars.get(SECONDS, [])[-9:]))
        left = max(run.total - step, 0) * seconds[len(seconds) // 2] if seconds else math.nan
        unknown = "not known until two steps are logged"
        shown = f"about {datetime.timedelta(seconds=round(left))}" if seconds else unknown
        rows.append(Row("time left", shown, False))
    rows.append(Row("last checkpoint", run.checkpoint or "none", False))
    for name, words in (("loss", "loss"), ("heldout_loss", "held-out loss")):
        for step, value in finite(run.scalars.get(name, []))[-1:]:
            rows.append(Row(words, f"{value:.4f} at step {step:,}", False))
    return rows


def finite(points: Points) -> Points:
    """Leave out values that are not finite."""
    return [point for point in points if math.isfinite(point[1])]


def epsilon_rows(run: RunFolder) -> list[Row]:
    """Return the rows of the status on epsilon, all of them public."""
    if run.epsilon is None:
        if run.epsilon_executed is None:
            return []
        return [Row("ε of the audit's result", rounded_up(run.epsilon_executed), True)]
    rows = []
    if run.epsilon_planned is not None:
        target = run.ledger.settings.target_epsilon
        asked = "" if target is None else f" (target {target:g})"
        name = "ε of this trial alone" if run.ledger.is_trial else "ε to state, at the end"
        rows.append(Row(name, rounded_up(run.epsilon_planned) + asked, True))
    rows.append(Row(f"…of {run.ledger.steps:,} steps", rounded_up(run.epsilon), True))
    if run.epsilon_executed is not None and run.epsilon_executed > run.epsilon * (1 + 1e-9):
        rows.append(Row("…of all steps begun", rounded_up(run.epsilon_executed), True))
    return rows
