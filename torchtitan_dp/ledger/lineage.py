"""The account of one lineage of weights: on what terms its steps were taken, and what they spend.

Guarantee:
    `Ledger.epsilon` bounds what the weights at `steps` reveal: the composition of every segment of
    their own lineage, and of the lineage of the weights they started from, whatever records those
    saw. A segment opened as "planned" assumes that the change was fixed before training; once one
    was opened as "adaptive", `Account` tells of all steps ever begun, by a Renyi filter
    (`privacy.filter`) at an order and against a budget fixed at the first start. "Not private" is
    never undone.
"""

import dataclasses
import json
import math
from dataclasses import dataclass, field
from typing import Any, Literal

from torchtitan_dp.ledger.starts import Start, Stretch, new_name, stretches, union
from torchtitan_dp.privacy import accounting, filter
from torchtitan_dp.privacy.segments import Segment as Mechanism

NewSegment = Literal["planned", "adaptive"]


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

    def mechanism(self, steps: int) -> Mechanism:
        """What an accountant needs to know of `steps` steps on these terms."""
        return Mechanism(self.noise_multiplier, self.sample_rate, steps)

    def epsilon(self, steps: int) -> float:
        """Spent by `steps` optimizer steps alone; infinite where there is no noise."""
        return accounting.epsilon(
            noise_multiplier=self.noise_multiplier,
            sample_rate=self.sample_rate,
            steps=steps,
            delta=self.delta,
            accountant=self.accountant,
        )

    def is_as(self, other: "Settings", *, targets_too: bool = False) -> bool:
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


@dataclass(frozen=True)
class Segment:
    """Steps taken on the same terms."""

    settings: Settings
    steps: int

    def mechanism(self) -> Mechanism:
        return self.settings.mechanism(self.steps)


@dataclass(frozen=True)
class Budget:
    """Of the Renyi filter that adaptive segments must stay within; fixed at the first start."""

    epsilon: float
    order: float


@dataclass(frozen=True)
class Ancestor:
    """A run that the initial weights come from, and the steps that made them."""

    run: str
    segments: tuple[Segment, ...]
    starts: tuple[Start, ...]

    def stretches(self) -> list[Stretch]:
        return stretches(self.segments, self.starts)


