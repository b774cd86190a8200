"""The terms of a configuration: noise, sampling rate, privacy unit and the rest."""

import dataclasses
import hashlib
import json
import math

from torchtitan_dp.config import JobConfig
from torchtitan_dp.config.checks import mesh_degrees
from torchtitan_dp.config.derived import ladder, privacy_unit, targets, trained, unit_word
from torchtitan_dp.config.rope import rope_in_words
from torchtitan_dp.gradients.methods import METHODS
from torchtitan_dp.ledger.settings import Settings
from torchtitan_dp.privacy.mechanism import mechanism_of


def settings_of(
    config: JobConfig, units: int, noise_multiplier: float, bands: int | None = None
) -> Settings:
    """Return the terms of a configuration.

    Args:
        units: number of training units. It is public where the rate follows from it, and then
            neighbours are data sets of as many units (`zero_out`).
        noise_multiplier: the configuration's own, or that of its target epsilon.
        bands: of correlated noise; by default `privacy.bands`, which is then a number.

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
    clipping: str = privacy.clipping
    if privacy.clipping_groups:
        clipping += f": {', '.join(privacy.clipping_groups)}"
    replicate, shard, _ = mesh_degrees(config)
    ranks = max(replicate, 1) * max(shard, 1)
    if bands is None:
        assert privacy.noise == "independent" or privacy.bands != "auto"
        bands = 1 if privacy.noise == "independent" else int(privacy.bands)
    mechanism = mechanism_of(
        privacy,
        noise_multiplier=float(noise_multiplier),
        sample_rate=rate,
        estimates_norms=METHODS[privacy.gradient_method].estimates_norms,
        bands=bands,
    )
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
        sampling="poisson" if bands == 1 else "cyclic_poisson",
        clipping=clipping,
        clip_function=privacy.clip_function,
        secure_noise=privacy.secure_noise,
        exact_sum=privacy.exact_sum,
        trained=trained(config),
        rope=rope_in_words(config),
        units=units if units_are_public else None,
        # Each length of the ladder is dealt out by itself, rounded up.
        samples_per_rank=math.ceil(_most_drawn(batch) / ranks) + len(ladder(config)),
        ranks_added_up=ranks,
    )


def _most_drawn(expected: int) -> int:
    """Return a number of drawn units that one step in 1e9 exceeds, for any number of units.

    A binomial tail is below that of the Poisson distribution of the same mean (Anderson & Samuels
    1967).
    """
    from scipy import stats  # a second to import

    return int(stats.poisson.isf(1e-9, expected))


def config_hash(config: JobConfig) -> str:
    """Return the SHA-256 of the configuration without the paths of records and outputs."""
    sections = dataclasses.asdict(config)
    sections["training"].pop("dataset_path")
    sections["job"].pop("dump_folder")
    sections["job"].pop("config_file")
    text = json.dumps(sections, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()
