"""TorchTitan's checkpointer, which loads the decided weights."""

import json
import os
import shutil
from collections.abc import Callable
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.optim.lr_scheduler import LambdaLR

import torchtitan_dp.distributed  # noqa: F401  lets TorchTitan import without a GPU

# isort: split
from torchtitan.components.checkpoint import (
    LR_SCHEDULER,
    MODEL,
    OPTIMIZER,
    AsyncMode,
    CheckpointManager,
)
from torchtitan.tools.logging import logger
from torchtitan.train import Trainer

from torchtitan_dp.base.process import Fault
from torchtitan_dp.base.torch_private import is_saved_at
from torchtitan_dp.checkpoint.folder import (
    AVERAGE,
    SETTINGS,
    has_average,
    in_one_line,
    newest_finished_checkpoint,
    refuse_another_model,
    stale_checkpoints,
    step_folder,
)
from torchtitan_dp.checkpoint.folder import load as load_states
from torchtitan_dp.checkpoint.start import Start, confirmed
from torchtitan_dp.models.ema import WEIGHTS, WeightAverage
from torchtitan_dp.models.hugging_face import shape
from torchtitan_dp.models.parameters import first_overflow, overflow

_NOWHERE = os.path.join(os.devnull, "none")  # a path at which nothing can be


