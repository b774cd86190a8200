"""Whether what a run's folder says of privacy holds together, and what several runs spend in all.

Guarantee:
    `total` bounds what all runs together reveal of one unit of all their records: every step ever
    begun in their folders, and those of the weights that they started from, each once
    (`ledger.starts`). Steps compose whatever the records: a unit of some runs alone is revealed by
    no more. Of an audited run it counts what publishing the audit's result spends; its weights are
    not private. Assumes that the runs' number, noise, rates and steps were not chosen by what
    private results showed.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from torchtitan_dp.checkpoint.folder import (
    checkpoint_folders,
    finished_checkpoints,
    read_ledger,
    step_folder,
)
from torchtitan_dp.ledger import schema
from torchtitan_dp.ledger.caveats import caveats
from torchtitan_dp.ledger.files import (
    EXECUTED_FILE,
    PRIVACY_FILE,
    ExecutedSteps,
    ledger_of,
    read_fingerprint,
    read_published_fields,
)
from torchtitan_dp.ledger.lineage import Ledger, Segment
from torchtitan_dp.ledger.starts import Stretch, union
from torchtitan_dp.privacy import accounting
from torchtitan_dp.privacy.segments import Segment as Mechanism
from torchtitan_dp.privacy.segments import merged

_TERMS = schema.names(schema.Origin.SETTINGS)
_SLACK = 1e-6  # relative: of the accountants' arithmetic on another machine


@dataclass
class Run:
    """What one folder says, computed anew from its segments."""

    folder: str
    ledger: Ledger
    begun: list[Stretch]  # every step ever begun in the folder
    fingerprint: str | None
    faults: list[str] = field(default_factory=list)  # contradictions
    notes: list[str] = field(default_factory=list)

    @property
    def steps_executed(self) -> int:
        return sum(segment.steps for segment in union(self.begun))

    @property
    def epsilon(self) -> float | None:
        """Of the weights; None if they are not private."""
        if self.ledger.adaptive:
            return self.epsilon_executed
        return self.ledger.epsilon() if self.ledger.private else None

    @property
    def epsilon_executed(self) -> float | None:
        """Of all that ever ran here, and of what its initial weights had spent."""
        if not self.ledger.composes:
            return None
        return self.ledger.compose(self.executed())

    @property
    def epsilon_planned(self) -> float | None:
        """The same, and of the steps that are still planned."""
        if not self.ledger.composes:
            return None
        return self.ledger.compose(self.planned())

    def executed(self) -> list[Mechanism]:
        """The steps that `epsilon_executed` is of."""
        return union(self.stretches())

    def planned(self) -> list[Mechanism]:
        """The steps that `epsilon_planned` is of."""
        return list(merged([*self.executed(), *self.ledger.still_planned()]))

    def caveats(self) -> list[str]:
        """What its epsilon rests on."""
        spent, planned = self.epsilon, self.epsilon_planned
        infinite = math.inf
        return caveats(
            self.ledger,
            infinite if spent is None else spent,
            infinite if planned is None else planned,
        )

    def stretches(self) -> list[Stretch]:
        """All that was begun, and what initial weights had spent."""
        return [*self.ledger.stretches_before(), *self.begun]


@dataclass(frozen=True)
class Total:
    """Of several runs, on the same records or on any."""

    epsilon: float | None  # None: not private
    epsilon_planned: float | None  # with what all runs still planned
    delta: float
    accountant: str
    steps_executed: int
    neighbouring_relation: str  # the weaker, where runs differ


def verify(folder: str) -> Run:
    """Read a run's folder and hold its files against each other.

    Raises:
        ValueError: one line, if there is no run, or a file of it cannot be read.
    """
    said = read_published_fields(folder)  # before the log, which a live run lengthens
    if said is None:
        raise ValueError(f"'{folder}' holds no {PRIVACY_FILE}: name the job.dump_folder of a run")
    if schema.is_release(said):
        raise ValueError(f"'{folder}' is a release: name the job.dump_folder of the run it is of")
    if said["mechanism"] == "none":
        raise ValueError(f"'{folder}' holds a run without privacy, which no epsilon covers")
    ledger, executed = ledger_of(said), ExecutedSteps(folder)
    begun = [*ledger.stretches(), *executed.stretches(ledger.settings)]
    run = Run(folder, ledger, begun, read_fingerprint(folder))
    for checkpoints in checkpoint_folders(folder):
        for step in finished_checkpoints(checkpoints):
            check_checkpoint(run, step, step_folder(checkpoints, step))
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
        _check_epsilon(run, "epsilon_planned", said["epsilon_planned"], run.epsilon_planned)
    return run


def _check_epsilon(run: Run, name: str, said: float | None, found: float | None) -> None:
    """More may be said than was spent (the next point of a curve), never less."""
    if (said is None) != (found is None):
        run.faults.append(f"{PRIVACY_FILE}: {name} = {said}, but the ledger gives {found}")
    elif said is not None and found is not None and said < found * (1 - _SLACK):
        run.faults.append(f"{PRIVACY_FILE}: {name} = {said:.6g}, but its steps spend {found:.6g}")


def check_checkpoint(run: Run, step: int, folder: str) -> None:
    """Enter into `run.faults` where a checkpoint's ledger contradicts `privacy.json`."""
    name, ledger = f"checkpoint step-{step}", run.ledger
    try:
        text = read_ledger(folder)
        if text is None:
            raise ValueError("it holds none")
        kept = Ledger.from_json(text)
    except (ValueError, KeyError, TypeError) as error:
        run.faults.append(f"{name}: its ledger cannot be read ({error})")
        return
    run.begun.extend(kept.stretches())  # of which the log may know nothing
    if kept.run != ledger.run:
        run.faults.append(f"{name}: is of another run, {kept.run}")
    if kept.steps != step:
        run.faults.append(f"{name}: its ledger counts {kept.steps} steps")
    if ledger.private and not kept.private:
        run.faults.append(f"{name}: is not private, but {PRIVACY_FILE} says so")
    if kept.planned_steps > ledger.planned_steps:
        run.faults.append(f"{name}: was planned for more steps than {PRIVACY_FILE} says")
    if kept.steps > ledger.steps:
        run.faults.append(f"{name}: is further than the {ledger.steps} steps of {PRIVACY_FILE}")
    elif kept.run == ledger.run and not _begins_as(ledger.segments(), kept.segments()):
        run.faults.append(f"{name}: its steps were taken on other terms than {PRIVACY_FILE} says")
    for what, lost in (
        ("a caveat", set(kept.caveats) - set(ledger.caveats)),
        ("an ancestor", {a.run for a in set(kept.ancestors) - set(ledger.ancestors)}),
        ("adaptive segments", {"adaptive"} if kept.adaptive and not ledger.adaptive else set()),
        ("the budget", {str(kept.budget)} if kept.budget != ledger.budget else set()),
    ):
        if lost:
            run.faults.append(f"{PRIVACY_FILE}: lacks {what} of {name}: {min(lost)}")


