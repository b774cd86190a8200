"""The private logs of a folder, and the number of lost steps that follows from them.

    starts.log           begin NAME and three pairs of steps and held-out losses: where it begins,
                         the most that a crash loses, and those of a checkpoint interval
                         saved NAME and the pair that a durable checkpoint has
                         end NAME and the pair, all of which was kept
    steps_executed.log   STEP NAME, before the update; 0 =STEP_NAME if it was taken elsewhere
    evaluations.log      STEP_NAME NAME, before a held-out loss is noised; STEP_NAME = if elsewhere

Guarantee:
    Lost steps follow from public events alone: starts, checkpoints, crashes. A start that did not
    end counts as the number that it declared; a load from step b after a checkpoint of step a > b
    counts as a - b, in whole intervals; `begin_step` refuses more steps than declared since the
    last durable checkpoint, before its noise is drawn. So steps and lost ones are never fewer than
    those begun: of starts that began at b_1 = 0, b_2, … and last saved a_1, a_2, …, each took at
    most a_i - b_i and what it declared, and b_k + sum(a_i - b_(i+1)) = sum(a_i - b_i), whatever was
    loaded. The same holds for held-out losses and, in whole periods, for the steps of each group of
    correlated noise; in whole rounds too, for random allocation, each of whose starts begins one.
    `steps_executed.log` cross-checks: how many steps a start took follows from how long they took,
    and so from records, and is never published.
"""

import dataclasses
import os
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from torchtitan_dp.ledger.lineage import Lineage
from torchtitan_dp.ledger.settings import new_name, step_name
from torchtitan_dp.process import Fault, private_opener

EXECUTED_FILE = "steps_executed.log"
STARTS_FILE = "starts.log"
EVALUATIONS_FILE = "evaluations.log"
STEPS_ELSEWHERE = (
    "steps of these weights were taken in another folder, whose log was not copied with them: "
    "steps and held-out losses lost there are not counted (add that folder with python -m "
    "torchtitan_dp.ledger)"
)
_TORN = "torn"
_ELSEWHERE = "="  # in the place of a start, or before the name of a step


class Losable(NamedTuple):
    """The steps that a start may lose."""

    most: int  # in a crash
    interval: int  # between two checkpoints


class Tally(NamedTuple):
    """Steps and held-out losses, of a lineage or lost."""

    steps: int = 0
    evaluations: int = 0

    @classmethod
    def of(cls, lineage: Lineage) -> "Tally":
        """Count those of a lineage."""
        losses = lineage.heldout_losses
        return cls(lineage.steps, 0 if losses is None else len(losses.losses))


