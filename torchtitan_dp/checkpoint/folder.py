"""A run's checkpoints on disk (whole, damaged or left by a killed save), their ledger and average.

DCP renames `.metadata` into place last, so a `step-N` with it was saved completely. Later damage
shows in the sizes of files (`damage`) and the CRC-32 of each entry (`damaged_entry`, which reads
them). A flipped bit in a readable `.metadata` shows in entries, chunks or names that do not fit;
loading uses nothing else of it.
"""

import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata

from torchtitan_dp.checkpoint import safe_load
from torchtitan_dp.config import JobConfig
from torchtitan_dp.models.ema import WEIGHTS

LEDGER_KEY = "train_state.ledger"
_DAMAGED = ".damaged"
_LAST = (safe_load.METADATA_FILE, "model.safetensors.index.json")


def checkpoint_folder(config: JobConfig) -> str:
    """Return the folder of a run's checkpoints."""
    return os.path.join(config.job.dump_folder, config.checkpoint.folder)


def finished_checkpoints(folder: str) -> list[int]:
    """Return the steps that were saved completely, newest first."""
    whole = [s for s in _steps(folder) if any(os.path.exists(os.path.join(s, f)) for f in _LAST)]
    return sorted((int(step.rpartition("-")[2]) for step in whole), reverse=True)


def newest_finished_checkpoint(folder: str) -> int:
    """Return the newest step that was saved completely; -1 if there is none."""
    return next(iter(finished_checkpoints(folder)), -1)


def stale_checkpoints(folder: str, keep: int, saved: int) -> list[str]:
    """List whole checkpoints that may be deleted, oldest first: all but the newest `keep`, and but
    the one that was saved just now. A name is whole, as `step-7`: copies of an owner are others."""
    stale = finished_checkpoints(folder)[keep:]
    return [step_folder(folder, step) for step in reversed(stale) if step != saved]


def step_folder(folder: str, step: int) -> str:
    """Return TorchTitan's folder of a step's checkpoint."""
    return os.path.join(folder, f"step-{step}")


def checkpoint_folders(dump_folder: str) -> list[str]:
    """Return all folders of a run with checkpoints, without those set aside as damaged."""
    entries = (entry.path for entry in os.scandir(dump_folder) if entry.is_dir())
    held = (path for path in entries if not path.endswith(_DAMAGED))
    return sorted(path for path in held if finished_checkpoints(path))


def drop_unfinished(folder: str) -> bool:
    """Remove checkpoints of which none is finished; return whether there were any.

    The folder stays, with anything else in it: it may be a link or a mount.
    """
    if newest_finished_checkpoint(folder) >= 0:
        return False
    unfinished = _steps(folder)
    for step in unfinished:
        shutil.rmtree(step)
    return bool(unfinished)


def damage(step: str) -> str:
    """Return the damage that metadata and file sizes show in a checkpoint's folder, or ""."""
    try:
        _check_sizes(step, safe_load.read_metadata(step))
    except ValueError as error:
        return str(error)
    return ""


def damaged_entry(step: str, rank: int, ranks: int) -> str:
    """Return the damage in one rank's share of a checkpoint's entries, or "".

    It reads about 1 / ranks of the checkpoint, one entry at a time.
    """
    try:
        metadata = safe_load.read_metadata(step)
        _check_sizes(step, metadata)
        share = sorted(safe_load.entries(metadata))[rank::ranks]
        for name in dict.fromkeys(entry.file for entry in share):
            with open(os.path.join(step, name), "rb") as file:
                for entry in share:
                    if entry.file == name:
                        safe_load.check_entry(file, entry)
    except (OSError, ValueError) as error:
        return str(error)
    return ""


def _check_sizes(step: str, metadata: Metadata) -> None:
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
    """Move a damaged checkpoint out of TorchTitan's sight; return its new place."""
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
        state_dict: the model's parameters; tensors on `meta` suffice.
        origin: the source of the model's shape, for the message.
    """
    saved = safe_load.shapes(safe_load.read_metadata(step))
    given = {name: tuple(tensor.shape) for name, tensor in state_dict.items()}
    layers = {name for name in saved if re.match(r"(model|layers)\.|[^.]*\.weight$", name)}
    for name in sorted(given.keys() | layers):
        if saved.get(name) != given.get(name):
            here, there = (list(s[name]) if name in s else "none" for s in (given, saved))
            raise ValueError(
                f"{origin}: its {name} is {here}, that of the checkpoint {step} is {there}; "
                "restore the saved model's configuration, or start afresh in another "
                "job.dump_folder"
            )


SETTINGS = "model_settings"
"""The state of what the model computes with (`ModelArgs.settings`), as JSON."""


def refuse_other_settings(step: str, settings: Mapping[str, Any], origin: str) -> None:
    """Raise ValueError, one line, if a checkpoint's model computes with other settings. Those that
    cannot be read are left to the load, which finds the damage; older checkpoints have none.

    Args:
        step: the checkpoint's own folder, with readable metadata.
        settings: of the model to load it into.
        origin: their source, for the message.
    """
    if SETTINGS not in safe_load.read_metadata(step).state_dict_metadata:
        return
    state = {SETTINGS: ""}
    try:
        safe_load.load(state, step, no_dist=True)
        saved = dict(_leaves(json.loads(state[SETTINGS])))
    except (CheckpointException, Exception):  # the first is a BaseException only
        return
    given = dict(_leaves(json.loads(json.dumps(settings))))
    for name in sorted(given.keys() | saved.keys()):
        if given.get(name) != saved.get(name):
            here, there = (json.dumps(each.get(name)) for each in (given, saved))
            raise ValueError(
                f"{origin}: its {name} is {here}, that of the checkpoint {step} is {there}; set it "
                "back, or start afresh in another job.dump_folder"
            )


def _leaves(settings: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each value in nested JSON by the path to it."""
    if not isinstance(settings, dict | list):
        yield path.removeprefix("."), settings
        return
    for key, part in settings.items() if isinstance(settings, dict) else enumerate(settings):
        yield from _leaves(part, f"{path}.{key}")


def none_whole(folder: str, newest: int, problem: str) -> str:
    """Return the error for a run all of whose checkpoints are damaged."""
    return (
        f"no checkpoint in {folder} is whole (step-{newest}: {problem}): restore one, or start "
        "afresh in another job.dump_folder"
    )


def _steps(folder: str) -> list[str]:
    """Return all checkpoints in a folder, finished or not."""
    names = os.listdir(folder) if os.path.isdir(folder) else []
    return [os.path.join(folder, name) for name in names if re.fullmatch(r"step-\d+", name)]


def read_ledger(step: str) -> str | None:
    """Return the ledger in a checkpoint, as JSON; None if it has none, or is no checkpoint.

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


AVERAGE = "ema"
"""The state of the average, beside TorchTitan's own states."""


def average_name(parameter: str) -> str:
    """Return the name that the average of a parameter has in a checkpoint."""
    return f"{AVERAGE}.{WEIGHTS}.{parameter}"


def has_average(step: str) -> bool:
    """Return whether a checkpoint's folder has an average; raise ValueError if it is damaged."""
    return safe_load.has_state(step, f"{AVERAGE}.{WEIGHTS}")