@dataclass
class Ledger:
    """The account of one lineage of weights."""

    settings: Settings  # of the segment that goes on
    steps: int = 0  # of the lineage, in all segments
    private: bool = True
    caveats: list[str] = field(default_factory=list)
    finished: list[Segment] = field(default_factory=list)  # segments before this one
    finished_starts: list[Start] = field(default_factory=list)  # of the same steps and more
    ancestors: list[Ancestor] = field(default_factory=list)
    budget: Budget | None = None
    adaptive: bool = False  # a segment was opened after results were seen
    planned_steps: int = 0  # the most that training.steps was
    run: str = field(default_factory=new_name)  # random and public, of the folder
    start: str = field(default_factory=new_name)  # the one that goes on
    config_hash: str = ""

    def mark_not_private(self, why: str) -> None:
        """For good: it survives resume and initial load."""
        self.private = False
        self.add_caveat(why)

    def add_caveat(self, caveat: str) -> None:
        """An assumption that the guarantee rests on; never removed."""
        if caveat not in self.caveats:
            self.caveats.append(caveat)

    def inherit(self, earlier: "Ledger", new_segment: NewSegment | None = None) -> None:
        """What was said of this run's earlier weights stays said of those that go on from them.

        Args:
            new_segment: how more steps than were planned came about, too.
        """
        self.private = self.private and earlier.private
        self.caveats = list(dict.fromkeys([*self.caveats, *earlier.caveats]))
        self.ancestors = list(dict.fromkeys([*earlier.ancestors, *self.ancestors]))
        self.adaptive = self.adaptive or earlier.adaptive
        self.budget, self.run = earlier.budget, earlier.run
        raised = self.planned_steps > earlier.planned_steps > 0
        if raised and new_segment == "adaptive":
            self.adaptive = True
            self.add_caveat(_CAVEATS["adaptive"])
        elif raised and not self.adaptive:
            self.add_caveat(
                f"training.steps was raised from {earlier.planned_steps} to {self.planned_steps} "
                "after the first start, which is assumed not to follow from results"
            )
        self.planned_steps = max(self.planned_steps, earlier.planned_steps)

    def go_on_from(self, loaded: "Ledger", new_segment: NewSegment | None) -> None:
        """Become the account of weights that were loaded, to be trained on with this one's terms.

        Raises:
            ValueError: the terms differ, and no new segment was asked for or may change them.
        """
        self.inherit(loaded, new_segment)
        self.steps, self.finished = loaded.steps, list(loaded.finished)
        self.finished_starts = [start for start in loaded.starts() if start.steps > 0]
        if self.settings.is_as(loaded.settings):
            return
        if new_segment is None:
            self.settings.refuse_change(since=loaded.settings)
        self.settings.refuse_change_of_run(since=loaded.settings)
        self.finished = [segment for segment in loaded.segments() if segment.steps > 0]
        self.adaptive = self.adaptive or new_segment == "adaptive"
        self.add_caveat(_CAVEATS[new_segment or "planned"])

    def segments(self, steps: int | None = None) -> list[Segment]:
        """Those of this folder's lineage, up to `steps` (by default all that were taken)."""
        left = self.steps if steps is None else steps
        found = []
        for segment in self.finished:
            found.append(Segment(segment.settings, min(segment.steps, left)))
            left -= found[-1].steps
        return [*found, Segment(self.settings, left)]

    def starts(self) -> list[Start]:
        """The same steps by the starts of the trainer that took them."""
        current = self.steps - sum(start.steps for start in self.finished_starts)
        assert current >= 0, (self.steps, self.finished_starts)
        return [*self.finished_starts, Start(self.start, current)]

    def rewind(self) -> None:
        """Become the account of weights that no step of this lineage has changed yet."""
        self.steps, self.finished, self.finished_starts = 0, [], []

    def stretches(self) -> list[Stretch]:
        """Of this folder's lineage."""
        return stretches(self.segments(), self.starts())

    def stretches_before(self) -> list[Stretch]:
        """Of the lineage of the initial weights."""
        return [stretch for ancestor in self.ancestors for stretch in ancestor.stretches()]

    def before(self) -> list[Mechanism]:
        """What initial weights had spent."""
        return union(self.stretches_before())

    def epsilon(self, steps: int | None = None) -> float:
        """Spent after `steps` steps of this lineage."""
        own = [segment.mechanism() for segment in self.segments(steps)]
        return self.compose([*self.before(), *own])

    def compose(self, segments: list[Mechanism]) -> float:
        """The epsilon of these segments one after the other, as this ledger accounts."""
        delta = self.settings.delta
        if self.adaptive and self.budget is not None:
            # The theorem bounds what may be spent, not what was: how much that is tells of results.
            spent = filter.adaptive_epsilon(segments, self.budget.order, delta)
            return max(self.budget.epsilon, spent)
        return accounting.compose(segments, delta=delta, accountant=self.settings.accountant)

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Ledger":
        return cls.from_fields(json.loads(text))

    @classmethod
    def from_fields(cls, fields: dict[str, Any]) -> "Ledger":
        """From what `dataclasses.asdict` gives."""
        fields = dict(fields)
        budget = fields.pop("budget")
        return cls(
            settings=Settings(**fields.pop("settings")),
            finished=_segments(fields.pop("finished")),
            finished_starts=[Start(**start) for start in fields.pop("finished_starts")],
            ancestors=[
                Ancestor(
                    ancestor["run"],
                    tuple(_segments(ancestor["segments"])),
                    tuple(Start(**start) for start in ancestor["starts"]),
                )
                for ancestor in fields.pop("ancestors")
            ],
            budget=None if budget is None else Budget(**budget),
            **fields,
        )


_CAVEATS = {
    "planned": "the settings changed during training, in a way assumed to be fixed before it",
    "adaptive": "settings were chosen after results were seen: epsilon is that of a Renyi filter",
}


def _segments(listed: list[dict[str, Any]]) -> list[Segment]:
    return [Segment(Settings(**segment["settings"]), segment["steps"]) for segment in listed]


def fix_budget(settings: Settings, steps: int, before: list[Mechanism]) -> Budget | None:
    """The filter's terms, from what is planned at the first start; None without noise."""
    if settings.noise_multiplier == 0 or not all(s.noise_multiplier > 0 for s in before):
        return None
    planned = [*before, settings.mechanism(steps)]
    order = filter.fix_order(planned, settings.delta)
    epsilon = filter.adaptive_epsilon(planned, order, settings.delta)
    return Budget(epsilon, order) if math.isfinite(epsilon) else None
