"""The terms that steps are taken on, segments of such steps, and which terms may change."""

import math
from dataclasses import dataclass

from torchtitan_dp.config import JobConfig
from torchtitan_dp.config.checks import mesh_degrees
from torchtitan_dp.config.lengths import ladder
from torchtitan_dp.config.lora import ALL, trained
from torchtitan_dp.config.units import privacy_unit, targets, unit_word
from torchtitan_dp.gradients.methods import METHODS, accounted_projections
from torchtitan_dp.privacy import accounting
from torchtitan_dp.privacy.envelope import largest_ratio
from torchtitan_dp.privacy.segments import Segment

SAMPLED_GAUSSIAN = "poisson_sampled_gaussian"
RANDOMIZED = "poisson_sampled_gaussian_of_randomized_norms"  # a mixture of Gaussians
NOT_RECORDED = "not recorded"  # how norms were found, of steps that a log alone tells of


@dataclass(frozen=True)
class Settings:
    """Hold what the guarantee depends on, which stays the same within a segment."""

    noise_multiplier: float
    sample_rate: float
    max_grad_norm: float
    delta: float
    expected_batch_size: int
    accountant: accounting.Accountant
    sample_rate_source: str
    neighbouring_relation: str
    privacy_unit: str = "record"
    targets: str = "every token"
    windows_per_draw: int = 1
    target_epsilon: float | None = None  # from which the noise followed, if it did
    mechanism: str = SAMPLED_GAUSSIAN
    sampling: str = "poisson"
    clipping: str = "flat"
    clip_function: str = "vanilla"
    secure_noise: bool = False
    exact_sum: bool = False
    projections: int = 0  # that norms are estimated from, whose errors epsilon counts; 0: none
    capped_projections: int = 0  # the same, where what is longer counts as its estimate; 0: none
    norm_estimator: str = "exact"
    trained: str = ALL
    units: int | None = None  # where their number is public
    samples_per_rank: int | None = None  # hardly ever exceeded in a step, whatever is drawn
    ranks_added_up: int = 1  # the data-parallel ranks whose sums are added up

    def spending(self, steps: int) -> Segment:
        """Return what an accountant needs to know of `steps` steps on these terms."""
        return Segment(self.noise_multiplier, self.sample_rate, steps, self.projections)

    @property
    def method(self) -> str:
        """Name the gradient method as far as epsilon depends on it."""
        accounted = "'randomized' with underestimates = 'accounted'"
        return accounted if self.projections else "one of exact or capped norms"

    @property
    def norms(self) -> tuple[int, int, str]:
        """Return all that tells how norms are found."""
        return self.projections, self.capped_projections, self.norm_estimator

    @property
    def accounted_estimator(self) -> str:
        """Name the estimator of norms as far as epsilon depends on it."""
        return self.norm_estimator if self.projections else "exact"

    @property
    def unit(self) -> str:
        """Name in one word what is drawn, clipped and protected: a record, or a unit of several."""
        return self.privacy_unit.split()[0]

    @property
    def implied_units(self) -> int:
        """Return how many units the public rate stands for; their number need not be public."""
        return round(self.expected_batch_size / self.sample_rate)

    @property
    def summands(self) -> int:
        """Return the most samples that one rank adds up in a step, guessed where it is unknown."""
        return self.samples_per_rank or 2 * self.expected_batch_size

    def epsilon(self, steps: int) -> float:
        """Return what `steps` optimizer steps spend alone; it is infinite without noise."""
        return accounting.epsilon(
            noise_multiplier=self.noise_multiplier,
            sample_rate=self.sample_rate,
            steps=steps,
            delta=self.delta,
            accountant=self.accountant,
            projections=self.projections,
        )

    @property
    def largest_share(self) -> float:
        """Return the most that a unit can move the sum by, over C."""
        return largest_ratio(self.projections)

    def same_terms(self, other: "Settings", *, targets_too: bool = False) -> bool:
        """Tell whether a step on these terms spends what one on the others does."""
        if targets_too and self.target_epsilon != other.target_epsilon:
            return False
        return not _changes(self, other, {**_OF_A_SEGMENT, **_OF_A_RUN})

    def same_segment(self, other: "Settings") -> bool:
        """Tell whether steps on both are told as one segment: the terms are the same, and how norms
        are found, which is told although it may change no epsilon."""
        return self.same_terms(other) and self.norms == other.norms

    def refuse_change(self, since: "Settings") -> None:
        """Raise ValueError, naming both values, if the guarantee's terms differ from `since`."""
        for key, now, before in _changes(self, since, {**_OF_A_SEGMENT, **_OF_A_RUN}):
            remedy = (
                ", or open a new segment with privacy.new_segment"
                if key in _OF_A_SEGMENT.values()
                else ""
            )
            raise ValueError(
                f"{key} = {now}: this run was started with {before}; set it back, start afresh "
                f"in another job.dump_folder{remedy}"
            )

    def refuse_change_of_run(self, since: "Settings") -> None:
        """Raise the same for what no new segment may change."""
        for key, now, before in _changes(self, since, _OF_A_RUN):
            raise ValueError(
                f"{key} = {now}: this run was started with {before}, which no new segment may "
                "change; set it back, or start afresh in another job.dump_folder"
            )