def _begins_as(whole: Sequence[Segment], part: Sequence[Segment]) -> bool:
    """Whether the first steps of `whole` were taken on the terms of `part`."""
    whole, part = ([s for s in told if s.steps > 0] for told in (whole, part))
    if len(part) > len(whole):
        return False
    pairs = list(zip(part, whole, strict=False))
    return all(ours.settings.same_terms(theirs.settings) for ours, theirs in pairs) and (
        all(ours.steps == theirs.steps for ours, theirs in pairs[:-1])
        and all(ours.steps <= theirs.steps for ours, theirs in pairs[-1:])
    )


def total(runs: Sequence[Run], delta: float | None = None, *, overlapping: bool = False) -> Total:
    """What all runs spend together.

    Args:
        delta: by default the smallest of the runs'.
        overlapping: the runs may be on different records; the sum is that of a unit in all.

    Raises:
        ValueError: one line, if they are not on the same records and `overlapping` is not said, or
            not of the same unit; or if `delta` was asked for of adaptive runs, whose budget holds
            at their own.
    """
    if not overlapping:
        _require_common(
            [run.fingerprint for run in runs],
            "records",
            "a unit that is in both pays both: say --overlapping to add them up all the same",
            runs,
        )
    _require_common(
        [run.ledger.settings.privacy_unit for run in runs],
        "privacy unit",
        "add up only runs that are",
        runs,
    )
    deltas = [run.ledger.settings.delta for run in runs]
    steps = sum(segment.steps for segment in union(s for run in runs for s in run.begun))
    relation = max(run.ledger.settings.neighbouring_relation for run in runs)
    assert relation in ("add_remove", "zero_out")  # whoever may be left out may be emptied
    adaptive = any(run.ledger.adaptive for run in runs)
    if adaptive and delta is not None:
        raise ValueError(
            f"--delta = {delta:g}: settings were chosen after results were seen, and the budget "
            "fixed before holds at the run's own delta; leave it out"
        )
    if delta is None:
        delta = min(deltas)
    if not all(run.ledger.composes for run in runs):
        return Total(None, None, delta, "none", steps, relation)
    if adaptive and len(runs) > 1:
        # Filters at different orders do not add up; their guarantees do.
        spent = sum(run.epsilon_executed or 0.0 for run in runs)
        planned = sum(run.epsilon_planned or 0.0 for run in runs)
        how = "sum of the runs' epsilon and delta"
        return Total(spent, planned, sum(deltas), how, steps, relation)
    segments = union(stretch for run in runs for stretch in run.stretches())
    coming = [spending for run in runs for spending in run.ledger.still_planned()]
    if adaptive:
        told = [runs[0].ledger.compose(parts) for parts in (segments, [*segments, *coming])]
        return Total(told[0], told[1], delta, "rdp filter", steps, relation)
    names = {run.ledger.settings.accountant for run in runs}
    accountant: accounting.Accountant = names.pop() if len(names) == 1 else "rdp"
    told = [
        accounting.compose(parts, delta=delta, accountant=accountant)
        for parts in (segments, [*segments, *coming])
    ]
    return Total(told[0], max(told), delta, accountant, steps, relation)


def _require_common(values: list[str | None], what: str, remedy: str, runs: Sequence[Run]) -> None:
    for run, value in zip(runs, values, strict=True):
        if value != values[0]:
            raise ValueError(
                f"'{run.folder}' and '{runs[0].folder}' are not on the same {what}: {remedy}"
            )
