"""The one decision of how a run starts: its weights are drawn, initial ones, or its own again.

The model check, the plan and the checkpoint manager all go by it. It is made from what a single
process sees in a moment, which are names and sizes of files. At the load all ranks read the
checkpoint's entries; where they find one damaged, `manager.Checkpointer` sets that checkpoint aside
and revises the decision to the newest one that is whole.

Guarantee:
    Weights never come without what is known of their past: those of this run with the ledger in
    their checkpoint, those of another with the ledger in it or beside it. Where none is found, that
    is said, and `checkpoint.initial` refuses them unless the user answers for them.
"""

import enum
import functools
import os
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch.distributed.checkpoint import CheckpointException

from torchtitan_dp.checkpoint.adapters import has_adapters, without_adapters
from torchtitan_dp.checkpoint.average import read_decay
from torchtitan_dp.checkpoint.folder import (
    checkpoint_folder,
    checkpoint_folders,
    damage,
    finished_checkpoints,
    none_whole,
    read_ledger,
    refuse_another_model,
    step_folder,
)
from torchtitan_dp.checkpoint.initial import InitialWeights, ledger_beside
from torchtitan_dp.checkpoint.plan import Plan, make_plan
from torchtitan_dp.checkpoint.safe_load import METADATA_FILE
from torchtitan_dp.config import JobConfig
from torchtitan_dp.ledger import ExecutedSteps, Ledger, check_fingerprint


class Weights(enum.Enum):
    """Say where the weights of a start come from."""

    DRAWN = "drawn from debug.seed"
    INITIAL_DCP = "a checkpoint of TorchTitan that the configuration names"
    INITIAL_HF = "a Hugging Face folder that the configuration names"
    OWN = "a checkpoint of this run"


@dataclass(frozen=True)
class Start:
    """Say how a run starts, and find the ledger that its weights come with."""

    weights: Weights = Weights.DRAWN
    place: str = ""  # the folder that they are read from
    key: str = ""  # of the configuration, which names it
    step: int = 0  # of this run's own checkpoint

    @property
    def resumes(self) -> bool:
        """Tell whether the run goes on from a checkpoint of its own."""
        return self.weights is Weights.OWN

    @property
    def loads(self) -> bool:
        """Tell whether all weights are read from files (initial ones may lack adapters of LoRA)."""
        return self.weights is not Weights.DRAWN

    @functools.cached_property
    def resumed(self) -> Ledger | None:
        """Return the ledger of this run's own weights.

        It is None where there are none, and where their checkpoint cannot be read, which the load
        finds out.
        """
        if not self.resumes:
            return None
        try:
            text = read_ledger(self.place)
            return None if text is None else Ledger.from_json(text)
        except (ValueError, KeyError, TypeError, CheckpointException):
            return None

    @functools.cached_property
    def initial(self) -> InitialWeights | None:
        """Return the weights of another run, with their ledger; None where none are loaded.

        Raises:
            ValueError: a ledger is there, and cannot be read.
        """
        if not self.loads or self.resumes:
            return None
        text = read_ledger(os.path.realpath(self.place))
        if text is None:
            return ledger_beside(self.place)
        return InitialWeights(self.place, Ledger.from_json(text))


def decide_start(config: JobConfig) -> Start:
    """Decide how a run starts, from what lies in its folder and from the configuration.

    A checkpoint of its own comes first: the newest whose files have their sizes, or, where all are
    damaged, the newest, for `check_start` or the load to refuse.
    """
    if not config.checkpoint.enable:
        return Start()
    folder = checkpoint_folder(config)
    if steps := finished_checkpoints(folder):
        whole = (step for step in steps if not damage(step_folder(folder, step)))
        return own_checkpoint(folder, next(whole, steps[0]))
    if config.checkpoint.initial_load_in_hf:
        return Start(Weights.INITIAL_HF, *weights_folder(config))
    if config.checkpoint.initial_load_path:
        return Start(Weights.INITIAL_DCP, *weights_folder(config))
    return Start()


def own_checkpoint(folder: str, step: int) -> Start:
    """Return the start that goes on from this run's checkpoint of a step."""
    return Start(Weights.OWN, step_folder(folder, step), "checkpoint.folder", step)


