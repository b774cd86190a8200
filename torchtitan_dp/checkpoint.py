"""Which checkpoints are whole, and what a run killed in its first save leaves behind."""

import os
import re
import shutil

_WRITTEN_LAST = (".metadata", "model.safetensors.index.json")


def has_whole_checkpoint(folder: str) -> bool:
    """Whether any `step-N` in the folder was saved to the end."""
    return any(os.path.exists(os.path.join(s, f)) for s in _steps(folder) for f in _WRITTEN_LAST)


def drop_unfinished(folder: str) -> None:
    """Remove a folder that holds unfinished checkpoints only.

    TorchTitan would load none of them and, with the folder there, would not load the initial
    weights that were asked for either. Anything else in the folder is left, and raises OSError.
    """
    if not os.path.isdir(folder) or has_whole_checkpoint(folder):
        return
    for step in _steps(folder):
        shutil.rmtree(step)
    os.rmdir(folder)


def _steps(folder: str) -> list[str]:
    names = os.listdir(folder) if os.path.isdir(folder) else []
    return [os.path.join(folder, name) for name in names if re.fullmatch(r"step-\d+", name)]
