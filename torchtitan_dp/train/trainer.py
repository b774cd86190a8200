"""DP-SGD on TorchTitan's Trainer: the loop of LongShield's Algorithm 1, and nothing else.

    torchrun … -m torchtitan_dp.train --job.config_file FILE [--section.key value …]

Guarantee:
    - After k optimizer steps the weights are (epsilon, delta)-DP for one record, or one unit of
      `data.unit_field`, with the epsilon that `privacy.json` states: each step is the
      Poisson-subsampled Gaussian mechanism on the sum of clipped gradients, one a unit (with
      estimated norms, the mixture of Gaussians of `privacy.losses`; with correlated noise, each
      round of steps, `privacy.banded`).
    - Control flow depends on records' lengths (`data.batching`) and on no other content. Whether
      and when a run ends does not depend on records, as far as `rehearsal` can see to it, but on
      weights after their noise, which epsilon covers: a run ends where they are not finite.
"""

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import torchtitan_dp.distributed  # noqa: F401  lets TorchTitan import without a GPU

# isort: split
from torch.distributed.elastic.multiprocessing.errors import record
from torchtitan.tools.logging import init_logger, logger

from torchtitan_dp.base.process import (
    PLANNED,
    STOPPED_FILE,
    as_faults,
    faults_kept,
    lock_folder,
    protect,
)
from torchtitan_dp.checkpoint.bookkeeping import Bookkeeping
from torchtitan_dp.checkpoint.plan import refuse_private_folder
from torchtitan_dp.checkpoint.start import Start, decision
from torchtitan_dp.config import JobConfig
from torchtitan_dp.config.derived import config_file, ladder, mesh_degrees
from torchtitan_dp.config.load import fail, load_config
from torchtitan_dp.data.batching import Feed, Microbatch
from torchtitan_dp.distributed.agreement import StopRequest, lost_ranks_as_faults, shorten_timeouts
from torchtitan_dp.distributed.devices import require_usable_devices
from torchtitan_dp.gradients.fsdp import ReductionGroups
from torchtitan_dp.gradients.step import build_step
from torchtitan_dp.ledger import Lineage
from torchtitan_dp.models.hugging_face import describe, shape
from torchtitan_dp.models.loss import SampleLosses, shard_of
from torchtitan_dp.models.parallelize import trained_fsdp_modules
from torchtitan_dp.models.parameters import overflow, trainable_parameters
from torchtitan_dp.selfcheck.proof import prove
from torchtitan_dp.train.check import check_run, show_notices
from torchtitan_dp.train.processor import PrivateMetricsProcessor, SampleStatistics
from torchtitan_dp.train.rehearsal import rehearse
from torchtitan_dp.train.spec import BaselineTrainer, RunTrainer, export_weights, quiet, register


