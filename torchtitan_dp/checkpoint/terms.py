"""The terms of a run: those of its configuration, and the noise that its first start fixes."""

import dataclasses
import hashlib
import json
import math
from collections.abc import Sequence

from scipy import special

from torchtitan_dp.checkpoint.workload import shares_of_steps
from torchtitan_dp.config import JobConfig
from torchtitan_dp.config.derived import (
    ladder,
    mesh_degrees,
    privacy_unit,
    publishing_key,
    rope_in_words,
    targets,
    trained,
    unit_word,
)
from torchtitan_dp.gradients.methods import METHODS
from torchtitan_dp.ledger.lineage import Lineage
from torchtitan_dp.ledger.settings import HeldOutLosses, Settings, scheduled
from torchtitan_dp.privacy import accounting
from torchtitan_dp.privacy.accounting import rounded_up
from torchtitan_dp.privacy.coefficients import INDEPENDENT, found_for
from torchtitan_dp.privacy.published_loss import LossNoise, noise_of
from torchtitan_dp.privacy.segments import Segment, mechanism_of


def settings_of(
    config: JobConfig,
    units: int,
    noise_multiplier: float,
    column: Sequence[float] | None = None,
) -> Settings:
    """Return the terms of a configuration.

    Args:
        units: number of training units. It is public where the rate follows from it, and then
            neighbours are data sets of as many units (`zero_out`).
        noise_multiplier: the configuration's own, or that of its target epsilon.
        column: of correlated noise; by default that of `privacy.bands`, which is then a number.

    Raises:
        ValueError: one line; more units are expected in a step than there are.
    """
    privacy, batch = config.privacy, config.training.global_batch_size
    assert privacy.delta is not None
    rate, source = privacy.sample_rate, "privacy.sample_rate"
    units_are_public = rate is None
    if rate is None:
        word = unit_word(config)
        if batch > units:
            raise ValueError(
                f"training.global_batch_size = {batch}: more than the {units} training {word}s, so "
                f"the sample rate would exceed 1; use at most {units}"
            )
        rate = batch / units
        source = f"training.global_batch_size / number of training {word}s (which is public)"
    replicate, shard, _ = mesh_degrees(config)
    ranks = max(replicate, 1) * max(shard, 1)
    if column is None:
        assert privacy.noise == "independent" or privacy.bands != "auto"
        column = column_of(config, 1 if privacy.noise == "independent" else int(privacy.bands))
    asked = rate
    mechanism = mechanism_of(
        privacy,
        noise_multiplier=float(noise_multiplier),
        sample_rate=rate,
        estimates_norms=METHODS[privacy.gradient_method].estimates_norms,
        column=column,
    )
    rate = mechanism.sample_rate
    if privacy.sampling == "allocation":
        source = f"1 / {round(1 / rate)} steps of a round, the next to {source}"
    return Settings(
        mechanism,
        max_grad_norm=float(privacy.max_grad_norm),
        delta=privacy.delta,
        expected_batch_size=batch,
        accountant=privacy.accountant,
        sample_rate_source=source,
        neighbouring_relation="zero_out" if units_are_public else "add_remove",
        privacy_unit=privacy_unit(config),
        targets=targets(config),
        windows_per_draw=config.data.windows_per_draw,
        target_epsilon=privacy.target_epsilon,
        sampling=mechanism.sampling,
        clipping=privacy.clipping,
        clip_function=privacy.clip_function,
        secure_noise=privacy.secure_noise,
        trained=trained(config),
        rope=rope_in_words(config),
        units=units if units_are_public else None,
        # Each length of the ladder is dealt out by itself, rounded up.
        samples_per_rank=math.ceil(_most_drawn(batch * rate / asked) / ranks) + len(ladder(config)),
        ranks_added_up=ranks,
    )


def _most_drawn(expected: float) -> int:
    """Return a number of drawn units that one step in 1e9 exceeds, for any number of units.

    A binomial tail is below that of the Poisson distribution of the same mean (Anderson & Samuels
    1967).
    """
    most = math.ceil(special.pdtrik(1 - 1e-9, expected))
    return most - int(most > 0 and special.pdtr(most - 1, expected) >= 1 - 1e-9)


