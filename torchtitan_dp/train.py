"""DP-SGD on TorchTitan's Trainer: the loop of LongShield's Algorithm 1, and nothing else.

    torchrun … -m torchtitan_dp.train --job.config_file FILE [--section.key value …]

Guarantee:
    After k optimizer steps the weights are (epsilon, delta)-DP for one record, or one unit of
    `data.unit_field`, with the epsilon that `privacy.json` states: each step is the
    Poisson-subsampled Gaussian mechanism on the sum of clipped gradients, one a unit (with
    estimated norms, the mixture of Gaussians of `privacy.randomized`; with correlated noise, each
    round of steps, `privacy.banded`). It rests on the guarantees
    of `privacy.sampling`, `data.units`, `gradients`, `optimizer` and `privacy.accounting`, and on
    keys that leave this process's memory only to the other ranks. Control flow depends on records'
    lengths (`data.batching`) and on no other content. Whether and when a run ends does not depend
    on records, as far as `rehearsal` can see to it. A run whose weights are no longer finite ends:
    that follows from weights after their noise, which epsilon covers.
"""

import contextlib
import hashlib
import inspect
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import torchtitan_dp.distributed  # noqa: F401  lets TorchTitan import without a GPU

# isort: split
from torch.distributed.elastic.multiprocessing.errors import record
from torchtitan.tools.logging import init_logger, logger
from torchtitan.train import Trainer

from torchtitan_dp import momentum
from torchtitan_dp.baseline import BaselineTrainer
from torchtitan_dp.checkpoint.manager import Checkpointer
from torchtitan_dp.checkpoint.plan import earlier_ledger, most_lost, refuse_overspending
from torchtitan_dp.checkpoint.start import Start, check_records, decision, plan_start
from torchtitan_dp.config import JobConfig
from torchtitan_dp.config.derived import ladder, mesh_degrees
from torchtitan_dp.config.load import fail, load_config, write_config
from torchtitan_dp.data.batching import Draw, Microbatch, RecordLoader
from torchtitan_dp.data.feed import Feed
from torchtitan_dp.distributed.agreement import (
    broadcast_from_rank0,
    require_agreement,
    shared_root_key,
)
from torchtitan_dp.distributed.devices import kind, require_usable_devices
from torchtitan_dp.distributed.stop import StopRequest, lost_ranks_as_faults, shorten_timeouts
from torchtitan_dp.gradients.clipped_sum import ClippedSum
from torchtitan_dp.gradients.fsdp import ReductionGroups
from torchtitan_dp.gradients.step import build_step
from torchtitan_dp.ledger import (
    PRIVACY_FILE,
    Account,
    ExecutedSteps,
    Ledger,
    summary,
    versions,
    write_fingerprint,
)
from torchtitan_dp.ledger.caveats import STEPS_ELSEWHERE
from torchtitan_dp.ledger.files import to_bytes
from torchtitan_dp.ledger.heldout import NoisedLoss
from torchtitan_dp.models.ema import ema_of
from torchtitan_dp.models.hugging_face import describe, origin, shape
from torchtitan_dp.models.hugging_face_weights import export
from torchtitan_dp.models.loss import SampleLosses
from torchtitan_dp.models.parallelize import trained_fsdp_modules
from torchtitan_dp.models.parameters import overflow, trainable_parameters
from torchtitan_dp.preflight.check import check_run
from torchtitan_dp.preflight.console import quiet, show_notices
from torchtitan_dp.preflight.host_memory import require_host_memory
from torchtitan_dp.preflight.rehearsal import rehearse
from torchtitan_dp.privacy.banded import NoiseChain
from torchtitan_dp.privacy.sampling import poisson_draw
from torchtitan_dp.process import (
    PLANNED,
    STOPPED_FILE,
    faults_kept,
    lock_folder,
    mistakes_as_faults,
    os_errors_as_faults,
    protect,
)
from torchtitan_dp.train_spec import OpenOnce, register
from torchtitan_dp.validate import HeldOutValidator, publish
from torchtitan_dp.watch.processor import PrivateMetricsProcessor, SampleStatistics


