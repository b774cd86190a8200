"""What runs spend, alone and together, and the assumptions that their epsilon rests on.

Guarantee:
    - `epsilon(lineage, lost=False)` bounds what the weights reveal: their own steps, and
      all that the runs behind their initial weights ever began or planned, on any records.
    - `total` bounds what all runs together reveal of one unit of all their records. Runs add up:
      steps that two folders list, since one is a copy of the other, count twice, never too little;
      of a run behind initial weights each export counts once, by its own random name.
    - Runs on the same records hold out the same units, for which published losses alone add up
      (`heldout_epsilon`). Of runs on different records a unit pays all. Of an audited run the cost
      of publishing its result counts. The runs' number, noise, rates and steps are assumed not to
      follow from what private results showed.
"""

import functools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from torchtitan_dp.ledger.lineage import Ancestor, Lineage, Settings
from torchtitan_dp.ledger.log import FINGERPRINT_FILE
from torchtitan_dp.privacy import accounting, published_loss
from torchtitan_dp.privacy.accounting import rounded_up
from torchtitan_dp.privacy.clipping import fp32_sum_excess
from torchtitan_dp.privacy.meaning import Meaning, meaning
from torchtitan_dp.privacy.segments import Segment, composition


def spent(lineage: Lineage, planned: int = 0, *, lost: bool = True) -> list[Segment]:
    """Return the steps ever begun for these weights, and so many planned ones, for an accountant;
    `lost` includes those beside their own."""
    counts = lineage.steps + planned, lineage.lost if lost else 0
    return [*inherited(lineage.ancestors), *map(lineage.settings.segment, counts)]


def inherited(ancestors: Iterable[Ancestor]) -> tuple[Segment, ...]:
    """Return all that these runs ever began or planned, each export once."""
    return tuple(one for run in dict.fromkeys(ancestors) for one in run.spent())


def epsilon(lineage: Lineage, planned: int = 0, *, lost: bool = True) -> float:
    """Return the epsilon of the steps that `spent` returns."""
    return lineage.settings.compose(spent(lineage, planned, lost=lost))


def explain(lineage: Lineage, segments: list[Segment], epsilon: float) -> Meaning | None:
    """Return the meaning of an epsilon for one person; None where there is no privacy."""
    if not lineage.composes or not math.isfinite(epsilon):
        return None
    return meaning(segments, lineage.settings.delta)


def heldout_epsilon(lineage: Lineage) -> float | None:
    """Return the epsilon, for one held-out unit, of the losses that were or will be published, and
    of all that the runs behind the initial weights spent; None where there are none."""
    loss, losses = lineage.heldout_loss, lineage.published_losses
    if loss is None or losses is None:
        return None
    return published_loss.epsilon(losses, delta=loss.delta, before=inherited(lineage.ancestors))


_ASSUMPTIONS = (
    "the owner of the records ran the training: the guarantee is towards all who get the weights",
    "machine failures do not depend on the content of records: a run that does not fit its memory, "
    "or whose kernels are missing, ends before it draws a record",
    "only the owner sees losses, gradient norms, batch sizes, timing and other logs of the run, "
    "which are computed from records without noise",
    "all draws and all noise, from counter-based generators with secret 128-bit keys of the "
    "operating system, are indistinguishable from random",
    "the program is correct: it is tested, not proven",
    "the model, the terms of each step and the numbers of steps and runs were not chosen by "
    "earlier results on the same records; several runs compose (torchtitan-dp ledger)",
)


def assumptions(lineage: Lineage) -> list[str]:
    """Return the assumptions of every run; none where there is no epsilon."""
    return list(_ASSUMPTIONS) if lineage.composes else []


PUBLIC = "the initial weights are assumed to be public"
_EARLY = "not all planned steps were taken: "
_LOST = "steps were lost: "
_ROUNDED = "the clipped sum is rounded: "
_LESS = ": train on more ranks, or lower training.global_batch_size"
_SMALL = 0.01  # of C: such a rounding nobody needs to act on
_ESTIMATED = (
    "norms were estimated from random projections: the estimates' errors, which epsilon counts, "
    "are taken to be those of real numbers"
)
BY_RDP = (
    "RDP counts in the place of privacy.accountant = 'pld', whose numbers float64 cannot hold here "
    "or are larger: epsilon holds, but may be above the least one"
)


