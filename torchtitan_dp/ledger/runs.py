"""One run's spending, computed anew from its folder, and the sum over several runs.

Guarantee:
    `total` bounds what all runs together reveal of one unit of all their records: every step ever
    begun in their folders, and those of the weights that they started from, each once
    (`ledger.steps`), and lost ones as they are published. Steps compose whatever the records: a
    unit of some runs alone is revealed by no more. Runs on the same records hold out the same
    units, for which published held-out losses alone add up (`heldout_epsilon`); of runs on
    different records a unit may be trained on in one and held out in another, and pays all. Of an
    audited run it counts what publishing the audit's result spends; its weights are not private.
    Assumes that the runs' number, noise, rates and steps were not chosen by what private results
    showed.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from torchtitan_dp.ledger.caveats import caveats
from torchtitan_dp.ledger.files import FINGERPRINT_FILE
from torchtitan_dp.ledger.lineage import Ledger, most_evaluations, still_planned_by
from torchtitan_dp.ledger.settings import NamedStep, union
from torchtitan_dp.privacy import accounting
from torchtitan_dp.privacy.mechanism import Segment, composition


@dataclass
class Run:
    """One folder, its epsilons computed anew from its segments."""

    folder: str
    ledger: Ledger
    begun: list[NamedStep]  # every step ever begun in the folder
    fingerprint: str | None
    faults: list[str] = field(default_factory=list)  # contradictions
    notes: list[str] = field(default_factory=list)

    @property
    def epsilon(self) -> float | None:
        """The epsilon of the weights; None if they are not private."""
        return self.ledger.epsilon() if self.ledger.private else None

    @property
    def epsilon_executed(self) -> float | None:
        """The epsilon of all executed steps and of the initial weights, as published."""
        if not self.ledger.composes:
            return None
        return self.ledger.compose(self.ledger.executed())

    @property
    def epsilon_planned(self) -> float | None:
        """The same, with the steps that are still planned."""
        if not self.ledger.composes:
            return None
        return self.ledger.compose(self.ledger.planned())

    def caveats(self) -> list[str]:
        """Return the caveats under its epsilon."""
        spent, planned = (
            math.inf if epsilon is None else epsilon
            for epsilon in (self.epsilon, self.epsilon_planned)
        )
        return caveats(self.ledger, spent, planned)


@dataclass(frozen=True)
class Total:
    """The spending of several runs together."""

    epsilon: float | None  # None: not private
    epsilon_planned: float | None  # with what all runs still planned
    delta: float
    accountant: str
    steps_executed: int
    neighbouring_relation: str  # the weaker, where runs differ
    heldout_epsilon: float | None = None  # of a unit that is held out in all; None: none published


def total(runs: Sequence[Run], delta: float | None = None, *, overlapping: bool = False) -> Total:
    """Return the spending of all runs together.

    Args:
        delta: by default the smallest of the runs'.
        overlapping: the runs may be on different records; the sum is that of a unit in all.

    Raises:
        ValueError: one line, if they are not on the same records and `overlapping` is false, or
            not of the same unit.
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
    # By their published number, or it would show how many steps a crash lost.
    lost = [run.ledger.published_lost() for run in runs]
    taken = union(step for run in runs for step in run.ledger.taken())
    steps = sum(segment.steps for segment in (*taken, *lost))
    relation = max(run.ledger.settings.neighbouring_relation for run in runs)
    assert relation in ("add_remove", "zero_out")  # a unit that may be left out may be emptied
    if delta is None:
        delta = min(deltas)
    if not all(run.ledger.composes for run in runs):
        return Total(None, None, delta, "none", steps, relation)
    segments = [
        *union([s for run in runs for s in (*run.ledger.taken_before(), *run.ledger.taken())]),
        *lost,
        *_lost_before(runs),
    ]
    segments += _evaluations_before(runs)
    if overlapping:
        segments += _evaluations(runs)
    coming = [spending for run in runs for spending in run.ledger.still_planned()]
    names = {run.ledger.settings.accountant for run in runs}
    accountant: accounting.Accountant = names.pop() if len(names) == 1 else "rdp"
    if any(part.ratios is not None for part in composition([*segments, *coming])):
        accountant = "pld"  # no other is tight for estimated norms
    epsilons = [
        accounting.compose(parts, delta=delta, accountant=accountant)
        for parts in (segments, [*segments, *coming])
    ]
    heldout = None if overlapping else _heldout_epsilon(runs, delta)
    return Total(epsilons[0], max(epsilons), delta, accountant, steps, relation, heldout)


def _evaluations(runs: Sequence[Run]) -> list[Segment]:
    """Return bounds on the held-out losses of all runs; those of copies of one run add up."""
    found = (run.ledger.evaluations() for run in runs)
    return [segment for segment in found if segment is not None]


def _evaluations_before(runs: Sequence[Run]) -> list[Segment]:
    """Return the same of their ancestors, each once, without those that are among the runs."""
    among = {run.ledger.run for run in runs}
    ancestors = (ancestor for run in runs for ancestor in run.ledger.ancestors)
    return most_evaluations(a for a in ancestors if a.run not in among)


def _heldout_epsilon(runs: Sequence[Run], delta: float) -> float | None:
    """Return what all published held-out losses spend, with all that their ancestors did."""
    if not (evaluations := _evaluations(runs)):
        return None
    if len(runs) == 1:
        return runs[0].ledger.heldout_epsilon(delta)  # by Laplace's own composition, if it is less
    among = {run.ledger.run for run in runs}
    others = dict.fromkeys(a for run in runs for a in run.ledger.ancestors if a.run not in among)
    behind = [
        *still_planned_by(others),
        *union(step for run in runs for step in run.ledger.taken_before() if step.run not in among),
        *_lost_before(runs),
        *_evaluations_before(runs),
    ]
    return accounting.compose([*evaluations, *behind], delta=delta, accountant="pld")


def _lost_before(runs: Sequence[Run]) -> list[Segment]:
    """Return the lost steps of ancestors, without those that one of the runs counts itself."""
    counted = {run.ledger.run: run.ledger.published_lost() for run in runs}
    found = {
        (ancestor.run, ancestor.lost)
        for run in runs
        for ancestor in run.ledger.ancestors
        if ancestor.lost is not None
    }
    return [
        lost
        for name, lost in sorted(found, key=lambda item: (item[0], item[1].order, item[1].steps))
        if name not in counted
        or counted[name].mechanism != lost.mechanism
        or counted[name].steps < lost.steps
    ]


def _require_common(values: list[str | None], what: str, remedy: str, runs: Sequence[Run]) -> None:
    """Raise ValueError if a run's value is not that of the first."""
    for run, value in zip(runs, values, strict=True):
        if value is None and len(runs) > 1:
            raise ValueError(
                f"'{run.folder}' has no {FINGERPRINT_FILE}, so that it may be on other {what} "
                f"than the rest: restore it; {remedy}"
            )
        if value != values[0]:
            raise ValueError(
                f"'{run.folder}' and '{runs[0].folder}' are not on the same {what}: {remedy}"
            )