@dataclass(frozen=True)
class RunSegment:
    """Say how many steps a run took one after the other on the same terms."""

    settings: Settings
    steps: int

    def spending(self) -> Segment:
        """Return what an accountant needs to know of them."""
        return self.settings.spending(self.steps)


@dataclass(frozen=True)
class Sampling:
    """Say how units are drawn, and which data sets the guarantee therefore compares."""

    rate: float
    source: str  # of the rate, for people
    neighbouring_relation: str


_OF_A_SEGMENT = {
    "noise_multiplier": "privacy.noise_multiplier",
    # Before the rate, which may follow from it: the key that was edited is named.
    "expected_batch_size": "training.global_batch_size",
    "sample_rate": "privacy.sample_rate",
    "max_grad_norm": "privacy.max_grad_norm",
    "clipping": "privacy.clipping",
    "clip_function": "privacy.clip_function",
    "secure_noise": "privacy.secure_noise",
    "exact_sum": "privacy.exact_sum",
    "method": "privacy.gradient_method",  # as far as epsilon depends on it
    "projections": "privacy.projections",
    "accounted_estimator": "privacy.norm_estimator",
    "windows_per_draw": "data.windows_per_draw",
}
_OF_A_RUN = {
    "delta": "privacy.delta",
    "neighbouring_relation": "privacy.sample_rate",
    "privacy_unit": "data.unit_field",
    "trained": "lora",
}


def _changes(
    now: Settings, before: Settings, keys: dict[str, str]
) -> list[tuple[str, object, object]]:
    """Return the keys of the configuration whose values differ, with both values."""
    values = [(key, getattr(now, name), getattr(before, name)) for name, key in keys.items()]
    return [change for change in values if change[1] != change[2]]


def sampling_of(config: JobConfig, units: int) -> Sampling:
    """Return how the configuration has units drawn.

    Args:
        units: number of training units.

    Raises:
        ValueError: one line; more units are expected in a step than there are.
    """
    rate, batch = config.privacy.sample_rate, config.training.global_batch_size
    if rate is not None:
        return Sampling(rate, "privacy.sample_rate", "add_remove")
    word = unit_word(config)
    if batch > units:
        raise ValueError(
            f"training.global_batch_size = {batch}: more than the {units} training "
            f"{word}s, so the sample rate would exceed 1; use at most {units}"
        )
    source = f"training.global_batch_size / number of training {word}s (which is public)"
    return Sampling(batch / units, source, "zero_out")


def settings_of(config: JobConfig, units: int, noise_multiplier: float) -> Settings:
    """Return the terms that the configuration asks for.

    Args:
        units: number of training units.
        noise_multiplier: the configuration's own, or the one that its target epsilon leads to.

    Raises:
        ValueError: as `sampling_of`.
    """
    privacy, batch = config.privacy, config.training.global_batch_size
    sampling = sampling_of(config, units)
    assert privacy.delta is not None
    replicate, shard, _ = mesh_degrees(config)
    ranks = max(replicate, 1) * max(shard, 1)
    projections = accounted_projections(privacy)
    estimated = METHODS[privacy.gradient_method].estimates_norms
    return Settings(
        noise_multiplier=float(noise_multiplier),
        sample_rate=sampling.rate,
        max_grad_norm=float(privacy.max_grad_norm),
        delta=privacy.delta,
        expected_batch_size=batch,
        accountant=privacy.accountant,
        sample_rate_source=sampling.source,
        neighbouring_relation=sampling.neighbouring_relation,
        privacy_unit=privacy_unit(config),
        targets=targets(config),
        windows_per_draw=config.data.windows_per_draw,
        target_epsilon=privacy.target_epsilon,
        mechanism=RANDOMIZED if projections else SAMPLED_GAUSSIAN,
        projections=projections,
        capped_projections=privacy.projections if estimated and not projections else 0,
        norm_estimator=privacy.norm_estimator if estimated else "exact",
        clipping=_clipping(privacy.clipping, privacy.clipping_groups),
        clip_function=privacy.clip_function,
        secure_noise=privacy.secure_noise,
        exact_sum=privacy.exact_sum,
        trained=trained(config),
        units=units if sampling.neighbouring_relation == "zero_out" else None,
        # Each length of the ladder is dealt out by itself, rounded up.
        samples_per_rank=math.ceil(_most_drawn(batch) / ranks) + len(ladder(config)),
        ranks_added_up=ranks,
    )


def _clipping(clipping: str, groups: list[str]) -> str:
    """Say what is clipped together: `per_layer: layers.*, *`."""
    return f"{clipping}: {', '.join(groups)}" if groups else clipping


def _most_drawn(expected: int) -> int:
    """Return how many units a step exceeds only once in 1e9 steps, whatever their number.

    A binomial tail is below that of the Poisson distribution of the same mean (Anderson & Samuels
    1967).
    """
    from scipy import stats  # a second to import

    return int(stats.poisson.isf(1e-9, expected))
