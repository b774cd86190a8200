"""Ledgers of weights that this run's privacy does not cover: initial ones, and a baseline's.

Guarantee:
    The spending of the runs behind the initial weights is composed with this run's, on any records:
    that bounds what is revealed of a unit of both runs, or of either. "Not private" stays with
    weights. Weights without a ledger are refused unless the user declares them public, which is
    recorded as an assumption. Weights of a run without privacy are marked "not private" in each
    checkpoint, beside each export and in the run's folder.
"""

import contextlib
import os
from dataclasses import dataclass, replace

from torchtitan_dp.config import JobConfig
from torchtitan_dp.config.derived import privacy_unit, rope_in_words, trained
from torchtitan_dp.ledger.files import PRIVACY_FILE, read_published, read_published_fields
from torchtitan_dp.ledger.lineage import Ancestor, Lineage
from torchtitan_dp.ledger.log import RunLog
from torchtitan_dp.ledger.settings import Settings
from torchtitan_dp.ledger.spending import evaluations
from torchtitan_dp.privacy.segments import NONE, Mechanism

PUBLIC = "the initial weights are assumed to be public"
_NOT_PRIVATE = "the initial weights are not private"


@dataclass(frozen=True)
class InitialWeights:
    """The weights that a run starts from, and the ledger found with them."""

    path: str
    ledger: Lineage | None = None
    any_begun: bool = False  # whether they may be of any step begun in their folder


def with_initial(lineage: Lineage, config: JobConfig, initial: InitialWeights | None) -> Lineage:
    """Return a run's ledger with the entries of its initial weights, which it keeps forever.

    Raises:
        ValueError: one line for the user; the weights have no ledger, or no epsilon of this run
            could cover their steps.
    """
    if initial is None:
        return lineage
    earlier = initial.ledger
    if earlier is None:
        _refuse_unknown(config, initial.path)
        return lineage.with_caveats(PUBLIC)
    lineage = lineage.with_caveats(*(f"of the initial weights: {one}" for one in earlier.caveats))
    if not earlier.private:
        return lineage.marked_not_private(_NOT_PRIVATE)
    _refuse_what_does_not_compose(config, earlier, initial.path)
    own = Ancestor(
        earlier.run,
        earlier.settings,
        " ".join(earlier.names()),
        earlier.planned_steps,
        earlier.lost,
        initial.any_begun,
        evaluations(earlier),
    )
    lineage = lineage.with_caveats(
        f"the initial weights are of run {earlier.run}, whose steps are included",
        f"this run's noise, rate and steps are assumed not to follow from what run {earlier.run} "
        f"showed, and its {privacy_unit(config)}s not to be larger than that run's",
    )
    ancestors = dict.fromkeys([*lineage.ancestors, *earlier.ancestors, own])
    return replace(lineage, ancestors=tuple(ancestors))


def _refuse_unknown(config: JobConfig, path: str) -> None:
    """Raise ValueError unless weights without a ledger are declared public, and can be."""
    if not config.privacy.initial_weights_public:
        raise ValueError(
            f"privacy.initial_weights_public = false: the weights in '{path}' have no "
            "ledger of their spending; set it to true if they never saw private records"
        )
    if os.path.realpath(path).startswith(os.path.realpath(config.job.dump_folder) + os.sep):
        raise ValueError(
            f"checkpoint.initial_load_path = '{path}': it lies in job.dump_folder, where "
            "weights count as those of this run; move it elsewhere"
        )


def _refuse_what_does_not_compose(config: JobConfig, earlier: Lineage, path: str) -> None:
    """Raise ValueError if no epsilon of this run could cover the earlier one's steps."""
    remedy = "start from other weights, or, if they never saw these records, from a folder of "
    remedy += f"safetensors without {PRIVACY_FILE}, with privacy.initial_weights_public = true"
    unit, rate = privacy_unit(config), config.privacy.sample_rate
    for theirs in (earlier.settings, *(ancestor.settings for ancestor in earlier.ancestors)):
        if theirs.privacy_unit != unit:
            raise ValueError(
                f"checkpoint.initial_load_path = '{path}': trained with the privacy of one "
                f"{theirs.privacy_unit}, and this run's unit is one {unit}, so that "
                f"no epsilon covers both; set data.unit_field as it was there, {remedy}"
            )
        if theirs.neighbouring_relation == "zero_out" and rate is not None:  # this: add_remove
            raise ValueError(
                f"privacy.sample_rate = {rate:g}: the weights in '{path}' were trained "
                "at a rate that followed from the number of records, so that neighbours that add "
                f"or remove one are not covered; leave it unset, {remedy}"
            )


def ledger_beside(path: str) -> InitialWeights:
    """Return the weights at `path` with the ledger beside them, if there is one.

    Exported or released weights have their own. Other weights within a run's folder could be any of
    that run, so all steps ever begun there are charged, too.
    """
    place = os.path.realpath(path)
    if (own := read_published(place)) is not None:
        return InitialWeights(path, own)
    for folder in (os.path.dirname(place), os.path.dirname(os.path.dirname(place))):
        if (published := read_published(folder)) is not None:
            return InitialWeights(path, RunLog(folder).enter_lost(published), any_begun=True)
    return InitialWeights(path)


def baseline_ledger(config: JobConfig, units: int) -> Lineage:
    """Return the ledger of a run without privacy on so many training units."""
    batch = config.training.global_batch_size
    settings = Settings(
        Mechanism(0.0, min(max(batch, 1) / units, 1.0), private=False),
        max_grad_norm=0.0,  # none
        delta=config.privacy.delta or 0.0,
        expected_batch_size=batch,
        accountant=config.privacy.accountant,
        sample_rate_source="shuffled batches of one size",
        neighbouring_relation="none",
        sampling="shuffled",
        clipping="none",
        clip_function="none",
        trained=trained(config),
        rope=rope_in_words(config),
    )
    lineage = Lineage(settings, planned_steps=config.training.steps)
    return lineage.marked_not_private("trained without privacy (privacy.enable = false)")


def refuse_private_folder(folder: str) -> None:
    """Refuse to train without privacy in a private run's folder, by ValueError: its `privacy.json`
    would no longer cover the weights."""
    is_there = os.path.exists(os.path.join(folder, PRIVACY_FILE))
    if (is_there and not _is_baseline(folder)) or RunLog(folder).count > 0:
        raise ValueError(
            f"privacy.enable = false: job.dump_folder = '{folder}' is that of a private run; give "
            "this one its own job.dump_folder"
        )


def refuse_baseline_folder(folder: str) -> None:
    """Refuse to train with privacy in the folder of a run without, by ValueError."""
    if _is_baseline(folder):
        raise ValueError(
            f"privacy.enable = true: job.dump_folder = '{folder}' is that of a run without "
            "privacy, whose weights cannot become private; give this one its own job.dump_folder"
        )


def _is_baseline(folder: str) -> bool:
    """Return whether its `privacy.json` is of a run without privacy; one that is broken is not."""
    with contextlib.suppress(ValueError):
        published = read_published_fields(folder)
        return published is not None and published["mechanism"] == NONE
    return False
