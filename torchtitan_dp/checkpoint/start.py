"""The decision how a run starts: from drawn weights, initial ones, or its own checkpoint.

The model check, the plan and the checkpoint manager depend on it. A process decides by the names
and sizes of files alone. At the load all ranks read the checkpoint's entries; if one is damaged,
`confirmed` sets that checkpoint aside and revises the decision to the newest whole one.

Guarantee:
    Weights always come with their history: this run's with the ledger in their checkpoint, another
    run's with the ledger in it or beside it. Weights without a ledger are reported, and refused by
    `checkpoint.initial` unless the user answers for them.
"""

import enum
import functools
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import CheckpointException

import torchtitan_dp.distributed  # noqa: F401  lets TorchTitan import without a GPU

# isort: split
from torchtitan.tools.logging import logger

from torchtitan_dp.checkpoint import safe_load
from torchtitan_dp.checkpoint.folder import (
    checkpoint_folder,
    checkpoint_folders,
    damage,
    damaged_entry,
    drop_unfinished,
    finished_checkpoints,
    none_whole,
    read_ledger,
    refuse_another_model,
    set_aside,
    step_folder,
)
from torchtitan_dp.checkpoint.initial import InitialWeights, ledger_beside
from torchtitan_dp.checkpoint.plan import Plan, make_plan
from torchtitan_dp.checkpoint.safe_load import METADATA_FILE
from torchtitan_dp.config import JobConfig
from torchtitan_dp.config.derived import weights_folder
from torchtitan_dp.ledger import Lineage, RunLog, check_fingerprint
from torchtitan_dp.models.lora import is_adapter, without_adapters
from torchtitan_dp.optimizer import MomentumSGD
from torchtitan_dp.process import Fault


class Weights(enum.Enum):
    """The source of a start's weights."""

    DRAWN = "drawn from debug.seed"
    INITIAL_DCP = "a checkpoint of TorchTitan that the configuration names"
    INITIAL_HF = "a Hugging Face folder that the configuration names"
    OWN = "a checkpoint of this run"


@dataclass(frozen=True)
class Start:
    """The decided start of a run, with the ledger of its weights."""

    weights: Weights = Weights.DRAWN
    place: str = ""  # their folder
    key: str = ""  # the key of the configuration that names that folder
    step: int = 0  # of this run's own checkpoint

    @property
    def resumes(self) -> bool:
        """Whether the run continues from a checkpoint of its own."""
        return self.weights is Weights.OWN

    @property
    def loads(self) -> bool:
        """Whether all weights are read from files (initial ones may lack adapters of LoRA)."""
        return self.weights is not Weights.DRAWN

    @functools.cached_property
    def own_ledger(self) -> Lineage | None:
        """The ledger of this run's own weights; None if there are none, or if their checkpoint
        cannot be read, which the load detects."""
        if not self.resumes:
            return None
        try:
            text = read_ledger(self.place)
            return None if text is None else Lineage.from_json(text)
        except (ValueError, KeyError, TypeError, CheckpointException):
            return None

    @functools.cached_property
    def initial(self) -> InitialWeights | None:
        """The weights of another run, with their ledger; None if none are loaded.

        Raises:
            ValueError: a ledger is there, and cannot be read.
        """
        if not self.loads or self.resumes:
            return None
        text = read_ledger(os.path.realpath(self.place))
        if text is None:
            return ledger_beside(self.place)
        return InitialWeights(self.place, Lineage.from_json(text))


def decide_start(config: JobConfig) -> Start:
    """Decide how a run starts. A checkpoint of its own comes first: the newest whose files have
    their sizes or, if all are damaged, the newest, which `check_start` or the load refuses."""
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


def decision(config: JobConfig) -> Callable[[], Start]:
    """Return a function that decides how a run starts, once, at its first call: as the model is
    built, when rank 0 has locked the folder, so that no other run changes it."""
    return functools.cache(functools.partial(decide_start, config))


def own_checkpoint(folder: str, step: int) -> Start:
    """Return the start from this run's checkpoint of a step."""
    return Start(Weights.OWN, step_folder(folder, step), "checkpoint.folder", step)


def confirmed(start: Start, folder: str, step: int = -1) -> Start:
    """Return rank 0's decision, revised where the ranks together find damage: a damaged checkpoint
    of this run is set aside, in a warning, for an older whole one. The remains of killed saves are
    removed if nothing else was saved. Collective over the world.

    Args:
        folder: of this run's checkpoints.
        step: the only one to take; -1 for the newest.

    Raises:
        Fault: no checkpoint of this run is whole (nothing was moved), or the initial one is not.
    """
    dist.barrier()  # all ranks have decided what they draw or load
    if dist.get_rank() == 0 and drop_unfinished(folder):
        logger.warning(f"{folder} has no whole checkpoint: starting from the beginning")
    dist.barrier()
    decided: list[Any] = [start, finished_checkpoints(folder)]
    dist.broadcast_object_list(decided, src=0)
    start, steps = decided
    if step == -1 and (start.resumes or steps):  # a newer one is checked, too
        step = _newest_whole(folder, steps or [start.step])
    if step != -1:
        return own_checkpoint(folder, step)
    if start.weights is Weights.INITIAL_DCP and (problem := _damage_on_any_rank(start.place)):
        raise Fault(f"{start.key} = '{start.place}': it is damaged ({problem}); use an intact copy")
    return start