def config_hash(config: JobConfig) -> str:
    """Return the SHA-256 of the configuration without the paths of records and outputs."""
    sections = dataclasses.asdict(config)
    sections["training"].pop("dataset_path")
    sections["job"].pop("dump_folder")
    sections["job"].pop("config_file")
    text = json.dumps(sections, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


AS_GOOD = 1.1
"""Fewer bands whose noise is at most this much more are preferred: less is kept in memory, and each
step is less noisy."""


def column_of(config: JobConfig, bands: int) -> tuple[float, ...]:
    """Find the coefficients of so many bands for the weights that this run exports."""
    return INDEPENDENT if bands == 1 else found_for(shares_of_steps(config), bands)


def choose_noise(
    config: JobConfig, units: int, spent: list[Segment], earlier: Lineage | None
) -> tuple[float, tuple[float, ...]]:
    """Return the configuration's noise, the resumed run's, or the least that meets the target; and
    its column.

    A resume's is read, never found again: its schedule, or the processor, may be another.

    Args:
        spent: all steps behind the initial weights, which count as well.
        earlier: the ledger of this run's earlier steps, if there is one.
    """
    privacy = config.privacy
    kept = INDEPENDENT if earlier is None else earlier.settings.mechanism.column
    if privacy.noise == "independent":
        bands = 1
    elif privacy.bands != "auto":
        bands = privacy.bands
    elif earlier is not None:
        bands = len(kept)
    else:
        bands = best_of(noise_by_bands(config, units, spent))
    column = kept if bands == len(kept) else column_of(config, bands)
    if privacy.noise_multiplier is not None:
        return privacy.noise_multiplier, column
    if earlier is not None:
        return earlier.settings.mechanism.noise_multiplier, column
    return _least_noise(config, units, column, spent, config.training.steps), column


def _least_noise(
    config: JobConfig, units: int, column: Sequence[float], spent: list[Segment], steps: int
) -> float:
    """Find the noise multiplier that meets the target."""
    privacy = config.privacy
    assert privacy.target_epsilon is not None
    assert privacy.delta is not None
    return accounting.noise_for(
        settings_of(config, units, 0.0, column).mechanism,
        steps,
        target_epsilon=privacy.target_epsilon,
        delta=privacy.delta,
        accountant=privacy.accountant,
        before=spent,
    )


def noise_by_bands(
    config: JobConfig, units: int, spent: list[Segment]
) -> dict[int, tuple[float, float, float]]:
    """Return, by the number of bands, sigma and the noise of a step and in the exported weights
    (`Mechanism.noise_of_run`, `noise_in_weights`), all for the target epsilon: of 1, 2, 4, …
    rounds, as far as the rate allows."""
    steps, shares = max(config.training.steps, 1), shares_of_steps(config)
    rate = settings_of(config, units, 0.0, INDEPENDENT).mechanism.sample_rate
    of_rounds = {-(-steps // 2**power) for power in range(steps.bit_length() + 1)}
    found = {}
    for bands in sorted({min(bands, math.floor(1 / rate)) for bands in of_rounds}):
        column = found_for(shares, bands)
        sigma = _least_noise(config, units, column, spent, steps)
        mechanism = settings_of(config, units, sigma, column).mechanism
        in_step, _ = mechanism.noise_of_run(steps)
        found[bands] = (sigma, in_step, mechanism.noise_in_weights(shares))
    return found


def best_of(found: dict[int, tuple[float, float, float]]) -> int:
    """Return the bands of `noise_by_bands` with the least noise in the exported weights, or fewer
    that are as good."""
    least = min(in_weights for *_, in_weights in found.values())
    return min(bands for bands, (*_, in_weights) in found.items() if in_weights <= AS_GOOD * least)


def choose_losses(config: JobConfig, earlier: Lineage | None) -> HeldOutLosses | None:
    """Return the noise of the configuration's held-out losses, or that of the run's first start;
    None if they are not published.

    Args:
        earlier: the ledger of this folder's earlier steps.

    Raises:
        ValueError: one line; the terms are not those of the first start.
    """
    validation, delta = config.validation, config.validation.publish_delta or config.privacy.delta
    assert delta is not None
    key, asked = publishing_key(config)
    if earlier is not None:
        kept = earlier.heldout_losses
        before = None if kept is None else (_asked_for(kept, key), kept.delta, kept.clip)
        now = asked, delta, validation.publish_clip
        keys = (key, "publish_delta", "publish_clip")
        values = [None] * 3 if before is None else before
        for key, new, old in zip(keys, now, values, strict=True):
            if new != old and not (before is None and asked is None):
                raise ValueError(
                    f"validation.{key} = {new}: this run was started with {old}, for which the "
                    "noise of held-out losses was fixed; set it back, or start afresh in another "
                    "job.dump_folder"
                )
        if kept is None:
            return None
        return dataclasses.replace(kept, freq=validation.freq)
    if asked is None:
        return None
    planned = max(scheduled(validation.freq, 1, config.training.steps), 1)
    if key == "publish_epsilon":
        target, noise = asked, noise_of(target_epsilon=asked, delta=delta, evaluations=planned)
    else:
        noise = LossNoise("gaussian", asked)
        target = noise.epsilon(planned, delta=delta) * (1 + 1e-9)  # another machine may round
    return HeldOutLosses(
        noise,
        clip=validation.publish_clip,
        delta=delta,
        target_epsilon=target,
        freq=validation.freq,
    )


def _asked_for(losses: HeldOutLosses, key: str) -> float | None:
    """Return the value of a key of `[validation]` from which the noise of losses follows."""
    if key == "publish_epsilon":
        return losses.target_epsilon
    return losses.noise.scale if losses.noise.kind == "gaussian" else None


def refuse_more_losses(config: JobConfig, ledger: Lineage) -> None:
    """Refuse, by ValueError, more evaluations than the noise was chosen for; those that a crash
    lost count beside them."""
    losses = ledger.heldout_losses
    if losses is None:
        return
    planned = losses.evaluations(ledger.steps + 1, config.training.steps) - losses.lost
    spent = losses.noise.epsilon(planned, delta=losses.delta)
    if spent > losses.target_epsilon:
        key, asked = publishing_key(config)
        assert asked is not None, "`choose_losses` refuses another noise before"
        raise ValueError(
            f"validation.{key} = {asked:g}: the noise of held-out losses was "
            f"fixed at this run's first start, and {planned} evaluations would spend "
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
    if publishing_key(config)[1] is not None and delta * heldout >= 1:
        word = unit_word(config)
        raise ValueError(
            f"{key} = {delta:g}: at least 1 / number of held-out {word}s ({1 / heldout:.2g}), "
            f"which allows publishing a {word} outright; use a tenth of that, "
            f"{accounting.rounded_down(0.1 / heldout, digits=2)}, or less"
        )
