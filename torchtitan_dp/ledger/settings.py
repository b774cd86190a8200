"""The terms that a run's steps are taken on, those of its held-out losses, and the names of steps.

Each start of the trainer draws a random, secret name and numbers its steps. A step's own name is a
hash of the two, so that a step that several accounts list counts once, and names in `privacy.json`
hide which steps one start took: how many fitted into a job follows from how long they took, and so
from records.

Guarantee:
    `union` leaves out no step: it drops only steps whose name and terms are already there. A copied
    folder that was trained on in two places has two starts from there on, and so other names. Names
    of one start cannot be linked without its own name (SHA-256 of 128 random bits and a number),
    which is in the log of steps and in checkpoints, both private. `HeldOutLosses.evaluations` is at
    least the number of evaluations ever begun in the folder, and of those still planned. Held-out
    units are disjoint from trained ones by a rule on their names alone, so that a unit pays for
    evaluations or for steps, never for both.
"""

import dataclasses
import hashlib
import secrets
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torchtitan_dp.privacy import accounting
from torchtitan_dp.privacy.published_loss import LossNoise
from torchtitan_dp.privacy.segments import Mechanism, Segment


@dataclass(frozen=True)
class Settings:
    """The terms that the guarantee depends on, the same for all steps of a run."""

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
    trained: str = "all weights"
    rope: str = "as given"
    units: int | None = None  # where their number is public
    samples_per_rank: int | None = None  # hardly any draw exceeds it in a step
    ranks_added_up: int = 1  # the data-parallel ranks whose sums are added up

    def segment(self, steps: int) -> Segment:
        """Return `steps` steps in a row on these terms for an accountant."""
        return Segment(self.mechanism, steps)

    @property
    def unit(self) -> str:
        """One word for the privacy unit: a record, or a unit of several."""
        return self.privacy_unit.split()[0]

    @property
    def bands(self) -> int:
        """The number of groups of units that take turns; 1 for independent noise."""
        return self.mechanism.period

    @property
    def implied_units(self) -> int:
        """The number of units that the public rate stands for; their number need not be public."""
        return self.units or round(self.expected_batch_size / self.mechanism.sample_rate)

    @property
    def summands(self) -> int:
        """The most samples that one rank adds up in a step, guessed where it is unknown."""
        return self.samples_per_rank or 2 * self.expected_batch_size

    def epsilon(self, steps: int) -> float:
        """Compute the epsilon of `steps` optimizer steps alone; it is infinite without noise."""
        return accounting.compose(
            [self.segment(steps)], delta=self.delta, accountant=self.accountant
        )

    def changed(self, since: "Settings") -> str:
        """Return the first term that differs from `since`, with both values, or ""."""
        now, before = _by_key(self), _by_key(since)
        for key in now | before:
            if now.get(key) != before.get(key):
                return f"{key} = {now.get(key)}: this run was started with {before.get(key)}"
        return ""

    def refuse_change(self, since: "Settings") -> None:
        """Raise ValueError, one line, if a term differs from `since`."""
        if change := self.changed(since):
            raise ValueError(
                f"{change}; set it back, or start a run of its own from these weights (another "
                "job.dump_folder, checkpoint.initial_load_path), whose ledger counts their steps"
            )

    def on_either_mesh(self, other: "Settings") -> "Settings":
        """Return the same terms, of a run whose steps were taken on the meshes of both."""
        return dataclasses.replace(
            self,
            samples_per_rank=max(self.summands, other.summands),
            ranks_added_up=max(self.ranks_added_up, other.ranks_added_up),
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
        mechanism = Mechanism.from_fields(fields)
        own = {name: value for name, value in fields.items() if name not in mechanism.fields()}
        return cls(mechanism, **own)


def _by_key(settings: Settings) -> dict[str, object]:
    """Return the terms by the keys of the configuration that set them."""
    mechanism = settings.mechanism
    estimated = "accounted" if mechanism.projections else ""
    estimated = "capped" if mechanism.capped_projections else estimated
    return {
        # Of banded noise, its bands differ too.
        "privacy.sampling": "allocation" if mechanism.round_steps > 1 else "poisson",
        "privacy.noise_multiplier": mechanism.noise_multiplier,
        # Before the rate, which may follow from it: the key that was edited is named.
        "training.global_batch_size": settings.expected_batch_size,
        "privacy.sample_rate": mechanism.sample_rate,
        "privacy.sample_rate (neighbours)": settings.neighbouring_relation,
        "privacy.max_grad_norm": settings.max_grad_norm,
        "privacy.clipping": settings.clipping,
        "privacy.clip_function": settings.clip_function,
        "privacy.secure_noise": settings.secure_noise,
        "privacy.gradient_method": f"'randomized' with underestimates = '{estimated}'"
        if estimated
        else "one of exact norms",
        "privacy.projections": mechanism.projections or mechanism.capped_projections,
        "privacy.norm_estimator": mechanism.norm_estimator,
        "data.windows_per_draw": settings.windows_per_draw,
        "privacy.delta": settings.delta,
        "data.unit_field": settings.privacy_unit,
        "lora": settings.trained,
        "privacy.bands": settings.bands,
        "privacy.bands (coefficients)": mechanism.column,
        "rope": settings.rope,
    }


class NoisedLoss(NamedTuple):
    """The result of one evaluation of held-out units."""

    step: int
    loss: float  # nats
    standard_deviation: float  # of its noise


@dataclass(frozen=True)
class HeldOutLosses:
    """The terms of a folder's evaluations, and the results of those of a lineage of weights."""

    noise: LossNoise
    clip: float  # L, in nats
    delta: float
    target_epsilon: float  # from which the noise followed
    freq: int  # of evaluations, in steps
    lost: int = 0  # evaluations begun in the folder beside those of the lineage, as published
    losses: tuple[NoisedLoss, ...] = ()

    def evaluations(self, first: int, last: int) -> int:
        """Count evaluations: kept ones, lost ones, and those planned for steps first to last."""
        first = max(first, 1 + max((loss.step for loss in self.losses), default=0))
        return self.lost + len(self.losses) + scheduled(self.freq, first, last)

    def most_lost(self, steps: int, last: int) -> int:
        """Return the most evaluations that are lost with so many steps in a row, of 1 to `last`."""
        starts = 1, min(self.freq, last), max(last - steps + 1, 1)  # one of these has the most
        return max(_due(self.freq, at, min(at + steps - 1, last), last) for at in starts)

    def with_losses(self, *losses: NoisedLoss) -> "HeldOutLosses":
        """Return the same terms with these results."""
        return dataclasses.replace(self, losses=tuple(losses))

    def fields(self) -> dict[str, Any]:
        """Return it as `privacy.json` and checkpoints record it."""
        own = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        losses = [list(loss) for loss in self.losses]
        return {**own, "noise": self.noise.kind, "scale": self.noise.scale, "losses": losses}

    @classmethod
    def from_fields(cls, fields: dict[str, Any]) -> "HeldOutLosses":
        """Build it from what `fields` gives.

        Raises:
            KeyError, TypeError: a key is missing or unknown.
        """
        own = dict(fields)
        noise = LossNoise(own.pop("noise"), own.pop("scale"))
        losses = tuple(NoisedLoss(*loss) for loss in own.pop("losses"))
        return cls(noise, losses=losses, **own)


def scheduled(freq: int, first: int, last: int) -> int:
    """Count the evaluations of steps first to last: of step 1, of each multiple of `freq`, and of
    the last, which is the run's.

    >>> scheduled(10, 1, 40), scheduled(10, 2, 40), scheduled(10, 11, 19), scheduled(1, 1, 3)
    (5, 4, 1, 3)
    """
    return _due(freq, first, last, last)


def _due(freq: int, first: int, last: int, end: int) -> int:
    """Count the evaluations of steps first to last of a run whose last step is `end`."""
    if last < first:
        return 0
    ends = {step for step in (1, end) if first <= step <= last and step % freq}
    return last // freq - (first - 1) // freq + len(ends)


def new_name() -> str:
    """Draw a name of 128 random bits."""
    return secrets.token_hex(16)


def step_name(start: str, number: int) -> str:
    """Return the public name of a start's step, by the start's secret name; from 1."""
    return hashlib.sha256(f"{start} {number}".encode()).hexdigest()[:16]


def step_names(start: str, steps: int) -> list[str]:
    """Return the names of the first `steps` steps of a start."""
    return [step_name(start, number) for number in range(1, steps + 1)]


@dataclass(frozen=True)
class NamedStep:
    """A step with its mechanism, or a round of steps that count as a whole."""

    name: str
    mechanism: Mechanism
    run: str = field(default="", compare=False)  # whose groups of units these are


def name_steps(settings: Settings, names: Iterable[str], run: str) -> list[NamedStep]:
    """Return the steps of a run's lineage, by their names in order; of random allocation each
    round by the name of its first step, which belongs to one start (`lineage.resumed`)."""
    mechanism, t = settings.mechanism, settings.mechanism.round_steps
    return [
        NamedStep(name, mechanism.at(n), run)
        for n, name in enumerate(names, start=1)
        if (n - 1) % t == 0
    ]


def union(steps: Iterable[NamedStep]) -> list[Segment]:
    """Return all steps, each once, by mechanism, and groups by run too; whole rounds."""
    counts = Counter(
        (step.mechanism, "" if step.mechanism.group is None else step.run) for step in set(steps)
    )
    found = (
        Segment(mechanism, count * mechanism.round_steps, run)
        for (mechanism, run), count in counts.items()
    )
    return sorted(found, key=lambda segment: segment.order)
