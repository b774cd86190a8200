"""The assumptions that epsilon rests on: those of every run, and those of this one.

Guarantee:
    `caveats` lists every caveat that the ledger has recorded, and those that follow from its
    numbers: steps that were planned and not taken, steps that were lost, and a clipped sum that was
    rounded. `recorded` leaves out the latter, which weights that resume from these compute anew.
"""

from collections.abc import Iterable

from torchtitan_dp.ledger.lineage import Ledger
from torchtitan_dp.ledger.settings import Settings
from torchtitan_dp.privacy.accounting import rounded_up
from torchtitan_dp.privacy.clipping import fp32_sum_excess
from torchtitan_dp.privacy.mechanism import MECHANISMS

_OF_EVERY_RUN = (
    "the owner of the records ran the training: the guarantee is towards everybody who gets the "
    "weights",
    "machine failures do not depend on the content of records: a run that does not fit its memory, "
    "or whose kernels are missing, ends before it draws a record",
    "only the owner sees losses, gradient norms, batch sizes, timing and other logs of the run, "
    "which are computed from records without noise",
    "all draws and all noise, from counter-based generators with secret 128-bit keys of the "
    "operating system, are indistinguishable from random",
    "the program is correct: it is tested, not proven",
)
_FIXED = (
    "the model, the terms of each step and the numbers of steps and runs were not chosen by "
    "earlier results on the same records; several runs compose (python -m torchtitan_dp.ledger)"
)


def assumptions(ledger: Ledger) -> list[str]:
    """Return the assumptions of every run; none where there is no epsilon."""
    if not ledger.composes:
        return []
    return [*_OF_EVERY_RUN, _FIXED]


STEPS_ELSEWHERE = (
    "steps of these weights were taken in another folder, whose log was not copied with them: "
    "steps and held-out losses lost there are not counted (add that folder with python -m "
    "torchtitan_dp.ledger)"
)
_EARLY = "not all planned steps were taken: "
_LOST = "steps were lost: "
_ROUNDED = "the clipped sum is rounded: "


def caveats(ledger: Ledger, epsilon: float, epsilon_planned: float) -> list[str]:
    """Return the caveats to read beside these epsilons of the run (infinite: not private)."""
    found = list(ledger.caveats)
    stopped = [f"{ledger.steps} of {ledger.planned_steps}"] if ledger.left else []
    for ancestor in ledger.ancestors:
        if ancestor.left:
            done = ancestor.planned_steps - ancestor.left
            stopped.append(f"{done} of {ancestor.planned_steps} by run {ancestor.run}")
    if ledger.composes and stopped:
        noised, other = "", ""
        if ledger.heldout_losses is not None:
            noised, other = " or held-out losses with noise", "other "
        found.append(
            f"{_EARLY}{', '.join(stopped)}; epsilon = {rounded_up(epsilon)}, of the steps taken, "
            "applies if neither results nor a clock decided when to stop; epsilon_planned = "
            f"{rounded_up(epsilon_planned)} applies if weights{noised} alone did; no epsilon "
            f"applies if {other}losses, norms or other logs did, or a clock (a time limit, a "
            "preemption, an owner's patience): the number of steps that fit into a time depends on "
            "the lengths of records"
        )
    by_ancestors = sum(segment.steps for segment in ledger.lost_before())
    if ledger.composes and (lost := ledger.published_lost().steps + by_ancestors):
        found.append(
            f"{_LOST}{lost} steps are counted for them, for each crash as many as it could lose, "
            "because the number that it did lose depends on the lengths of records; the number of "
            "crashes is assumed not to"
        )
    before = [segment for ancestor in ledger.ancestors for segment in ancestor.segments]
    segments = [*before, *ledger.segments()]
    taken = [s.settings for s in segments if s.steps > 0] or [ledger.settings]
    if ledger.composes:
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
        found += dict.fromkeys(filter(None, (settings.mechanism.caveat for settings in taken)))
    return found


def recorded(found: Iterable[str]) -> list[str]:
    """Return the caveats that weights inherit which go on from these."""
    computed_anew = (_EARLY, _LOST, _ROUNDED, *(kind.caveat for kind in MECHANISMS if kind.caveat))
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
