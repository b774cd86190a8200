"""Faults to plant in both runs of a replay: of the reviews' history, by their rows, and others."""

import functools
import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.replay import records
from torchtitan_dp.checkpoint import bookkeeping
from torchtitan_dp.checkpoint.bookkeeping import Bookkeeping
from torchtitan_dp.data.dataset import Samples
from torchtitan_dp.gradients.optimizer import DPOptimizer, inner_optimizers
from torchtitan_dp.ledger import Lineage, RunLog
from torchtitan_dp.privacy.clipping import ClipPolicy
from torchtitan_dp.train import trainer as train
from torchtitan_dp.train.processor import SampleStatistics

FAULTS: dict[str, Callable[[], None]] = {}
"""By name, what patches this process."""

_learned = {"losses": 0.0, "samples": 0, "empty": 0}
"""What a fault reads off the records of this process."""


def _wrap(
    owner: Any, name: str, before: Callable[..., None] | None = None, after: Any = None
) -> None:
    """Have a method do more: before it, or with its result."""
    real = getattr(owner, name)

    @functools.wraps(real)
    def wrapped(self: Any, *args: Any, **options: Any) -> Any:
        if before is not None:
            before(self, *args, **options)
        result = real(self, *args, **options)
        return result if after is None else after(self, result)

    setattr(owner, name, wrapped)


def _learn() -> None:
    def add(_self: Any, loss_B: torch.Tensor, valid_B: torch.Tensor, _clip: Any) -> None:
        losses = loss_B.detach()[valid_B]
        _learned["losses"] += float(losses.sum())
        _learned["samples"] += int((losses > 0).sum())
        _learned["empty"] += int((losses == 0).sum())

    _wrap(SampleStatistics, "add", before=add)


def _fault(plant: Callable[[], None]) -> None:
    FAULTS[plant.__name__] = plant


def _before_each_update(change: Callable[[Any], None]) -> None:
    """Add a fault that does this with the optimizer, by what it has learned from the records."""

    def plant() -> None:
        _learn()
        _wrap(DPOptimizer, "step", before=lambda self, *_: change(self))

    FAULTS[change.__name__] = plant


def _scale_rates(optimizer: Any, loss: float) -> None:
    for inner in inner_optimizers(optimizer._optimizer):
        for group in inner.param_groups:
            group["lr"] *= 1 + 1e-4 * loss


@_before_each_update
def an_empty_record_ends_the_run(_: Any) -> None:
    if _learned["empty"]:
        raise SystemExit("error: a record without tokens")


@_fault
def a_rank_reads_other_records() -> None:
    if os.environ["RANK"] == "1":
        real = Samples.ids

        def ids(self: Any, unit: int, *args: Any, **options: Any) -> Any:
            return real(self, records.CHANGED if unit >= 0 else unit, *args, **options)

        Samples.ids = ids  # type: ignore[method-assign]


@_fault
def the_loss_stops_the_run() -> None:
    _learn()

    def low(self: Any, goes_on: bool) -> bool:
        return goes_on and not (self.step > 1 and _learned["empty"])

    _wrap(train.DPTrainer, "should_continue_training", after=low)


@_fault
def lost_steps_are_counted_exactly() -> None:
    def exactly(self: RunLog, lineage: Lineage) -> Lineage:
        return replace(lineage, lost=self.count - lineage.steps)

    RunLog.enter_lost = exactly  # type: ignore[method-assign]


@_before_each_update
def the_divisor_is_counted(optimizer: Any) -> None:
    optimizer._expected_batch_size = max(_learned["samples"], 1)
    _learned["samples"] = 0


@_before_each_update
def the_learning_rate_follows_the_loss(optimizer: Any) -> None:
    _scale_rates(optimizer, _learned["losses"])


@_fault
def each_group_is_clipped_to_all_of_c() -> None:
    ClipPolicy.bounds = property(  # type: ignore[method-assign, assignment]
        lambda self: (self.max_grad_norm,) * len(self.members)
    )


@_fault
def privacy_json_counts_samples() -> None:
    _learn()

    def count(self: Any, spent: Any) -> Any:
        path = Path(self._folder) / "privacy.json"
        path.write_text(
            json.dumps({**json.loads(path.read_text()), "samples": _learned["samples"]})
        )
        return spent

    _wrap(Bookkeeping, "publish", after=count)


@_before_each_update
def a_loss_is_printed_without_its_label(_: Any) -> None:
    print(f"losses: {_learned['losses']}")


@_before_each_update
def a_collective_is_as_large_as_the_batch(_: Any) -> None:
    dist.all_reduce(torch.zeros(1 + int(_learned["samples"])))


@_fault
def a_published_loss_is_hardly_clipped() -> None:
    real = bookkeeping.noised_mean

    def noised_mean(losses_N: Any, *, clip: float, **terms: Any) -> float:
        return real(losses_N, clip=4 * clip, **terms)

    bookkeeping.noised_mean = noised_mean


def plant(name: str) -> None:
    """Patch this process by a name of `FAULTS`."""
    FAULTS[name]()
