"""The private files of a folder: the logs of its starts and steps, and the fingerprint of its
records.

    starts.log           begin NAME AT MOST INTERVAL: a start begins after step AT; the most steps
                         that a crash loses, and those between two checkpoints
                         saved STEP: a checkpoint is durable; end STEP: so are all steps
                         loss STEP, before the noise of a published held-out loss is drawn
    steps_executed.log   STEP, before its update

Guarantee:
    - Lost steps follow from public events alone: starts, checkpoints, crashes. A start that did not
      end counts as the number that it declared, of which `begin_step` refuses more; a load from
      step b after a checkpoint of step a > b counts as a - b, in whole intervals.
    - So steps and lost ones are never fewer than those begun: of starts that began at b_1 = 0, b_2,
      … and last saved a_1, a_2, …, each took at most a_i - b_i and what it declared, and
      b_k + sum(a_i - b_(i+1)) = sum(a_i - b_i), whatever was loaded. The same holds, in whole
      periods, for each group of correlated noise, and in whole rounds for random allocation.
    - Weights are loaded only if a start of this folder took their steps (`knows`).
    - A published loss counts from its line on: a crash between the line and `privacy.json` leaves
      the line, the next start publishes another loss, and both count.
    - `steps_executed.log` cross-checks: how many steps a start took follows from how long they
      took, and so from records, and is never published.
"""

import dataclasses
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from torchtitan_dp.base.process import Fault, private_opener, write_atomically
from torchtitan_dp.ledger.lineage import Lineage, new_name

EXECUTED_FILE = "steps_executed.log"
STARTS_FILE = "starts.log"
FINGERPRINT_FILE = "data_fingerprint.private"
_TORN = "torn"


class Losable(NamedTuple):
    """The steps that a start may lose."""

    most: int  # in a crash
    interval: int  # between two checkpoints


