"""The terms that steps are taken on, segments of such steps, and which terms may change."""

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

from torchtitan_dp.config import JobConfig
from torchtitan_dp.config.checks import mesh_degrees
from torchtitan_dp.config.lengths import ladder
from torchtitan_dp.config.lora import ALL, trained
from torchtitan_dp.config.units import privacy_unit, targets, unit_word
from torchtitan_dp.gradients.methods import METHODS
from torchtitan_dp.privacy import accounting
from torchtitan_dp.privacy.mechanism import Mechanism, Segment, from_fields, mechanism_of


@dataclass(frozen=True)
class Settings:
    """What the guarantee depends on, the same within a segment."""

    mechanism: Mechanism
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
    sampling: str = "poisson"
    clipping: str = "flat"
    clip_function: str = "vanilla"
    secure_noise: bool = False
    exact_sum: bool = False
    trained: str = ALL
    units: int | None = None  # where their number is public
    samples_per_rank: int | None = None  # hardly ever exceeded in a step, whatever is drawn
    ranks_added_up: int = 1  # the data-parallel ranks whose sums are added up

    def spending(self, steps: int) -> Segment:
        """Return `steps` steps on these terms for an accountant."""
        return Segment(self.mechanism.as_logged(), steps)

    @property
    def unit(self) -> str:
        """One word for what is drawn, clipped and protected: a record, or a unit of several."""
        return self.privacy_unit.split()[0]

    @property
    def implied_units(self) -> int:
        """The number of units that the public rate stands for; their number need not be public."""
        return round(self.expected_batch_size / self.mechanism.sample_rate)

    @property
    def summands(self) -> int:
        """The most samples that one rank adds up in a step, guessed where it is unknown."""
        return self.samples_per_rank or 2 * self.expected_batch_size

    def epsilon(self, steps: int) -> float:
        """Compute the epsilon of `steps` optimizer steps alone; it is infinite without noise."""
        return accounting.compose(
            [self.spending(steps)], delta=self.delta, accountant=self.accountant
        )

    def same_terms(self, other: "Settings", *, targets_too: bool = False) -> bool:
        """Return whether a step on these terms spends as much as one on the others."""
        if targets_too and self.target_epsilon != other.target_epsilon:
            return False
        return not [*_changes(self, other, of_a_run=False), *_changes(self, other, of_a_run=True)]

    def same_segment(self, other: "Settings") -> bool:
        """Return whether steps on both are recorded as one segment: the terms are the same, and how
        norms were found, which is recorded although it may change no epsilon."""
        return self.same_terms(other) and self.mechanism.fields() == other.mechanism.fields()

    def refuse_change(self, since: "Settings") -> None:
        """Raise ValueError, naming both values, if the guarantee's terms differ from `since`."""
        for of_a_run, remedy in (
            (False, ", or open a new segment with privacy.new_segment"),
            (True, ""),
        ):
            for key, now, before in _changes(self, since, of_a_run=of_a_run):
                raise ValueError(
                    f"{key} = {now}: this run was started with {before}; set it back, start afresh "
                    f"in another job.dump_folder{remedy}"
                )

    def refuse_change_of_run(self, since: "Settings") -> None:
        """Raise the same for terms that no new segment may change."""
        for key, now, before in _changes(self, since, of_a_run=True):
            raise ValueError(
                f"{key} = {now}: this run was started with {before}, which no new segment may "
                "change; set it back, or start afresh in another job.dump_folder"
            )

    def fields(self) -> dict[str, Any]:
        """Return the terms as `privacy.json` and checkpoints record them."""
        own = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return {**own, **self.mechanism.fields()}

    @classmethod
    def from_fields(cls, fields: dict[str, Any]) -> "Settings":
        """Build them from what `fields` gives.

        Raises:
            KeyError, TypeError, ValueError: a key is missing, unknown or out of its range.
        """
        mechanism = from_fields(fields)
        own = {name: value for name, value in fields.items() if name not in mechanism.fields()}
        return cls(mechanism, **own)


@dataclass(frozen=True)
class RunSegment:
    """Steps that a run took one after the other on the same terms."""

    settings: Settings
    steps: int

    def spending(self) -> Segment:
        """Return these steps for an accountant."""
        return self.settings.spending(self.steps)

    def fields(self) -> dict[str, Any]:
        """Return them as `privacy.json` and checkpoints record them."""
        return {"settings": self.settings.fields(), "steps": self.steps}

    @classmethod
    def from_fields(cls, fields: dict[str, Any]) -> "RunSegment":
        """Build them from what `fields` gives."""
        return cls(Settings.from_fields(fields["settings"]), fields["steps"])


@dataclass(frozen=True)
class Sampling:
    """Say how units are drawn, and which data sets the guarantee therefore compares."""

    rate: float
    source: str  # of the rate, for people
    neighbouring_relation: str


_OF_A_RUN = {
    "privacy.delta": "delta",
    "privacy.sample_rate": "neighbouring_relation",
    "data.unit_field": "privacy_unit",
    "lora": "trained",
}


def _of_a_segment(settings: Settings) -> dict[str, object]:
    """Return the terms that a new segment may change, by keys of the configuration."""
    return {
        "privacy.noise_multiplier": settings.mechanism.noise_multiplier,
        # Before the rate, which may follow from it: the key that was edited is named.
        "training.global_batch_size": settings.expected_batch_size,
        "privacy.sample_rate": settings.mechanism.sample_rate,
        "privacy.max_grad_norm": settings.max_grad_norm,
        "privacy.clipping": settings.clipping,
        "privacy.clip_function": settings.clip_function,
        "privacy.secure_noise": settings.secure_noise,
        "privacy.exact_sum": settings.exact_sum,
        **settings.mechanism.terms(),
        "data.windows_per_draw": settings.windows_per_draw,
    }


def _changes(
    now: Settings, before: Settings, *, of_a_run: bool
) -> list[tuple[str, object, object]]:
    """Return the keys of the configuration whose values differ, with both values."""
    ours, theirs = (
        {key: getattr(settings, name) for key, name in _OF_A_RUN.items()}
        if of_a_run
        else _of_a_segment(settings)
        for settings in (now, before)
    )
    changes = [(key, ours.get(key), theirs.get(key)) for key in ours | theirs]
    return [change for change in changes if change[1] != change[2]]


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
    mechanism = mechanism_of(
        privacy,
        noise_multiplier=float(noise_multiplier),
        sample_rate=sampling.rate,
        estimates_norms=METHODS[privacy.gradient_method].estimates_norms,
    )
    return Settings(
        mechanism,
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
