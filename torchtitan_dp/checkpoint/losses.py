"""The noise of held-out losses that are published, fixed at a run's first start."""

import dataclasses

from torchtitan_dp.config import JobConfig
from torchtitan_dp.config.derived import unit_word
from torchtitan_dp.ledger.heldout import HeldOutLosses, scheduled
from torchtitan_dp.ledger.lineage import Ledger
from torchtitan_dp.privacy.accounting import rounded_up
from torchtitan_dp.privacy.published_loss import noise_of


def choose_losses(config: JobConfig, earlier: Ledger | None) -> HeldOutLosses | None:
    """Return the noise of the configuration's held-out losses, or that of the run's first start;
    None if they are not published.

    Args:
        earlier: the ledger of this folder's earlier steps.

    Raises:
        ValueError: one line; the terms are not those of the first start.
    """
    validation, delta = config.validation, config.validation.publish_delta or config.privacy.delta
    assert delta is not None
    if earlier is not None:
        kept = earlier.heldout_losses
        before = None if kept is None else (kept.target_epsilon, kept.delta, kept.clip)
        now = validation.publish_epsilon, delta, validation.publish_clip
        keys = ("publish_epsilon", "publish_delta", "publish_clip")
        values = [None] * 3 if before is None else before
        for key, new, old in zip(keys, now, values, strict=True):
            if new != old and not (before is None and validation.publish_epsilon is None):
                raise ValueError(
                    f"validation.{key} = {new}: this run was started with {old}, for which the "
                    "noise of held-out losses was fixed; set it back, or start afresh in another "
                    "job.dump_folder"
                )
        if kept is None:
            return None
        return dataclasses.replace(kept, freq=validation.freq)
    if validation.publish_epsilon is None:
        return None
    planned = scheduled(validation.freq, 1, config.training.steps)
    noise = noise_of(
        target_epsilon=validation.publish_epsilon, delta=delta, evaluations=max(planned, 1)
    )
    return HeldOutLosses(
        noise,
        clip=validation.publish_clip,
        delta=delta,
        target_epsilon=validation.publish_epsilon,
        freq=validation.freq,
    )


def refuse_more_losses(config: JobConfig, ledger: Ledger) -> None:
    """Refuse, by ValueError, more evaluations than the noise was chosen for; those that a crash
    lost count beside them."""
    losses = ledger.heldout_losses
    if losses is None:
        return
    planned = losses.evaluations(ledger.steps + 1, config.training.steps) - losses.lost
    spent = losses.noise.epsilon(planned, delta=losses.delta)
    if spent > losses.target_epsilon:
        raise ValueError(
            f"validation.publish_epsilon = {losses.target_epsilon:g}: the noise of held-out losses "
            f"was fixed at this run's first start, and {planned} evaluations would spend "
            f"{rounded_up(spent)}; raise validation.freq, lower training.steps, or start afresh in "
            "another job.dump_folder"
        )


def refuse_delta_of_losses(config: JobConfig, heldout: int) -> None:
    """Refuse, by ValueError, a delta at which a whole held-out unit might be published.

    Args:
        heldout: the number of held-out units, which is public where losses are published.
    """
    validation = config.validation
    delta, key = validation.publish_delta, "validation.publish_delta"
    if delta is None:
        delta, key = config.privacy.delta, "validation.publish_delta (unset: privacy.delta)"
    assert delta is not None
    if validation.publish_epsilon is not None and delta * heldout >= 1:
        word = unit_word(config)
        raise ValueError(
            f"{key} = {delta:g}: at least 1 / number of held-out {word}s ({1 / heldout:.2g}), "
            f"which allows publishing a {word} outright; use a tenth of that or less"
        )
