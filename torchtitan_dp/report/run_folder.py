"""A run's folder, as far as it can be read: settings, ledger, lock, checkpoints, scalars, status.

Nothing is written, and the run may be training meanwhile. A missing or damaged `privacy.json` is
refused; what else is missing becomes a note. Each start writes its scalars into a TensorBoard file
of its own. Where starts overlap, since a crash lost steps, the later start's values stay; the
earlier ones are kept as lost.
"""

import datetime
import fcntl
import itertools
import json
import math
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from torchtitan_dp.checkpoint.folder import newest_whole_checkpoint, step_folder
from torchtitan_dp.checkpoint.verify import verify
from torchtitan_dp.config import JobConfig
from torchtitan_dp.config.load import RUN_CONFIG_FILE, read_config
from torchtitan_dp.ledger import EXECUTED_FILE, PRIVACY_FILE, Ledger, schema
from torchtitan_dp.ledger.caveats import assumptions
from torchtitan_dp.ledger.files import ledger_of, read_description, read_published_fields
from torchtitan_dp.models.families import trained_count
from torchtitan_dp.models.hugging_face import shape
from torchtitan_dp.privacy.accounting import rounded_up
from torchtitan_dp.privacy.mechanism import NoMechanism
from torchtitan_dp.process import FAULT_FILE, LOCK_FILE

_SECTIONS = ("not_private/", "private_to_publish/")
_OTHER_NAMES = {"loss_metrics/global_avg_loss": "loss"}  # TorchTitan's, of the baseline
_ALL = {"scalars": 0}  # no reservoir sampling
SECONDS = "a step's time, s"  # no scalar of the run's: from the times of its logged steps
_EVENTS = "events.out.tfevents."


@dataclass(frozen=True)
class Point:
    """One value of a scalar, and the time at which it was logged."""

    step: int
    value: float
    time: float


@dataclass
class Scalar:
    """One scalar over all starts."""

    kept: list[Point] = field(default_factory=list)
    lost: list[list[Point]] = field(default_factory=list)  # by start

    @property
    def last(self) -> Point | None:
        """The last value that is a number."""
        return next((p for p in reversed(self.kept) if math.isfinite(p.value)), None)


@dataclass
class Scalars:
    """All scalars of a run, by name without its section."""

    by_name: dict[str, Scalar] = field(default_factory=dict)
    starts: list[int] = field(default_factory=list)  # the first logged step of each start

    def of(self, name: str) -> Scalar:
        """Return a scalar; without points if it was never logged."""
        return self.by_name.get(name, Scalar())


@dataclass
class RunFolder:
    """What was read of a run."""

    path: Path
    published: dict[str, Any]  # privacy.json
    ledger: Ledger
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
        return bool(self.published["mechanism"] != NoMechanism.name)

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
        """Whether all planned steps were taken."""
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
    newest = newest_whole_checkpoint(str(checkpoints))
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
    _account(run)
    return run


def _settings(folder: str, notes: list[str]) -> tuple[JobConfig | None, dict[str, Any]]:
    try:
        config = read_config(folder)
    except ValueError as error:
        notes.append(str(error))
        return None, {}
    with open(os.path.join(folder, RUN_CONFIG_FILE), encoding="utf-8") as file:
        return config, json.load(file)


def _account(run: RunFolder) -> None:
    """Fill in what the run spent. A run that is training has published it at its last logged step;
    of one that ended, the steps after its last checkpoint are lost, and the ledger is verified."""
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


def read_scalars(folder: Path) -> Scalars:
    """Read all event files below a folder, those of rank 0 where every rank wrote some.

    The end of a file that a crash or damage left unreadable is left out.
    """
    files = sorted(
        (path for path in folder.rglob(f"{_EVENTS}*") if path.is_file() and _of_rank_0(path)),
        key=_order,
    )
    found = Scalars()
    for start in filter(None, map(_read_file, files)):
        first = min(points[0].step for points in start.values())
        for scalar in found.by_name.values():
            _take_back(scalar, first)
        start[SECONDS] = _seconds(start)
        for name, points in start.items():
            found.by_name.setdefault(name, Scalar()).kept += points
        found.starts.append(first)
    return found


def _order(path: Path) -> tuple[str, str, str]:
    """Sort event files by time: the second and, last in the name, their number in a process."""
    first, *_, last = path.name.removeprefix(_EVENTS).split(".")
    return first.zfill(20), last.zfill(20), path.name


def _of_rank_0(path: Path) -> bool:
    ranks = [part for part in path.parts if part.startswith("rank_")]
    return ranks in ([], ["rank_0"])


def _read_file(path: Path) -> dict[str, list[Point]]:
    """Return the scalars of one start, each sorted by step."""
    events = EventAccumulator(str(path), size_guidance=_ALL, purge_orphaned_data=False)
    events.Reload()
    found: dict[str, list[Point]] = {}
    for tag in events.Tags()["scalars"]:
        name = tag
        for section in _SECTIONS:
            name = name.removeprefix(section)
        points = (Point(e.step, e.value, e.wall_time) for e in events.Scalars(tag))
        found[_OTHER_NAMES.get(name, name)] = sorted(points, key=lambda point: point.step)
    return found


def _take_back(scalar: Scalar, first: int) -> None:
    """Move the points from a step on to the lost ones."""
    lost = [point for point in scalar.kept if point.step >= first]
    if lost:
        scalar.kept = scalar.kept[: -len(lost)]
        scalar.lost.append(lost)


def _seconds(start: dict[str, list[Point]]) -> list[Point]:
    """Return the mean time of a step between each two logged steps of a start."""
    logged = start.get("loss", [])
    return [
        Point(now.step, (now.time - then.time) / (now.step - then.step), now.time)
        for then, now in itertools.pairwise(logged)
        if now.step > then.step
    ]


@dataclass(frozen=True)
class Row:
    """A fact on the run, and whether it may be published."""

    name: str
    value: str
    public: bool


def status_rows(run: RunFolder) -> list[Row]:
    """Return the status."""
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
