"""What a lineage spends, and the assumptions that its epsilon rests on.

Guarantee:
    `epsilon` bounds what the weights at `steps` reveal: the composition of all steps of their own
    lineage, and of the lineage of the weights they started from, on any records. `caveats` lists
    every caveat that the lineage has recorded, and those that follow from its numbers: steps that
    were planned and not taken, steps that were lost, and a clipped sum that was rounded. `recorded`
    leaves out the latter, which weights that resume from these compute anew.
"""

from collections.abc import Iterable

from torchtitan_dp.ledger.lineage import Ancestor, Lineage
from torchtitan_dp.ledger.settings import Settings, union
from torchtitan_dp.privacy import accounting
from torchtitan_dp.privacy.accounting import rounded_up
from torchtitan_dp.privacy.clipping import fp32_sum_excess
from torchtitan_dp.privacy.segments import Mechanism, Segment, steps_in_a_row


def own_steps(lineage: Lineage, steps: int | None = None) -> list[Segment]:
    """Return this run's first steps, by default those that were taken."""
    count = lineage.steps if steps is None else steps
    return steps_in_a_row(lineage.settings.mechanism, 1, count, lineage.run)


def initial_steps(lineage: Lineage) -> list[Segment]:
    """Return all steps that may have made the initial weights, each once."""
    taken = union(step for ancestor in lineage.ancestors for step in ancestor.taken())
    return [*taken, *lost_by(a for a in lineage.ancestors if a.any_begun)]


def spending(lineage: Lineage, *, lost: bool, planned: bool) -> list[Segment]:
    """Return the steps behind these weights, and the held-out losses behind the initial ones.

    Args:
        lost: with all other steps ever begun, as published, also behind the initial weights.
        planned: with the steps that this run, and those behind the initial weights, planned but did
            not take.
    """
    if lost:
        found = [*own_steps(lineage), *all_but_own(lineage)]
    else:
        found = [*own_steps(lineage), *initial_steps(lineage), *most_evaluations(lineage.ancestors)]
    if planned:
        terms = lineage.settings.mechanism
        found += steps_in_a_row(terms, lineage.steps + 1, lineage.left, lineage.run)
        found += still_planned_by(lineage.ancestors)
    return found


def all_but_own(lineage: Lineage) -> list[Segment]:
    """Return all that was ever begun, as published, beside this run's lineage: its lost steps, and
    all steps and held-out losses behind the initial weights."""
    lost = [lineage.settings.segment(lineage.lost)] if lineage.lost else []
    return [*lost, *_behind(lineage)]


def _behind(lineage: Lineage) -> list[Segment]:
    """Return all steps and held-out losses, as published, of runs behind the initial weights."""
    ancestors = lineage.ancestors
    others = lost_by(a for a in ancestors if not a.any_begun)
    return [*initial_steps(lineage), *others, *most_evaluations(ancestors)]


def lost_by(ancestors: Iterable[Ancestor]) -> list[Segment]:
    """Return the lost steps of runs, as published, of each the most that is known."""
    most: dict[tuple[str, Mechanism], int] = {}
    for ancestor in ancestors:
        which = ancestor.run, ancestor.settings.mechanism
        most[which] = max(ancestor.lost, most.get(which, 0))
    return [Segment(mechanism, steps) for (_, mechanism), steps in most.items() if steps]


def still_planned_by(ancestors: Iterable[Ancestor]) -> list[Segment]:
    """Return the steps that runs planned but did not take."""
    return [
        segment
        for one in ancestors
        for segment in steps_in_a_row(one.settings.mechanism, one.steps + 1, one.left, one.run)
    ]


def most_evaluations(ancestors: Iterable[Ancestor]) -> list[Segment]:
    """Return bounds on the held-out losses of runs, of each the largest that is known: an older
    checkpoint lacks what a crash lost since."""
    most: dict[str, Segment] = {}
    for ancestor in ancestors:
        if (found := ancestor.evaluations) is not None:
            known = most.get(ancestor.run, found)
            most[ancestor.run] = max(found, known, key=lambda segment: segment.steps)
    return list(most.values())


def compose(lineage: Lineage, segments: list[Segment]) -> float:
    """Return the epsilon of these segments one after the other, as this run accounts."""
    terms = lineage.settings
    return accounting.compose(segments, delta=terms.delta, accountant=terms.accountant)


def epsilon(lineage: Lineage, steps: int | None = None) -> float:
    """Return the epsilon of weights after so many steps of this run, by default those taken."""
    return compose(lineage, [*initial_steps(lineage), *own_steps(lineage, steps)])


def evaluations(lineage: Lineage) -> Segment | None:
    """Return a bound on this run's held-out losses that were or will be published, if any."""
    losses = lineage.heldout_losses
    if losses is None:
        return None
    return losses.noise.segment(losses.evaluations(lineage.steps, lineage.planned_steps))


def heldout_epsilon(lineage: Lineage, delta: float | None = None) -> float:
    """Return the epsilon of all held-out losses that were or will be published, and of all that the
    runs behind the initial weights spent; by default at the losses' own delta."""
    losses = lineage.heldout_losses
    assert losses is not None
    return losses.noise.epsilon(
        losses.evaluations(lineage.steps, lineage.planned_steps),
        delta=losses.delta if delta is None else delta,
        before=[*_behind(lineage), *still_planned_by(lineage.ancestors)],
    )


