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

from torchtitan_dp.ledger.files import FINGERPRINT_FILE
from torchtitan_dp.ledger.lineage import Ancestor, Lineage
from torchtitan_dp.ledger.settings import union
from torchtitan_dp.ledger.spending import (
    caveats,
    compose,
    epsilon,
    evaluations,
    heldout_epsilon,
    lost_by,
    most_evaluations,
    spending,
    still_planned_by,
)
from torchtitan_dp.privacy import accounting
from torchtitan_dp.privacy.segments import Segment, composition, steps_in_a_row


@dataclass
class Run:
    """One folder, its epsilons computed anew from its ledger."""

    folder: str
    ledger: Lineage
    fingerprint: str | None
    faults: list[str] = field(default_factory=list)  # contradictions
    notes: list[str] = field(default_factory=list)

    @property
    def epsilon(self) -> float | None:
        """The epsilon of the weights; None if they are not private."""
        return epsilon(self.ledger) if self.ledger.private else None

    @property
    def epsilon_executed(self) -> float | None:
        """The epsilon of all executed steps and of the initial weights, as published."""
        return self._composed(planned=False)

    @property
    def epsilon_planned(self) -> float | None:
        """The same, with the steps that are still planned."""
        return self._composed(planned=True)

    def caveats(self) -> list[str]:
        """Return the caveats under its epsilon."""
        spent, planned = (
            math.inf if epsilon is None else epsilon
            for epsilon in (self.epsilon, self.epsilon_planned)
        )
        return caveats(self.ledger, spent, planned)

    def _composed(self, *, planned: bool) -> float | None:
        if not self.ledger.composes:
            return None
        return compose(self.ledger, spending(self.ledger, lost=True, planned=planned))


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
    ledgers = [run.ledger for run in runs]
    if delta is None:
        delta = min(one.settings.delta for one in ledgers)
    # By their published number, or it would show how many steps a crash lost.
    lost = [one.settings.segment(one.lost) for one in ledgers]
    taken = {(name, one.settings.mechanism) for one in ledgers for name in one.names()}
    steps = len(taken) + sum(segment.steps for segment in lost)
    relation = max(one.settings.neighbouring_relation for one in ledgers)
    assert relation in ("add_remove", "zero_out")  # max: the weaker; what may leave may be emptied
    if not all(one.composes for one in ledgers):
        return Total(None, None, delta, "none", steps, relation)
    ancestors = [ancestor for one in ledgers for ancestor in one.ancestors]
    behind = (step for ancestor in ancestors for step in ancestor.taken())
    segments = [
        *union([*behind, *(step for one in ledgers for step in one.taken())]),
        *lost,
        *_lost_before(ledgers),
        *most_evaluations(_others(ledgers)),
        *(_evaluations(ledgers) if overlapping else []),
    ]
    coming = [*still_planned_by(ancestors)]
    for one in ledgers:
        coming += steps_in_a_row(one.settings.mechanism, one.steps + 1, one.left, one.run)
    names = {one.settings.accountant for one in ledgers}
    accountant: accounting.Accountant = names.pop() if len(names) == 1 else "rdp"
    parts = composition([*segments, *coming])
    if any(part.ratios is not None or part.round_steps > 1 for part in parts):
        accountant = "pld"  # no other is tight for estimated norms, or for rounds
    epsilons = [
        accounting.compose(parts, delta=delta, accountant=accountant)
        for parts in (segments, [*segments, *coming])
    ]
    heldout = None if overlapping else _heldout_epsilon(ledgers, delta)
    return Total(epsilons[0], max(epsilons), delta, accountant, steps, relation, heldout)


def _evaluations(ledgers: Sequence[Lineage]) -> list[Segment]:
    """Return bounds on the held-out losses of all runs; those of copies of one run add up."""
    return [segment for one in ledgers if (segment := evaluations(one)) is not None]


def _others(ledgers: Sequence[Lineage]) -> list[Ancestor]:
    """Return the runs behind initial weights, each once, without those that are added up here."""
    among = {one.run for one in ledgers}
    return [*dict.fromkeys(a for one in ledgers for a in one.ancestors if a.run not in among)]


def _heldout_epsilon(ledgers: Sequence[Lineage], delta: float) -> float | None:
    """Return what all published held-out losses spend, with all that their ancestors did."""
    if not (published := _evaluations(ledgers)):
        return None
    if len(ledgers) == 1:
        return heldout_epsilon(ledgers[0], delta)  # by Laplace's own composition, if it is less
    others = _others(ledgers)
    behind = [
        *still_planned_by(others),
        *union(step for ancestor in others for step in ancestor.taken()),
        *_lost_before(ledgers),
        *most_evaluations(others),
    ]
    return accounting.compose([*published, *behind], delta=delta, accountant="pld")


def _lost_before(ledgers: Sequence[Lineage]) -> list[Segment]:
    """Return the lost steps behind initial weights, without those that a run counts itself."""
    counted = {one.run: one.lost for one in ledgers}
    ancestors = (ancestor for one in ledgers for ancestor in one.ancestors)
    return lost_by(a for a in ancestors if a.lost > counted.get(a.run, 0))


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
