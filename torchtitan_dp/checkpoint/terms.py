"""The terms of a run: those of its configuration, and the noise that its first start fixes.

The noise follows from the share that each step has in the weights that a run exports (its workload
matrix), and so from public settings: the steps, the schedule of learning rates, momentum,
weight decay, and the average of weights where that is exported.
"""

import dataclasses
import hashlib
import json
import math
from collections.abc import Callable, Sequence

import numpy as np
from scipy import special

from torchtitan_dp.config import JobConfig
from torchtitan_dp.config.derived import (
    METHODS,
    ladder,
    mesh_degrees,
    privacy_unit,
    targets,
    trained,
    unit_word,
)
from torchtitan_dp.ledger.lineage import Settings
from torchtitan_dp.privacy import accounting
from torchtitan_dp.privacy.coefficients import INDEPENDENT, found_for
from torchtitan_dp.privacy.segments import Segment, mechanism_of


def settings_of(
    config: JobConfig, units: int, noise_multiplier: float, column: Sequence[float] | None = None
) -> Settings:
    """Return the terms of a configuration; ValueError: more units are expected in a step than there
    are.

    Args:
        units: number of training units. It is public where the rate follows from it, and then
            neighbours are data sets of as many units (`zero_out`).
        column: of correlated noise; by default that of `privacy.bands`, which is then a number.
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
        units=units if units_are_public else None,
        # Each length of the ladder is dealt out by itself, rounded up.
        samples_per_rank=math.ceil(_most_drawn(batch * rate / asked) / ranks) + len(ladder(config)),
        ranks_added_up=ranks,
    )


def _most_drawn(expected: float) -> int:
    """Return a number of drawn units that one step in 1e9 exceeds: a binomial tail is below that of
    the Poisson distribution of the same mean (Anderson & Samuels 1967)."""
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
    config: JobConfig, units: int, spent: Sequence[Segment], earlier: Settings | None
) -> tuple[float, tuple[float, ...]]:
    """Return the configuration's noise, the resumed run's, or the least that meets the target
    beside the steps `spent` behind the initial weights; and its column. Those of `earlier` steps
    are read, never found again: the schedule, or the processor, may be another."""
    privacy = config.privacy
    kept = INDEPENDENT if earlier is None else earlier.mechanism.column
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
        return earlier.mechanism.noise_multiplier, column
    return _least_noise(config, units, column, spent, config.training.steps), column


def _least_noise(
    config: JobConfig, units: int, column: Sequence[float], spent: Sequence[Segment], steps: int
) -> float:
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
    config: JobConfig, units: int, spent: Sequence[Segment]
) -> dict[int, tuple[float, float]]:
    """Return, by the number of bands, sigma and the noise in the exported weights for the target
    epsilon: of 1, 2, 4, … rounds, as far as the rate allows."""
    steps, shares = max(config.training.steps, 1), shares_of_steps(config)
    rate = settings_of(config, units, 0.0, INDEPENDENT).mechanism.sample_rate
    of_rounds = {-(-steps // 2**power) for power in range(steps.bit_length() + 1)}
    found = {}
    for bands in sorted({min(bands, math.floor(1 / rate)) for bands in of_rounds}):
        column = found_for(shares, bands)
        sigma = _least_noise(config, units, column, spent, steps)
        mechanism = settings_of(config, units, sigma, column).mechanism
        found[bands] = (sigma, mechanism.noise_in_weights(shares))
    return found


def best_of(found: dict[int, tuple[float, float]]) -> int:
    """Return the bands of `noise_by_bands` with least noise in the weights, or fewer, as good."""
    least = min(in_weights for _, in_weights in found.values())
    return min(bands for bands, (_, in_weights) in found.items() if in_weights <= AS_GOOD * least)


_COUPLED = "Adam"  # adds the decay to the gradient: a share of it that depends on gradients


def shares_of_steps(config: JobConfig) -> tuple[float, ...]:
    """Return a_1, …, a_n: by how much noise in the gradient of step t moves the exported weights,
    relative to other steps.

    Where β is the momentum, λ the weight decay and η_s the rate of step s, the optimizers
    (`optimizer.MomentumSGD`, AdamW) do

        m_s = β m_{s-1} + (1 - β) g_s        w_s = (1 - λ η_s) w_{s-1} - η_s m_s / (1 - β^s)

    but for a divisor, AdamW's root of the second moment, which is taken to be constant: with DP it
    is next to nothing but the size of a step's noise. The exported weights are Σ e_s w_s: the last
    ones, or the average of `models.ema`.
    """
    optimizer = config.optimizer
    beta = optimizer.beta1
    decay = 0.0 if optimizer.name == _COUPLED else optimizer.weight_decay
    exported, after, moment = 1.0, 0.0, 0.0  # Π d_r of later averages; Σ e_s …; Σ β^… …
    steps, factor = max(config.training.steps, 1), schedule(config)
    next_rate, shares = 0.0, np.zeros(steps)
    for step in range(steps, 0, -1):
        kept = min(config.ema.decay, step / (9 + step)) if config.ema.enable else 0.0
        rate = optimizer.lr * factor(step - 1)
        after = exported * (1 - kept) + (1 - decay * next_rate) * after
        exported, next_rate = exported * kept, rate
        moment = rate * after / (1 - beta**step) + beta * moment
        shares[step - 1] = moment
    return tuple((shares / (np.abs(shares).max() or 1.0)).tolist())


def schedule(config: JobConfig) -> Callable[[int], float]:
    """Return TorchTitan's factor of the learning rate, by the number of steps before."""
    import torch

    import torchtitan_dp.distributed  # noqa: F401  lets TorchTitan import without a GPU

    # isort: split
    from torchtitan.components.lr_scheduler import build_lr_schedulers

    settings, steps = config.lr_scheduler, config.training.steps
    total = max(settings.total_steps or steps, 1)
    warmup = min(settings.warmup_steps, total)  # as TorchTitan does, with a warning
    decays = settings.decay_ratio and min(settings.decay_ratio, 1 - warmup / total)
    settings = dataclasses.replace(
        settings, warmup_steps=warmup, total_steps=total, decay_ratio=decays
    )
    one = torch.optim.SGD([torch.zeros(())], lr=1.0)
    schedulers = build_lr_schedulers([one], settings, total)  # type: ignore[arg-type]
    (factor,) = schedulers.schedulers[0].lr_lambdas  # type: ignore[attr-defined]
    return factor  # type: ignore[no-any-return]
