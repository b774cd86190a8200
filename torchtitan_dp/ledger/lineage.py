"""One lineage of weights, a frozen value: the steps that made them, their terms and marks.

Guarantee:
    "Not private" is never undone, and no caveat is: both survive a resume and an initial load.
"""

import dataclasses
import json
from dataclasses import dataclass, field, replace
from typing import Any

from torchtitan_dp.ledger.settings import (
    HeldOutLosses,
    NamedStep,
    Settings,
    name_steps,
    new_name,
    step_names,
)
from torchtitan_dp.privacy.segments import Mechanism, Segment

FORMAT = 1  # of a ledger in a checkpoint, and of `privacy.json`
TRIAL = "a trial of a search: epsilon counts it alone, and choosing it spent what all trials did"


@dataclass(frozen=True)
class Audit:
    """The mark of an audited run: its weights saw canaries, so they are not private."""

    canaries: int
    otherwise_private: bool  # but for the canaries: publishing the result then has an epsilon


@dataclass(frozen=True)
class Ancestor:
    """A run that the initial weights come from, with the steps that made them."""

    run: str
    settings: Settings
    step_names: str  # in order, separated by spaces
    planned_steps: int = 0  # of all of its steps, those above included
    lost: int = 0  # other steps that were begun in its folder, as published
    any_begun: bool = False  # whether lost steps, too, may have made the weights
    evaluations: Segment | None = None  # a bound on its held-out losses, if any were published

    @property
    def steps(self) -> int:
        """The number of steps that made the weights."""
        return len(self.step_names.split())

    @property
    def left(self) -> int:
        """The number of steps that were planned and are not listed here."""
        return max(self.planned_steps - self.steps, 0)

    def taken(self) -> list[NamedStep]:
        """Return the steps that made the weights."""
        return name_steps(self.settings, self.step_names.split(), self.run)

    def fields(self) -> dict[str, Any]:
        """Return it as `privacy.json` and checkpoints record it."""
        losses = self.evaluations
        return {
            **{f.name: getattr(self, f.name) for f in dataclasses.fields(self)},
            "settings": self.settings.fields(),
            "evaluations": losses and {**losses.mechanism.fields(), "steps": losses.steps},
        }

    @classmethod
    def from_fields(cls, fields: dict[str, Any]) -> "Ancestor":
        """Build it from what `fields` gives."""
        losses = fields["evaluations"]
        return cls(
            **{
                **fields,
                "settings": Settings.from_fields(fields["settings"]),
                "evaluations": losses and Segment(Mechanism.from_fields(losses), losses["steps"]),
            }
        )


@dataclass(frozen=True)
class Lineage:
    """The ledger of one lineage of weights; a trainer has that of its present weights."""

    settings: Settings
    steps: int = 0  # of this run
    private: bool = True
    caveats: tuple[str, ...] = ()
    step_names: str = ""  # of the steps before this start, in order, separated by spaces
    ancestors: tuple[Ancestor, ...] = ()
    audit: Audit | None = None
    planned_steps: int = 0  # the most that training.steps was
    run: str = field(default_factory=new_name)  # random and public, of the folder
    start: str = field(default_factory=new_name)  # the current one; secret
    lost: int = 0  # steps begun in the folder beside the lineage, as published
    heldout_losses: HeldOutLosses | None = None  # if they are published
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

    def names(self) -> list[str]:
        """Return the names of this run's steps, in order."""
        before = self.step_names.split()
        assert len(before) <= self.steps, (self.steps, len(before))
        return [*before, *step_names(self.start, self.steps - len(before))]

    def taken(self) -> list[NamedStep]:
        """Return this run's steps."""
        return name_steps(self.settings, self.names(), self.run)

    def evaluated(self) -> list[str]:
        """Return the names of the steps of this lineage whose held-out losses were published."""
        if self.heldout_losses is None:
            return []
        names = self.names()
        return [names[loss.step - 1] for loss in self.heldout_losses.losses]

    def with_caveats(self, *caveats: str) -> "Lineage":
        """Return it with more assumptions that the guarantee rests on; none is ever removed."""
        return replace(self, caveats=tuple(dict.fromkeys([*self.caveats, *caveats])))

    def marked_not_private(self, why: str) -> "Lineage":
        """Return it as not private, and why, for good: both survive resume and initial load."""
        return replace(self.with_caveats(why), private=False)

    def marked_audited(self, canaries: int) -> "Lineage":
        """Return it as not private because canaries were trained on, whatever else it is."""
        audited = replace(self, audit=Audit(canaries, self.private))
        return audited.marked_not_private(f"audited: {canaries} canaries were trained on")

    def to_json(self) -> str:
        """Write all of it, for a checkpoint."""
        return json.dumps({"format": FORMAT, **self.fields()})

    def fields(self) -> dict[str, Any]:
        """Return all of it, as `privacy.json` and checkpoints record it."""
        return {
            **{f.name: getattr(self, f.name) for f in dataclasses.fields(self)},
            "settings": self.settings.fields(),
            "caveats": list(self.caveats),
            "ancestors": [ancestor.fields() for ancestor in self.ancestors],
            "audit": None if self.audit is None else dataclasses.asdict(self.audit),
            "heldout_losses": self.heldout_losses and self.heldout_losses.fields(),
        }

    @classmethod
    def from_json(cls, text: str) -> "Lineage":
        """Read what `to_json` wrote.

        Raises:
            ValueError: it is of another format; KeyError or TypeError: it is no ledger.
        """
        fields = json.loads(text)
        if (found := fields.pop("format", None)) != FORMAT:
            raise ValueError(
                f"a ledger of format {found}, and this version of torchtitan_dp reads {FORMAT}: "
                "use the version that wrote it"
            )
        return cls.from_fields(fields)

    @classmethod
    def from_fields(cls, fields: dict[str, Any]) -> "Lineage":
        """Build it from what `fields` gives."""
        audit, losses = fields["audit"], fields["heldout_losses"]
        return cls(
            **{
                **fields,
                "settings": Settings.from_fields(fields["settings"]),
                "caveats": tuple(fields["caveats"]),
                "ancestors": tuple(Ancestor.from_fields(one) for one in fields["ancestors"]),
                "audit": None if audit is None else Audit(**audit),
                "heldout_losses": None if losses is None else HeldOutLosses.from_fields(losses),
            }
        )


