"""A checkpoint of the small model, saved and loaded by what saves and loads a run's."""

import contextlib
import copy
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any, cast

import torch
from torchtitan.components.lr_scheduler import build_lr_schedulers
from torchtitan.train import Trainer

from torchtitan_dp.checkpoint.manager import Checkpointer
from torchtitan_dp.checkpoint.start import Start
from torchtitan_dp.config import JobConfig
from torchtitan_dp.models.parameters import local_part
from torchtitan_dp.privacy.keys import RootKey
from torchtitan_dp.selfcheck.ranks import Ranks
from torchtitan_dp.selfcheck.reference import make_samples
from torchtitan_dp.selfcheck.result import Measured
from torchtitan_dp.selfcheck.small import Small
from torchtitan_dp.selfcheck.terms import Terms

_STEP = 2


def checkpoint(ranks: Ranks, terms: Terms, place: str) -> Sequence[Measured]:
    """Save weights and AdamW's state, spoil them, load them, and count the tensors that differ.

    Args:
        place: a folder that all ranks see; what is made in it is removed.
    """
    small = Small(terms, ranks.device, max_grad_norm=1.0)
    replicate, shard, _ = terms.degrees
    small.accumulate(make_samples(terms.args, ranks=replicate * shard))
    small.update(sigma=1.0, batch=1.0, key=RootKey.from_debug_seed(3).stream("noise").take(1))
    kept = {name: tensor.clone() for name, tensor in _tensors(small).items()}
    with _folder(ranks, place) as folder:
        run = _Run(small, folder)
        checkpointer = Checkpointer(cast(Trainer, run), Start(), "selfcheck")
        checkpointer.save(_STEP)
        with torch.no_grad():
            for tensor in _tensors(small).values():
                tensor.fill_(-1)
        run.step = 0
        checkpointer.load()
        checkpointer.close()
    loaded = _tensors(small)
    lost = sum(not torch.equal(loaded[name], tensor) for name, tensor in kept.items())
    lost += run.step != _STEP
    return (Measured("tensors that are not as they were", lost, 0),)


def _tensors(small: Small) -> dict[str, torch.Tensor]:
    """Return this rank's shards of all that a checkpoint must hold, by name."""
    found = {name: local_part(parameter.detach()) for name, parameter in small.parameters.items()}
    names = {parameter: name for name, parameter in small.parameters.items()}
    for inner in small.optimizers.optimizers:
        for parameter, state in inner.state.items():
            for key, value in state.items():
                found[f"{names[parameter]}/{key}"] = local_part(value)
    return found


class _Counter:
    """Puts a step into a checkpoint, as a trainer and a loader do."""

    def __init__(self, step: int) -> None:
        self.step = step

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.step = state_dict["step"]


class _Run(_Counter):
    """Has of a trainer what the checkpointer asks for."""

    def __init__(self, small: Small, folder: str) -> None:
        super().__init__(_STEP)
        config: JobConfig = copy.deepcopy(small.terms.config)
        config.job.dump_folder = folder
        saving = config.checkpoint
        saving.enable, saving.interval, saving.keep_latest_k = True, 1, 0
        saving.load_only = saving.initial_load_in_hf = saving.last_save_in_hf = False
        saving.initial_load_path, saving.async_mode = None, "disabled"
        self.job_config = config
        self.checkpointer = SimpleNamespace(close=lambda: None, enable=False)
        self.dataloader = _Counter(_STEP)
        self.model_parts, self.optimizers = [small.model], small.optimizers
        self.lr_schedulers = build_lr_schedulers(
            small.optimizers, config.lr_scheduler, config.training.steps
        )


@contextlib.contextmanager
def _folder(ranks: Ranks, place: str) -> Iterator[str]:
    """Make a folder that rank 0 removes when all have done, or one of them failed."""
    made = tempfile.mkdtemp(prefix="selfcheck-", dir=place) if ranks.rank == 0 else ""
    folder = ranks.from_first(made)
    try:
        yield folder
        ranks.gather(None)  # all have read it
    finally:
        if ranks.rank == 0:
            shutil.rmtree(folder, ignore_errors=True)


def place_of(config: JobConfig | None, nodes: int) -> str:
    """Return where checkpoints are tried: where the run's will lie, if that is known.

    Args:
        nodes: how many machines take part: of several, the folder must be shared.
    """
    if config is None:
        return os.getcwd() if nodes > 1 else tempfile.gettempdir()
    folder = os.path.abspath(config.job.dump_folder)
    while not os.path.isdir(folder):
        folder = os.path.dirname(folder)
    return folder
