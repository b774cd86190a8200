"""Runs checks on all ranks, and has them agree on the outcome of each."""

import datetime
import math
import os
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
import torch.distributed as dist

import torchtitan_dp.distributed  # noqa: F401  lets TorchTitan import without a GPU

# isort: split
from torchtitan.tools.utils import device_type

from torchtitan_dp.distributed.devices import cuda_devices

_COLLECTIVE = datetime.timedelta(seconds=60)  # the time-out of a check's collectives
_AGREEMENT = datetime.timedelta(seconds=150)  # how long a rank waits for the others' measurements
_GRACE_S = 20  # how long a rank whose check failed waits before it ends all of them

# The bound of statistics that are nearly normal, in standard deviations: 6e-7 lies beyond 5, on
# both sides. Keys are fixed and public, so that a machine that passes goes on passing.
DEVIATIONS = 5.0

Measured = dict[str, tuple[float, float]]
"""What a check measured on this rank: by name, the value and its limit."""


@dataclass(frozen=True)
class Check:
    """A statement about this machine, what to do where it is wrong, and its measurement: of the
    ranks and `args`, collective over the world, with the same names on each rank."""

    name: str
    remedy: str
    measure: Callable[..., Measured]
    args: tuple[object, ...] = ()


@dataclass(frozen=True)
class Outcome:
    """One measurement over all ranks: its worst value on any of them."""

    name: str
    value: float  # NaN where a rank could not measure
    bound: float
    remedy: str
    error: str = ""  # why it could not

    @property
    def passed(self) -> bool:
        return self.value <= self.bound  # NaN is not

    def row(self) -> str:
        """Format it as a line of the table."""
        found = self.error or f"{self.value:9.3g}  <= {self.bound:.3g}"
        return f"  {'ok' if self.passed else 'FAILED':6}  {self.name:80}  {found}"

    def failure(self) -> str:
        """Return one line: what failed, and what to do."""
        found = self.error or f"{self.value:.3g} (the limit is {self.bound:.3g})"
        return f"FAILED: {self.name}: {found}; {self.remedy}"


@dataclass(frozen=True)
class Ranks:
    """This rank's device, and the group of all that check together."""

    device: torch.device
    group: dist.ProcessGroup | None = None
    """On gloo, for measurements alone: a check that hangs does not block it. None: the default."""

    def gather(self, mine: Any) -> list[Any]:
        """Return every rank's object, by rank. Collective over the world."""
        found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(found, mine, group=self.group)
        return found

    def differing(self, mine: object) -> int:
        """Count the ranks that have another value than rank 0. Collective over the world."""
        found = self.gather(mine)
        return sum(one != found[0] for one in found)


def start(backend: str | None) -> Ranks:
    """Join torchrun's process group, or start one of this process; None is the device's backend."""
    device, alone = torch.device("cpu"), dict[str, Any]()
    if device_type != "cpu":
        index = int(os.environ.get("LOCAL_RANK", "0")) % cuda_devices()
        torch.accelerator.set_device_index(index)
        device = torch.device(device_type, index)
    if "WORLD_SIZE" not in os.environ:
        os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1")
        alone = {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group(backend, timeout=_COLLECTIVE, **alone)
    return Ranks(device, dist.new_group(backend="gloo", timeout=_AGREEMENT))


def run(
    ranks: Ranks, checks: Iterable[Check], report: Callable[[Outcome], None] = lambda _: None
) -> list[Outcome]:
    """Run each check, `report` each outcome on all ranks, and return all. A check that raises has
    failed; if on some ranks only, the others may still be in one of its collectives: it is the
    last. Collective over the world."""
    outcomes: list[Outcome] = []
    for check in checks:
        mine: Measured | str
        try:
            mine = check.measure(ranks, *check.args)
        except (Exception, SystemExit) as error:  # a `Fault` is a SystemExit
            mine = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        found = _gather_or_end(ranks, check, mine)
        for outcome in merged(check, found):
            outcomes.append(outcome)
            report(outcome)
        if 0 < sum(isinstance(one, str) for one in found) < len(found):
            break
    return outcomes


def _gather_or_end(ranks: Ranks, check: Check, mine: Measured | str) -> list[Measured | str]:
    """Gather every rank's measurements, or end this process if the others do not answer: soon if
    its own check failed, since they may hang in one of its collectives."""

    def end() -> NoReturn:
        line = mine if isinstance(mine, str) else "another rank has ended"
        print(f"selfcheck: rank {dist.get_rank()}: {check.name}: {line}", file=sys.stderr)
        os._exit(1)

    timer = threading.Timer(_GRACE_S, end)
    if isinstance(mine, str):
        timer.start()
    try:
        return ranks.gather(mine)
    except RuntimeError:
        end()
    finally:
        timer.cancel()


def worst(values: Sequence[float]) -> float:
    """Return the largest value, or NaN if any is: Python's `max` would depend on their order."""
    return math.nan if any(map(math.isnan, values)) else max(values, default=0.0)


def merged(check: Check, ranks: Sequence[Measured | str]) -> list[Outcome]:
    """Return outcomes with the worst value of any rank; a string is a rank's error."""
    found: dict[str, list[tuple[float, float]]] = {}
    for rank, one in enumerate(ranks):
        if isinstance(one, str):
            error = f"rank {rank}: {one}"
            return [Outcome(check.name, math.nan, math.nan, check.remedy, error)]
        for what, numbers in one.items():
            found.setdefault(what, []).append(numbers)
    assert {len(of) for of in found.values()} == {len(ranks)}, "ranks measured other things"
    outcomes = []
    for what, of in found.items():
        value, bound = worst([value for value, _ in of]), min(bound for _, bound in of)
        outcomes.append(Outcome(f"{check.name}: {what}", value, bound, check.remedy))
    return outcomes
