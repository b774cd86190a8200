"""The ledger of one lineage of weights: the terms of its steps, and the epsilon they spend.

Guarantee:
    `Ledger.epsilon` bounds what the weights at `steps` reveal: the composition of every segment of
    their own lineage, and of the lineage of the weights they started from, on any records. A new
    segment assumes that the change was fixed before training. "Not private" is never undone.
"""

import dataclasses
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torchtitan_dp.ledger.heldout import HeldOutLosses
from torchtitan_dp.ledger.settings import (
    NamedStep,
    RunSegment,
    Settings,
    name_steps,
    names_of_starts,
    new_name,
    step_names,
    union,
)
from torchtitan_dp.privacy import accounting
from torchtitan_dp.privacy.mechanism import (
    Mechanism,
    Segment,
    from_fields,
    steps_in_a_row,
    worst,
)

FORMAT = 1  # of a ledger in a checkpoint, and of `privacy.json`


@dataclass(frozen=True)
class Audit:
    """The mark of an audited run: its weights saw canaries, so they are not private."""

    canaries: int
    otherwise_private: bool  # so that publishing the audit's result spends what its steps do


@dataclass(frozen=True)
class Ancestor:
    """A run that the initial weights come from, with the steps that made them."""

    run: str
    segments: tuple[RunSegment, ...]
    step_names: str  # of the same steps, in order, separated by spaces
    planned_steps: int = 0  # of all of its steps, those above included
    lost: Segment | None = None  # by blocks: other steps that were begun in its folder
    evaluations: Segment | None = None  # a bound on its held-out losses, if any were published

    @property
    def left(self) -> int:
        """The number of steps that were planned and are not listed here."""
        return max(self.planned_steps - sum(segment.steps for segment in self.segments), 0)

    def taken(self) -> list[NamedStep]:
        """Return the steps that made the weights."""
        return name_steps(self.segments, self.step_names.split(), self.run)

    def fields(self) -> dict[str, Any]:
        """Return it as `privacy.json` and checkpoints record it."""
        return {
            **{f.name: getattr(self, f.name) for f in dataclasses.fields(self)},
            "segments": [segment.fields() for segment in self.segments],
            "lost": _lost_fields(self.lost),
            "evaluations": _lost_fields(self.evaluations),
        }

    @classmethod
    def from_fields(cls, fields: dict[str, Any]) -> "Ancestor":
        """Build it from what `fields` gives, here or in version 0.1.0."""
        names = fields.get("step_names")
        return cls(
            fields["run"],
            tuple(RunSegment.from_fields(segment) for segment in fields["segments"]),
            names_of_starts(fields["starts"]) if names is None else names,
            fields["planned_steps"],
            _lost_of(fields.get("lost")),
            _lost_of(fields.get("evaluations")),
        )


def taken_by(ancestors: Iterable[Ancestor]) -> list[NamedStep]:
    """Return the steps of all of them."""
    return [step for ancestor in ancestors for step in ancestor.taken()]


def still_planned_by(ancestors: Iterable[Ancestor]) -> list[Segment]:
    """Return the steps that they planned but did not take."""
    return [segment for a in ancestors for segment in _worst(a.segments, a.left, a.run)]


def most_evaluations(ancestors: Iterable[Ancestor]) -> list[Segment]:
    """Return bounds on the held-out losses of runs, of each the largest that is known: an older
    checkpoint lacks what a crash lost since."""
    most: dict[str, Segment] = {}
    for ancestor in ancestors:
        if (found := ancestor.evaluations) is not None:
            most[ancestor.run] = max(found, most.get(ancestor.run, found), key=_steps)
    return list(most.values())


def _steps(segment: Segment) -> int:
    return segment.steps