def reasons(caveats: Iterable[str]) -> str:
    """Return the caveats by which a run is not private, without an assumption that harms none."""
    return "; ".join(one for one in dict.fromkeys(caveats) if not one.endswith(PUBLIC))


def to_act_on(caveats: Sequence[str]) -> list[str]:
    """Leave out a small rounding, which `privacy.json` alone states."""
    return [one for one in caveats if not one.startswith(_ROUNDED) or one.endswith(_LESS)]


def caveats(lineage: Lineage, epsilon: float, epsilon_planned: float) -> list[str]:
    """Return the caveats to read beside these epsilons of the run (infinite: not private)."""
    found = list(lineage.caveats)
    if not lineage.composes:
        return found
    stopped = [f"{lineage.steps} of {lineage.planned_steps}"] if lineage.left else []
    others = [one for one in lineage.ancestors if one.left]
    stopped += [f"{one.steps} of {one.planned_steps} by run {one.run}" for one in others]
    if stopped:
        found.append(
            f"{_EARLY}{', '.join(stopped)}. If the stop was decided beforehand, epsilon = "
            f"{rounded_up(epsilon)}; if by the weights alone, epsilon_planned = "
            f"{rounded_up(epsilon_planned)}. If a loss, a norm or another log decided it, or a "
            "clock (a time limit, a preemption, patience), no epsilon holds, since the steps that "
            "fit into a time depend on the lengths of records: resume until all steps are taken"
        )
    if lost := lineage.lost + sum(ancestor.lost for ancestor in lineage.ancestors):
        found.append(
            f"{_LOST}{lost} are counted: each crash as the most steps that it can lose, since the "
            "true number may depend on records; that no record caused a crash is assumed"
        )
    taken = [ancestor.settings for ancestor in lineage.ancestors if ancestor.steps]
    if lineage.steps or not taken:
        taken.append(lineage.settings)
    worst = max(taken, key=_rounds_by)
    excess = _rounds_by(worst)
    two = next((digits for digits in range(2, 12) if excess >= 10.0 ** (1 - digits)), 12) + 1
    moved = f"{rounded_up(1 + excess, digits=two)} C instead of C"  # two digits of the excess
    if worst.mechanism.largest_share > 1:
        moved = f"{rounded_up(excess, digits=2)} C more than epsilon counts"
    found.append(
        f"{_ROUNDED}each rank adds up to {worst.summands} {worst.unit}s per step in fp32; "
        f"the worst gradients could move it by {moved}{_LESS if excess > _SMALL else ''}"
    )
    if any(settings.mechanism.projections for settings in taken):
        found.append(_ESTIMATED)
    if counted_by(lineage) != lineage.settings.accountant:
        found.append(BY_RDP)
    return found


def counted_by(lineage: Lineage) -> accounting.Accountant:
    """Return the accountant that counts all executed and planned steps of this run."""
    terms, steps = lineage.settings, spent(lineage, lineage.left)
    return accounting.counted_by(steps, delta=terms.delta, accountant=terms.accountant)


def recorded(found: Iterable[str]) -> list[str]:
    """Return the caveats that weights trained on from these inherit: those not computed anew."""
    computed_anew = (_EARLY, _LOST, _ROUNDED, _ESTIMATED, BY_RDP)
    return [caveat for caveat in found if not caveat.startswith(computed_anew)]


def _rounds_by(settings: Settings) -> float:
    """Return by how much of C a unit may move the rounded sum beside what it adds."""
    excess = fp32_sum_excess(settings.summands, settings.ranks_added_up)
    return settings.mechanism.largest_share * excess


UNVERIFIED = "no checkpoint is there to compare privacy.json with: restore one, or do not trust it"