class Checkpointer(CheckpointManager):
    """TorchTitan's manager, for the decided start, whole checkpoints and errors of one line.

    On a resume weights, moments and step come from the checkpoint, the optimizer's settings and the
    schedule from the configuration.

    Guarantee:
        No weights that are not finite are loaded or saved. Where a run ends for that, it follows
        from weights after their noise, so it is post-processing of what epsilon counts.
    """

    start: Start
    """The decided start; after `load`, the actual one."""

    folder: str
    """Of this run's checkpoints."""

    on_saved: Callable[[int], None]
    """Called on each rank with the step of a checkpoint, once all ranks' parts are on disk."""

    def __init__(
        self, trainer: Trainer, start: Start, origin: str, average: WeightAverage | None = None
    ) -> None:
        """Replace the manager of TorchTitan's Trainer, with the same states and an `average` of
        weights; rank 0's `start` counts, and `origin` names the source of the model's shape."""
        config, theirs = trainer.job_config, trainer.checkpointer
        averages = {} if average is None else {AVERAGE: average}
        settings = json.dumps(shape(config).settings)  # compared before a load
        theirs.close()
        super().__init__(
            dataloader=trainer.dataloader,
            model_parts=trainer.model_parts,
            optimizers=trainer.optimizers,
            lr_schedulers=trainer.lr_schedulers,
            states={"train_state": trainer, SETTINGS: settings, **averages},
            checkpoint_config=config.checkpoint,
            sd_adapter=theirs.sd_adapter if theirs.enable else None,
            base_folder=config.job.dump_folder,
        )
        self.start, self._origin, self._config = start, origin, config
        self._named = [p for part in trainer.model_parts for p in part.named_parameters()]
        self._average = average
        self.on_saved: Callable[[int], None] = lambda step: None
        self._under_way: int | None = None  # the step of a background save

    def load(self, step: int = -1) -> bool:
        """Load the decided weights, or those that `confirmed` revises them to; return whether any
        were loaded. `step` is -1: no other is configured. Collective over the world. Fault: none is
        whole, or the loaded weights are not finite."""
        loaded = self.enable and self._load()
        self._require_finite_start()
        return loaded

    def _load(self) -> bool:
        self.start = confirmed(self.start, self.folder)
        if self.start.resumes:  # TorchTitan would warn that it does not load these
            self.initial_load_in_hf, self.initial_load_path = False, None
            configured = [_settings(optimizer) for optimizer in self.states[OPTIMIZER]]
            loaded = super().load(self.start.step)
            self._follow_configuration(configured)
            return loaded
        # TorchTitan loads initial weights only where there is no folder of checkpoints. There may
        # be an empty one: a link, a mount, with a file system's `lost+found`.
        folder, self.folder = self.folder, _NOWHERE
        try:
            return super().load()
        finally:
            self.folder = folder

    def _follow_configuration(self, configured: list[list[dict[str, Any]]]) -> None:
        """Undo the load of settings and schedule: restore each optimizer's `configured` settings,
        and build the configuration's schedule anew."""
        if self.start.step >= self._config.training.steps:
            return  # no step is left, and a schedule may have no rate for later ones
        for optimizer, groups in zip(self.states[OPTIMIZER], configured, strict=True):
            for group, settings in zip(optimizer.param_groups, groups, strict=True):
                group.update(settings)
        schedulers = self.states[LR_SCHEDULER]
        schedulers.schedulers = [
            LambdaLR(old.optimizer, old.lr_lambdas, last_epoch=self.start.step - 1)
            for old in schedulers
        ]

    def _require_finite_start(self) -> None:
        """Raise Fault unless all weights, and averages, are numbers. Collective."""
        start, loaded = self.start, self._named.copy()
        if self._average is not None and self._average.updates:  # else it begins with the weights
            loaded += self._average.state_dict()[WEIGHTS].items()
        names = [""] * dist.get_world_size()
        dist.all_gather_object(names, first_overflow(loaded))
        if not (name := next(filter(None, names), "")):
            return
        if not start.loads:
            raise RuntimeError(f"{name} was not drawn")
        remedy = "use an intact copy"
        if start.resumes:
            remedy = "move this checkpoint away, and the run resumes from the one before"
        raise Fault(f"{start.key} = '{start.place}': {name} is missing or not finite; {remedy}")

    def require_finite(self, step: int) -> None:
        """Raise Fault, on all ranks alike, if the trained weights after `step` are not finite.
        Collective: an all-reduce of one number over the world."""
        overflows = overflow(tensor for _, tensor in self._named if tensor.requires_grad)
        dist.all_reduce(overflows, op=dist.ReduceOp.MAX)
        if overflows.item():
            self.end_not_finite(step)

    def end_not_finite(self, step: int) -> NoReturn:
        """Raise Fault for weights that are not finite after `step`. Collective over the world."""
        newest = -1
        if self.enable:
            self._wait_for_background_save()
            newest = newest_finished_checkpoint(self.folder)
        place = f"goes on from step-{newest}" if newest >= 0 else "starts again"
        raise Fault(
            f"optimizer.lr = {self._config.optimizer.lr:g}: after step {step} the weights are not "
            "finite, and they were not saved; lower it, or raise lr_scheduler.warmup_steps, and the"
            f" same command {place} (lost steps stay counted)"
        )

    def dcp_load(
        self, state_dict: dict[str, Any], checkpoint_id: str, from_hf: bool, from_quantized: bool
    ) -> None:
        """Read a checkpoint into the states; log it if it lacks an average."""
        if from_hf:
            super().dcp_load(state_dict, checkpoint_id, from_hf, from_quantized)
            return
        refuse_another_model(checkpoint_id, self.states[MODEL].state_dict(), self._origin)
        left_out = {SETTINGS}
        if AVERAGE in state_dict and not has_average(checkpoint_id):
            logger.info(f"ema: {checkpoint_id} has no average; it begins with the weights there")
            left_out.add(AVERAGE)
        state_dict = {name: value for name, value in state_dict.items() if name not in left_out}
        try:
            load_states(state_dict, checkpoint_id)
        except CheckpointException as error:
            raise Fault(
                f"checkpoint {checkpoint_id} cannot be loaded ({in_one_line(error)}): move it "
                "away, and the run resumes from the one before"
            ) from error
        # As TorchTitan does: the model's states were flattened.
        self.states[MODEL].load_state_dict(state_dict)

    def save(self, curr_step: int, last_step: bool = False) -> None:
        """Save as TorchTitan does; raise Fault in one line if this or a background save failed, or
        if the weights are not finite, also at the last step without a save."""
        saves = self.enable and is_saved_at(self, curr_step, last_step)
        if last_step or saves:
            self.require_finite(curr_step)
        self._saving = curr_step
        try:
            super().save(curr_step, last_step)
        except (CheckpointException, OSError) as error:
            self._raise_unsaved(curr_step, error)
        if saves:
            self._report(curr_step, not last_step and self.async_mode != AsyncMode.DISABLED)

    def _purge_stale_checkpoints(self) -> None:
        """Queue what `keep_latest_k` deletes, after a save; TorchTitan's own takes any folder in
        whose name `step-N` occurs."""
        if self.keep_latest_k > 0 and dist.get_rank() == 0:
            saved: int = getattr(self, "_saving", -1)
            for path in stale_checkpoints(self.folder, self.keep_latest_k, saved):
                self.purge_queue.put(path)

    def _report(self, step: int, in_background: bool = False) -> None:
        """Report a checkpoint to `on_saved`; a background save once the next has waited for it."""
        if self._under_way not in (None, step):
            self.on_saved(self._under_way)
        self._under_way = step if in_background else None
        if not in_background:
            self.on_saved(step)

    @torch.no_grad()
    def stop_at(self, step: int, steps: int) -> bool:
        """Save and log a checkpoint of `step` for a requested stop; return whether it was saved.
        Collective over the world."""
        saves = self.enable
        try:
            if saves:
                self._wait_for_background_save()
            if saves and step != self.start.step and not is_saved_at(self, step):
                states = self.states | self.states[MODEL].state_dict()  # as TorchTitan saves them
                del states[MODEL]
                place = step_folder(self.folder, step)
                self.dcp_save(states, checkpoint_id=place, async_mode=AsyncMode.DISABLED)
        except (CheckpointException, OSError) as error:
            self._raise_unsaved(step, error)
        if saves:
            self._report(step)
        kept = "saved" if saves else "not saved, since checkpoint.enable is false"
        kept = kept if step else "before the first step"
        logger.info(f"stopped at step {step} of {steps} as asked, {kept}: the same command resumes")
        return saves

    def _wait_for_background_save(self) -> None:
        if self.save_future is not None:
            self.save_future.result()

    def _raise_unsaved(self, step: int, error: BaseException) -> None:
        newest = newest_finished_checkpoint(self.folder)
        whole = f"step-{newest}" if newest >= 0 else "none"
        free = shutil.disk_usage(self.folder).free / 2**30
        raise Fault(
            f"checkpoint step-{step} was not saved in {self.folder}, where {free:.2f} GiB are free "
            f"({in_one_line(error)}): fix this and run the same command; the last complete one is "
            f"{whole}"
        ) from error


def _settings(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Return the settings of an optimizer's groups, without parameters: rates, decay, betas, …"""
    return [
        {key: value for key, value in group.items() if key != "params"}
        for group in optimizer.param_groups
    ]
