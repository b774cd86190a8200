"""The ledger: the terms of a run's steps, and the history of its weights, as frozen values.

Guarantee:
    "Not private" is never undone, and no caveat is: both survive a resume and an initial load.
"""

import dataclasses
import json
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeVar

from torchtitan_dp.privacy import accounting
from torchtitan_dp.privacy.published_loss import releases
from torchtitan_dp.privacy.segments import Mechanism, Segment

FORMAT = 1  # of a ledger in a checkpoint, and of `privacy.json`
TRIAL = "a trial of a search: epsilon counts it alone, and choosing it spent what all trials did"


class _Recorded:
    def fields(self) -> dict[str, Any]:
        """Return the fields as `privacy.json` and checkpoints record them."""
        return {name: _plain(value) for name, value in vars(self).items()}


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain(one) for one in value]
    return value.fields() if isinstance(value, _Recorded | Mechanism) else value


@dataclass(frozen=True)
class Settings(_Recorded):
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
    def implied_units(self) -> int:
        """The number of units that the public rate stands for; their number need not be public."""
        return self.units or round(self.expected_batch_size / self.mechanism.sample_rate)

    @property
    def summands(self) -> int:
        """The most samples that one rank adds up in a step, guessed where it is unknown."""
        return self.samples_per_rank or 2 * self.expected_batch_size

    def epsilon(self, steps: int) -> float:
        """Compute the epsilon of `steps` optimizer steps alone; it is infinite without noise."""
        return self.compose([self.segment(steps)])

    def compose(self, segments: list[Segment]) -> float:
        """Compute the epsilon of segments one after the other, as this run accounts."""
        return accounting.compose(segments, delta=self.delta, accountant=self.accountant)

    def changed(self, since: "Settings") -> str:
        """Return the first term that differs from `since`, with both values, or ""."""
        now, before = _by_key(self), _by_key(since)
        for key in now | before:
            if now.get(key) != before.get(key):
                return f"{key} = {now.get(key)}: this run was started with {before.get(key)}"
        return ""

    def resumed(self, since: "Settings") -> "Settings":
        """Return the terms of a run that goes on from steps on the terms `since`, on either mesh;
        ValueError, one line, if a term differs."""
        if change := self.changed(since):
            raise ValueError(
                f"{change}; set it back; for another run name another job.dump_folder (exported "
                "weights go on by checkpoint.initial_load_path, with their ledger)"
            )
        return replace(
            self,
            samples_per_rank=max(self.summands, since.summands),
            ranks_added_up=max(self.ranks_added_up, since.ranks_added_up),
        )

    def fields(self) -> dict[str, Any]:
        """Return the terms, with the mechanism's own among them."""
        return super().fields() | self.mechanism.fields()

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> "Settings":
        """Build them from what `fields` gives; KeyError, TypeError or ValueError where a key is
        missing or out of its range."""
        own = {one.name: fields[one.name] for one in dataclasses.fields(cls)}
        return cls(**{**own, "mechanism": Mechanism.from_fields(dict(fields))})


def _by_key(settings: Settings) -> dict[str, object]:
    mechanism, method = settings.mechanism, "one of exact norms"
    if mechanism.projections or mechanism.capped_projections:
        how = "accounted" if mechanism.projections else "capped"
        method = f"'randomized' with underestimates = '{how}'"
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
        "privacy.gradient_method": method,
        "privacy.projections": mechanism.projections or mechanism.capped_projections,
        "privacy.norm_estimator": mechanism.norm_estimator,
        "data.windows_per_draw": settings.windows_per_draw,
        "privacy.delta": settings.delta,
        "data.unit_field": settings.privacy_unit,
        "lora": settings.trained,
        "privacy.bands": mechanism.period,
        "privacy.bands (coefficients)": mechanism.column,
    }


class NoisedLoss(NamedTuple):
    """A published held-out loss."""

    step: int
    loss: float  # nats
    standard_deviation: float  # of its noise


@dataclass(frozen=True)
class HeldOutLoss(_Recorded):
    """The terms on which a run publishes the held-out loss of its last weights."""

    noise_multiplier: float  # the noise's standard deviation over clip / number of units
    clip: float  # L, in nats
    delta: float
    target_epsilon: float  # from which the noise followed
    begun: int = 0  # releases in this folder, each counted before its noise was drawn
    noised: NoisedLoss | None = None  # the newest one of these weights

    def is_due(self, steps: int) -> bool:
        """Return whether the loss after so many steps, the last ones, is yet to be published."""
        return self.noised is None or self.noised.step < steps

    def releases(self, steps: int) -> Segment:
        """Return all releases of the folder, the one that is due after so many steps included."""
        return releases(self.noise_multiplier, self.begun + self.is_due(steps))

    @classmethod
    def from_fields(cls, fields: dict[str, Any]) -> "HeldOutLoss":
        """Build it from what `fields` gives; KeyError or TypeError where a key is not its own."""
        return cls(**{**fields, "noised": fields["noised"] and NoisedLoss(*fields["noised"])})


