"""A run's folder, as far as it can be read: settings, ledger, lock, checkpoints, scalars, status.

Nothing is written, and the run may be training meanwhile. A missing or damaged `privacy.json` is
refused; what else is missing becomes a note.
"""

import datetime
import fcntl
import json
import math
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torchtitan_dp.checkpoint.folder import newest_finished_checkpoint, step_folder
from torchtitan_dp.checkpoint.verify import verify
from torchtitan_dp.config import JobConfig
from torchtitan_dp.config.load import RUN_CONFIG_FILE, read_config
from torchtitan_dp.ledger import EXECUTED_FILE, PRIVACY_FILE, Lineage, schema
from torchtitan_dp.ledger.log import read_description
from torchtitan_dp.ledger.schema import ledger_of, read_published_fields
from torchtitan_dp.ledger.spending import assumptions
from torchtitan_dp.models.flavors import trained_count
from torchtitan_dp.models.hugging_face import shape
from torchtitan_dp.privacy.accounting import rounded_up
from torchtitan_dp.privacy.segments import NONE
from torchtitan_dp.process import FAULT_FILE, LOCK_FILE
from torchtitan_dp.report.charts import SECONDS, Scalars, read_scalars


@dataclass
class RunFolder:
    """The content of a run's folder, and what follows from it."""

    path: Path
    published: dict[str, Any]  # privacy.json
    ledger: Lineage
    alive: bool
    begun: int  # the last step that was begun
    checkpoint: int  # the newest whole one; -1: none
    checkpoint_time: float
    scalars: Scalars
    config: JobConfig | None = None  # checked, for one process
    settings: dict[str, Any] = field(default_factory=dict)  # as saved
    trained: int | None = None  # parameters
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
        """Whether the weights are private."""
        return self.ledger.private and bool(self.published["private"]) and self.with_privacy

    @property
    def total(self) -> int:
        """The steps that the run takes in all."""
        return self.ledger.planned_steps or (self.config.training.steps if self.config else 0)

    @property
    def finished(self) -> bool:
        return self.ledger.steps >= self.total > 0


def open_run(folder: str) -> RunFolder:
    """Read a run's folder.

    Raises:
        ValueError: one line; there is no run, or its `privacy.json` cannot be read.
    """
    path = Path(folder)
    if not path.is_dir():
        raise ValueError(f"RUN = '{folder}': no such folder; name a run's job.dump_folder")
    published = read_published_fields(folder)
    if published is None:
        raise ValueError(
            f"RUN = '{folder}': it has no {PRIVACY_FILE}: name the job.dump_folder of a run that "
            "has begun"
        )
    if schema.is_release(published):
        raise ValueError(f"RUN = '{folder}' is a release: name the job.dump_folder of its run")
    notes: list[str] = []
    config, settings = _settings(folder, notes)
    checkpoints = path / (config.checkpoint.folder if config else "checkpoint")
    newest = newest_finished_checkpoint(str(checkpoints))
    tensorboard = path / (config.metrics.save_tb_folder if config else "tb")
    scalars = read_scalars(tensorboard)
    if not scalars.by_name:
        notes.append(
            "no scalars were found: TensorBoard was off (metrics.enable_tensorboard), no step was "
            "logged yet, or its files are damaged"
        )
    saved = os.path.getmtime(step_folder(str(checkpoints), newest)) if newest >= 0 else 0
    run = RunFolder(
        path=path,
        published=published,
        ledger=ledger_of(published),
        alive=_is_locked(path / LOCK_FILE),
        begun=_last_begun(path / EXECUTED_FILE),
        checkpoint=newest,
        checkpoint_time=saved,
        scalars=scalars,
        config=config,
        settings=settings,
        caveats=list(published["caveats"]),
        assumptions=list(published["assumptions"]),
        notes=notes,
        records=read_description(folder),
    )
    if config is not None:
        try:
            run.trained = trained_count(shape(config))
        except (OSError, ValueError) as error:
            notes.append(f"the model's shape is not known: {error}")
    if (fault := path / FAULT_FILE).exists():
        run.ended_by = fault.read_text(encoding="utf-8").strip().removeprefix("error: ")
    _set_epsilons(run)
    return run


def _settings(folder: str, notes: list[str]) -> tuple[JobConfig | None, dict[str, Any]]:
    try:
        config = read_config(folder)
    except ValueError as error:
        notes.append(str(error))
        return None, {}
    with open(os.path.join(folder, RUN_CONFIG_FILE), encoding="utf-8") as file:
        return config, json.load(file)


