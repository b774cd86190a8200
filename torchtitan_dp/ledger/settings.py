"""The terms that steps are taken on, which of them may change, and the names of steps.

Each start of the trainer draws a random, secret name and numbers its steps. A step's own name is a
hash of the two, so that a step that several accounts list counts once, and names in `privacy.json`
hide which steps one start took: how many fitted into a job follows from how long they took, and so
from records.

Guarantee:
    `union` leaves out no step: it drops only steps whose name and terms are already there. A copied
    folder that was trained on in two places has two starts from there on, and so other names. Names
    of one start cannot be linked without its own name (SHA-256 of 128 random bits and a number),
    which is in the log of steps and in checkpoints, both private.
"""

import dataclasses
import hashlib
import itertools
import secrets
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torchtitan_dp.privacy import accounting
from torchtitan_dp.privacy.mechanism import Mechanism, Segment, from_fields


@dataclass(frozen=True)
class Settings:
    """The terms that the guarantee depends on, the same within a segment."""

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
    samples_per_rank: int | None = None  # hardly ever exceeded in a step, whatever is drawn
    ranks_added_up: int = 1  # the data-parallel ranks whose sums are added up

    def spending(self, steps: int) -> Segment:
        """Return `steps` steps on these terms for an accountant."""
        return Segment(self.mechanism.as_logged(), steps)

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
        of_a_segment = ", or open a new segment with privacy.new_segment"
        for of_a_run, remedy in ((False, of_a_segment), (True, "")):
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


_OF_A_RUN = {
    "privacy.delta": "delta",
    "privacy.sample_rate": "neighbouring_relation",
    "data.unit_field": "privacy_unit",
    "lora": "trained",
    "privacy.bands": "bands",
    "rope": "rope",
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


def new_name() -> str:
    """Draw a name of 128 random bits."""
    return secrets.token_hex(16)


def step_name(start: str, number: int) -> str:
    """Return the public name of a start's step, by the start's secret name; from 1."""
    return hashlib.sha256(f"{start} {number}".encode()).hexdigest()[:16]


def step_names(start: str, steps: int) -> list[str]:
    """Return the names of the first `steps` steps of a start."""
    return [step_name(start, number) for number in range(1, steps + 1)]


def names_of_starts(starts: Iterable[dict[str, Any]]) -> str:
    """Return the names of a lineage that version 0.1.0 listed by start: `[{name, steps}]`."""
    return " ".join(name for s in starts for name in step_names(s["name"], s["steps"]))


@dataclass(frozen=True)
class NamedStep:
    """A step, with its mechanism as a log records it."""

    name: str
    mechanism: Mechanism
    run: str = field(default="", compare=False)  # whose groups of units these are


def name_steps(segments: Sequence[RunSegment], names: Sequence[str], run: str) -> list[NamedStep]:
    """Return the steps of a run's lineage, with their mechanisms; names are in the segments'
    order."""
    number = itertools.count(1)
    mechanisms = [s.settings.mechanism.at(next(number)) for s in segments for _ in range(s.steps)]
    return [NamedStep(name, which, run) for name, which in zip(names, mechanisms, strict=True)]


def union(steps: Iterable[NamedStep]) -> list[Segment]:
    """Return all steps, each once, by mechanism, and groups by run too."""
    counts = Counter(
        (step.mechanism, "" if step.mechanism.group is None else step.run) for step in set(steps)
    )
    found = (Segment(mechanism, count, run) for (mechanism, run), count in counts.items())
    return sorted(found, key=lambda segment: segment.order)
