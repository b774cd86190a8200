"""One rank of a recorded or replayed run: training as it is, with a tape at `optimizer.step` and at
the noise of published held-out losses.

Started by `tests.processes.launcher` in the place of `torchtitan_dp.train`. $REPLAY has a `Job`.
"""

import dataclasses
import hashlib
import itertools
import json
import os
import resource
import secrets
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode

from tests.replay import faults
from torchtitan_dp.checkpoint import bookkeeping
from torchtitan_dp.train import trainer as train

ENVIRONMENT = "REPLAY"
CRASH = 137
_FULL = 20_000  # bytes of a file on a disk that is full: a log grows on, a checkpoint fails


@dataclasses.dataclass(frozen=True)
class Job:
    """What becomes of one job of a scheduler."""

    stop_at: int | None = None
    """The step after which it is asked to stop."""
    crash_at: int | None = None
    """The step in which it dies, before the update."""
    full_at: int | None = None
    """The step after which the disk is full."""
    clock: int | None = None
    """The tokens after which its time is up; each step takes as long as its samples are."""
    crash_clock: int | None = None
    """The tokens after which it dies."""
    damages: bool = False
    """Whether the newest checkpoint is damaged before it begins."""


@dataclasses.dataclass
class Seen:
    """What one rank did, as far as neighbours must agree on it."""

    steps: list[int] = dataclasses.field(default_factory=list)
    rates: list[float] = dataclasses.field(default_factory=list)
    draws: list[str] = dataclasses.field(default_factory=list)
    collectives: list[str] = dataclasses.field(default_factory=list)
    without_tape: list[int] = dataclasses.field(default_factory=list)
    squared_distances: dict[int, float] = dataclasses.field(default_factory=dict)
    """By step, of the outputs before they were replaced, over this rank's shards."""
    loss_distances: list[float] = dataclasses.field(default_factory=list)
    """Of published held-out losses before they were replaced, in multiples of L / n."""

    def write(self, path: Path) -> None:
        soft = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, soft))
        path.write_text(json.dumps(dataclasses.asdict(self)))


class Collectives(TorchDispatchMode):
    """Lists the collectives of the training loop, with sizes and dtypes."""

    def __init__(self, seen: Seen) -> None:
        super().__init__()
        self._seen = seen

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = str(function)
        if name.startswith(("c10d", "_c10d_functional")) and "wait" not in name:
            leaves = torch.utils._pytree.tree_leaves((args, kwargs))
            shapes = [f"{x.dtype}{list(x.shape)}" for x in leaves if isinstance(x, torch.Tensor)]
            self._seen.collectives.append(f"{name} {' '.join(shapes)}")
        return function(*args, **(kwargs or {}))


def main(argv: list[str]) -> None:
    plan = json.loads(os.environ[ENVIRONMENT])
    job, tape, rank = Job(**plan["job"]), Path(plan["tape"]), int(os.environ["RANK"])
    seen, out = Seen(), Path(f"{plan['seen']}_{rank}.json")
    if plan["fault"] is not None:
        faults.plant(plan["fault"])
    _fix_randomness(plan["number"])
    _replay_losses(tape, seen)
    trainer_type = train.DPTrainer

    def watched(real_draw: Any) -> Any:
        def draw(*args: Any, **options: Any) -> Any:
            drawn = real_draw(*args, **options)
            seen.draws.append(hashlib.sha256(drawn.tobytes()).hexdigest())
            return drawn

        return draw

    class Watched(trainer_type):  # type: ignore[misc, valid-type]
        """A trainer that is cut off as its job is, and whose outputs go over the tape."""

        shown, started = 0, False

        def accumulate(self, microbatch: Any, statistics: Any) -> None:
            super().accumulate(microbatch, statistics)
            self.shown += microbatch.labels_BT.numel()
            if self.started and job.crash_clock is not None and self.shown >= job.crash_clock:
                seen.write(out)
                os._exit(CRASH)

        def train_step(self, feed: Any) -> None:
            hook = register_optimizer_step_pre_hook(
                lambda optimizer, *_: _at_step(optimizer, self.step, rank, job, tape, seen, out)
            )
            try:
                super().train_step(feed)
            finally:
                hook.remove()
            if self.step == job.full_at:
                hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
                resource.setrlimit(resource.RLIMIT_FSIZE, (_FULL, hard))

        def should_continue_training(self) -> bool:
            if self.step == job.stop_at or (job.clock is not None and self.shown >= job.clock):
                self.stop._asked.set()
            return super().should_continue_training()

        def batch_generator(self, data_iterable: Any) -> Any:
            feed = super().batch_generator(data_iterable)
            self.shown, self.started = 0, True  # rehearsals are alike
            return feed

    train.DPTrainer = Watched  # type: ignore[misc]
    for name in ("poisson_draw", "allocate"):
        setattr(bookkeeping, name, watched(getattr(bookkeeping, name)))
    try:
        if plan["collectives"]:
            with Collectives(seen):
                train.main(argv)
        else:
            train.main(argv)
    finally:
        seen.write(out)


def _at_step(
    optimizer: Optimizer, step: int, rank: int, job: Job, tape: Path, seen: Seen, out: Path
) -> None:
    """Record the noised gradients of this step, or put those of the tape in their place."""
    if hasattr(optimizer, "optimizers"):  # TorchTitan's container, whose parts come next
        return
    if step == job.crash_at:
        seen.write(out)
        os._exit(CRASH)
    seen.steps.append(step)
    seen.rates += [float(group["lr"]) for group in optimizer.param_groups]
    gradients = [
        parameter.grad.to_local() if isinstance(parameter.grad, DTensor) else parameter.grad
        for group in optimizer.param_groups
        for parameter in group["params"]
    ]
    path = tape / f"{step}_{rank}.pt"
    if not path.exists():
        if (tape / "recorded").exists():
            seen.without_tape.append(step)
        torch.save(gradients, path)
        return
    recorded, distance = torch.load(path), 0.0
    for gradient, replacement in zip(gradients, recorded, strict=True):
        distance += float((gradient.double() - replacement.double()).square().sum())
        gradient.copy_(replacement)
    seen.squared_distances[step] = distance


def _replay_losses(tape: Path, seen: Seen) -> None:
    """Record each published held-out loss, or put that of the tape in its place."""
    real = bookkeeping.noised_mean

    def noised_mean(losses_N: np.ndarray, *, clip: float, key: bytes, **terms: float) -> float:
        found = real(losses_N, clip=clip, key=key, **terms)
        path = tape / f"loss_{key.hex()}"  # a release of both sides has the same key
        if not path.exists():
            path.write_text(repr(found))
        recorded = float(path.read_text())
        seen.loss_distances.append(abs(found - recorded) * len(losses_N) / clip)
        return recorded

    bookkeeping.noised_mean = noised_mean


def _fix_randomness(number: int) -> None:
    """Draw the same keys and names on both sides, and in all jobs: a step that is taken again has
    its noise again. `privacy.debug_seed` would forbid a release."""
    names = itertools.count()
    secrets.token_bytes = lambda size=32: hashlib.shake_256(b"replay").digest(size)

    def name(size: int = 32) -> str:
        return hashlib.shake_256(f"{number} {next(names)}".encode()).hexdigest(size)

    secrets.token_hex = name
