"""The private logs of a folder: every step ever begun there, and every start that began to train.

Guarantee:
    `steps_executed.log` has a line, synced before the update, for every step ever begun in this
    folder, with its noise, rate and start: lost and abandoned ones too. `starts.log` has a line,
    synced before the first draw, for every start, and one for each end at which all of its steps
    were saved. `evaluations.log` has a line, synced before the noise is drawn, for every held-out
    loss that is published. Nothing in them is computed from the content of records; but how many
    steps a start took follows from how long they took, so none is ever published.
"""

import dataclasses
import hashlib
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from torchtitan_dp.ledger.heldout import HeldOutLosses
from torchtitan_dp.ledger.lineage import Ledger
from torchtitan_dp.ledger.settings import NamedStep, Settings, new_name, step_name, step_names
from torchtitan_dp.privacy.mechanism import Segment, from_log, worst
from torchtitan_dp.process import Fault, private_opener

EXECUTED_FILE = "steps_executed.log"
STARTS_FILE = "starts.log"
EVALUATIONS_FILE = "evaluations.log"
_TORN = "torn"
_NAMED = "="  # before the name of a step itself, where its start is not known


class ExecutedSteps:
    """Every step begun in a folder, a line `step sigma rate start` each, appended only.

    Further words of its mechanism may follow. A step that was begun elsewhere, and is known from
    its checkpoint, has the number 0 and `=name` for a start.
    """

    def __init__(self, folder: str) -> None:
        """Read the files, if there are any; raise ValueError if one is not ours."""
        self._start = new_name()
        self._folder = folder
        self._path = os.path.join(folder, EXECUTED_FILE)
        self._begun: dict[NamedStep, str] = {}  # in their order, with their start; "": not known
        self._taken: Counter[str] = Counter()  # steps by start
        self._torn = 0  # lines whose terms were lost: counted on the worst terms
        self._torn_name = ""  # of their own in each folder: copies may tear at different steps
        self._tail_is_torn = False
        self._size = 0  # in bytes, as this object read or left it
        if os.path.exists(self._path):
            self._read()
        self._starts = _read_starts(os.path.join(folder, STARTS_FILE))
        self._evaluated = _read_evaluations(os.path.join(folder, EVALUATIONS_FILE))

    @property
    def count(self) -> int:
        """The number of steps ever begun."""
        return len(self._begun) + self._torn

    def new_start(self) -> str:
        """Draw the name of the steps that begin from now on: at each start, and at each load."""
        self._start = new_name()
        return self._start

    def begin_start(self, most_lost: int, losses: HeldOutLosses | None = None) -> None:
        """Record, durably, that this start is about to draw its first units, and the steps that it
        counts as lost if it crashes, with their held-out losses. Call on one rank.

        Args:
            losses: the terms of those that are published, if any are.
        """
        line = StartLine(most_lost, None if losses is None else losses.most_lost(most_lost))
        self._starts[self._start] = line
        counts = f"{most_lost}" if losses is None else f"{most_lost} {line.evaluations}"
        self._append_start(f"begin {self._start} {counts}")

    def end_start(self) -> None:
        """Record that this start ends with all of its steps saved. Call on one rank."""
        if self._start in self._starts:
            self._starts[self._start].ended = True
        self._append_start(f"end {self._start}")

    def begin(self, step: int, settings: Settings) -> None:
        """Record, durably, that `step`'s update is about to happen. Call on one rank."""
        number = self._taken[self._start] + 1
        begun = NamedStep(step_name(self._start, number), settings.mechanism.at(step))
        self._append_steps(step, [(self._start, begun)])
        self._taken[self._start] = number

    def begin_evaluation(self) -> None:
        """Record, durably, that the held-out loss after the last step is about to be published.
        Call on one rank."""
        self._append_evaluation(step_name(self._start, self._taken[self._start]), self._start)

    def adopt(self, lineage: Iterable[NamedStep], evaluated: Iterable[str] = ()) -> None:
        """Add steps and evaluations of a checkpoint that came without (all of) its logs. Call on
        one rank."""
        missing = [(_NAMED + step.name, step) for step in lineage if step not in self._begun]
        if missing:
            self._append_steps(0, missing)
        for name in evaluated:
            if name not in self._evaluated:
                self._append_evaluation(name, _NAMED)

    def missing(self, lineage: Iterable[NamedStep], evaluated: Iterable[str] = ()) -> int:
        """Count the steps and evaluations of a lineage that have no line here."""
        evaluations = sum(name not in self._evaluated for name in evaluated)
        return evaluations + sum(step not in self._begun for step in lineage)

    def begun(self, settings: Settings) -> list[NamedStep]:
        """Return all steps ever begun; torn lines as steps of a start of their own, on the worst
        mechanism that is known, that of `settings` included."""
        found = list(self._begun)
        of_torn = worst({settings.mechanism.as_logged(), *(step.mechanism for step in found)})
        torn = step_names(self._torn_name, self._torn)
        return [*found, *(NamedStep(name, of_torn.at_unknown()) for name in torn)]

    def enter_lost(self, ledger: Ledger, also: Iterable[NamedStep] = ()) -> None:
        """Enter into a ledger the steps that were begun in this folder and are not of its lineage.

        Args:
            also: steps that are known to have been begun here, whatever the log has.
        """
        lineage = set(ledger.taken())
        present = ledger.settings.mechanism.as_logged()
        begun = {*self.begun(ledger.settings), *also}
        of_lost = worst({present, *(step.mechanism for step in begun | lineage)})
        lost = begun - lineage
        counted = self._by_blocks(lost, present.period)
        ledger.lost = Segment(of_lost, counted) if counted else None
        ledger.lost_exactly = len(lost)
        if (losses := ledger.heldout_losses) is not None:
            kept = set(ledger.evaluated())
            by_start = Counter(s for name, s in self._evaluated.items() if name not in kept)
            found = self._in_blocks(by_start, lambda start: start.evaluations_of(losses))
            ledger.heldout_losses = dataclasses.replace(losses, lost=found)

    def _by_blocks(self, lost: Iterable[NamedStep], period: int) -> int:
        """Count lost steps by blocks.

        A start loses steps in a row; steps of an unknown start need not be. Blocks are whole
        periods, so that all of them together are dominated as steps in a row are.
        """
        by_start = Counter(self._begun.get(step, "") for step in lost)
        return self._in_blocks(by_start, lambda start: -(-start.most_lost // period) * period)

    def _in_blocks(self, by_start: Counter[str], block_of: "Callable[[StartLine], int]") -> int:
        """Count what was lost, whatever a crash did lose: a start that crashed counts as what it
        could lose at most, or a multiple of that.

        Args:
            by_start: the true numbers; of an unknown start under "".
            block_of: returns the most that a start loses; of an unknown one the most with a step.
        """
        crashed = {name for name, start in self._starts.items() if not start.ended} - {self._start}
        total = 0
        for name in {*by_start, *crashed}:
            block = block_of(self._starts.get(name, StartLine(1)))
            if not name:
                total += block * by_start[name]
                continue
            total += block * max(name in crashed, -(-by_start[name] // block))
        return total

    def spare(self, steps: Segment) -> list[NamedStep]:
        """Name steps that were never begun, the same ones each time; nobody else can name them."""
        start = next(iter(self._taken), self._start)
        secret = f"spare {os.path.realpath(self._folder)} {start}"
        mechanism = steps.mechanism.at_unknown()
        return [NamedStep(name, mechanism) for name in step_names(secret, steps.steps)]

    def _append_start(self, line: str) -> None:
        """Write and sync a line, on a new one after what a crash may have left."""
        _append(os.path.join(self._folder, STARTS_FILE), f"\n{line}\n".encode())

    def _append_evaluation(self, name: str, start: str) -> None:
        """Write and sync a line, on a new one after what a crash may have left."""
        path = os.path.join(self._folder, EVALUATIONS_FILE)
        _append(path, f"\n{name} {start}\n".encode())
        self._evaluated[name] = "" if start == _NAMED else start

    def _append_steps(self, step: int, steps: list[tuple[str, NamedStep]]) -> None:
        """Write and sync a line for each step; `step` is 0 where it was begun elsewhere."""
        lines = ""
        for start, taken in steps:
            of = taken.mechanism
            words = (str(step), f"{of.noise_multiplier!r}", f"{of.sample_rate!r}", start)
            lines += " ".join((*words, *of.logged)) + "\n"
        # A torn last line was begun too, and must neither swallow the next nor pass for whole.
        content = (f" {_TORN}\n" * self._tail_is_torn + lines).encode()
        _append(self._path, content, expected_size=self._size)
        self._tail_is_torn = False
        self._size += len(content)
        self._begun.update((taken, "" if step == 0 else start) for start, taken in steps)

    def _read(self) -> None:
        """Read all lines, and count those that were torn by a crash."""
        with open(self._path, "rb") as file:
            content = file.read()
        self._size = len(content)
        self._tail_is_torn = content != b"" and not content.endswith(b"\n")
        lines = content.decode("ascii", errors="replace").splitlines()
        last_torn = 0
        for number, line in enumerate(lines, start=1):
            if line.endswith(_TORN) or (self._tail_is_torn and number == len(lines)):
                self._torn += 1
                last_torn = number
            else:
                self._read_step(line, number)
        if last_torn:
            so_far = "\n".join(lines[:last_torn]).removesuffix(f" {_TORN}")
            so_far = os.path.realpath(self._path) + so_far
            self._torn_name = f"{_TORN} {hashlib.sha256(so_far.encode()).hexdigest()[:16]}"

    def _read_step(self, line: str, number: int) -> None:
        """Add the step of a line; raise ValueError, with the line's number, if it is none."""
        try:
            step, sigma, rate, start, *rest = line.split()
            mechanism = from_log(float(sigma), float(rate), rest)
            int(step)
        except ValueError:
            raise ValueError(
                f"{self._path}, line {number}: '{line[:40]}' is not a step; restore the file, or "
                "use another job.dump_folder"
            ) from None
        if start.startswith(_NAMED):
            name = start.removeprefix(_NAMED)
        else:
            self._taken[start] += 1
            name = step_name(start, self._taken[start])
        self._begun[NamedStep(name, mechanism)] = "" if step == "0" else start


@dataclass
class StartLine:
    """A start that began to train."""

    most_lost: int  # the number of steps that it counts as lost if it crashes
    evaluations: int | None = None  # the same of held-out losses, which its own frequency decides
    ended: bool = False  # with all of its steps saved

    def evaluations_of(self, losses: HeldOutLosses) -> int:
        """Return the most evaluations that it loses; by present terms where its own are unknown."""
        if self.evaluations is None:
            return losses.most_lost(self.most_lost)
        return self.evaluations


def _lines(path: str) -> Iterator[tuple[str, str]]:
    """Yield the lines of a log that are not blank, each with a name by its number; none if there is
    no log."""
    if os.path.exists(path):
        with open(path, encoding="ascii", errors="replace") as file:
            yield from ((f"line {n}", line) for n, line in enumerate(file, start=1) if line.strip())


def _read_starts(path: str) -> dict[str, StartLine]:
    """Return the starts of `starts.log` by name.

    Anything else there is a line that a crash has torn, and counts as a start that has not ended.
    """
    starts: dict[str, StartLine] = {}
    for number, line in _lines(path):
        match line.split():
            case ["begin", name, steps, *words] if _are_counts([steps, *words]):
                starts[name] = StartLine(int(steps), int(words[0]) if words else None)
            case ["end", name]:
                if name in starts:
                    starts[name].ended = True
            case _:
                largest = max((start.most_lost for start in starts.values()), default=1)
                starts[number] = StartLine(largest)
    return starts


def _are_counts(words: list[str]) -> bool:
    return len(words) in (1, 2) and all(word.isdecimal() and int(word) > 0 for word in words)


def _read_evaluations(path: str) -> dict[str, str]:
    """Return the evaluations of `evaluations.log`: the start of each, by its step's name.

    A line that a crash has torn counts as an evaluation of an unknown start.
    """
    found: dict[str, str] = {}
    for number, line in _lines(path):
        match line.split():
            case [name, start] if line.endswith("\n"):
                found[name] = "" if start == _NAMED else start
            case _:
                found[number] = ""
    return found


def _append(path: str, content: bytes, expected_size: int | None = None) -> None:
    """Append to a private file and sync it, and its folder if it is new.

    Raises:
        Fault: the file has another size than expected.
    """
    is_new = not os.path.exists(path)
    with open(path, "ab", opener=private_opener) as file:
        # The lock was removed, or is none.
        if expected_size not in (None, os.fstat(file.fileno()).st_size):
            raise Fault(
                f"{path} was changed since this run read it: another run writes to the "
                "same job.dump_folder, or the file was edited; end the other run, and start "
                "this one again"
            )
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    if is_new:  # a new file's name is on disk only when its folder is
        descriptor = os.open(os.path.dirname(path), os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