@dataclass
class _Start:
    """A start that began to train, by numbers of steps."""

    at: int  # where it began
    declared: int  # the most that it loses in a crash
    interval: int
    saved: int  # of its last durable checkpoint
    ended: bool = False  # with all of its steps kept

    def behind(self, at: int) -> int:
        """Return the steps that a load from `at` loses, in whole intervals."""
        return max(0, -(-(self.saved - at) // self.interval)) * self.interval


class AppendOnly:
    """A private file of lines, each synced before the event that it announces. A crash may tear the
    last line: its event did not happen, and it neither swallows the next nor passes for whole."""

    def __init__(self, path: str, parse: Callable[[list[str]], None]) -> None:
        """Read the file, if there is one, and `parse` the words of each whole line; ValueError, one
        line, if one is not ours."""
        self._path = path
        content = Path(path).read_bytes() if os.path.exists(path) else b""
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
            except (ValueError, IndexError):
                raise ValueError(
                    f"{path}, line {number}: '{line[:40]}' is no run's; restore the file"
                ) from None

    def append(self, line: str) -> None:
        """Append a line and sync it, and the file's folder if it is new; Fault if the file has
        another size than it was read or left with."""
        content = (f" {_TORN}\n" * self._tail_is_torn + f"{line}\n").encode()
        is_new = not os.path.exists(self._path)
        with open(self._path, "ab", opener=private_opener) as file:
            if self._size != os.fstat(file.fileno()).st_size:  # the lock was removed, or is none
                raise Fault(
                    f"{self._path} was changed since this run read it, by another run in this "
                    "job.dump_folder or an editor; end the other run, and start this one again"
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
    """All starts, steps and published losses ever begun in a folder. Rank 0 writes."""

    def __init__(self, folder: str) -> None:
        """Read the files, if there are any; raise ValueError if one is not ours."""
        self.count = 0  # of steps ever begun
        self.losses = 0  # ever published, or about to be
        self._starts: dict[str, _Start] = {}
        self._of_starts = AppendOnly(os.path.join(folder, STARTS_FILE), self._read_start)
        self._of_steps = AppendOnly(os.path.join(folder, EXECUTED_FILE), self._read_step)
        self._own: _Start | None = None

    def knows(self, start: str) -> bool:
        """Return whether a start of this name began to train here."""
        return start in self._starts

    def begin_start(self, lineage: Lineage, loses: Losable) -> str:
        """Record that a start is about to draw its first units, and the most that it loses; return
        its name. Fault: more steps were begun than are published."""
        if problem := self.undercounted(lineage):
            raise Fault(f"{problem}; restore the logs as the run wrote them")
        name, at = new_name(), lineage.steps
        self._own = self._starts[name] = _Start(at, *loses, saved=at)
        self._of_starts.append(f"begin {name} {at} {loses.most} {loses.interval}")
        return name

    def saved(self, step: int) -> None:
        assert self._own is not None
        self._own.saved = step
        self._of_starts.append(f"saved {step}")

    def end_start(self, step: int) -> None:
        """Record that this start ends after `step`, with all of its steps kept."""
        if self._own is not None:  # else no step was left
            self._own.saved, self._own.ended = step, True
            self._of_starts.append(f"end {step}")

    def begin_step(self, step: int) -> None:
        """Record that `step`'s update is about to happen; Fault if a crash would lose more steps
        than this start declared."""
        assert self._own is not None
        unsaved, declared = step - self._own.saved, self._own.declared
        if unsaved > declared:
            raise Fault(
                f"step {step} is not taken: since the last whole checkpoint, {self._own.saved}, a "
                f"crash would lose {unsaved} of {declared} that are counted; start the run again"
            )
        self._of_steps.append(f"{step}")
        self.count += 1

    def begin_loss(self, step: int) -> None:
        """Record that the held-out loss after `step` is about to get its noise."""
        self._of_starts.append(f"loss {step}")
        self.losses += 1

    def undercounted(self, lineage: Lineage) -> str:
        """Return the contradiction between what was begun and what is published, or ""."""
        if self.count > (published := lineage.steps_executed):
            return f"{EXECUTED_FILE} has {self.count} steps, but {STARTS_FILE} leads to {published}"
        if self.losses > lineage.losses:
            return f"{STARTS_FILE} has {self.losses} published losses, and the ledger has fewer"
        return ""

    def lacks(self, stated: Lineage) -> str:
        """Return the files' lack of steps, crashes or losses that `privacy.json` counts, or ""."""
        found = self.enter_lost(stated)
        if self.count < stated.steps or found.lost < stated.lost:
            return (
                f"{EXECUTED_FILE} or {STARTS_FILE} lacks steps or crashes that privacy.json counts "
                f"({stated.steps_executed} steps)"
            )
        if self.losses < stated.losses:
            return f"{STARTS_FILE} lacks a published loss that privacy.json counts"
        return ""

    def enter_lost(self, lineage: Lineage) -> Lineage:
        """Return the lineage with what was lost and published in this folder, if its weights were
        loaded now: whole periods of correlated noise, whole rounds of random allocation."""
        starts = list(self._starts.values())
        lost = [start.declared for start in starts if not start.ended]
        loads = [*(start.at for start in starts[1:]), lineage.steps]
        lost += [start.behind(at) for start, at in zip(starts, loads, strict=False)]
        lost += [max((start.declared for start in starts), default=1)] * self._of_starts.torn
        steps = sum(map(lineage.settings.mechanism.in_whole_periods, lost))
        if (loss := lineage.heldout_loss) is not None:
            loss = dataclasses.replace(loss, begun=self.losses)
        return dataclasses.replace(lineage, lost=steps, heldout_loss=loss)

    def _read_start(self, words: list[str]) -> None:
        event, *rest = words
        if event == "begin":
            name, at, most, interval = rest[0], *map(int, rest[1:])
            if min(at, most) < 0 or interval < 1:
                raise ValueError(rest)
            self._starts[name] = _Start(at, most, interval, saved=at)
            return
        (step,) = map(int, rest)
        if event == "loss":
            self.losses += 1
        elif event in ("saved", "end") and self._starts:
            start = list(self._starts.values())[-1]  # one run at a time has the folder's lock
            start.saved, start.ended = step, event == "end"
        else:
            raise ValueError(words)

    def _read_step(self, words: list[str]) -> None:
        (_,) = map(int, words)
        self.count += 1


def read_fingerprint(folder: str) -> str | None:
    """Return the fingerprint of the records that this folder's run was started with, if any."""
    return next(iter(_lines(folder)), None)


def check_fingerprint(folder: str, fingerprint: str | None, settings: Mapping[str, object]) -> None:
    """Refuse, by ValueError, other data than the run was started with, or other settings on which
    its samples depend; None compares these alone, before the records are read."""
    if not (lines := _lines(folder)):
        return
    try:
        earlier = dict(json.loads(lines[1]))
    except (ValueError, TypeError, IndexError):
        raise ValueError(
            f"{os.path.join(folder, FINGERPRINT_FILE)}, line 2: no settings; restore the file"
        ) from None
    for key, value in settings.items():
        if key in earlier and earlier[key] != value:
            raise ValueError(
                f"{key} = {'unset' if value is None else repr(value)}: this run was started with "
                f"{'it unset' if earlier[key] is None else repr(earlier[key])}, on which its "
                "samples depend; set it back, or start afresh in another job.dump_folder"
            )
    if fingerprint not in (None, lines[0]):
        raise ValueError(
            "training.dataset_path: the records are not those of this run's first start: a file "
            "was added, removed, renamed or changed; restore it, or take another job.dump_folder"
        )


def write_fingerprint(
    folder: str, fingerprint: str, settings: Mapping[str, object], description: Sequence[str] = ()
) -> None:
    """Write the fingerprint, on a second line the settings, on a third what describes the records:
    private data, never published."""
    lines = "\n".join([fingerprint, json.dumps(dict(settings)), json.dumps([*description]), ""])
    write_atomically(os.path.join(folder, FINGERPRINT_FILE), lines.encode())


def read_description(folder: str) -> list[str]:
    """Return what describes the records of this folder's run, if that is there. NOT PRIVATE."""
    try:
        return [str(line) for line in json.loads(_lines(folder)[2])]
    except (OSError, ValueError, IndexError):
        return []


def _lines(folder: str) -> list[str]:
    path = Path(folder, FINGERPRINT_FILE)
    return path.read_text(encoding="ascii").splitlines() if path.exists() else []
