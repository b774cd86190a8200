"""The terms that a step is taken on, and which of them may change during a run."""

import math
from dataclasses import dataclass

from torchtitan_dp.config import JobConfig
from torchtitan_dp.config.checks import mesh_degrees
from torchtitan_dp.data.buckets import ladder
from torchtitan_dp.data.opening import noun, privacy_unit
from torchtitan_dp.privacy import accounting
from torchtitan_dp.privacy.segments import Segment as Mechanism


@dataclass(frozen=True)
class Settings:
    """What the guarantee depends on; fixed for a segment, at a run's first start."""

    noise_multiplier: float
    sample_rate: float
    max_grad_norm: float
    delta: float
    expected_batch_size: int
    accountant: accounting.Accountant
    sample_rate_source: str
    neighbouring_relation: str
    privacy_unit: str = "record"
    target_epsilon: float | None = None  # from which the noise followed, if it did
    mechanism: str = "poisson_sampled_gaussian"
    sampling: str = "poisson"
    clipping: str = "flat"
    clip_function: str = "vanilla"
    secure_noise: bool = False
    exact_sum: bool = False
    units: int | None = None  # where their number is public
    samples_per_rank: int | None = None  # hardly ever exceeded in a step, whatever is drawn
    ranks_added_up: int = 1  # the data-parallel ranks whose sums are added up

    def spending(self, steps: int) -> Mechanism:
        """What an accountant needs to know of `steps` steps on these terms."""
        return Mechanism(self.noise_multiplier, self.sample_rate, steps)

    @property
    def unit(self) -> str:
        """What is drawn, clipped and protected, in a word: a record, or a unit of several."""
        return self.privacy_unit.split()[0]

    @property
    def summands(self) -> int:
        """How many samples one rank adds up in a step, at most; a guess, where it is not known."""
        return self.samples_per_rank or 2 * self.expected_batch_size

    def epsilon(self, steps: int) -> float:
        """Spent by `steps` optimizer steps alone; infinite where there is no noise."""
        return accounting.epsilon(
            noise_multiplier=self.noise_multiplier,
            sample_rate=self.sample_rate,
            steps=steps,
            delta=self.delta,
            accountant=self.accountant,
        )

    def same_terms(self, other: "Settings", *, targets_too: bool = False) -> bool:
        """Whether a step on these terms spends what one on the others does."""
        if targets_too and self.target_epsilon != other.target_epsilon:
            return False
        return not _changes(self, other, {**_OF_A_SEGMENT, **_OF_A_RUN})

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
        """The same for what no new segment may change."""
        for key, now, before in _changes(self, since, _OF_A_RUN):
            raise ValueError(
                f"{key} = {now}: this run was started with {before}, which no new segment may "
                "change; set it back, or start afresh in another job.dump_folder"
            )


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
}
_OF_A_RUN = {
    "delta": "privacy.delta",
    "neighbouring_relation": "privacy.sample_rate",
    "privacy_unit": "data.unit_field",
}


def _changes(
    now: Settings, before: Settings, keys: dict[str, str]
) -> list[tuple[str, object, object]]:
    values = [(key, getattr(now, name), getattr(before, name)) for name, key in keys.items()]
    return [change for change in values if change[1] != change[2]]


def settings_of(config: JobConfig, records: int) -> Settings:
    """All that the configuration says of the guarantee, but for noise that follows from epsilon."""
    privacy, batch = config.privacy, config.training.global_batch_size
    if privacy.sample_rate is not None:
        rate, source, relation = privacy.sample_rate, "privacy.sample_rate", "add_remove"
    else:
        rate, relation = batch / records, "zero_out"
        source = f"training.global_batch_size / number of training {noun(config)}s"
        source += " (which is public)"
        if rate > 1:
            raise ValueError(
                f"training.global_batch_size = {batch}: more than the {records} training "
                f"{noun(config)}s, so the sample rate would exceed 1; use at most {records}"
            )
    assert privacy.delta is not None
    replicate, shard, _ = mesh_degrees(config)
    ranks = max(replicate, 1) * max(shard, 1)
    return Settings(
        noise_multiplier=privacy.noise_multiplier or 0.0,
        sample_rate=rate,
        max_grad_norm=float(privacy.max_grad_norm),
        delta=privacy.delta,
        expected_batch_size=batch,
        accountant=privacy.accountant,
        sample_rate_source=source,
        neighbouring_relation=relation,
        privacy_unit=privacy_unit(config),
        target_epsilon=privacy.target_epsilon,
        clipping=privacy.clipping,
        clip_function=privacy.clip_function,
        secure_noise=privacy.secure_noise,
        exact_sum=privacy.exact_sum,
        units=records if relation == "zero_out" else None,
        # Each length of the ladder is dealt out by itself, rounded up.
        samples_per_rank=math.ceil(_most_drawn(batch) / ranks) + len(ladder(config)),
        ranks_added_up=ranks,
    )


def _most_drawn(expected: int) -> int:
    """How many units a step hardly ever draws more of: once in 1e9 steps, whatever their number.

    A binomial tail is below that of the Poisson distribution of the same mean (Anderson & Samuels
    1967).
    """
    from scipy import stats  # a second to import

    return int(stats.poisson.isf(1e-9, expected))