_ASSUMPTIONS = (
    "the owner of the records ran the training: the guarantee is towards everybody who gets the "
    "weights",
    "machine failures do not depend on the content of records: a run that does not fit its memory, "
    "or whose kernels are missing, ends before it draws a record",
    "only the owner sees losses, gradient norms, batch sizes, timing and other logs of the run, "
    "which are computed from records without noise",
    "all draws and all noise, from counter-based generators with secret 128-bit keys of the "
    "operating system, are indistinguishable from random",
    "the program is correct: it is tested, not proven",
    "the model, the terms of each step and the numbers of steps and runs were not chosen by "
    "earlier results on the same records; several runs compose (python -m torchtitan_dp.ledger)",
)


def assumptions(lineage: Lineage) -> list[str]:
    """Return the assumptions of every run; none where there is no epsilon."""
    return list(_ASSUMPTIONS) if lineage.composes else []


_EARLY = "not all planned steps were taken: "
_LOST = "steps were lost: "
_ROUNDED = "the clipped sum is rounded: "
_ESTIMATED = (
    "norms were estimated from random projections: the estimates' errors, which epsilon "
    "counts, are taken to be those of real numbers"
)
BY_RDP = (
    "RDP counts in the place of privacy.accountant = 'pld', whose numbers float64 cannot hold here "
    "or are larger: epsilon holds, but may be above the least one"
)


def caveats(lineage: Lineage, epsilon: float, epsilon_planned: float) -> list[str]:
    """Return the caveats to read beside these epsilons of the run (infinite: not private)."""
    found = list(lineage.caveats)
    stopped = [f"{lineage.steps} of {lineage.planned_steps}"] if lineage.left else []
    for ancestor in lineage.ancestors:
        if ancestor.left:
            done = ancestor.planned_steps - ancestor.left
            stopped.append(f"{done} of {ancestor.planned_steps} by run {ancestor.run}")
    if lineage.composes and stopped:
        noised, other = "", ""
        if lineage.heldout_losses is not None:
            noised, other = " or held-out losses with noise", "other "
        found.append(
            f"{_EARLY}{', '.join(stopped)}; epsilon = {rounded_up(epsilon)}, of the steps taken, "
            "applies if neither results nor a clock decided when to stop; epsilon_planned = "
            f"{rounded_up(epsilon_planned)} applies if weights{noised} alone did; no epsilon "
            f"applies if {other}losses, norms or other logs did, or a clock (a time limit, a "
            "preemption, an owner's patience): the number of steps that fit into a time depends on "
            "the lengths of records"
        )
    lost = lineage.lost + sum(segment.steps for segment in lost_by(lineage.ancestors))
    if lineage.composes and lost:
        found.append(
            f"{_LOST}{lost} steps are counted for them, for each crash as many as it could lose, "
            "because the number that it did lose depends on the lengths of records; the number of "
            "crashes is assumed not to"
        )
    taken = [ancestor.settings for ancestor in lineage.ancestors if ancestor.steps]
    if lineage.steps or not taken:
        taken.append(lineage.settings)
    if lineage.composes:
        worst = max(taken, key=_rounds_by)
        excess = _rounds_by(worst)
        found.append(
            f"{_ROUNDED}each rank adds up to {worst.summands} {worst.unit}s per step in fp32; "
            "adversarial gradients could move the sum by "
            + (
                f"{rounded_up(excess, digits=2)} C more than epsilon counts"
                if worst.mechanism.largest_share > 1
                else f"{rounded_up(1 + excess, digits=_digits(excess))} C instead of C"
            )
        )
        if any(settings.mechanism.projections for settings in taken):
            found.append(_ESTIMATED)
        if counted_by(lineage) != lineage.settings.accountant:
            found.append(BY_RDP)
    return found


def counted_by(lineage: Lineage) -> accounting.Accountant:
    """Return the accountant that counts all executed and planned steps of this run."""
    steps, terms = spending(lineage, lost=True, planned=True), lineage.settings
    return accounting.counted_by(steps, delta=terms.delta, accountant=terms.accountant)


def recorded(found: Iterable[str]) -> list[str]:
    """Return the caveats that weights trained on from these inherit: those not computed anew."""
    computed_anew = (
        _EARLY,
        _LOST,
        _ROUNDED,
        BY_RDP,
        _ESTIMATED,
    )
    return [caveat for caveat in found if not caveat.startswith(computed_anew)]


def _rounds_by(settings: Settings) -> float:
    """Return by how much of C a unit may move the rounded sum beside what it adds."""
    excess = fp32_sum_excess(settings.summands, settings.ranks_added_up)
    return settings.mechanism.largest_share * excess


def _digits(excess: float) -> int:
    """Return how many digits of 1 + excess show two of the excess."""
    digits = 2
    while digits < 12 and excess < 10.0 ** (1 - digits):
        digits += 1
    return digits + 1