@dataclass(frozen=True)
class Ancestor(_Recorded):
    """A run whose exported or released weights this one, or an ancestor, started from."""

    run: str  # the name of that export: copies of a run have exports of different names
    settings: Settings
    steps: int  # of the weights
    planned_steps: int
    lost: int  # steps beside these, as published
    losses: int = 0  # releases of held-out losses, of this noise
    noise_of_losses: float = 0.0

    @property
    def left(self) -> int:
        """The number of steps that were planned and not taken."""
        return max(self.planned_steps - self.steps, 0)

    def spent(self) -> list[Segment]:
        """Return all that it ever began, or planned, as published."""
        found = [self.settings.segment(self.steps + self.left)]
        found += [self.settings.segment(self.lost)] if self.lost else []
        return found + ([releases(self.noise_of_losses, self.losses)] if self.losses else [])

    @classmethod
    def from_fields(cls, fields: dict[str, Any]) -> "Ancestor":
        """Build it from what `fields` gives."""
        return cls(**{**fields, "settings": Settings.from_fields(fields["settings"])})


@dataclass(frozen=True)
class Audit(_Recorded):
    """The mark of an audited run: its weights saw canaries, so they are not private."""

    canaries: int
    otherwise_private: bool  # but for the canaries: publishing the result then has an epsilon


def new_name() -> str:
    return secrets.token_hex(16)


@dataclass(frozen=True, kw_only=True)
class History(_Recorded):
    """What was done to a run's weights, and its marks, whatever the terms of the steps to come."""

    steps: int = 0  # of this run
    private: bool = True
    caveats: tuple[str, ...] = ()
    ancestors: tuple[Ancestor, ...] = ()
    audit: Audit | None = None
    planned_steps: int = 0  # the most that training.steps was
    run: str = field(default_factory=new_name)  # random and public, of the folder
    start: str = ""  # the random name of the start that took the last steps; in checkpoints alone
    lost: int = 0  # steps begun in the folder beside these, as published
    heldout_loss: HeldOutLoss | None = None  # if it is published
    config_hash: str = ""

    @property
    def is_trial(self) -> bool:
        """Whether it, or a run behind its initial weights, is a trial of a search."""
        return any(caveat.endswith(TRIAL) for caveat in self.caveats)

    @property
    def composes(self) -> bool:
        """Whether its steps spend a finite epsilon: of a private run, or of its audit."""
        return self.private or (self.audit is not None and self.audit.otherwise_private)

    @property
    def left(self) -> int:
        """The number of steps that are planned and were not taken by these weights."""
        return max(self.planned_steps - self.steps, 0)

    @property
    def steps_executed(self) -> int:
        """The number of steps ever begun in this folder, as it is published."""
        return self.steps + self.lost

    @property
    def losses(self) -> int:
        """The number of held-out losses ever published, or about to be."""
        return 0 if self.heldout_loss is None else self.heldout_loss.begun

    @property
    def published_losses(self) -> Segment | None:
        """All of these, with one that is still planned; None where none is."""
        last = self.steps + self.left
        return None if self.heldout_loss is None else self.heldout_loss.releases(last)


@dataclass(frozen=True)
class Lineage(History):
    """The ledger of one lineage of weights; a trainer has that of its present weights."""

    settings: Settings

    def to_json(self) -> str:
        return json.dumps({"format": FORMAT, **self.fields()})

    @classmethod
    def from_json(cls, text: str) -> "Lineage":
        """Read what `to_json` wrote; ValueError, KeyError or TypeError if it is no ledger."""
        fields = json.loads(text)
        if (found := fields.pop("format", None)) != FORMAT:
            raise ValueError(f"ledger format {found}, not {FORMAT}: use the version that wrote it")
        return cls.from_fields(fields)

    @classmethod
    def from_fields(cls, fields: dict[str, Any]) -> "Lineage":
        """Build it from what `fields` gives."""
        audit, loss = fields["audit"], fields["heldout_loss"]
        values = {
            "settings": Settings.from_fields(fields["settings"]),
            "caveats": tuple(fields["caveats"]),
            "ancestors": tuple(Ancestor.from_fields(one) for one in fields["ancestors"]),
            "audit": audit and Audit(**audit),
            "heldout_loss": loss and HeldOutLoss.from_fields(loss),
        }
        return cls(**(fields | values))


_History = TypeVar("_History", bound=History)


LATER = "after the first start, which is assumed not to follow from results"
"""The end of a caveat on what a resume changed."""


def with_caveats(history: _History, *caveats: str) -> _History:
    """Return it with more assumptions that the guarantee rests on; none is ever removed."""
    return replace(history, caveats=tuple(dict.fromkeys([*history.caveats, *caveats])))


def not_private(history: _History, why: str) -> _History:
    """Return it as not private, and why, for good."""
    return replace(with_caveats(history, why), private=False)


def audited(history: _History, canaries: int) -> _History:
    """Return it as not private because canaries were trained on, whatever else it is."""
    marked = replace(history, audit=Audit(canaries, history.private))
    return not_private(marked, f"audited: {canaries} canaries were trained on")


def of_weights(history: _History, weights: History) -> _History:
    """Return the history of other weights of the same run: its marks, their steps."""
    loss = history.heldout_loss
    if loss is not None and loss.noised is not None and loss.noised.step > weights.steps:
        loss = replace(loss, noised=None)
    return replace(history, steps=weights.steps, start=weights.start, heldout_loss=loss)