def _newest_whole(folder: str, steps: list[int]) -> int:
    """Return the newest whole one of these steps, and set newer ones aside. Collective."""
    damaged: list[tuple[int, str]] = []
    for step in steps:
        if not (problem := _damage_on_any_rank(step_folder(folder, step))):
            break
        damaged.append((step, problem))
    else:
        raise Fault(none_whole(folder, *damaged[0]))
    if dist.get_rank() == 0:
        for broken, problem in damaged:
            kept = set_aside(folder, broken)
            logger.warning(
                f"checkpoint step-{broken} is damaged ({problem}): moved to {kept}; the run "
                f"resumes from step-{step}"
            )
    dist.barrier()
    return step


def _damage_on_any_rank(checkpoint: str) -> str:
    """Return the damage that any rank found in its share of a checkpoint, or "". Collective."""
    return of_any_rank(damaged_entry(checkpoint, dist.get_rank(), dist.get_world_size()))


def of_any_rank(found: str) -> str:
    """Return, on all ranks, the first rank's text that is not empty, or "". Collective."""
    texts: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(texts, found)
    return next(filter(None, texts), "")


def has_adapters(step: str) -> bool:
    """Return whether an initial checkpoint has adapters; they stay as drawn if it has none."""
    return any(map(is_adapter, safe_load.shapes(safe_load.read_metadata(step))))


def check_start(start: Start, state_dict: Mapping[str, torch.Tensor], origin: str) -> None:
    """Refuse a checkpoint that cannot be loaded, by the files that one process checks quickly.

    Args:
        start: one that loads a checkpoint, this run's own or an initial one.
        state_dict: the model's parameters; tensors on `meta` suffice. An initial checkpoint may
            lack all adapters of LoRA, which are then drawn.
        origin: the source of the model's shape, for the message.

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


def refuse_another_optimizer(config: JobConfig, start: Start) -> None:
    """Refuse, by ValueError, to continue this run with an optimizer that has another state. A
    checkpoint that cannot be read is left to the load."""
    if not start.resumes:
        return
    try:
        names = safe_load.read_metadata(start.place).state_dict_metadata
    except ValueError:
        return
    states = {name.rpartition(".")[2] for name in names if name.startswith("optimizer.state.")}
    momentum, name = MomentumSGD.__name__, config.optimizer.name
    earlier = "AdamW" if "exp_avg_sq" in states else momentum
    if states and (name == momentum) != (earlier == momentum):
        raise ValueError(
            f"optimizer.name = '{name}': the optimizer's state in {start.place} is of '{earlier}'; "
            "set it back, or start afresh in another job.dump_folder"
        )


def plan_start(config: JobConfig, units: int, start: Start, earlier: Lineage | None) -> Plan:
    """Plan the privacy budget of a run with this start, as `make_plan` does.

    Args:
        earlier: ledger of the earlier runs in its folder (`checkpoint.plan.earlier_ledger`).
    """
    if earlier is not None:
        _refuse_to_leave_checkpoints(config, start)
        _refuse_another_run(start, earlier)
    resumed = (start.own_ledger or earlier) if start.resumes else None
    return make_plan(config, units, earlier, resumed, start.initial)


def _refuse_another_run(start: Start, earlier: Lineage) -> None:
    """Raise ValueError for a checkpoint of another run than the folder's, on whose terms the
    folder's own lost steps and held-out losses would count."""
    if start.own_ledger is not None and start.own_ledger.run != earlier.run:
        raise ValueError(
            f"{start.key}: '{start.place}' is of run {start.own_ledger.run}, and steps of run "
            f"{earlier.run} were begun in this job.dump_folder; move the checkpoint away, or name "
            "it as checkpoint.initial_load_path in another job.dump_folder"
        )


def check_records(folder: str, fingerprint: str | None, settings: Mapping[str, object]) -> None:
    """Refuse, by ValueError, other records than those of this folder's run, if it has begun a step
    or saved one: no output depends on the records of a start that failed before. Without a
    fingerprint, as before they are read, their settings are compared alone."""
    if not os.path.isdir(folder):
        return
    if RunLog(folder).count or checkpoint_folders(folder):
        check_fingerprint(folder, fingerprint, settings)


def _refuse_to_leave_checkpoints(config: JobConfig, start: Start) -> None:
    """Raise ValueError if a run would not continue from the checkpoints in its folder, which
    `privacy.json` covers."""
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
