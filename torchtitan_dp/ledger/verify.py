"""Whether what a run's folder says of privacy holds together, and what several runs spend in all.

Guarantee:
    `total` bounds what all runs together reveal of one unit of their common records: every step
    ever begun in their folders, and those of the weights that they started from. Assumes that the
    runs' number, noise, rates and steps were not chosen by what private results showed.
"""

import dataclasses
import os
from collections.abc import Sequence
from dataclasses import dataclass, field

from torchtitan_dp.checkpoint import finished_checkpoints, read_ledger, step_folder
from torchtitan_dp.ledger.files import (
    EXECUTED_FILE,
    PRIVACY_FILE,
    ExecutedSteps,
    read_fingerprint,
    read_published,
    read_published_fields,
)
from torchtitan_dp.ledger.lineage import Ledger, Segment, Settings
from torchtitan_dp.privacy import accounting
from torchtitan_dp.privacy.segments import Segment as Mechanism

_TERMS = tuple(f.name for f in dataclasses.fields(Settings) if f.name != "target_epsilon")
_SLACK = 1e-6  # relative: of the accountants' arithmetic on another machine


@dataclass
class Run:
    """What one folder says, computed anew from its segments."""

    folder: str
    ledger: Ledger
    begun: list[Mechanism]  # every step ever begun in the folder
    fingerprint: str | None
    faults: list[str] = field(default_factory=list)  # contradictions
    notes: list[str] = field(default_factory=list)

    @property
    def steps_executed(self) -> int:
        return sum(segment.steps for segment in self.begun)

    @property
    def epsilon(self) -> float | None:
        """Of the weights; None if they are not private."""
        return self.ledger.epsilon() if self.ledger.private else None

    @property
    def epsilon_executed(self) -> float | None:
        """Of all that ever ran here, and of what its initial weights had spent."""
        if not self.ledger.private:
            return None
        return self.ledger.compose([*self.ledger.before(), *self.begun])


@dataclass(frozen=True)
class Total:
    """Of several runs on the same records."""

    epsilon: float | None  # None: not private
    delta: float
    accountant: str
    steps_executed: int


def verify(folder: str) -> Run:
    """Read a run's folder and hold its files against each other.

    Raises:
        ValueError: one line, if there is no run, or a file of it cannot be read.
    """
    ledger = read_published(folder)
    if ledger is None:
        raise ValueError(f"'{folder}' holds no {PRIVACY_FILE}: name the job.dump_folder of a run")
    executed = ExecutedSteps(folder)
    run = Run(folder, ledger, executed.segments(ledger.settings), read_fingerprint(folder))
    said = read_published_fields(folder)
    for name in _TERMS:
        if said.get(name) != getattr(ledger.settings, name):
            run.faults.append(f"{PRIVACY_FILE}: {name} is not that of its last segment")
    if executed.count < said["steps_executed"]:
        run.faults.append(
            f"{EXECUTED_FILE} counts {executed.count} steps, but {PRIVACY_FILE} "
            f"{said['steps_executed']}"
        )
    elif executed.count > said["steps_executed"]:
        more = executed.count - said["steps_executed"]
        run.notes.append(f"{more} steps were begun after {PRIVACY_FILE} was last written")
    _check_epsilon(run, "epsilon", said["epsilon"], run.epsilon)
    if executed.count <= said["steps_executed"]:
        _check_epsilon(run, "epsilon_executed", said["epsilon_executed"], run.epsilon_executed)
    for checkpoints in sorted(entry.path for entry in os.scandir(folder) if entry.is_dir()):
        for step in finished_checkpoints(checkpoints):
            _check_checkpoint(run, step, step_folder(checkpoints, step))
    return run


def _check_epsilon(run: Run, name: str, said: float | None, found: float | None) -> None:
    """More may be said than was spent (the next point of a curve), never less."""
    if (said is None) != (found is None):
        run.faults.append(f"{PRIVACY_FILE}: {name} = {said}, but the ledger gives {found}")
    elif said is not None and found is not None and said < found * (1 - _SLACK):
        run.faults.append(f"{PRIVACY_FILE}: {name} = {said:.6g}, but its steps spend {found:.6g}")


