"""Which checkpoints are whole, and what a run killed in its first save leaves behind."""

import os
import re
import shutil

from torchtitan_dp.config import JobConfig

LEDGER_KEY = "train_state.ledger"
_LAST = (".metadata", "model.safetensors.index.json")


def finished_checkpoints(folder: str) -> list[int]:
    """The steps whose save came to its end, the furthest first."""
    whole = [s for s in _steps(folder) if any(os.path.exists(os.path.join(s, f)) for f in _LAST)]
    return sorted((int(step.rpartition("-")[2]) for step in whole), reverse=True)


def newest_whole_checkpoint(folder: str) -> int:
    """The step of the furthest one whose save came to its end; -1 if there is none."""
    return next(iter(finished_checkpoints(folder)), -1)


def step_folder(folder: str, step: int) -> str:
    """TorchTitan's name of a step's checkpoint."""
    return os.path.join(folder, f"step-{step}")


def loads_weights(config: JobConfig) -> bool:
    """Whether a run that starts now takes all weights from files: it resumes, or is given them."""
    checkpoint = config.checkpoint
    given = bool(checkpoint.initial_load_path) or checkpoint.initial_load_in_hf
    folder = os.path.join(config.job.dump_folder, checkpoint.folder)
    return checkpoint.enable and (given or newest_whole_checkpoint(folder) >= 0)


def drop_unfinished(folder: str) -> bool:
    """Remove a folder that holds unfinished checkpoints only; whether there was one.

    TorchTitan would load none of them and, with the folder there, would not load the initial
    weights that were asked for either. Anything else in the folder is left, and raises OSError.
    """
    if not os.path.isdir(folder) or newest_whole_checkpoint(folder) >= 0:
        return False
    for step in _steps(folder):
        shutil.rmtree(step)
    os.rmdir(folder)
    return True


def _steps(folder: str) -> list[str]:
    names = os.listdir(folder) if os.path.isdir(folder) else []
    return [os.path.join(folder, name) for name in names if re.fullmatch(r"step-\d+", name)]


def read_ledger(path: str) -> str | None:
    """The ledger in the checkpoint folder `path`, as JSON; None if it holds none."""
    if not os.path.exists(os.path.join(path, _LAST[0])):
        return None
    import torch.distributed.checkpoint as dcp  # only those who start from other weights wait

    reader = dcp.FileSystemReader(path)
    if LEDGER_KEY not in reader.read_metadata().state_dict_metadata:
        return None
    entry = {LEDGER_KEY: ""}
    dcp.load(entry, storage_reader=reader, no_dist=True)
    return entry[LEDGER_KEY]
