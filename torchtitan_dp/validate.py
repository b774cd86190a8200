"""The loss on units (records) that are never trained on. It is computed from them without noise.

Not private: publish it only if the held-out records may be.
"""

from contextlib import AbstractContextManager

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

    def compare(self, average: WeightAverage | None) -> None:
        """Evaluate an average of the model's weights beside them, from now on."""
        self._average = average

    def should_validate(self, step: int) -> bool:
        return step == 1 or step % self._config.validation.freq == 0

    @torch.no_grad()
    def validate(self, model_parts: list[nn.Module], step: int) -> float:
        """Log `heldout_loss`, of the weights, and of an average `heldout_loss_ema`.

        Collectives: those of `_mean_loss`, for each.

        Returns:
            that of the weights.
        """
        (model,) = model_parts
        loss = self._mean_loss(model)
        losses, shown = {"heldout_loss": loss}, f"{loss:.4f}"
        if self._average is not None:
            with self._average.in_place_of_weights():
                losses["heldout_loss_ema"] = self._mean_loss(model)
            shown += f", averaged weights: {losses['heldout_loss_ema']:.4f}"
        self._metrics.logger.log(losses, step)
        logger.info(f"step: {step:3}  not private: held-out loss: {shown}")
        return loss

    def _mean_loss(self, model: nn.Module) -> float:
        """Compute the mean, over held-out units, of the mean loss of each one's sample.

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
        sums = torch.zeros(2, dtype=torch.float64)  # losses, units
        model.eval()
        for microbatch in feed.microbatches(Draw(self._positions())):
            with self._amp:
                loss_B = losses(microbatch.tokens_BT, microbatch.labels_BT)
            sums[0] += loss_B.sum().item()
            sums[1] += (microbatch.labels_BT >= 0).any(dim=1).sum().item() / self._dims.cp
        feed.close()
        model.train()
        free_gathered(model)  # without a backward pass some would stay
        if (mesh := self._dims.get_optional_mesh("loss")) is not None:
            sums = sums.to(losses.device)
            dist.all_reduce(sums, group=mesh.get_group())
        return (sums[0] / sums[1]).item()

    def _positions(self) -> np.ndarray:
        """List those that fill `validation.steps` microbatches on every rank; all, if it is -1."""
        every = np.arange(len(self._loader.units))
        steps = self._config.validation.steps
        return every if steps < 0 else every[: steps * self._loader.ranks * self._loader.batch_size]