# How one lineage follows from another.


def of_weights(lineage: Lineage, weights: Lineage) -> Lineage:
    """Return the ledger of other weights of the same run: its terms and marks, their steps."""
    losses = lineage.heldout_losses
    if losses is not None:
        loaded = weights.heldout_losses
        losses = losses.with_losses(*(loaded.losses if loaded else ()))
    return replace(
        lineage,
        steps=weights.steps,
        start=weights.start,
        step_names=weights.step_names,
        heldout_losses=losses,
    )


def rewound(lineage: Lineage) -> Lineage:
    """Return the ledger of weights that no step of this run has changed yet."""
    return of_weights(lineage, Lineage(lineage.settings, start=lineage.start))


def inherited(now: Lineage, earlier: Lineage) -> Lineage:
    """Return a start's ledger with all marks of the run's earlier one, which are kept forever."""
    caveats = earlier.caveats
    if now.planned_steps > earlier.planned_steps > 0:
        caveats += (
            f"training.steps was raised from {earlier.planned_steps} to {now.planned_steps} after "
            "the first start, which is assumed not to follow from results",
        )
    return replace(
        now.with_caveats(*caveats),
        private=now.private and earlier.private,
        ancestors=tuple(dict.fromkeys([*earlier.ancestors, *now.ancestors])),
        run=earlier.run,
        planned_steps=max(now.planned_steps, earlier.planned_steps),
        audit=now.audit or earlier.audit,
    )


def resumed(now: Lineage, loaded: Lineage) -> Lineage:
    """Return the ledger of weights that were loaded, to be trained on by this start.

    A start begins rounds of random allocation, and never goes on with one, whose key is gone: so
    each round of a lineage belongs to one start, and its steps are ceil(steps / t) rounds.

    Raises:
        ValueError: the terms differ, or steps are left and the weights are inside a round.
    """
    now.settings.refuse_change(since=loaded.settings)
    refuse_inside_round(now, loaded.steps)
    settings = now.settings.on_either_mesh(loaded.settings)
    names = " ".join(loaded.names())
    found = of_weights(inherited(now, loaded), replace(loaded, step_names=names, start=now.start))
    return replace(found, settings=settings)


def refuse_inside_round(now: Lineage, steps: int) -> None:
    """Refuse, by ValueError, to train on from weights that are inside a round."""
    t = now.settings.mechanism.round_steps
    if steps % t and now.planned_steps > steps:
        raise ValueError(
            f"training.steps = {now.planned_steps}: these weights, after step {steps}, are inside "
            f"a round of {t} steps (privacy.sampling = 'allocation'), which ended there; start a "
            "run of its own from them (another job.dump_folder, checkpoint.initial_load_path), "
            "whose ledger counts their steps"
        )
