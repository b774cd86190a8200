"""The scalars in a run's TensorBoard files, by start, with the steps that later starts took again.

Each start writes one file, into a folder of its own or a common one. Where starts overlap, since a
crash lost steps, the later start's values hold; the earlier ones are kept as lost.
"""

import itertools
import math
from dataclasses import dataclass, field
from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

_SECTIONS = ("not_private/", "private_to_publish/")
_OTHER_NAMES = {"loss_metrics/global_avg_loss": "loss"}  # TorchTitan's, of the baseline
_ALL = {"scalars": 0}  # no reservoir sampling
SECONDS = "a step's time, s"  # no scalar of the run's: from the times of its logged steps
_EVENTS = "events.out.tfevents."


@dataclass(frozen=True)
class Point:
    """One value of a scalar, and the time at which it was logged."""

    step: int
    value: float
    time: float


@dataclass
class Scalar:
    """One scalar over all starts."""

    kept: list[Point] = field(default_factory=list)
    lost: list[list[Point]] = field(default_factory=list)  # by start

    @property
    def last(self) -> Point | None:
        """The last value that is a number."""
        return next((p for p in reversed(self.kept) if math.isfinite(p.value)), None)


@dataclass
class Scalars:
    """All scalars of a run, by name without its section."""

    by_name: dict[str, Scalar] = field(default_factory=dict)
    starts: list[int] = field(default_factory=list)  # the first logged step of each start

    def of(self, name: str) -> Scalar:
        """Return a scalar; without points if it was never logged."""
        return self.by_name.get(name, Scalar())


def read(folder: Path) -> Scalars:
    """Read all event files below a folder, those of rank 0 where every rank wrote some.

    The end of a file that a crash or damage left unreadable is left out.
    """
    files = sorted(
        (path for path in folder.rglob(f"{_EVENTS}*") if path.is_file() and _of_rank_0(path)),
        key=_order,
    )
    found = Scalars()
    for start in filter(None, map(_read_file, files)):
        first = min(points[0].step for points in start.values())
        for scalar in found.by_name.values():
            _take_back(scalar, first)
        start[SECONDS] = _seconds(start)
        for name, points in start.items():
            found.by_name.setdefault(name, Scalar()).kept += points
        found.starts.append(first)
    return found


def _order(path: Path) -> tuple[str, str, str]:
    """Return the key that sorts event files by time: the second and, last in the name, their number
    in the process that wrote them."""
    first, *_, last = path.name.removeprefix(_EVENTS).split(".")
    return first.zfill(20), last.zfill(20), path.name


def _of_rank_0(path: Path) -> bool:
    ranks = [part for part in path.parts if part.startswith("rank_")]
    return ranks in ([], ["rank_0"])


def _read_file(path: Path) -> dict[str, list[Point]]:
    """Return the scalars of one start, each sorted by step."""
    events = EventAccumulator(str(path), size_guidance=_ALL, purge_orphaned_data=False)
    events.Reload()
    found: dict[str, list[Point]] = {}
    for tag in events.Tags()["scalars"]:
        name = tag
        for section in _SECTIONS:
            name = name.removeprefix(section)
        points = (Point(e.step, e.value, e.wall_time) for e in events.Scalars(tag))
        found[_OTHER_NAMES.get(name, name)] = sorted(points, key=lambda point: point.step)
    return found


def _take_back(scalar: Scalar, first: int) -> None:
    """Move the points from a step on to the lost ones."""
    lost = [point for point in scalar.kept if point.step >= first]
    if lost:
        scalar.kept = scalar.kept[: -len(lost)]
        scalar.lost.append(lost)


def _seconds(start: dict[str, list[Point]]) -> list[Point]:
    """Return the mean time of a step between each two logged steps of a start."""
    logged = start.get("loss", [])
    return [
        Point(now.step, (now.time - then.time) / (now.step - then.step), now.time)
        for then, now in itertools.pairwise(logged)
        if now.step > then.step
    ]