class DPTrainer(Trainer):
    """Trains as TorchTitan does, with a step that is DP-SGD with AdamW."""

    job_config: JobConfig
    checkpointer: Checkpointer
    dataloader: RecordLoader
    metrics_processor: PrivateMetricsProcessor
    validator: HeldOutValidator
    clipped_sum_type: type[ClippedSum] = ClippedSum  # audits plant canaries in theirs
    _next_draw: Draw | None

    def __init__(self, job_config: JobConfig, decide: Callable[[], Start]) -> None:
        # TorchTitan would demand a multiple of MBS x dp; ours is an expectation.
        expected_batch_size = job_config.training.global_batch_size
        job_config.training.global_batch_size = -1
        # Undecorated: @record would keep a traceback of what `main` turns into one line.
        inspect.unwrap(Trainer.__init__)(self, job_config)
        job_config.training.global_batch_size = expected_batch_size
        require_host_memory(job_config)  # before any rank takes its part of it
        (model,) = self.model_parts
        self.average = ema_of(job_config, model)
        if job_config.validation.enable:
            self.validator.compare(self.average)
        start = decide()
        self.checkpointer = Checkpointer(self, start, origin(job_config), self.average)
        self.stop = StopRequest()

        self.ledger, self.executed = self._open_ledger(start)
        self._open_account()
        if self.ledger.heldout_losses is not None:
            self.validator.publish_by(self._publish_loss, lambda: self.ledger.private)
        settings = self.ledger.settings
        self.trained = trainable_parameters(model)
        step = build_step(
            job_config.privacy,
            model,
            self.trained,
            trained_fsdp_modules(model),
            ReductionGroups.build(self.device.type, mesh_degrees(job_config)),
            max_grad_norm=settings.max_grad_norm,
            clipped_sum_type=self.clipped_sum_type,
        )
        self.clipped_sum, self.gradients = step.clipped_sum, step.gradients
        self.dp_optimizer = step.optimizer(
            self.optimizers,
            noise_multiplier=settings.mechanism.noise_of_step,
            expected_batch_size=settings.expected_batch_size,
        )
        momentum.set_noise_std(
            self.optimizers,
            noise_multiplier=settings.mechanism.noise_multiplier,
            max_grad_norm=settings.max_grad_norm,
            expected_batch_size=settings.expected_batch_size,
        )
        self.sample_losses = SampleLosses(
            model,
            self.device,
            self.parallel_dims.get_optional_mesh("cp"),
            job_config.parallelism.context_parallel_load_balancer,
        )
        self.feed = Feed(self.dataloader, ladder(job_config), self.device)
        self._ledger_loaded = False
        self._draw_secrets()

    def train_step(self, feed: Feed) -> None:
        """Take one step of Algorithm 1: draw, clip, accumulate, add noise, update."""
        settings, lr = self.ledger.settings, self.lr_schedulers.schedulers[0].get_last_lr()[0]
        statistics = SampleStatistics()
        draw, self._next_draw = self._next_draw or self._draw(self.step), None
        if self.step < self.job_config.training.steps:  # read while this step runs
            self._next_draw = self._draw(self.step + 1)
        self.gradients.start_step(self.projection_keys.take(self.step))
        for microbatch in feed.microbatches(draw, self._next_draw):  # may be none
            self.metrics_processor.microbatch_begun(microbatch.labels_BT.numel())
            self.accumulate(microbatch, statistics)
        self.checkpointer.maybe_wait_for_staging()
        if dist.get_rank() == 0:
            self.executed.begin(self.step, settings)
        self.dp_optimizer.step(self.clipped_sum.take(), self.noise_keys.take(self.step))
        if self.average is not None:
            self.average.update()  # of weights that are noised by now
        self.overflow = overflow(self.trained.values())  # read once the step is over
        self.clipped_sum.reset()
        self.lr_schedulers.step()
        self.ledger.steps = self.step
        self.metrics_processor.step_done(self.step)
        self._log(lr, statistics)
        if self.job_config.validation.enable and self.validator.should_validate(self.step):
            # Not after the step, as TorchTitan would: the checkpoint has its loss in the ledger.
            self.checkpointer.require_finite(self.step)
            self.validator.validate(self.model_parts, self.step)
        if self._should_publish(self.step):
            self._publish()

    def accumulate(self, microbatch: Microbatch, statistics: SampleStatistics) -> None:
        """Clip each sample's gradient and add it to the step's sum.

        It is also rehearsed: every part of a step that needs memory or a kernel belongs here.
        """
        for part in microbatch.to(self.device).split(self.gradients.batch_size):
            *earlier, last = part.windows()
            earlier_B: torch.Tensor | float = 0.0
            for window in earlier:  # as many on every rank, also where fewer were dealt
                loss_B = window.of_mean(self.sample_losses(window.tokens_BT, window.labels_BT))
                self.gradients.hold(loss_B)
                earlier_B = earlier_B + loss_B.detach()
            loss_B = last.of_mean(self.sample_losses(last.tokens_BT, last.labels_BT))
            clip = self.gradients.accumulate_clipped(
                loss_B, part.valid_B, part.positions_B.tolist()
            )
            loss_B = loss_B + earlier_B  # the mean over a unit's windows
            statistics.add(loss_B, part.valid_B, clip)

    def should_continue_training(self) -> bool:
        if self.step == self.checkpointer.start.step + 1:
            groups = self.clipped_sum.groups.all()
            shorten_timeouts(self.job_config, self.parallel_dims, groups)
        if not super().should_continue_training():
            return False
        is_asked, overflows = self.stop.agree(self.overflow)
        if overflows:
            self.checkpointer.end_not_finite(self.step)
        return not is_asked

    def train(self) -> None:
        inspect.unwrap(Trainer.train)(self)
        spent = self._publish()
        saved = True
        if super().should_continue_training():
            saved = self.checkpointer.stop_at(self.step, self.job_config.training.steps)
            if (stopped := os.environ.get(STOPPED_FILE)) is not None:
                Path(stopped).write_text("stopped")
        elif spent is not None:
            self.metrics_processor.send()
            for line in summary(spent):
                logger.info(line)
            folder = self.job_config.job.dump_folder
            logger.info(f"outputs: {folder}/")
            if spent["private"]:
                logger.info(f"to publish: torchtitan-dp release {folder} NEW_FOLDER")
        if saved and dist.get_rank() == 0:
            self.executed.end_start()

    def exported_terms(self) -> dict[str, Any]:
        """Return the `privacy.json` of the weights as they are exported now."""
        return self.account.exported()

    def batch_generator(self, data_iterable: Any) -> Any:
        """Prepare the first step, after loading; the steps are fed ahead of time."""
        if self.checkpointer.start.resumes:
            if not self._ledger_loaded:
                raise RuntimeError("weights were loaded from a checkpoint without its ledger")
            self.dp_optimizer.require_steps(self.step)
        self.overflow = overflow(self.trained.values())
        if self.average is not None:
            self.average.begin()
        if self.step < self.job_config.training.steps:
            rehearse(self)
            if dist.get_rank() == 0:
                losses = self.ledger.heldout_losses
                self.executed.begin_start(most_lost(self.job_config), losses)
        published = self._publish()
        self.metrics_processor.begin(
            self.step,
            private=self.ledger.private,
            epsilon_planned=published["epsilon_planned"] if published else None,
        )
        return self.feed

    # The state in a checkpoint besides weights, optimizer and LR schedule.

    def state_dict(self) -> dict[str, Any]:
        if self.clipped_sum.accumulating:
            raise RuntimeError("a checkpoint in the middle of a step would contain un-noised sums")
        batch, seq_len = self.ledger.settings.expected_batch_size, self.job_config.training.seq_len
        windows = self.job_config.data.windows_per_draw
        return {
            "step": self.step,
            # Expected, hence public.
            "ntokens_seen": self.step * batch * windows * seq_len,
            "ledger": self.ledger.to_json(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore step, ledger and token count from a checkpoint.

        The plan has merged the ledger of the chosen checkpoint, so that a mistake is reported
        before the model is built; the ledger that is loaded here may be older, and counts.
        """
        loaded = Ledger.from_json(state_dict["ledger"])
        self._ledger_loaded = True
        planned = self.job_config.privacy.new_segment is not None
        self.ledger.resume_from(loaded, new_segment=planned)
        refuse_overspending(self.job_config, self.ledger)
        assert loaded.steps == state_dict["step"]
        self.step = loaded.steps
        self._open_account()
        self.ntokens_seen = state_dict["ntokens_seen"]
        self._draw_secrets()

    # Secrets, ledger, logs.

    def _draw(self, step: int) -> Draw:
        """Draw a step's units, and take its window key. Each key is used once.

        A draw made ahead of time depends on its step's keys alone. If the run stops before that
        step, the draw is discarded.
        """
        terms, mechanism = self.ledger.settings, self.ledger.settings.mechanism
        group = self.feed.loader.groups(mechanism.period)[step % mechanism.period]
        key, secure = self.sampling_keys.take(step), terms.secure_noise
        drawn = poisson_draw(key, len(group), mechanism.draw_rate, secure=secure)
        return Draw(group[drawn], self.window_keys.take(step))

    def _draw_secrets(self) -> None:
        """Draw fresh keys, at each start and each load. Collective over the world."""
        self._next_draw = None
        root = shared_root_key(self.device, self.job_config.privacy.debug_seed)
        bands = self.ledger.settings.mechanism.period
        self.sampling_keys, self.noise_keys = (
            root.stream("sampling"),
            NoiseChain(root.stream("noise"), bands),
        )
        self.window_keys = root.stream("window")
        self.projection_keys = root.stream("projection")  # of estimated norms
        self.coin_keys = root.stream("coin")  # of audits
        self.evaluation_keys = root.stream("evaluation")

    def _open_ledger(self, start: Start) -> tuple[Ledger, ExecutedSteps]:
        """Load or create the ledger. Its terms are fixed the first time this folder is used."""
        config = self.job_config
        folder = config.job.dump_folder
        fingerprint, units = self.dataloader.fingerprint, self.dataloader.units
        settings = self.dataloader.settings
        check_records(folder, fingerprint, settings)
        ledger = plan_start(config, len(units), start, earlier_ledger(folder)).ledger
        dealt = hashlib.sha256(units.tobytes()).hexdigest()
        require_agreement(
            {
                "the records": (fingerprint, dealt),
                "the tokens": self.dataloader.samples.store.fingerprint,
                "the privacy settings": ledger.settings,
                "the configuration": ledger.config_hash,
                "the versions of packages": versions(),
                # Replicas' noise is compiled for it, and must be the same bit by bit.
                "the kind of device": kind(self.device),
            }
        )
        ledger.rewind()  # until a checkpoint is loaded
        executed = ExecutedSteps(folder)
        dist.barrier()  # all ranks have read the folder
        if dist.get_rank() == 0:
            write_fingerprint(folder, fingerprint, settings, self.dataloader.describe())
            for line in write_config(config):
                logger.info(line)
        return ledger, executed

    def _open_account(self) -> None:
        """Rebuild the account for the remaining steps, at the start and after each checkpoint load.

        Collective over the world: any rank may write the ledger into a checkpoint.
        """
        ledger, executed = self.ledger, self.executed
        ledger.start = executed.new_start()
        if dist.get_rank() == 0:
            lineage = ledger.taken(), ledger.evaluated()
            if executed.missing(*lineage):
                ledger.add_caveat(STEPS_ELSEWHERE)
            executed.adopt(*lineage)
            executed.enter_lost(ledger)
        self.ledger = Ledger.from_json(broadcast_from_rank0(ledger.to_json()))
        self.account = Account(self.ledger, self.job_config.training.steps)

    def _log(self, lr: float, statistics: SampleStatistics) -> None:
        if not self.metrics_processor.should_log(self.step):
            return
        settings = self.ledger.settings
        public = {
            "lr": lr,
            "epsilon": self.account.epsilon(),
            "noise_multiplier": settings.mechanism.noise_multiplier,
        }
        self.metrics_processor.log_step(
            self.step,
            public,
            statistics.reduce(self.parallel_dims),
            self.account.beside_epsilon(self.job_config.privacy.target_epsilon),
        )

    def _should_publish(self, step: int) -> bool:
        """Return whether to write `privacy.json`: before each checkpoint, when logging, at the
        end."""
        config, last = self.job_config.checkpoint, step == self.job_config.training.steps
        return last or step % config.interval == 0 or self.metrics_processor.should_log(step)

    def _publish_loss(self, loss_N: np.ndarray, step: int) -> NoisedLoss:
        """Add noise to the held-out loss after `step`, and enter it into the ledger."""
        return publish(self.ledger, self.executed, self.evaluation_keys.take(step), loss_N, step)

    def _publish(self) -> dict[str, Any] | None:
        """Write `privacy.json` on rank 0, and return its content there."""
        if dist.get_rank() != 0:
            return None
        return self.account.publish(self.job_config.job.dump_folder)


def build_trainer(config: JobConfig, decide: Callable[[], Start]) -> DPTrainer | BaselineTrainer:
    """Build the trainer of `config`: with privacy, or TorchTitan's own, the baseline.

    Args:
        decide: from `checkpoint.start.decision`.
    """
    trainer = DPTrainer if config.privacy.enable else BaselineTrainer
    return trainer(config, decide)


def _require_launcher() -> None:
    """End with code 2 where nothing has started this process as one of its ranks."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        if name not in os.environ:
            fail(
                f"{name} is not set: start training by `torchtitan-dp train`, ./run_train.sh or "
                "torchrun, which start its processes"
            )


def export_weights(trainer: DPTrainer | BaselineTrainer) -> str:
    """Export the weights, or their average, as a Hugging Face folder with its `privacy.json`.

    Collective over the world.

    Returns:
        the folder.
    """
    terms = {PRIVACY_FILE: to_bytes(trainer.exported_terms())}
    average = trainer.average
    swapped = average.in_place_of_weights() if average else contextlib.nullcontext()
    with swapped, mistakes_as_faults():
        return export(trainer.model_parts[0], trainer.job_config, beside=terms)


@record
@os_errors_as_faults()
@lost_ranks_as_faults()
def main(argv: list[str]) -> None:
    """Train, as one worker of `torchrun`."""
    protect()
    init_logger()
    quiet(logger)
    open_records = OpenOnce()
    with mistakes_as_faults():
        require_usable_devices()
        _require_launcher()
        config = load_config(argv, int(os.environ["WORLD_SIZE"]))
        checked = check_run(config, open_records)
        if os.environ["RANK"] == "0" and PLANNED not in os.environ:  # else the plan did
            show_notices(config, checked)
        # Held by the kernel until this process ends.
        lock = lock_folder(config.job.dump_folder) if os.environ["RANK"] == "0" else None
    logger.info(describe(config, shape(config)))
    decide = decision(config)
    # Without privacy nothing would find a weight that was neither drawn nor loaded.
    register(config, open_records, decide if config.privacy.enable else None)
    # Not TorchTitan's: in checkpoint/ it would be taken for one to resume from.
    exports, config.checkpoint.last_save_in_hf = config.checkpoint.last_save_in_hf, False
    trainer = build_trainer(config, decide)
    kept = faults_kept(config.job.dump_folder) if lock else contextlib.nullcontext()
    try:
        with kept:
            trainer.train()
        if exports and trainer.step == config.training.steps:  # not where it was stopped
            which = " (the average of weights)" if trainer.average else ""
            logger.info(f"Hugging Face folder: {export_weights(trainer)}/{which}")
    finally:
        trainer.close()
    dist.destroy_process_group()
    del lock


if __name__ == "__main__":
    main(sys.argv[1:])
