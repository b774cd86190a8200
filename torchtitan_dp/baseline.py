"""TorchTitan's Trainer, on the same data path: the baseline WITHOUT privacy.

Its checkpoints, its folder and its exports are marked as not private, permanently.
"""

import dataclasses
import inspect
import math
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

import torchtitan_dp.distributed  # noqa: F401  lets TorchTitan import without a GPU

# isort: split
from torchtitan.train import Trainer

from torchtitan_dp.checkpoint.initial import baseline_ledger
from torchtitan_dp.checkpoint.manager import Checkpointer
from torchtitan_dp.checkpoint.start import Start
from torchtitan_dp.config import JobConfig
from torchtitan_dp.data.batching import RecordLoader
from torchtitan_dp.ledger import Lineage
from torchtitan_dp.ledger.account import without_privacy
from torchtitan_dp.ledger.files import write_published
from torchtitan_dp.models.ema import ema_of
from torchtitan_dp.models.hugging_face import origin
from torchtitan_dp.preflight.host_memory import require_host_memory
from torchtitan_dp.validate import HeldOutValidator
from torchtitan_dp.watch.processor import LabelledMetricsProcessor


class BaselineTrainer(Trainer):
    """TorchTitan's trainer, whose checkpoints have a ledger that is not private."""

    job_config: JobConfig
    dataloader: RecordLoader
    metrics_processor: LabelledMetricsProcessor
    validator: HeldOutValidator

    def __init__(self, job_config: JobConfig, decide: Callable[[], Start]) -> None:
        # To TorchTitan a max_norm of 0 means gradients of 0; here it means no clipping.
        job_config.training.max_norm = job_config.training.max_norm or math.inf
        inspect.unwrap(Trainer.__init__)(self, job_config)
        require_host_memory(job_config)  # before any rank takes its part of it
        (model,) = self.model_parts
        self.average = ema_of(job_config, model)
        if job_config.validation.enable:
            self.validator.compare(self.average)
        self.checkpointer = Checkpointer(self, decide(), origin(job_config), self.average)
        self.ledger = baseline_ledger(job_config, len(self.dataloader.units))
        self._publish()

    def batch_generator(self, data_iterable: Any) -> Any:
        """Open the metrics and start the average, after loading; yield TorchTitan's batches."""
        self.metrics_processor.begin(self.step, private=False)
        if self.average is not None:
            self.average.begin()
        return super().batch_generator(data_iterable)

    def train_step(self, data_iterator: Any) -> None:
        super().train_step(data_iterator)
        if self.average is not None:
            self.average.update()

    def train(self) -> None:
        # Undecorated: @record would keep a traceback of an error that `main` prints in one line.
        inspect.unwrap(Trainer.train)(self)
        self._publish()

    def state_dict(self) -> dict[str, Any]:
        """Return TorchTitan's entries of a checkpoint, and the ledger."""
        return {**super().state_dict(), "ledger": self._current().to_json()}

    def _current(self) -> Lineage:
        return dataclasses.replace(self.ledger, steps=self.step)

    def _publish(self) -> None:
        if dist.get_rank() == 0:
            write_published(self.job_config.job.dump_folder, self.exported_terms())

    def exported_terms(self) -> dict[str, Any]:
        """Return the `privacy.json` of the weights as they are now."""
        return without_privacy(self._current())