def _set_epsilons(run: RunFolder) -> None:
    """Set epsilons, caveats and faults: of a run that is training as published at its last logged
    step; of one that ended as `verify` finds them, since steps after its checkpoint are lost."""
    if not run.with_privacy:
        return
    published = run.published
    names = ("epsilon", "epsilon_executed", "epsilon_planned")
    run.epsilon, run.epsilon_executed, run.epsilon_planned = (published[name] for name in names)
    verified = verify(str(run.path))
    run.faults = verified.faults
    if run.alive or run.faults:
        return
    run.ledger = verified.ledger
    for name in names[1:]:
        stated, found = published[name], getattr(verified, name)
        setattr(run, name, found if None in (stated, found) else max(stated, found))
    run.caveats = verified.caveats()
    run.assumptions = assumptions(run.ledger)


def _is_locked(path: Path) -> bool:
    """Return whether a process has the run's lock."""
    if not path.exists():
        return False
    with open(path, encoding="ascii") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:  # a file system without locks, on which no run starts: it holds a copy
            return False
    return False


def _last_begun(path: Path) -> int:
    """Return the last step in the log of begun steps; 0 if there is none."""
    if not path.exists():
        return 0
    for line in reversed(path.read_text(encoding="ascii", errors="replace").splitlines()):
        number = line.split(maxsplit=1)[0] if line.strip() else ""
        if number.isdecimal() and int(number) > 0:
            return int(number)
    return 0


@dataclass(frozen=True)
class Row:
    """A fact on the run, and whether it may be published."""

    name: str
    value: str
    public: bool


def status_rows(run: RunFolder) -> list[Row]:
    step = max(run.ledger.steps, run.begun) if run.alive else run.ledger.steps
    rows = [Row("state", _state(run), False), Row("step", f"{step:,} of {run.total:,}", True)]
    if not run.private:
        why = "; ".join(run.caveats) or "it trains without privacy"
        rows.append(Row("privacy", f"NOT private: {why}", True))
    rows += epsilon_rows(run)
    if run.alive and not run.finished:
        rows.append(Row("time left", _time_left(run, step), False))
    checkpoint = "none"
    if run.checkpoint >= 0:
        when = datetime.datetime.fromtimestamp(run.checkpoint_time, datetime.timezone.utc)
        checkpoint = f"step {run.checkpoint:,}, {when:%Y-%m-%d %H:%M} UTC"
    rows.append(Row("last checkpoint", checkpoint, False))
    for name, words in (("loss", "loss"), ("heldout_loss", "held-out loss")):
        if (last := run.scalars.of(name).last) is not None:
            rows.append(Row(words, f"{last.value:.4f} at step {last.step:,}", False))
    return rows


def epsilon_rows(run: RunFolder) -> list[Row]:
    """Return the rows of the status on epsilon, all of them public."""
    if run.epsilon is None:
        if run.epsilon_executed is None:
            return []
        return [Row("ε of the audit's result", rounded_up(run.epsilon_executed), True)]
    rows = [Row(f"ε of these weights, {run.ledger.steps:,} steps", rounded_up(run.epsilon), True)]
    if run.epsilon_executed is not None and run.epsilon_executed > run.epsilon * (1 + 1e-9):
        rows.append(Row("ε of all steps begun", rounded_up(run.epsilon_executed), True))
    if run.epsilon_planned is not None:
        target = run.ledger.settings.target_epsilon
        asked = "" if target is None else f" (target {target:g})"
        rows.append(Row("ε at the end", rounded_up(run.epsilon_planned) + asked, True))
    return rows


def as_text(title: str, rows: list[Row], faults: list[str]) -> str:
    """Write the status for a terminal."""
    width = max(len(row.name) for row in rows)
    labelled = [(row, "" if row.public else "  (not private)") for row in rows]
    lines = [title, *(f"  {row.name:{width}}  {row.value}{label}" for row, label in labelled)]
    return "\n".join([*lines, *(f"  FAULT: {fault}" for fault in faults)])


def _state(run: RunFolder) -> str:
    if run.alive:
        return "alive: a process has the folder's lock"
    if run.ended_by:
        return f"stopped: {run.ended_by}"
    if run.finished:
        return "finished"
    if run.checkpoint < 0:
        return "stopped, without a checkpoint; the same command starts it"
    return f"stopped; the same command goes on from step {run.checkpoint:,}"


def _time_left(run: RunFolder, step: int) -> str:
    """Estimate it from the median time of the last few steps."""
    seconds = sorted(p.value for p in run.scalars.of(SECONDS).kept[-9:] if math.isfinite(p.value))
    if not seconds:
        return "not known until two steps are logged"
    left = max(run.total - step, 0) * seconds[len(seconds) // 2]
    return f"about {datetime.timedelta(seconds=round(left))}"