class DPTrainer(RunTrainer):
    """Trains as TorchTitan does, with a step that is DP-SGD with AdamW."""

    metrics_processor: PrivateMetricsProcessor

    def __init__(self, job_config: JobConfig, decide: Callable[[], Start]) -> None:
        # TorchTitan would demand a multiple of MBS x dp; ours is an expectation.
        expected_batch_size = job_config.training.global_batch_size
        job_config.training.global_batch_size = -1
        super().__init__(job_config, decide)
        job_config.training.global_batch_size = expected_batch_size
        self.stop = StopRequest()
        self.books = Bookkeeping(job_config, self.dataloader, self.checkpointer.start, self.device)
        (model,) = self.model_parts
        self.trained = trainable_parameters(model)
        settings = self.books.settings
        step = build_step(
            job_config.privacy,
            model,
            self.trained,
            trained_fsdp_modules(model),
            ReductionGroups.build(self.device.type, mesh_degrees(job_config)),
            max_grad_norm=settings.max_grad_norm,
        )
        self.clipped_sum, self.gradients = step.clipped_sum, step.gradients
        self.dp_optimizer = step.optimizer(
            self.optimizers,
            noise_multiplier=settings.mechanism.noise_multiplier,
            noise_of_step=settings.mechanism.noise_of_step,
            expected_batch_size=settings.expected_batch_size,
        )
        shard = shard_of(self.parallel_dims, job_config)
        self.sample_losses = SampleLosses(model, self.device, shard)
        self.feed = Feed(self.dataloader, ladder(job_config), self.device)
        self._summary: list[str] = []

    @property
    def ledger(self) -> Lineage:
        """The ledger of the present weights."""
        return self.books.ledger

    def train_step(self, feed: Feed) -> None:
        """Take one step of Algorithm 1: draw, clip, accumulate, add noise, update."""
        lr, statistics = self.lr_schedulers.schedulers[0].get_last_lr()[0], SampleStatistics()
        draw, following = self.books.draws(self.step, feed.loader)  # the next is read meanwhile
        self.gradients.start_step(self.books.projection_keys.take(self.step))
        for microbatch in feed.microbatches(draw, following):  # may be none
            self.metrics_processor.microbatch_begun(microbatch.labels_BT.numel())
            self.accumulate(microbatch, statistics)
        self.checkpointer.maybe_wait_for_staging()
        self.books.begin_step(self.step)
        self.dp_optimizer.step(self.clipped_sum.take(), self.books.noise_keys.take(self.step))
        if self.average is not None:
            self.average.update()  # of weights that are noised by now
        self.overflow = overflow(self.trained.values())  # read once the step is over
        self.clipped_sum.reset()
        self.lr_schedulers.step()
        self.books.end_step(self.step)
        self.metrics_processor.step_done(self.step)
        self._show(lr, statistics)

    def accumulate(self, microbatch: Microbatch, statistics: SampleStatistics) -> None:
        """Clip each sample's gradient and add it to the step's sum. It is also rehearsed: all that
        needs memory or a kernel belongs here."""
        for part in microbatch.split(self.gradients.batch_size):
            *earlier, last = part.windows()
            earlier_B: torch.Tensor | float = 0.0
            for window in earlier:  # equally many on all ranks, also for units that have fewer
                loss_B = window.scale_losses(self.sample_losses(window.tokens_BT, window.labels_BT))
                self.gradients.hold(loss_B)
                earlier_B = earlier_B + loss_B.detach()
            loss_B = last.scale_losses(self.sample_losses(last.tokens_BT, last.labels_BT))
            positions = part.positions_B.tolist()
            clip = self.gradients.accumulate_clipped(loss_B, part.valid_B, positions)
            loss_B = loss_B + earlier_B  # the mean over a unit's windows
            statistics.add(loss_B, part.valid_B, clip)

    def should_continue_training(self) -> bool:
        if self.step == self.checkpointer.start.step + 1:
            shorten_timeouts(self.job_config, self.parallel_dims, self.clipped_sum.groups.all())
        if not super().should_continue_training():
            return False
        is_asked, overflows = self.stop.agree(self.overflow)
        if overflows:
            self.checkpointer.end_not_finite(self.step)
        return not (is_asked and self.books.may_stop(self.step))

    def train(self) -> None:
        super().train()
        self.books.publish()
        is_done, saved = self.step >= self.job_config.training.steps, True
        if not is_done:
            saved = self.checkpointer.stop_at(self.step, self.job_config.training.steps)
        if saved:
            self.books.end_start()
        if not is_done and (stopped := os.environ.get(STOPPED_FILE)) is not None:
            Path(stopped).write_text("stopped")
        if is_done:
            self._publish_loss()
            if (spent := self.books.publish()) is not None:
                self.metrics_processor.logger.send()
                self._summary = self.books.summary(spent)

    def summary(self) -> list[str]:
        return [*super().summary(), *self._summary]

    def _publish_loss(self) -> None:
        """Publish the held-out loss of the last weights, where that is asked for and was not done.
        Collective over the world."""
        noised = self.books.publish_loss(lambda: self.validator.losses(self.model_parts))
        if noised is not None:
            self.metrics_processor.logger.log({"heldout_loss_noised": noised.loss}, noised.step)
            label = "" if self.ledger.private else "not private: "
            logger.info(
                f"step: {noised.step}/{noised.step}  {label}held-out loss with noise: "
                f"{noised.loss:.4f}, standard deviation {noised.standard_deviation:.2g}"
            )

    def batch_generator(self, data_iterable: Any) -> Any:
        """Prepare the first step, after loading, and return the feed of all steps."""
        if self.checkpointer.start.resumes:
            self.books.require_loaded()
            self.dp_optimizer.require_steps(self.step)
        self.overflow = overflow(self.trained.values())
        if self.average is not None:
            self.average.begin()
        if self.step < self.job_config.training.steps:
            if config_file(self.job_config) is not None:  # the tests prove Llamas by flavor
                prove(self)
            rehearse(self)
            self.stop.listen()  # before the start counts in the ledger
            self.books.begin_start()
            self.checkpointer.on_saved = self.books.saved
        planned = (self.books.publish() or {}).get("epsilon_planned")
        private = self.ledger.private
        self.metrics_processor.begin(self.step, private=private)
        self.evaluate_start()
        self.metrics_processor.count_from(self.step, planned)
        return self.feed

    # The state in a checkpoint besides weights, optimizer and LR schedule.

    def state_dict(self) -> dict[str, Any]:
        if self.clipped_sum.accumulating:
            raise RuntimeError("a checkpoint in the middle of a step would contain un-noised sums")
        rows = self.books.settings.expected_batch_size * self.job_config.data.windows_per_draw
        return {
            "step": self.step,
            # Expected, hence public.
            "ntokens_seen": self.step * rows * self.job_config.training.seq_len,
            "ledger": self.ledger.to_json(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.step = self.books.load(state_dict["ledger"])
        assert self.step == state_dict["step"]
        self.ntokens_seen = state_dict["ntokens_seen"]

    def exported_terms(self) -> dict[str, Any]:
        return self.books.exported()

    def _show(self, lr: float, statistics: SampleStatistics) -> None:
        step, config = self.step, self.job_config
        if logs := self.metrics_processor.should_log(step):
            self.metrics_processor.log_step(
                step,
                {"lr": lr, **self.books.scalars()},
                statistics.reduce(self.parallel_dims),
                self.books.beside_epsilon(),
            )
        if logs or step % config.checkpoint.interval == 0 or step == config.training.steps:
            self.books.publish()


def build_trainer(config: JobConfig, decide: Callable[[], Start]) -> RunTrainer:
    """Build the trainer of `config`, with privacy or the baseline, for a start that
    `checkpoint.start.decision` decides."""
    return (DPTrainer if config.privacy.enable else BaselineTrainer)(config, decide)


@record
@as_faults(OSError)
@lost_ranks_as_faults()
def main(argv: list[str]) -> None:
    """Train, as one worker of `torchrun`."""
    protect()
    init_logger()
    quiet(logger)
    with as_faults(ValueError):
        require_usable_devices()
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
            if name not in os.environ:
                fail(f"{name} is not set: start it by `torchtitan-dp train` or torchrun")
        config = load_config(argv, int(os.environ["WORLD_SIZE"]))
        checked = check_run(config)
        if os.environ["RANK"] == "0" and PLANNED not in os.environ:  # else the plan did
            show_notices(config, checked)
        # Held by the kernel until this process ends.
        lock = lock_folder(config.job.dump_folder) if os.environ["RANK"] == "0" else None
        if lock and not config.privacy.enable:  # a private run may have ended meanwhile
            refuse_private_folder(config.job.dump_folder)
    logger.info(describe(config, shape(config)))
    decide = decision(config)
    # The baseline draws all weights, whichever of them it then loads.
    register(config, checked.records, decide if config.privacy.enable else None)
    trainer = build_trainer(config, decide)
    # Not TorchTitan's: in checkpoint/ it would be taken for one to resume from.
    trainer.checkpointer.last_save_in_hf = False
    kept = faults_kept(config.job.dump_folder) if lock else contextlib.nullcontext()
    try:
        with kept:
            trainer.train()
        if trainer.step == config.training.steps:  # not where it was stopped
            if config.checkpoint.last_save_in_hf:
                which = " of the averaged weights" if trainer.average else ""
                private = isinstance(trainer, DPTrainer) and trainer.ledger.private
                ships = "what to ship is a release" if private else "NOT private, not to ship"
                folder = f"Hugging Face folder{which}, to evaluate here; {ships}"
                logger.info(f"{folder}: {export_weights(trainer)}/")
            for line in trainer.summary():
                logger.info(line)
    finally:
        trainer.close()
    dist.destroy_process_group()
    del lock