@dataclass
class Ledger:
    """The account of one lineage of weights."""

    settings: Settings  # of the current segment
    steps: int = 0  # of the lineage, in all segments
    private: bool = True
    caveats: list[str] = field(default_factory=list)
    finished: list[RunSegment] = field(default_factory=list)  # segments before this one
    step_names: str = ""  # of the steps before this start, in order, separated by spaces
    ancestors: list[Ancestor] = field(default_factory=list)
    audit: Audit | None = None
    planned_steps: int = 0  # the most that training.steps was
    run: str = field(default_factory=new_name)  # random and public, of the folder
    start: str = field(default_factory=new_name)  # the current one; secret
    lost: Segment | None = None  # by blocks: steps begun here beside the lineage, on worst terms
    lost_exactly: int = 0  # the number of these steps; private
    heldout_losses: HeldOutLosses | None = None  # if they are published
    config_hash: str = ""

    def mark_not_private(self, why: str) -> None:
        """Mark it as not private, and why, for good: both survive resume and initial load."""
        self.private = False
        self.add_caveat(why)

    def mark_audited(self, canaries: int) -> None:
        """Mark it as not private because canaries were trained on, whatever else it is."""
        self.audit = Audit(canaries, self.private)
        self.mark_not_private(f"audited: {canaries} canaries were trained on")

    @property
    def composes(self) -> bool:
        """Whether its steps spend a finite epsilon: of a private run, or of its audit."""
        return self.private or (self.audit is not None and self.audit.otherwise_private)

    def add_caveat(self, caveat: str) -> None:
        """Add an assumption that the guarantee rests on; it is never removed."""
        if caveat not in self.caveats:
            self.caveats.append(caveat)

    def inherit(self, earlier: "Ledger") -> None:
        """Take over the account of this run's earlier weights, from which these go on."""
        self.private = self.private and earlier.private
        self.caveats = list(dict.fromkeys([*self.caveats, *earlier.caveats]))
        self.ancestors = list(dict.fromkeys([*earlier.ancestors, *self.ancestors]))
        self.run = earlier.run
        if self.planned_steps > earlier.planned_steps > 0:
            self.add_caveat(
                f"training.steps was raised from {earlier.planned_steps} to {self.planned_steps} "
                "after the first start, which is assumed not to follow from results"
            )
        self.planned_steps = max(self.planned_steps, earlier.planned_steps)
        self.audit = self.audit or earlier.audit

    def resume_from(self, loaded: "Ledger", *, new_segment: bool) -> None:
        """Become the account of weights that were loaded, to be trained on with this one's terms.

        Exact norms and capped estimates may take each other's place without `new_segment`: that
        changes no epsilon. The norms of each step are recorded all the same.

        Args:
            new_segment: whether the terms may differ, by a change that was fixed before training.

        Raises:
            ValueError: the terms differ, and no new segment was asked for or may change them.
        """
        self.inherit(loaded)
        self.steps, self.finished = loaded.steps, list(loaded.finished)
        self.step_names = " ".join(loaded.names())
        self._keep_losses_of(loaded)
        now, then = self.settings, loaded.settings
        if now.same_segment(then):  # on whatever meshes: the worst of both
            self.settings = dataclasses.replace(
                now,
                samples_per_rank=max(now.summands, then.summands),
                ranks_added_up=max(now.ranks_added_up, then.ranks_added_up),
            )
            return
        if not now.same_terms(then):
            if not new_segment:
                now.refuse_change(since=then)
            now.refuse_change_of_run(since=then)
            self.add_caveat(_CHANGED)
        self.finished = [segment for segment in loaded.segments() if segment.steps > 0]

    def segments(self, steps: int | None = None) -> list[RunSegment]:
        """Return this folder's lineage by terms, up to `steps` (by default all that were taken)."""
        left = self.steps if steps is None else steps
        found = []
        for segment in self.finished:
            found.append(RunSegment(segment.settings, min(segment.steps, left)))
            left -= found[-1].steps
        return [*found, RunSegment(self.settings, left)]

    def names(self) -> list[str]:
        """Return the names of the same steps, all of them."""
        before = self.step_names.split()
        assert len(before) <= self.steps, (self.steps, len(before))
        return [*before, *step_names(self.start, self.steps - len(before))]

    def rewind(self) -> None:
        """Become the account of weights that no step of this lineage has changed yet."""
        self.steps, self.finished, self.step_names = 0, [], ""
        if self.heldout_losses is not None:
            self.heldout_losses = self.heldout_losses.kept()

    def go_back_to(self, weights: "Ledger") -> None:
        """Become the account of older weights of this lineage, on whose terms it began."""
        accountant = self.settings.accountant  # the folder's, by which its epsilon is published
        self.settings = dataclasses.replace(weights.settings, accountant=accountant)
        self.steps, self.start = weights.steps, weights.start
        self.finished, self.step_names = weights.finished, weights.step_names
        self._keep_losses_of(weights)

    def _keep_losses_of(self, weights: "Ledger") -> None:
        """Keep the held-out losses of the lineage of older weights alone."""
        if self.heldout_losses is not None:
            kept = weights.heldout_losses.losses if weights.heldout_losses else ()
            self.heldout_losses = self.heldout_losses.kept(*kept)

    def evaluated(self) -> list[str]:
        """Return the names of the steps of this lineage whose held-out losses were published."""
        if self.heldout_losses is None:
            return []
        names = self.names()
        return [names[loss.step - 1] for loss in self.heldout_losses.losses]

    def evaluations(self) -> Segment | None:
        """Return a bound on the held-out losses that were or will be published, if any."""
        losses = self.heldout_losses
        if losses is None:
            return None
        return losses.noise.segment(losses.evaluations(self.steps, self.planned_steps))

    def heldout_epsilon(self, delta: float | None = None) -> float:
        """Return the epsilon of all held-out losses that were or will be published, and of all that
        the runs behind the initial weights spent; by default at the losses' own delta."""
        losses = self.heldout_losses
        assert losses is not None
        behind = [*self.before(), *self.lost_before(), *still_planned_by(self.ancestors)]
        return losses.noise.epsilon(
            losses.evaluations(self.steps, self.planned_steps),
            delta=losses.delta if delta is None else delta,
            before=[*behind, *self.evaluations_before()],
        )

    def taken(self) -> list[NamedStep]:
        """Return the steps of this folder's lineage."""
        return name_steps(self.segments(), self.names(), self.run)

    def taken_before(self) -> list[NamedStep]:
        """Return the steps of the lineage of the initial weights."""
        return taken_by(self.ancestors)

    def taken_in_all(self) -> list[Segment]:
        """Return the steps of both lineages, each once."""
        return union([*self.taken_before(), *self.taken()])

    def before(self) -> list[Segment]:
        """Return the steps behind the initial weights, each once."""
        return union(self.taken_before())

    def published_lost(self) -> Segment:
        """Return the lost steps as they are published: by blocks, at least as many as were lost."""
        return self.lost or self.settings.spending(0)

    def lost_before(self) -> list[Segment]:
        """Return the lost steps of the runs behind the initial weights, as they were published."""
        most: dict[tuple[str, Mechanism], int] = {}
        for ancestor in self.ancestors:
            if (lost := ancestor.lost) is not None:
                which = ancestor.run, lost.mechanism
                most[which] = max(lost.steps, most.get(which, 0))
        return [Segment(mechanism, steps) for (_, mechanism), steps in most.items()]

    def evaluations_before(self) -> list[Segment]:
        """Return bounds on the held-out losses of the runs behind the initial weights, which may
        have been chosen by them."""
        return most_evaluations(self.ancestors)

    def spare(self) -> Segment:
        """Return the steps by which the published number of lost steps is above the true one."""
        lost = self.published_lost()
        return dataclasses.replace(lost, steps=lost.steps - self.lost_exactly)

    @property
    def steps_executed(self) -> int:
        """The number of steps ever begun in this folder, as it is published."""
        return self.steps + self.published_lost().steps

    def executed(self) -> list[Segment]:
        """Return every step ever begun, as published, also behind the initial weights, and the
        held-out losses there."""
        lost = [self.published_lost(), *self.lost_before()]
        return [*self.taken_in_all(), *lost, *self.evaluations_before()]

    def planned(self) -> list[Segment]:
        """Return the same steps, and those that are still planned."""
        return [*self.executed(), *self.still_planned()]

    def kept(self) -> list[Segment]:
        """Return the steps of the lineage, and the held-out losses behind the initial weights."""
        return [*self.taken_in_all(), *self.evaluations_before()]

    def kept_and_planned(self) -> list[Segment]:
        """Return the steps of the lineage, and those that are still planned: without lost ones."""
        return [*self.kept(), *self.still_planned()]

    @property
    def left(self) -> int:
        """The number of steps that are planned and were not taken by these weights."""
        return max(self.planned_steps - self.steps, 0)

    def still_planned(self) -> list[Segment]:
        """Return the steps that this run and those behind its initial weights planned but did not
        take, on the worst terms that each run had: better ones count for steps taken alone."""
        own = _worst(self.segments(), self.left, self.run)
        return [*own, *still_planned_by(self.ancestors)]

    def epsilon(self, steps: int | None = None) -> float:
        """Return the epsilon after `steps` steps of this lineage."""
        return self.compose([*self.before(), *self.own(steps)])

    def own(self, steps: int | None = None) -> list[Segment]:
        """Return this folder's lineage for an accountant, up to `steps`."""
        found: list[Segment] = []
        first = 1
        for part in self.segments(steps):
            found += steps_in_a_row(part.settings.mechanism, first, part.steps, self.run)
            first += part.steps
        return found

    def compose(self, segments: list[Segment]) -> float:
        """Return the epsilon of these segments one after the other, as this ledger accounts."""
        terms = self.settings
        return accounting.compose(segments, delta=terms.delta, accountant=terms.accountant)

    def to_json(self) -> str:
        """Write all of it, for a checkpoint."""
        return json.dumps({"format": FORMAT, **self.fields()})

    def fields(self) -> dict[str, Any]:
        """Return all of it, as `privacy.json` and checkpoints record it."""
        return {
            **{f.name: getattr(self, f.name) for f in dataclasses.fields(self)},
            "settings": self.settings.fields(),
            "finished": [segment.fields() for segment in self.finished],
            "ancestors": [ancestor.fields() for ancestor in self.ancestors],
            "audit": None if self.audit is None else dataclasses.asdict(self.audit),
            "lost": _lost_fields(self.lost),
            "heldout_losses": self.heldout_losses and self.heldout_losses.fields(),
        }

    @classmethod
    def from_json(cls, text: str) -> "Ledger":
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
    def from_fields(cls, fields: dict[str, Any]) -> "Ledger":
        """Build it from what `fields` gives, here or in version 0.1.0.

        Raises:
            ValueError: it has segments that this version cannot account for.
        """
        fields = dict(fields)
        if fields.pop("adaptive", False):
            raise ValueError(
                "its run had privacy.new_segment = 'adaptive', which this version does not account "
                "for"
            )
        fields.pop("budget", None)
        audit, lost, losses = (
            fields.pop(name, None) for name in ("audit", "lost", "heldout_losses")
        )
        if (starts := fields.pop("finished_starts", None)) is not None:
            fields["step_names"] = names_of_starts(starts)
        return cls(
            settings=Settings.from_fields(fields.pop("settings")),
            finished=[RunSegment.from_fields(segment) for segment in fields.pop("finished")],
            ancestors=[Ancestor.from_fields(ancestor) for ancestor in fields.pop("ancestors")],
            audit=None if audit is None else Audit(**audit),
            lost=_lost_of(lost),
            heldout_losses=None if losses is None else HeldOutLosses.from_fields(losses),
            **fields,
        )


def _lost_fields(lost: Segment | None) -> dict[str, Any] | None:
    return None if lost is None else {**lost.mechanism.fields(), "steps": lost.steps}


def _lost_of(fields: dict[str, Any] | None) -> Segment | None:
    return None if fields is None else Segment(from_fields(fields), fields["steps"])


_CHANGED = "the settings changed during training, in a way assumed to be fixed before it"


def _worst(segments: Sequence[RunSegment], steps: int, run: str) -> list[Segment]:
    """Return so many steps that follow these, of the worst mechanism that any of them has."""
    if not segments or steps == 0:
        return []
    mechanism = worst(segment.settings.mechanism for segment in segments)
    taken = sum(segment.steps for segment in segments)
    return steps_in_a_row(mechanism, taken + 1, steps, run)