@dataclass
class Run:
    """One folder, its epsilons computed anew from its ledger."""

    folder: str
    ledger: Lineage
    fingerprint: str | None
    faults: list[str] = field(default_factory=list)  # contradictions
    notes: list[str] = field(default_factory=list)

    @property
    def verified(self) -> bool:
        return not self.faults and UNVERIFIED not in self.notes

    @property
    def epsilon(self) -> float | None:
        """The epsilon of the weights; None if they are not private."""
        return epsilon(self.ledger, lost=False) if self.ledger.private else None

    @property
    def epsilon_executed(self) -> float | None:
        """The epsilon of all executed steps and of the initial weights, as published."""
        return epsilon(self.ledger) if self.ledger.composes else None

    @property
    def epsilon_planned(self) -> float | None:
        """The same, with the steps that are still planned."""
        return epsilon(self.ledger, self.ledger.left) if self.ledger.composes else None

    def caveats(self) -> list[str]:
        """Return the caveats under its epsilon."""
        values = self.epsilon, self.epsilon_planned
        return caveats(self.ledger, *(math.inf if value is None else value for value in values))


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
    """Add up the budget that runs on the same records spend together.

    Args:
        delta: of the sum; by default the smallest of the runs' own.
        overlapping: the runs may be on different records; the sum then holds for a unit that is in
            all of them.

    Raises:
        ValueError: the runs protect different units, or are on different records without
            `overlapping`.
    """
    if not overlapping:
        remedy = "--overlapping adds up the epsilon of a unit that may be in both"
        what = "files, in another format, or hold out others (data.heldout_fraction)"
        _require_one([run.fingerprint for run in runs], what, remedy, runs)
    units = [run.ledger.settings.privacy_unit for run in runs]
    _require_one(units, "privacy units", "add up only runs that are", runs)
    ledgers = [run.ledger for run in runs]
    if delta is None:
        delta = min(one.settings.delta for one in ledgers)
    steps = sum(one.steps_executed for one in ledgers)
    relation = max(one.settings.neighbouring_relation for one in ledgers)
    assert relation in ("add_remove", "zero_out")  # max: the weaker; what may leave may be emptied
    if not all(one.composes for one in ledgers):
        return Total(None, None, delta, "none", steps, relation)
    before = inherited(ancestor for one in ledgers for ancestor in one.ancestors)
    losses = [published for one in ledgers if (published := one.published_losses) is not None]
    begun, planned = (
        [
            *before,
            *(losses if overlapping else ()),
            *(one.settings.segment(one.steps + plans * one.left) for one in ledgers),
            *(one.settings.segment(one.lost) for one in ledgers),
        ]
        for plans in (0, 1)
    )
    names = {one.settings.accountant for one in ledgers}
    accountant: accounting.Accountant = names.pop() if len(names) == 1 else "rdp"
    if any(part.ratios is not None or part.round_steps > 1 for part in composition(planned)):
        accountant = "pld"  # no other is tight for estimated norms, or for rounds
    spends = functools.partial(accounting.compose, delta=delta)
    taken = spends(begun, accountant=accountant)
    most = max(taken, spends(planned, accountant=accountant))
    heldout = spends([*before, *losses], accountant="pld") if losses and not overlapping else None
    return Total(taken, most, delta, accountant, steps, relation, heldout)


def counted_twice(runs: Sequence[Run]) -> list[str]:
    """Describe steps that `total` counts more than once: of copies of a run, and of a run beside
    one that began with its weights."""
    folders, lines = dict[str, str](), list[str]()
    for run in runs:
        if other := folders.get(run.ledger.run):
            lines.append(f"steps counted twice: '{run.folder}' and '{other}' are copies")
        folders[run.ledger.run] = run.folder
    for run in runs:
        for ancestor in run.ledger.ancestors:
            if (name := ancestor.run.partition("/")[0]) in folders:
                lines.append(
                    f"steps counted twice: '{run.folder}', which began with weights of "
                    f"'{folders[name]}', counts that run's steps too: leave '{folders[name]}' out, "
                    "unless it was trained on afterwards"
                )
    return lines


def _require_one(values: Sequence[str | None], what: str, remedy: str, runs: Sequence[Run]) -> None:
    for run, value in zip(runs, values, strict=True):
        if value is None and len(runs) > 1:
            raise ValueError(
                f"'{run.folder}' has no {FINGERPRINT_FILE}, so that it may be on other {what}: "
                f"restore it; {remedy}"
            )
        if value != values[0]:
            raise ValueError(f"'{run.folder}' and '{runs[0].folder}' are on other {what}: {remedy}")
