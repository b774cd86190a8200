"""The loss on units (records) that are never trained on, and how it goes along a sample.

It is computed from them without noise, so not private. With `validation.publish_epsilon` a run
publishes another one at its end, of clipped losses and with noise (`checkpoint.bookkeeping`). Which
units are evaluated is public.
"""

import contextlib
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn

import torchtitan_dp.distributed  # noqa: F401  lets TorchTitan import without a GPU

# isort: split
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.distributed import ParallelDims
from torchtitan.tools.logging import logger

from torchtitan_dp.config import JobConfig
from torchtitan_dp.config.derived import heldout_units
from torchtitan_dp.data.batching import Draw, Feed, RecordLoader
from torchtitan_dp.gradients.fsdp import free_gathered
from torchtitan_dp.models.ema import WeightAverage
from torchtitan_dp.models.loss import SampleLosses, shard_of


class HeldOut(NamedTuple):
    """Held-out losses of some weights."""

    mean: float  # over units, of the mean loss of each one's sample
    at: dict[str, float]  # mean over tokens at these positions, by name of the bucket
    loss_N: np.ndarray  # fp64: the mean loss of each unit's sample; 0 without a target


class HeldOutValidator:
    """Evaluates the same `validation.steps` microbatches at step 0, each `freq`, and the end."""

    def __init__(
        self,
        loader: RecordLoader,
        job_config: JobConfig,
        parallel_dims: ParallelDims,
        metrics: MetricsProcessor,
    ) -> None:
        # The loader is of the held-out units.
        self._loader, self._config, self._dims = loader, job_config, parallel_dims
        self._metrics = metrics
        self.average: WeightAverage | None = None  # of the weights, evaluated beside them
        self._found: dict[int, float] = {}  # the loss to compare, by step
        self.is_trial = False  # of a search, which chooses by published losses alone
        self._buckets = buckets(job_config.training.seq_len)

    def should_validate(self, step: int) -> bool:
        """Return whether a step is due."""
        config = self._config
        return step == config.training.steps or step % config.validation.freq == 0

    @torch.no_grad()
    def losses(self, model_parts: list[nn.Module]) -> np.ndarray:
        """Return the loss of each held-out unit, in a call of its own (fp64): by the average of
        weights, where there is one. Collectives: those of `_held_out`."""
        (model,) = model_parts
        average = self.average
        with average.in_place_of_weights() if average else contextlib.nullcontext():
            return self._held_out(model, alone=True).loss_N

    @torch.no_grad()
    def validate(self, model_parts: list[nn.Module], step: int) -> float:
        """Log `heldout_loss` and, by position, `heldout_loss_at/…`, of the weights; of an average
        `heldout_loss_ema` and `heldout_loss_ema_at/…`. Return the loss of the weights.

        Collectives: those of `_held_out`, for each.
        """
        (model,) = model_parts
        found = {"heldout_loss": self._held_out(model)}
        shown = f"{found['heldout_loss'].mean:.4f}"
        if self.average is not None:
            with self.average.in_place_of_weights():
                found["heldout_loss_ema"] = self._held_out(model)
            shown += f", averaged weights: {found['heldout_loss_ema'].mean:.4f}"
        at, losses = f"step: {step}/{self._config.training.steps}", dict[str, float]()
        if self.is_trial:
            shown = "not shown: a search chooses by the published one alone"
        logger.info(f"{at}  not private: held-out loss: {shown}")
        for name, one in found.items():
            losses |= {name: one.mean, **{f"{name}_at/{where}": x for where, x in one.at.items()}}
            if len(self._buckets) > 1:
                which = "averaged weights' " if name.endswith("_ema") else ""
                parts = ", ".join(f"{where}: {loss:.4f}" for where, loss in one.at.items())
                logger.info(f"{at}  not private: {which}held-out loss at tokens {parts}")
        self._metrics.logger.log(losses, step)
        if not self.is_trial:
            self._found[step] = losses.get("heldout_loss_ema", losses["heldout_loss"])
        return losses["heldout_loss"]

    def comparison(self) -> str | None:
        """Compare this start's first loss and the one after the last step, in one line; None
        without both."""
        after = self._found.get(last := self._config.training.steps)
        if after is None or (first := min(self._found)) == last:
            return None
        before = self._found[first]
        when = f"after step {first}" if first else "before the first step"
        line = f"not private: held-out loss {before:.4f} {when}, {after:.4f} now"
        best = self._config.validation.reference_loss
        if first or best is None or best >= before:
            return line
        closed = (before - after) / (before - best)
        return f"{line}; {closed:.0%} of the gain without privacy, which reaches {best:g}"

    def _held_out(self, model: nn.Module, *, alone: bool = False) -> HeldOut:
        """Compute losses of the held-out units, in one forward pass over each: `alone` where they
        are published, since rounding depends on what is beside it, and where samples meet.

        Collectives: those of `Feed.microbatches`; FSDP2's gathers in forward; one all-reduce over
        the `loss` mesh, all ranks.
        """
        device = next(model.parameters()).device
        losses = SampleLosses(model, device, shard_of(self._dims, self._config))
        feed = Feed(self._loader, (self._config.training.seq_len,), losses.device)
        starts_K = torch.tensor(list(self._buckets), device=losses.device)
        # Losses and the number of targets: of each unit, then of each bucket.
        positions = self._positions()
        rows = len(positions), len(starts_K)
        sums_R2 = torch.zeros((sum(rows), 2), dtype=torch.float64, device=losses.device)
        units_N2, sums_K2 = sums_R2.split(rows)
        model.eval()
        at_once = 1 if alone or model.meeting is not None else None
        every = feed.microbatches(Draw(positions))
        for microbatch in (part for whole in every for part in whole.split(at_once)):
            found = losses.of_tokens(microbatch.tokens_BT, microbatch.labels_BT)
            targets_B = (microbatch.labels_BT >= 0).sum(dim=1).to(losses.device)
            loss_BT = found.loss_BT.double()
            mine_B = microbatch.valid_B.to(losses.device)
            at_B = microbatch.positions_B.to(losses.device)[mine_B]
            units_N2[at_B, 0] += (loss_BT.sum(dim=1) / targets_B.clamp(min=1))[mine_B]
            units_N2[at_B, 1] += (targets_B / self._dims.cp)[mine_B]
            loss_N = loss_BT[found.is_target_BT]
            at_N = found.position_BT[found.is_target_BT]
            bucket_N = torch.bucketize(at_N, starts_K, right=True) - 1
            sums_K2.index_add_(0, bucket_N, torch.stack((loss_N, torch.ones_like(loss_N)), dim=1))
        model.train()
        free_gathered(model)  # without a backward pass some would stay
        if (mesh := self._dims.get_optional_mesh("loss")) is not None:
            dist.all_reduce(sums_R2, group=mesh.get_group())
        loss_N, targets_N = units_N2.cpu().unbind(dim=1)
        mean = (loss_N.sum() / (targets_N > 0).sum()).item()
        of_buckets = zip(self._buckets.values(), sums_K2.tolist(), strict=True)
        at = {name: losses / count for name, (losses, count) in of_buckets if count}
        return HeldOut(mean, at, loss_N.numpy())

    def _positions(self) -> np.ndarray:
        """List the units to evaluate, the first ones, by their index in the loader's."""
        loader, steps = self._loader, self._config.validation.steps
        return np.arange(heldout_units(len(loader.units), steps, loader.ranks * loader.batch_size))


def buckets(seq_len: int) -> dict[int, str]:
    """Divide the positions of a sample's targets at powers of four, into buckets by their start.

    >>> buckets(2048)
    {0: '0-64', 64: '64-256', 256: '256-1k', 1024: '1k-2k'}
    """
    starts = [0]
    while (following := max(64, 4 * starts[-1])) < seq_len:
        starts.append(following)
    spans = zip(starts, [*starts[1:], seq_len], strict=True)
    return {start: f"{_short(start)}-{_short(end)}" for start, end in spans}


def _short(tokens: int) -> str:
    """Write a number of tokens in units of 2^20 or 2^10 if it is a multiple.

    >>> _short(2**20), _short(4096), _short(1000)
    ('1M', '4k', '1000')
    """
    for unit, letter in ((2**20, "M"), (2**10, "k")):
        if tokens and tokens % unit == 0:
            return f"{tokens // unit}{letter}"
    return str(tokens)