def weights_folder(config: JobConfig) -> tuple[str, str]:
    """Return where initial weights lie, if any are loaded, and the key that says so."""
    if config.checkpoint.initial_load_path:
        return config.checkpoint.initial_load_path, "checkpoint.initial_load_path"
    return config.model.hf_assets_path, "model.hf_assets_path"


def check_start(start: Start, state_dict: Mapping[str, torch.Tensor], origin: str) -> None:
    """Refuse a checkpoint that cannot be loaded, as far as a plain process can tell in a moment.

    Args:
        start: one that loads a checkpoint, this run's own or an initial one.
        state_dict: the model's parameters; on `meta` will do. An initial checkpoint may lack all
            adapters of LoRA, which are then drawn.
        origin: what decides the model's shape, for the message.

    Raises:
        ValueError: one line; the checkpoint is damaged, is none, or is of another model.
    """
    at = f"{start.key} = '{start.place}'"
    if not start.resumes and not os.path.isfile(os.path.join(start.place, METADATA_FILE)):
        raise ValueError(
            f"{at}: not a checkpoint of TorchTitan (it has no .metadata); name its "
            "step-N folder, or set checkpoint.initial_load_in_hf for Hugging Face weights"
        )
    if problem := damage(start.place):
        if start.resumes:
            raise ValueError(none_whole(os.path.dirname(start.place), start.step, problem))
        raise ValueError(f"{at}: it is damaged ({problem}); use an intact copy")
    has_all = start.resumes or has_adapters(start.place)
    wanted = state_dict if has_all else without_adapters(state_dict)
    refuse_another_model(start.place, wanted, origin)


def refuse_another_decay(config: JobConfig, start: Start) -> None:
    """Refuse to continue this run's average of weights with another `ema.decay`.

    A decay that cannot be read is left to the load: it finds the damage, and may set the checkpoint
    aside for an older one.

    Raises:
        ValueError: one line.
    """
    if not (start.resumes and config.ema.enable):
        return
    decay = config.ema.decay
    try:
        earlier = read_decay(start.place, default=decay)
    except ValueError:
        return
    if decay != earlier:
        raise ValueError(
            f"ema.decay = {decay}: the average in {start.place} has {earlier}; set it back, or "
            "start afresh in another job.dump_folder"
        )


def plan_start(config: JobConfig, units: int, start: Start, account: Ledger | None) -> Plan:
    """Plan what a run spends that starts like this.

    Args:
        units: number of training units.
        account: what already ran in its folder, as `checkpoint.plan.earlier_ledger` returns it.

    Raises:
        ValueError: one line for the user.
    """
    if account is not None:
        _refuse_to_leave_checkpoints(config, start)
    resumed = (start.resumed or account) if start.resumes else None
    return make_plan(config, units, account, resumed, start.initial)


def check_records(folder: str, fingerprint: str, settings: Mapping[str, object]) -> None:
    """Refuse other records than those of this folder's run, if it has begun a step or saved one.

    A start that failed before the first update binds the folder to nothing: nothing was made of
    its records. `steps_executed.log` has each update's line before it is made, and the fingerprint
    is written before that, so that what is bound has one.

    Args:
        fingerprint, settings: as in `ledger.check_fingerprint`.

    Raises:
        ValueError: naming the key that changed and the remedy.
    """
    if not os.path.isdir(folder):
        return
    if ExecutedSteps(folder).count or checkpoint_folders(folder):
        check_fingerprint(folder, fingerprint, settings)


def _refuse_to_leave_checkpoints(config: JobConfig, start: Start) -> None:
    """Raise ValueError if a run does not go on from the checkpoints that its folder holds.

    `privacy.json` speaks for all of them, so that weights must go on from them.
    """
    held = checkpoint_folders(config.job.dump_folder)
    if not held or start.resumes:
        return
    name = os.path.basename(held[0])
    key, value = "checkpoint.folder", f"'{config.checkpoint.folder}'"
    if not config.checkpoint.enable:
        key, value = "checkpoint.enable", "false"
    raise ValueError(
        f"{key} = {value}: this run has checkpoints in '{name}', from which it resumes; set it "
        "back, or start afresh in another job.dump_folder"
    )
