"""A run's checkpoints on disk: which are whole, which are damaged, what a killed save left.

DCP renames `.metadata` into place when all else is on disk, so a `step-N` that has it was saved to
its end. What happened to it since is told by its sizes (`damage`) and by the CRC-32 of each of its
entries (`damaged_entry`, which reads them). A flipped bit in `.metadata` that leaves it readable is
told by entries, chunks or names that no longer fit; what else it holds is not used for loading.
"""

import os
import re
import shutil
from collections.abc import Mapping

import torch
from torch.distributed.checkpoint.metadata import Metadata

from torchtitan_dp.checkpoint import safe_load
from torchtitan_dp.config import JobConfig

LEDGER_KEY = "train_state.ledger"
_DAMAGED = ".damaged"
_LAST = (safe_load.METADATA_FILE, "model.safetensors.index.json")


def checkpoint_folder(config: JobConfig) -> str:
    """Return where a run's checkpoints lie."""
    return os.path.join(config.job.dump_folder, config.checkpoint.folder)


def finished_checkpoints(folder: str) -> list[int]:
    """Return the steps whose save came to its end, the furthest first."""
    whole = [s for s in _steps(folder) if any(os.path.exists(os.path.join(s, f)) for f in _LAST)]
    return sorted((int(step.rpartition("-")[2]) for step in whole), reverse=True)


def newest_whole_checkpoint(folder: str) -> int:
    """Return the furthest step whose save came to its end; -1 if there is none."""
    return next(iter(finished_checkpoints(folder)), -1)


def step_folder(folder: str, step: int) -> str:
    """Return where TorchTitan puts a step's checkpoint."""
    return os.path.join(folder, f"step-{step}")


def checkpoint_folders(dump_folder: str) -> list[str]:
    """Return all folders of a run that hold checkpoints, without those set aside as damaged."""
    entries = (entry.path for entry in os.scandir(dump_folder) if entry.is_dir())
    held = (path for path in entries if not path.endswith(_DAMAGED))
    return sorted(path for path in held if finished_checkpoints(path))


def drop_unfinished(folder: str) -> bool:
    """Remove a folder that holds unfinished checkpoints only; return whether there was one.

    TorchTitan would load none of them and, with the folder there, would not load the initial
    weights that were asked for either. Anything else in the folder is left, and raises OSError.
    """
    if not os.path.isdir(folder) or newest_whole_checkpoint(folder) >= 0:
        return False
    for step in _steps(folder):
        shutil.rmtree(step)
    os.rmdir(folder)
    return True


def damage(step: str) -> str:
    """Say what metadata and file sizes tell is wrong with a checkpoint; "" if nothing is.

    Args:
        step: the checkpoint's own folder.
    """
    try:
        _sizes(step, safe_load.read_metadata(step))
    except ValueError as error:
        return str(error)
    return ""


def damaged_entry(step: str, rank: int, ranks: int) -> str:
    """Say what is wrong with one rank's share of a checkpoint's entries; "" if nothing is.

    It reads about 1 / ranks of the checkpoint, one entry at a time.
    """
    try:
        metadata = safe_load.read_metadata(step)
        _sizes(step, metadata)
        share = sorted(safe_load.entries(metadata))[rank::ranks]
        for name in dict.fromkeys(entry.file for entry in share):
            with open(os.path.join(step, name), "rb") as file:
                for entry in share:
                    if entry.file == name:
                        safe_load.check_entry(file, entry)
    except (OSError, ValueError) as error:
        return str(error)
    return ""


def _sizes(step: str, metadata: Metadata) -> None:
    """Raise ValueError if a file is missing, or shorter than its entries need."""
    ends: dict[str, int] = {}
    for entry in safe_load.entries(metadata):
        ends[entry.file] = max(ends.get(entry.file, 0), entry.offset + entry.length)
    for name, end in ends.items():
        path = os.path.join(step, name)
        size = os.path.getsize(path) if os.path.isfile(path) else None
        if size is None or size < end:
            found = "is missing" if size is None else f"has {size:,} of {end:,} bytes"
            raise ValueError(f"{name} {found}")


def set_aside(folder: str, step: int) -> str:
    """Keep a damaged checkpoint where TorchTitan does not look; return its new place."""
    target = os.path.join(f"{folder}{_DAMAGED}", f"step-{step}")
    while os.path.exists(target):
        target += "_"
    os.makedirs(os.path.dirname(target), mode=0o700, exist_ok=True)
    os.rename(step_folder(folder, step), target)
    return target


def refuse_another_model(step: str, state_dict: Mapping[str, torch.Tensor], origin: str) -> None:
    """Raise ValueError, one line, if a checkpoint's parameters have other shapes than the model's.

    Args:
        step: the checkpoint's own folder, with readable metadata.
        state_dict: the model's parameters; on `meta` will do.
        origin: what decides the model's shape, for the message.
    """
    saved = safe_load.shapes(safe_load.read_metadata(step))
    given = {name: tuple(tensor.shape) for name, tensor in state_dict.items()}
    layers = {name for name in saved if re.match(r"layers\.|[^.]*\.weight$", name)}
    for name in sorted(given.keys() | layers):
        if saved.get(name) != given.get(name):
            here, there = (list(s[name]) if name in s else "none" for s in (given, saved))
            raise ValueError(
                f"{origin}: its {name} is {here}, that of the checkpoint {step} is {there}; set "
                "the model back to the one that was saved, or start afresh in another "
                "job.dump_folder"
            )


def none_whole(folder: str, newest: int, problem: str) -> str:
    """Say it to a user all of whose checkpoints are damaged."""
    return (
        f"no checkpoint in {folder} is whole (step-{newest}: {problem}): restore one, or start "
        "afresh in another job.dump_folder"
    )


def _steps(folder: str) -> list[str]:
    """Return all checkpoints in a folder, finished or not."""
    names = os.listdir(folder) if os.path.isdir(folder) else []
    return [os.path.join(folder, name) for name in names if re.fullmatch(r"step-\d+", name)]


def read_ledger(step: str) -> str | None:
    """Return the ledger in a checkpoint, as JSON; None if it holds none, or is no checkpoint.

    Args:
        step: the checkpoint's own folder.

    Raises:
        ValueError: its metadata is damaged.
    """
    if not os.path.exists(os.path.join(step, safe_load.METADATA_FILE)):
        return None
    if LEDGER_KEY not in safe_load.read_metadata(step).state_dict_metadata:
        return None
    entry = {LEDGER_KEY: ""}
    safe_load.load(entry, step, no_dist=True)
    return entry[LEDGER_KEY]
