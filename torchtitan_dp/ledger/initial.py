"""What initial weights bring along: the ledger of the run that they come from, or an assumption.

Guarantee:
    Weights that saw the same records spend on: their lineage is composed with this run's. "Not
    private" sticks to them. Weights without a ledger are taken only if the user says that they are
    public, which is recorded as an assumption.
"""

import os

from torchtitan_dp.checkpoint import read_ledger
from torchtitan_dp.config import JobConfig
from torchtitan_dp.ledger.files import read_fingerprint, read_published
from torchtitan_dp.ledger.lineage import Ancestor, Ledger

PUBLIC = "the initial weights are assumed to be public"


def initial_weights(config: JobConfig) -> str | None:
    """Where a run without a checkpoint of its own would load its weights from, if anywhere."""
    checkpoint = config.checkpoint
    if checkpoint.initial_load_path:
        return checkpoint.initial_load_path
    return config.model.hf_assets_path if checkpoint.initial_load_in_hf else None


def start_from(ledger: Ledger, config: JobConfig, fingerprint: str) -> None:
    """Enter into the ledger of a first start what its initial weights have behind them.

    Args:
        fingerprint: of this run's records.

    Raises:
        ValueError: one line for the user.
    """
    path = initial_weights(config)
    if path is None:
        return
    folder, earlier = find_ledger(path)
    if earlier is None:
        if not config.privacy.initial_weights_public:
            raise ValueError(
                f"privacy.initial_weights_public = false: the weights in '{path}' come without a "
                "ledger of what they spent; set it to true if they never saw private records"
            )
        ledger.add_caveat(PUBLIC)
        return
    for caveat in earlier.caveats:
        ledger.add_caveat(f"of the initial weights: {caveat}")
    if not earlier.private:
        ledger.mark_not_private("the initial weights are not private")
        return
    theirs = read_fingerprint(folder)
    if theirs is not None and theirs != fingerprint:
        ledger.add_caveat(
            f"the initial weights, of run {earlier.run}, were trained with privacy on other "
            f"records (epsilon = {earlier.epsilon():.4g}, delta = {earlier.settings.delta:g}); a "
            "person in both is covered by neither number alone"
        )
        return
    unit = ledger.settings.privacy_unit
    if earlier.settings.privacy_unit != unit:
        raise ValueError(
            f"checkpoint.initial_load_path = '{path}': trained with the privacy of one "
            f"{earlier.settings.privacy_unit}, and this run's unit is one {unit}, so that no "
            "epsilon covers both; set data.unit_field as it was there"
        )
    own = Ancestor(earlier.run, tuple(s for s in earlier.segments() if s.steps > 0))
    ledger.ancestors = list(dict.fromkeys([*earlier.ancestors, own]))
    ledger.add_caveat(f"the initial weights are of run {earlier.run}, whose steps are included")


def find_ledger(path: str) -> tuple[str, Ledger | None]:
    """The ledger of the weights at `path`, and the folder of the run or release they belong to.

    A checkpoint holds its own. For exported weights it is the `privacy.json` beside them or, as
    `<job.dump_folder>/hf` has it, one folder up.
    """
    path = os.path.abspath(path)
    text = read_ledger(path)
    if text is not None:
        return os.path.dirname(os.path.dirname(path)), Ledger.from_json(text)
    for folder in (path, os.path.dirname(path)):
        published = read_published(folder)
        if published is not None:
            return folder, published
    return path, None
