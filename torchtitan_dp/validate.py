"""The loss on units (records) that are never trained on, and how it goes along a sample. It is
computed from them without noise.

Not private: publish it only if the held-out records may be.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.distributed import ParallelDims
from torchtitan.tools.logging import logger

from torchtitan_dp.config import JobConfig
from torchtitan_dp.data.batching import RecordLoader
from torchtitan_dp.data.feed import ContextGroup, Draw, Feed
from torchtitan_dp.gradients.fsdp import free_gathered
from torchtitan_dp.models.ema import WeightAverage
from torchtitan_dp.models.loss import SampleLosses


class HeldOut(NamedTuple):
    """Held-out losses of some weights."""

    mean: float  # over units, of the mean loss of each one's sample
    at: dict[str, float]  # mean over tokens at these positions, by name of the bucket


class HeldOutValidator:
    """Evaluates the same `validation.steps` microbatches at step 1 and every `validation.freq`."""

    def __init__(
        self,
        loader: RecordLoader,
        job_config: JobConfig,
        parallel_dims: ParallelDims,
        amp: AbstractContextManager[None],
        metrics: MetricsProcessor,
    ) -> None:
        """
        Args:
            loader: over the held-out units, for this data-parallel rank.
            amp: the precision context of training.
        """
        self._loader, self._config, self._dims = loader, job_config, parallel_dims
        self._amp, self._metrics = amp, metrics
        self._average: WeightAverage | None = None
        self._buckets = buckets(job_config.training.seq_len)

    def compare(self, average: WeightAverage | None) -> None:
        """Evaluate an average of the model's weights beside them, from now on."""
        self._average = average

    def should_validate(self, step: int) -> bool:
        return step == 1 or step % self._config.validation.freq == 0

    @torch.no_grad()
    def validate(self, model_parts: list[nn.Module], step: int) -> float:
        """Log `heldout_loss` and, by position, `heldout_loss_at/…`, of the weights; of an average
        `heldout_loss_ema` and `heldout_loss_ema_at/…`.

        Collectives: those of `_held_out`, for each.

        Returns:
            the loss of the weights.
        """
        (model,) = model_parts
        found = {"heldout_loss": self._held_out(model)}
        shown = f"{found['heldout_loss'].mean:.4f}"
        if self._average is not None:
            with self._average.in_place_of_weights():
                found["heldout_loss_ema"] = self._held_out(model)
            shown += f", averaged weights: {found['heldout_loss_ema'].mean:.4f}"
        losses = {name: one.mean for name, one in found.items()}
        for name, one in found.items():
            losses |= {f"{name}_at/{bucket}": loss for bucket, loss in one.at.items()}
        self._metrics.logger.log(losses, step)
        at = f"step: {step}/{self._config.training.steps}"
        logger.info(f"{at}  not private: held-out loss: {shown}")
        for name, one in found.items() if len(self._buckets) > 1 else ():
            which = "averaged weights' " if name.endswith("_ema") else ""
            parts = ", ".join(f"{bucket}: {loss:.4f}" for bucket, loss in one.at.items())
            logger.info(f"{at}  not private: {which}held-out loss at tokens {parts}")
        return losses["heldout_loss"]

    def _held_out(self, model: nn.Module) -> HeldOut:
        """Compute losses of the held-out units, in one forward pass over each.

        Collectives: those of `Feed.microbatches`; FSDP2's gathers in forward; one all-reduce over
        the `loss` mesh, all ranks.
        """
        cp = self._dims.get_optional_mesh("cp")
        losses = SampleLosses(
            model,
            next(model.parameters()).device,
            cp,
            self._config.parallelism.context_parallel_load_balancer,
        )
        group = ContextGroup.over(cp)
        feed = Feed(self._loader, (self._config.training.seq_len,), losses.device, group)
        starts_K = torch.tensor(list(self._buckets), device=losses.device)
        # Losses and their number: in the first row of units, then of tokens in each bucket.
        sums_K2 = torch.zeros((1 + len(starts_K), 2), dtype=torch.float64, device=losses.device)
        model.eval()
        for microbatch in feed.microbatches(Draw(self._positions())):
            with self._amp:
                found = losses.of_tokens(microbatch.tokens_BT, microbatch.labels_BT)
            targets_B = (microbatch.labels_BT >= 0).sum(dim=1).to(losses.device)
            loss_BT = found.loss_BT.double()
            sums_K2[0, 0] += (loss_BT.sum(dim=1) / targets_B.clamp(min=1)).sum()
            sums_K2[0, 1] += (targets_B > 0).sum() / self._dims.cp
            loss_N = loss_BT[found.is_target_BT]
            bucket_N = torch.bucketize(found.position_BT[found.is_target_BT], starts_K, right=True)
            sums_K2.index_add_(0, bucket_N, torch.stack((loss_N, torch.ones_like(loss_N)), dim=1))
        feed.close()
        model.train()
        free_gathered(model)  # without a backward pass some would stay
        if (mesh := self._dims.get_optional_mesh("loss")) is not None:
            dist.all_reduce(sums_K2, group=mesh.get_group())
        sums_K2 = sums_K2.cpu()
        mean = (sums_K2[0, 0] / sums_K2[0, 1]).item()
        return HeldOut(mean, mean_at(list(self._buckets.values()), sums_K2[1:]))

    def _positions(self) -> np.ndarray:
        """List those that fill `validation.steps` microbatches on every rank; all, if it is -1."""
        every = np.arange(len(self._loader.units))
        steps = self._config.validation.steps
        return every if steps < 0 else every[: steps * self._loader.ranks * self._loader.batch_size]


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


def mean_at(names: Sequence[str], sums_K2: torch.Tensor) -> dict[str, float]:
    """Divide each bucket's sum of losses by their number; one without a target is left out."""
    both = zip(names, sums_K2.tolist(), strict=True)
    return {name: losses / count for name, (losses, count) in both if count}


def _short(tokens: int) -> str:
    """Write a number of tokens in units of 2^20 or 2^10 if it is a multiple.

    >>> _short(2**20), _short(4096), _short(1000)
    ('1M', '4k', '1000')
    """
    for unit, letter in ((2**20, "M"), (2**10, "k")):
        if tokens and tokens % unit == 0:
            return f"{tokens // unit}{letter}"
    return str(tokens)
