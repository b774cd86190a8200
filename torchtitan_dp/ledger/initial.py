"""What initial weights bring along: the ledger of the run that they come from, or an assumption.

Guarantee:
    What the runs behind the initial weights spent is composed with this run's, whatever records
    they saw: that bounds what is revealed of a unit of both, and of one of either. "Not private"
    sticks to weights. Those without a ledger are taken only if the user says that they are public,
    which is recorded as an assumption.
"""

import dataclasses
import os

from torchtitan_dp.checkpoint.folder import read_ledger
from torchtitan_dp.config import JobConfig
from torchtitan_dp.ledger.files import PRIVACY_FILE, ExecutedSteps, read_published
from torchtitan_dp.ledger.lineage import Ancestor, Ledger, Segment
from torchtitan_dp.ledger.starts import Start

PUBLIC = "the initial weights are assumed to be public"


def initial_weights(config: JobConfig) -> str | None:
    """Where a run without a checkpoint of its own would load its weights from, if anywhere."""
    checkpoint = config.checkpoint
    if checkpoint.initial_load_path:
        return checkpoint.initial_load_path
    return config.model.hf_assets_path if checkpoint.initial_load_in_hf else None


def start_from(ledger: Ledger, config: JobConfig) -> None:
    """Enter into the ledger of a run without weights of its own what its initial ones have spent.

    Raises:
        ValueError: one line for the user.
    """
    path = initial_weights(config)
    if path is None:
        return
    found = find_ledger(path)
    if found is None:
        if not config.privacy.initial_weights_public:
            raise ValueError(
                f"privacy.initial_weights_public = false: the weights in '{path}' come without a "
                "ledger of what they spent; set it to true if they never saw private records"
            )
        if os.path.realpath(path).startswith(os.path.realpath(config.job.dump_folder) + os.sep):
            raise ValueError(
                f"checkpoint.initial_load_path = '{path}': it lies in job.dump_folder, where "
                "weights count as those of this run; move it elsewhere"
            )
        ledger.add_caveat(PUBLIC)
        return
    earlier, all_begun = found
    for caveat in earlier.caveats:
        ledger.add_caveat(f"of the initial weights: {caveat}")
    if not earlier.private:
        ledger.mark_not_private("the initial weights are not private")
        return
    _refuse_what_does_not_compose(ledger, earlier, path)
    segments = tuple(segment for segment in earlier.segments() if segment.steps > 0)
    starts = tuple(start for start in earlier.starts() if start.steps > 0)
    own = Ancestor(earlier.run, segments, starts, earlier.planned_steps)
    lineage = [*ledger.ancestors, *earlier.ancestors, own, *all_begun]
    ledger.ancestors = list(dict.fromkeys(lineage))
    ledger.add_caveat(f"the initial weights are of run {earlier.run}, whose steps are included")
    ledger.add_caveat(
        f"this run's noise, rate and steps are assumed not to follow from what run {earlier.run} "
        f"showed, and its {ledger.settings.privacy_unit}s not to be larger than that run's"
    )


def _refuse_what_does_not_compose(ledger: Ledger, earlier: Ledger, path: str) -> None:
    """Raise ValueError if no epsilon of this run could cover the earlier one's steps."""
    remedy = "start from other weights, or, if they never saw these records, from a folder of "
    remedy += f"safetensors without {PRIVACY_FILE}, with privacy.initial_weights_public = true"
    if earlier.adaptive:
        raise ValueError(
            f"checkpoint.initial_load_path = '{path}': settings of the run it comes from were "
            "chosen after results were seen, which no epsilon of a later run covers; go on with "
            f"that run itself, {remedy}"
        )
    mine = ledger.settings
    before = (segment for ancestor in earlier.ancestors for segment in ancestor.segments)
    for segment in (*earlier.segments(), *before):
        theirs = segment.settings
        if theirs.privacy_unit != mine.privacy_unit:
            raise ValueError(
                f"checkpoint.initial_load_path = '{path}': trained with the privacy of one "
                f"{theirs.privacy_unit}, and this run's unit is one {mine.privacy_unit}, so that "
                f"no epsilon covers both; set data.unit_field as it was there, {remedy}"
            )
        if (theirs.neighbouring_relation, mine.neighbouring_relation) == ("zero_out", "add_remove"):
            raise ValueError(
                f"privacy.sample_rate = {mine.sample_rate:g}: the weights in '{path}' were trained "
                "at a rate that followed from the number of records, so that neighbours that add "
                f"or remove one are not covered; leave it unset, {remedy}"
            )


def find_ledger(path: str) -> tuple[Ledger, list[Ancestor]] | None:
    """The ledger of the weights at `path`; None if there is none.

    A checkpoint holds its own, and exported or released weights have theirs beside them. Other
    weights within a run's folder (saved without optimizer, say) could be any of that run: then all
    steps that were ever begun there are told as well, in the list.
    """
    path = os.path.realpath(path)
    text = read_ledger(path)
    if text is not None:
        return Ledger.from_json(text), []
    if (own := read_published(path)) is not None:
        return own, []
    for folder in (os.path.dirname(path), os.path.dirname(os.path.dirname(path))):
        if (published := read_published(folder)) is not None:
            return published, [_all_begun(published, folder)]
    return None


def _all_begun(ledger: Ledger, folder: str) -> Ancestor:
    begun = ExecutedSteps(folder).stretches(ledger.settings)
    terms = [
        dataclasses.replace(
            ledger.settings, noise_multiplier=s.noise_multiplier, sample_rate=s.sample_rate
        )
        for s in begun
    ]
    segments = [Segment(settings, s.steps) for settings, s in zip(terms, begun, strict=True)]
    return Ancestor(ledger.run, tuple(segments), tuple(Start(s.start, s.steps) for s in begun))
