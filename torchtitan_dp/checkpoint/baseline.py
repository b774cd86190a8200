"""The ledger of a run without privacy, which marks its weights as not private.

Guarantee:
    Weights of such a run are marked "not private" in each checkpoint, beside each export and in the
    run's folder, so that a run that starts from them cannot pass for private.
"""

import contextlib
import os
from typing import Any

from torchtitan_dp.config import JobConfig
from torchtitan_dp.config.derived import trained
from torchtitan_dp.config.rope import rope_in_words
from torchtitan_dp.ledger import schema
from torchtitan_dp.ledger.account import terms_in_words
from torchtitan_dp.ledger.executed import ExecutedSteps
from torchtitan_dp.ledger.files import PRIVACY_FILE, read_published_fields
from torchtitan_dp.ledger.lineage import Ledger
from torchtitan_dp.ledger.settings import Settings
from torchtitan_dp.privacy.mechanism import NoMechanism

WHY = "trained without privacy (privacy.enable = false)"


def baseline_ledger(config: JobConfig, units: int) -> Ledger:
    """Return the ledger of a run without privacy on so many training units."""
    batch = config.training.global_batch_size
    settings = Settings(
        NoMechanism(0.0, min(max(batch, 1) / units, 1.0)),
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
    ledger = Ledger(settings, planned_steps=config.training.steps)
    ledger.mark_not_private(WHY)
    return ledger


def published_baseline(ledger: Ledger) -> dict[str, Any]:
    """Return the `privacy.json` of a run without privacy."""
    spent = dict.fromkeys(("epsilon", "epsilon_planned", "epsilon_executed"))
    terms = terms_in_words(ledger, [], 0.0)
    return schema.assemble(ledger, {**spent, "caveats": ledger.caveats, **terms})


def refuse_private_folder(folder: str) -> None:
    """Refuse to train without privacy in a private run's folder.

    Its `privacy.json` would no longer cover the weights.

    Raises:
        ValueError: one line.
    """
    is_there = os.path.exists(os.path.join(folder, PRIVACY_FILE))
    if (is_there and not _is_baseline(folder)) or ExecutedSteps(folder).count > 0:
        raise ValueError(
            f"privacy.enable = false: job.dump_folder = '{folder}' is that of a private run; give "
            "this one its own job.dump_folder"
        )


def refuse_baseline_folder(folder: str) -> None:
    """Refuse to train with privacy in the folder of a run without: its weights are not private.

    Raises:
        ValueError: one line.
    """
    if _is_baseline(folder):
        raise ValueError(
            f"privacy.enable = true: job.dump_folder = '{folder}' is that of a run without "
            "privacy, whose weights cannot become private; give this one its own job.dump_folder"
        )


def _is_baseline(folder: str) -> bool:
    """Return whether its `privacy.json` is of a run without privacy; one that is broken is not."""
    with contextlib.suppress(ValueError):
        published = read_published_fields(folder)
        return published is not None and published["mechanism"] == NoMechanism.name
    return False