@dataclass
class _Start:
    """A start that began to train."""

    at: Tally  # where it began
    declared: Tally  # the most that it loses in a crash
    interval: Tally
    saved: Tally  # of its last durable checkpoint
    ended: bool = False  # with all of its steps kept

    def behind(self, at: Tally) -> Tally:
        """Return the tally that a load from `at` loses, in whole intervals."""
        intervals = max(0, -(-(self.saved.steps - at.steps) // self.interval.steps))
        return Tally(
            intervals * self.interval.steps,
            max(intervals * self.interval.evaluations, self.saved.evaluations - at.evaluations),
        )


class AppendOnly:
    """A private file of lines, each synced before the event that it announces. A crash may tear the
    last line: its event did not happen, and it neither swallows the next nor passes for whole."""

    def __init__(self, path: str, parse: Callable[[list[str]], None]) -> None:
        """Read the file, if there is one.

        Args:
            parse: called with the words of each whole line; raises ValueError if it is not ours.

        Raises:
            ValueError: one line, with the path and the line's number.
        """
        self._path = path
        content = b""
        if os.path.exists(path):
            with open(path, "rb") as file:
                content = file.read()
        self._size = len(content)
        self._tail_is_torn = content != b"" and not content.endswith(b"\n")
        lines = content.decode("ascii", errors="replace").splitlines()
        self.torn = 0
        for number, line in enumerate(lines, start=1):
            if line.endswith(_TORN) or (self._tail_is_torn and number == len(lines)):
                self.torn += 1
                continue
            try:
                parse(line.split())
            except (ValueError, KeyError):
                raise ValueError(
                    f"{path}, line {number}: '{line[:40]}' was not written by a run; restore the "
                    "file, or use another job.dump_folder"
                ) from None

    def append(self, *lines: str) -> None:
        """Append lines and sync them, and the file's folder if it is new.

        Raises:
            Fault: the file has another size than it was read or left with.
        """
        content = (f" {_TORN}\n" * self._tail_is_torn + "".join(f"{s}\n" for s in lines)).encode()
        is_new = not os.path.exists(self._path)
        with open(self._path, "ab", opener=private_opener) as file:
            if self._size != os.fstat(file.fileno()).st_size:  # the lock was removed, or is none
                raise Fault(
                    f"{self._path} was changed since this run read it: another run writes to the "
                    "same job.dump_folder, or the file was edited; end the other run, and start "
                    "this one again"
                )
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        self._tail_is_torn = False
        self._size += len(content)
        if is_new:  # a new file's name is on disk only when its folder is
            descriptor = os.open(os.path.dirname(self._path), os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)


class RunLog:
    """All starts of a folder, and all steps and held-out losses ever begun there. Rank 0 writes."""

    def __init__(self, folder: str) -> None:
        """Read the files, if there are any; raise ValueError if one is not ours."""
        self._starts: dict[str, _Start] = {}
        self._taken: Counter[str] = Counter()  # steps by start
        self._begun: set[str] = set()  # the names of steps
        self._evaluated: set[str] = set()  # the names of steps after which losses were evaluated
        self._of_starts = AppendOnly(os.path.join(folder, STARTS_FILE), self._read_start)
        self._of_steps = AppendOnly(os.path.join(folder, EXECUTED_FILE), self._read_step)
        self._of_losses = AppendOnly(os.path.join(folder, EVALUATIONS_FILE), self._read_evaluation)
        self._start = new_name()
        self._evaluated_after: list[int] = []  # by this start, the numbers of steps

    @property
    def count(self) -> int:
        """The number of steps ever begun, here or elsewhere by the weights that were loaded."""
        return len(self._begun)

    def new_start(self) -> str:
        """Draw the name of the steps that begin from now on: at each start, and at each load."""
        self._start, self._evaluated_after = new_name(), []
        return self._start

    def begin_start(self, lineage: Lineage, loses: Losable) -> None:
        """Record that this start is about to draw its first units, and the most that it loses.

        Raises:
            Fault: more steps were begun than are published.
        """
        if problem := self.undercounted(lineage):
            raise Fault(f"{problem}; restore the logs as the run wrote them")
        at, losses = Tally.of(lineage), lineage.heldout_losses
        last = max(lineage.planned_steps, 1)
        most, interval = (Tally(n, losses.most_lost(n, last) if losses else 0) for n in loses)
        self._starts[self._start] = _Start(at, most, interval, saved=at)
        self._of_starts.append(_line("begin", self._start, at, most, interval))

    def saved(self, step: int) -> None:
        """Record that a checkpoint of `step` is durable."""
        self._keep("saved", step)

    def end_start(self, step: int) -> None:
        """Record that this start ends after `step`, with all of its steps kept."""
        if self._start in self._starts:  # else no step was left
            self._keep("end", step)
            self._starts[self._start].ended = True

    def begin_step(self, step: int) -> None:
        """Record that `step`'s update is about to happen.

        Raises:
            Fault: a crash would lose more steps than this start declared.
        """
        start = self._starts[self._start]
        number = self._taken[self._start] + 1
        assert step == start.at.steps + number, (step, start.at.steps, number)
        self._refuse_more(step - start.saved.steps, start.declared.steps, f"step {step}")
        self._of_steps.append(f"{step} {self._start}")
        self._taken[self._start] = number
        self._begun.add(step_name(self._start, number))

    def begin_evaluation(self) -> None:
        """Record that the held-out loss after the last step is about to be published.

        Raises:
            Fault: a crash would lose more of them than this start declared.
        """
        start, number = self._starts[self._start], self._taken[self._start]
        unsaved = start.at.evaluations + len(self._evaluated_after) + 1 - start.saved.evaluations
        self._refuse_more(unsaved, start.declared.evaluations, "a held-out loss")
        name = step_name(self._start, number)
        self._of_losses.append(f"{name} {self._start}")
        self._evaluated.add(name)
        self._evaluated_after.append(start.at.steps + number)

    def adopt(self, lineage: Lineage) -> None:
        """Add steps and held-out losses of a checkpoint that came without (all of) its logs, as
        those of a start of its own from nothing."""
        steps = [name for name in lineage.names() if name not in self._begun]
        evaluated = [name for name in lineage.evaluated() if name not in self._evaluated]
        if not steps and not evaluated:
            return
        at, name, interval = Tally.of(lineage), new_name(), Tally(1, 0)
        self._starts[name] = _Start(Tally(), Tally(), interval, saved=at, ended=True)
        begin = _line("begin", name, Tally(), Tally(), interval)
        self._of_starts.append(begin, _line("end", name, at))
        if steps:
            self._of_steps.append(*(f"0 {_ELSEWHERE}{step}" for step in steps))
        if evaluated:
            self._of_losses.append(*(f"{step} {_ELSEWHERE}" for step in evaluated))
        self._begun.update(steps)
        self._evaluated.update(evaluated)

    def missing(self, lineage: Lineage) -> Tally:
        """Count the steps and held-out losses of a lineage that have no line here."""
        return Tally(
            sum(name not in self._begun for name in lineage.names()),
            sum(name not in self._evaluated for name in lineage.evaluated()),
        )

    def undercounted(self, lineage: Lineage) -> str:
        """Return the contradiction between what was begun and what is published, or ""."""
        published, losses = lineage.steps_executed, lineage.heldout_losses
        if self.count > published:
            return f"{EXECUTED_FILE} has {self.count} steps, but {STARTS_FILE} leads to {published}"
        if losses is not None and len(self._evaluated) > losses.lost + len(losses.losses):
            return f"{EVALUATIONS_FILE} has more held-out losses than {STARTS_FILE} leads to"
        return ""

    def opened(self, lineage: Lineage) -> Lineage:
        """Return the ledger of a start that loaded these weights; steps that the logs lack were
        taken elsewhere, and are entered."""
        if any(self.missing(lineage)):
            lineage = lineage.with_caveats(STEPS_ELSEWHERE)
            self.adopt(lineage)
        return self.enter_lost(lineage)

    def enter_lost(self, lineage: Lineage) -> Lineage:
        """Return the lineage with what was lost in this folder, if its weights were loaded now.

        Of correlated noise each part is whole periods, of random allocation whole rounds, so that
        all together are dominated as steps in a row are.
        """
        starts = list(self._starts.values())
        lost = [start.declared for start in starts if not start.ended]
        loads = [*(start.at for start in starts[1:]), Tally.of(lineage)]
        lost += [start.behind(at) for start, at in zip(starts, loads, strict=False)]
        largest = max((start.declared for start in starts), default=Tally(1, 1))
        lost += [largest] * self._of_starts.torn
        mechanism, losses = lineage.settings.mechanism, lineage.heldout_losses
        whole = mechanism.period * mechanism.round_steps  # one of them is 1
        if losses is not None:
            losses = dataclasses.replace(losses, lost=sum(part.evaluations for part in lost))
        steps = sum(-(-part.steps // whole) * whole for part in lost)
        return dataclasses.replace(lineage, lost=steps, heldout_losses=losses)

    def _refuse_more(self, unsaved: int, declared: int, what: str) -> None:
        if unsaved > declared:
            raise Fault(
                f"{what} is not taken: since the last whole checkpoint, of step "
                f"{self._starts[self._start].saved.steps}, a crash would lose {unsaved}, and at "
                f"most {declared} are counted (checkpoint.interval); start the run again"
            )

    def _keep(self, event: str, step: int) -> None:
        start = self._starts[self._start]
        evaluated = sum(after <= step for after in self._evaluated_after)
        start.saved = Tally(step, start.at.evaluations + evaluated)
        self._of_starts.append(_line(event, self._start, start.saved))

    def _read_start(self, words: list[str]) -> None:
        event, name, *rest = words
        numbers = [int(word) for word in rest]
        if event == "begin":
            at, most, interval = (Tally(*numbers[i : i + 2]) for i in (0, 2, 4))
            if len(numbers) != 6 or min(numbers) < 0 or interval.steps < 1:
                raise ValueError(rest)
            self._starts[name] = _Start(at, most, interval, saved=at)
            return
        if event not in ("saved", "end") or len(numbers) != 2:
            raise ValueError(words)
        self._starts[name].saved = Tally(*numbers)
        self._starts[name].ended = event == "end"

    def _read_step(self, words: list[str]) -> None:
        step, start = words
        if start.startswith(_ELSEWHERE):
            self._begun.add(start.removeprefix(_ELSEWHERE))
            return
        int(step)
        self._taken[start] += 1
        self._begun.add(step_name(start, self._taken[start]))

    def _read_evaluation(self, words: list[str]) -> None:
        name, _ = words
        self._evaluated.add(name)


def _line(event: str, start: str, *tallies: Tally) -> str:
    return " ".join(map(str, (event, start, *(number for tally in tallies for number in tally))))
