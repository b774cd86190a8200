"""A run's scalars in TensorBoard's files, and line charts as values for a template that draws SVG.

Each start of a run writes one file, into a folder of its own or a common one. Where starts overlap,
since a crash lost steps, the later start's values stay; the earlier ones are kept as lost.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

_SECTIONS = ("not_private/", "private_to_publish/")
_OTHER_NAMES = {"loss_metrics/global_avg_loss": "loss"}  # TorchTitan's, of the baseline
_ALL = {"scalars": 0}  # no reservoir sampling
_EVENTS = "events.out.tfevents."
SECONDS = "a step's time, s"  # no scalar of the run's: from the times of its logged steps

WIDTH, HEIGHT = 400, 210
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 10, 10, 36
_MOST = 400  # points of a line in the page: the least and the largest of each bucket

Points = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Point:
    """One value of a scalar, and the time at which it was logged."""

    step: int
    value: float
    time: float


@dataclass
class ScalarHistory:
    """One scalar over all starts."""

    kept: list[Point] = field(default_factory=list)
    lost: list[list[Point]] = field(default_factory=list)  # by start

    @property
    def last(self) -> Point | None:
        """The last value that is a number."""
        return next((p for p in reversed(self.kept) if math.isfinite(p.value)), None)

    def take_back(self, first: int) -> None:
        """Move the points from a step on to the lost ones."""
        lost = [point for point in self.kept if point.step >= first]
        if lost:
            self.kept = self.kept[: -len(lost)]
            self.lost.append(lost)


@dataclass
class Scalars:
    """All scalars of a run, by name without its section."""

    by_name: dict[str, ScalarHistory] = field(default_factory=dict)
    starts: list[int] = field(default_factory=list)  # the first logged step of each start

    def of(self, name: str) -> ScalarHistory:
        """Return a scalar; without points if it was never logged."""
        return self.by_name.get(name, ScalarHistory())


def read_scalars(folder: Path) -> Scalars:
    """Read all event files below a folder, those of rank 0 where every rank wrote some.

    The end of a file that a crash or damage left unreadable is left out.
    """
    found = Scalars()
    for start in filter(None, map(_read_file, sorted(_event_files(folder), key=_order))):
        first = min(points[0].step for points in start.values())
        for scalar in found.by_name.values():
            scalar.take_back(first)
        start[SECONDS] = _seconds(start.get("loss", []))
        for name, points in start.items():
            found.by_name.setdefault(name, ScalarHistory()).kept += points
        found.starts.append(first)
    return found


def _event_files(folder: Path) -> list[Path]:
    files = (path for path in folder.rglob(f"{_EVENTS}*") if path.is_file())
    return [f for f in files if {p for p in f.parts if p.startswith("rank_")} <= {"rank_0"}]


def _order(path: Path) -> tuple[str, str, str]:
    """Sort event files by time: the second and, last in the name, their number in a process."""
    first, *_, last = path.name.removeprefix(_EVENTS).split(".")
    return first.zfill(20), last.zfill(20), path.name


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


def _seconds(logged: list[Point]) -> list[Point]:
    """Return the mean time of a step between each two logged steps of a start."""
    return [
        Point(now.step, (now.time - then.time) / (now.step - then.step), now.time)
        for then, now in itertools.pairwise(logged)
        if now.step > then.step
    ]


@dataclass(frozen=True)
class Line:
    """One line: `kind` chooses colour and dashes."""

    name: str
    points: Points
    kind: str  # a class of the page's style: c1 …, lost, reference, coming
    last: str = ""  # its last value, for the legend

    @property
    def finite(self) -> list[tuple[float, float]]:
        return [(x, y) for x, y in self.points if math.isfinite(y)]


@dataclass(frozen=True)
class _Axis:
    """A line from `begin` to `end` on the page, for values from `low` to `high`."""

    low: float
    high: float
    begin: float
    end: float
    ticks: list[float]
    scale: Callable[[float], float] = float  # of values; low and high are scaled already

    def at(self, value: float) -> float:
        share = (self.scale(value) - self.low) / (self.high - self.low)
        return round(self.begin + share * (self.end - self.begin), 1)


@dataclass
class Chart:
    """A chart of lines over steps."""

    title: str
    unit: str
    lines: list[Line]
    public: bool
    logarithmic: bool = False
    from_zero: bool = False
    resumed: Sequence[int] = ()
    words: str = ""

    @property
    def empty(self) -> bool:
        """Whether no value can be drawn."""
        return not any(line.finite for line in self.lines if line.kind != "reference")

    @property
    def paths(self) -> list[tuple[str, str, str]]:
        """Name, kind and SVG path of each line."""
        return [(line.name, line.kind, self._path(line)) for line in self.lines]

    @property
    def x_ticks(self) -> list[tuple[float, str]]:
        return [(self._x.at(tick), f"{tick:,.0f}") for tick in self._x.ticks]

    @property
    def y_ticks(self) -> list[tuple[float, str]]:
        return [(self._y.at(tick), _short(tick)) for tick in self._y.ticks]

    @property
    def marks(self) -> list[float]:
        """Where the run was resumed."""
        return [self._x.at(step) for step in self.resumed if 0 <= step <= self._x.high]

    def _path(self, line: Line) -> str:
        drawn: list[str] = []
        pen = "M"
        for step, value in _thinned(line.points):
            if self._shows(value):
                drawn.append(f"{pen}{self._x.at(step)} {self._y.at(value)}")
            pen = "L" if self._shows(value) else "M"
        if len(drawn) == 1:  # a round cap makes it a dot
            drawn.append("h0")
        return "".join(drawn)

    def _shows(self, value: float) -> bool:
        return math.isfinite(value) and (value > 0 or not self.logarithmic)

    @cached_property
    def _shown(self) -> list[tuple[float, float]]:
        return [p for line in self.lines for p in line.points if self._shows(p[1])]

    @cached_property
    def _x(self) -> _Axis:
        end = max([1, *(x for x, _ in self._shown)])
        ticks = [tick for tick in _ticks(0, end, whole=True) if tick <= end]
        return _Axis(0, end, _LEFT, WIDTH - _RIGHT, ticks)

    @cached_property
    def _y(self) -> _Axis:
        ys = [y for _, y in self._shown] or [0.0]
        low, high, bottom = min(ys), max(ys), HEIGHT - _BOTTOM
        if self.logarithmic:
            low, high = math.log10(low or 1), math.log10(high or 1)
            low, high = (low, high) if high - low > 0.3 else (low - 0.2, high + 0.2)
            return _Axis(low, high, bottom, _TOP, _log_ticks(low, high), math.log10)
        low = 0.0 if self.from_zero else low
        high = high if high > low else low + (abs(low) or 1)
        ticks = _ticks(low, high)
        return _Axis(min(low, ticks[0]), max(high, ticks[-1]), bottom, _TOP, ticks)


def _thinned(points: Points) -> Points:
    """Keep the least and the largest value of each of a few hundred buckets, in order."""
    if len(points) <= _MOST:
        return points
    size = math.ceil(2 * len(points) / _MOST)
    kept: list[tuple[float, float]] = []
    for begin in range(0, len(points), size):
        bucket = points[begin : begin + size]
        ends = {min(bucket, key=lambda p: p[1]), max(bucket, key=lambda p: p[1])}
        kept += [point for point in bucket if point in ends]
    return kept


def _ticks(low: float, high: float, *, whole: bool = False) -> list[float]:
    """Return about four round numbers that cover a range.

    >>> _ticks(0, 40, whole=True), _ticks(0.0, 0.9)
    ([0, 10, 20, 30, 40], [0.0, 0.25, 0.5, 0.75, 1.0])
    """
    rough = (high - low) / 4
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= rough * 0.999)
    if whole:
        step = max(1, math.ceil(step))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(n * step, 12) for n in range(first, last + 1)]


def _log_ticks(low: float, high: float) -> list[float]:
    """Return round numbers within a range of decimal logarithms.

    >>> _log_ticks(-1.1, 1)
    [0.1, 1.0, 10.0]
    """
    mantissas = (1,) if high - low > 2 else (1, 2, 3, 5, 7)
    powers = range(math.floor(low), math.ceil(high) + 1)
    found = [float(f"{m}e{p}") for p in powers for m in mantissas]
    return [tick for tick in found if low - 1e-9 <= math.log10(tick) <= high + 1e-9]


def _short(value: float) -> str:
    """Write a tick's number.

    >>> _short(12000.0), _short(0.25), _short(1e-06)
    ('12,000', '0.25', '1e-06')
    """
    if abs(value) >= 1e6:
        return f"{value:.3g}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.6g}"
