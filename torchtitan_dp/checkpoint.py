"""Which checkpoints are whole, and what a run killed in its first save leaves behind."""

import os
import re
import shutil

from torchtitan_dp.config import JobConfig

_LAST = (".metadata", "model.safetensors.index.json")


def newest_whole_checkpoint(folder: str) -> int:
    """The step of the furthest one; -1 if there is none."""
    whole = [s for s in _steps(folder) if any(os.path.exists(os.path.join(s, f)) for f in _LAST)]
    return max((int(step.rpartition("-")[2]) for step in whole), default=-1)


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