def _check_checkpoint(run: Run, step: int, folder: str) -> None:
    name, ledger = f"checkpoint step-{step}", run.ledger
    try:
        text = read_ledger(folder)
        if text is None:
            raise ValueError("it holds none")
        kept = Ledger.from_json(text)
    except (ValueError, KeyError, TypeError) as error:
        run.faults.append(f"{name}: its ledger cannot be read ({error})")
        return
    if kept.run != ledger.run:
        run.faults.append(f"{name}: is of another run, {kept.run}")
    if kept.steps != step:
        run.faults.append(f"{name}: its ledger counts {kept.steps} steps")
    if ledger.private and not kept.private:
        run.faults.append(f"{name}: is not private, but {PRIVACY_FILE} says so")
    if kept.steps > ledger.steps:
        run.faults.append(f"{name}: is further than the {ledger.steps} steps of {PRIVACY_FILE}")
    elif kept.run == ledger.run and _up_to(kept, kept.steps) != _up_to(ledger, kept.steps):
        run.faults.append(f"{name}: its steps were taken on other terms than {PRIVACY_FILE} says")
    missing = set(kept.caveats) - set(ledger.caveats)
    if missing:
        run.faults.append(f"{PRIVACY_FILE}: lacks a caveat of {name}: {sorted(missing)[0]}")


def _up_to(ledger: Ledger, steps: int) -> list[Segment]:
    """Its segments as far as the first so many steps."""
    found = []
    for segment in ledger.segments():
        taken = min(segment.steps, steps)
        if taken > 0:
            found.append(dataclasses.replace(segment, steps=taken))
        steps -= taken
    return found


def total(runs: Sequence[Run], delta: float | None = None) -> Total:
    """What all runs spend together.

    Args:
        delta: by default the smallest of the runs'.

    Raises:
        ValueError: one line, if they are not on the same records, or not of the same unit.
    """
    _require_common([run.fingerprint for run in runs], "records", runs)
    _require_common([run.ledger.settings.privacy_unit for run in runs], "privacy unit", runs)
    deltas = [run.ledger.settings.delta for run in runs]
    steps = sum(run.steps_executed for run in runs)
    if delta is None:
        delta = min(deltas)
    if not all(run.ledger.private for run in runs):
        return Total(None, delta, "none", steps)
    if any(run.ledger.adaptive for run in runs) and len(runs) > 1:
        # Filters at different orders do not add up; their guarantees do.
        spent = [run.epsilon_executed or 0.0 for run in runs]
        return Total(sum(spent), sum(deltas), "sum of the runs' epsilon and delta", steps)
    segments = [*_ancestors(runs), *(segment for run in runs for segment in run.begun)]
    if len(runs) == 1 and runs[0].ledger.adaptive:
        return Total(runs[0].ledger.compose(segments), delta, "rdp filter", steps)
    names = {run.ledger.settings.accountant for run in runs}
    accountant: accounting.Accountant = names.pop() if len(names) == 1 else "rdp"
    epsilon = accounting.compose(segments, delta=delta, accountant=accountant)
    return Total(epsilon, delta, accountant, steps)


def _ancestors(runs: Sequence[Run]) -> list[Mechanism]:
    """What initial weights had spent: each ancestor once, unless it is one of the runs itself."""
    given = {run.ledger.run for run in runs}
    longest: dict[str, tuple[Segment, ...]] = {}
    for run in runs:
        for ancestor in run.ledger.ancestors:
            known = longest.get(ancestor.run, ())
            if ancestor.run not in given and _steps(ancestor.segments) > _steps(known):
                longest[ancestor.run] = ancestor.segments
    return [segment.mechanism() for segments in longest.values() for segment in segments]


def _steps(segments: Sequence[Segment]) -> int:
    return sum(segment.steps for segment in segments)


def _require_common(values: list[str | None], what: str, runs: Sequence[Run]) -> None:
    for run, value in zip(runs, values, strict=True):
        if value != values[0]:
            raise ValueError(
                f"'{run.folder}' and '{runs[0].folder}' are not on the same {what}: add up only "
                "runs that are"
            )
