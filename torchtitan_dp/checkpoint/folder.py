"""A run's checkpoints on disk: which are whole, whose they are, and what lies in them.

DCP renames `.metadata` into place last, so a `step-N` with it was saved completely; files that were
cut later show by their sizes (`damage`).

Guarantee:
    PyTorch unpickles `.metadata` and all values but tensors, which runs any code in a file. So
    nothing of a checkpoint is read unless this process' user owns it, its files and the folder that
    it lies in, and nobody else may write to one of them (`refuse_foreign`). All reading goes
    through `read_metadata` and `load`.

    `verify` reports a fault wherever `privacy.json`, the logs and the ledgers inside the
    checkpoints contradict each other, or an epsilon is below the spending of their steps. It
    cannot detect consistent edits of all of them.
"""

import json
import os
import re
import shutil
import stat
import warnings
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from torchtitan_dp.base.process import is_locked
from torchtitan_dp.config import JobConfig
from torchtitan_dp.ledger.lineage import Lineage
from torchtitan_dp.ledger.log import EXECUTED_FILE, STARTS_FILE, RunLog, read_fingerprint
from torchtitan_dp.ledger.schema import PRIVACY_FILE, ledger_of, read_run
from torchtitan_dp.ledger.spending import UNVERIFIED, Run, heldout_epsilon
from torchtitan_dp.models.ema import WEIGHTS
from torchtitan_dp.privacy.segments import NONE

LEDGER_KEY = "train_state.ledger"
SETTINGS = "model_settings"
"""The state of what the model computes with (`ModelArgs.settings`), as JSON."""
AVERAGE = "ema"
"""The state of the average, beside TorchTitan's own states."""
_METADATA_FILE = ".metadata"
_DAMAGED = ".damaged"


def checkpoint_folder(config: JobConfig) -> str:
    return os.path.join(config.job.dump_folder, config.checkpoint.folder)


def finished_checkpoints(folder: str) -> list[int]:
    """Return the steps that were saved completely, newest first."""
    whole = (s for s in _steps(folder) if os.path.exists(os.path.join(s, _METADATA_FILE)))
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
    return os.path.join(folder, f"step-{step}")


def checkpoint_folders(dump_folder: str) -> list[str]:
    """Return all folders of a run with checkpoints, without those set aside as damaged."""
    entries = (entry.path for entry in os.scandir(dump_folder) if entry.is_dir())
    held = (path for path in entries if not path.endswith(_DAMAGED))
    return sorted(path for path in held if finished_checkpoints(path))


def drop_unfinished(folder: str) -> bool:
    """Remove checkpoints of which none is finished; return whether there were any. The folder
    stays, with anything else in it: it may be a link or a mount."""
    if newest_finished_checkpoint(folder) >= 0:
        return False
    unfinished = _steps(folder)
    for step in unfinished:
        shutil.rmtree(step)
    return bool(unfinished)


def _steps(folder: str) -> list[str]:
    names = os.listdir(folder) if os.path.isdir(folder) else []
    return [os.path.join(folder, name) for name in names if re.fullmatch(r"step-\d+", name)]


def set_aside(folder: str, step: int) -> str:
    """Move a damaged checkpoint out of TorchTitan's sight; return its new place."""
    target = os.path.join(f"{folder}{_DAMAGED}", f"step-{step}")
    while os.path.exists(target):
        target += "_"
    os.makedirs(os.path.dirname(target), mode=0o700, exist_ok=True)
    os.rename(step_folder(folder, step), target)
    return target


def none_whole(folder: str, newest: int, problem: str) -> str:
    return (
        f"no checkpoint in {folder} is whole (step-{newest}: {problem}): restore one, or start "
        "afresh in another job.dump_folder"
    )


def refuse_foreign(step: str) -> None:
    """Raise ValueError, one line, for a checkpoint that is not this process' user's, or to which
    others may write: loading it would run any code in it. The folder that it lies in may be root's,
    and others may write there if its sticky bit keeps them from renaming the checkpoint."""
    parent, user = os.path.dirname(os.path.abspath(step)), os.geteuid()
    for path in (parent, step, *(os.path.join(step, name) for name in sorted(os.listdir(step)))):
        found, is_parent = os.stat(path), path == parent
        if found.st_uid not in ((user, 0) if is_parent else (user,)):
            raise ValueError(
                f"'{path}' belongs to user {found.st_uid}, whose checkpoint can run any code: load "
                "your own, or start from safetensors (checkpoint.initial_load_path)"
            )
        is_sticky = is_parent and found.st_mode & stat.S_ISVTX
        if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not is_sticky:
            raise ValueError(
                f"'{path}' may be written by others, and a checkpoint that they change can run any "
                f"code: if nobody did, take the right away (chmod -R go-w '{step}/..')"
            )


def read_metadata(step: str) -> Metadata:
    """Read a checkpoint's `.metadata`; ValueError, one line, if it is missing or damaged, or the
    checkpoint is not the user's alone."""
    refuse_foreign(step)
    try:
        metadata = dcp.FileSystemReader(step).read_metadata()
        assert isinstance(metadata, Metadata), type(metadata)
    except Exception as error:  # pickle raises a dozen kinds for damaged bytes
        raise ValueError(f"its {_METADATA_FILE} cannot be read: {in_one_line(error)}") from error
    return metadata


def load(state_dict: dict[str, Any], step: str, *, no_dist: bool = False) -> None:
    """Load in place as `dcp.load` does; ValueError, one line, if it is not the user's alone.
    Collective over the world unless `no_dist`."""
    refuse_foreign(step)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # as `no_dist` asks
        dcp.load(state_dict, storage_reader=dcp.FileSystemReader(step), no_dist=no_dist)


def damage(step: str) -> str:
    """Return the damage that metadata and file sizes show in a checkpoint's folder, or ""; raise
    ValueError, one line, if it is not the user's alone."""
    refuse_foreign(step)
    try:
        places = (read_metadata(step).storage_data or {}).values()
    except ValueError as error:
        return str(error)
    ends: dict[str, int] = {}
    for place in places:
        name = place.relative_path
        ends[name] = max(ends.get(name, 0), place.offset + place.length)
    for name, end in ends.items():
        path = os.path.join(step, name)
        if not os.path.isfile(path):
            return f"{name} is missing"
        if (size := os.path.getsize(path)) < end:
            return f"{name} has {size:,} of {end:,} bytes"
    return ""


def has_average(step: str) -> bool:
    """Return whether a checkpoint's folder has an average; raise ValueError if it is damaged."""
    names = read_metadata(step).state_dict_metadata
    return any(name.startswith(average_name("")) for name in names)


def average_name(parameter: str) -> str:
    return f"{AVERAGE}.{WEIGHTS}.{parameter}"


def read_ledger(step: str) -> Lineage:
    """Return the ledger in a checkpoint; ValueError, one line, if it cannot be read."""
    state = {LEDGER_KEY: ""}
    try:
        load(state, step, no_dist=True)
        return Lineage.from_json(state[LEDGER_KEY])
    except (CheckpointException, Exception) as error:  # the first is a BaseException only
        raise ValueError(
            f"the ledger in {step} cannot be read: {in_one_line(error)}; run its train command "
            "again, which moves a damaged checkpoint aside and goes on from the one before"
        ) from error


def in_one_line(error: BaseException) -> str:
    """Return an error in one line; of several ranks' the most specific OSError, if any."""
    if isinstance(error, CheckpointException):
        failures = [failure for failure, _ in error.failures.values()]
        error = min(failures, key=lambda failure: not isinstance(failure, OSError))
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def refuse_another_model(step: str, state_dict: Mapping[str, torch.Tensor], origin: str) -> None:
    """Raise ValueError, one line, if a checkpoint's parameters have other shapes than the model's,
    whose tensors may be on `meta`; `origin` names the source of its shape."""
    found = read_metadata(step).state_dict_metadata
    saved = {
        name: list(entry.size)
        for name, entry in found.items()
        if isinstance(entry, TensorStorageMetadata)
        and (name in state_dict or re.match(r"(model|layers)\.|[^.]*\.weight$", name))
    }
    given = {name: list(tensor.shape) for name, tensor in state_dict.items()}
    _refuse_difference(step, given, saved, origin)


def refuse_other_settings(step: str, settings: Mapping[str, Any], origin: str) -> None:
    """Raise ValueError, one line, if a checkpoint's model computes with other settings than these,
    of the named `origin`. Those that cannot be read are left to the load, which finds the damage.
    """
    state = {SETTINGS: ""}
    try:
        load(state, step, no_dist=True)
        saved = json.loads(state[SETTINGS])
    except (CheckpointException, Exception):  # the first is a BaseException only
        return
    _refuse_difference(step, json.loads(json.dumps(settings)), saved, origin)


def _refuse_difference(
    step: str, given: Mapping[str, Any], saved: Mapping[str, Any], origin: str
) -> None:
    for name in sorted(given.keys() | saved.keys()):
        if given.get(name) != saved.get(name):
            here, there = (json.dumps(s[name]) if name in s else "none" for s in (given, saved))
            raise ValueError(
                f"{origin}: its {name} is {here}, that of the checkpoint {step} is {there}; set it "
                "back, or start afresh in another job.dump_folder"
            )


_SLACK = 1e-6  # relative: of the accountants' arithmetic on another machine


def verify(folder: str) -> Run:
    """Read a run's folder, and compare its logs and checkpoints with `privacy.json`.

    Returns:
        The run: its ledger, the epsilon found again from it, `faults` (one line for each
        contradiction; empty if the files agree) and `notes`.

    Raises:
        ValueError: one line, if the folder holds no private run, or a file cannot be read.
    """
    published = read_run(folder)  # before the log, which a live run lengthens
    if published["mechanism"] == NONE:
        raise ValueError(f"RUN = '{folder}' is a run without privacy: no epsilon covers it")
    held = [(step, at) for at in checkpoint_folders(folder) for step in finished_checkpoints(at)]
    stated, log = ledger_of(published), RunLog(folder)
    ledger = log.enter_lost(stated)
    run = Run(folder, ledger, read_fingerprint(folder))
    for step, at in held:
        check_checkpoint(run, log, step, step_folder(at, step))
    if lacking := log.lacks(stated):
        run.faults.append(lacking)
    elif ledger.steps_executed > stated.steps_executed or log.losses > stated.losses:
        run.notes.append(f"steps or a held-out loss were begun after {PRIVACY_FILE} was written")
    if problem := log.undercounted(ledger):
        run.faults.append(problem)
    spends = {"epsilon": run.epsilon}
    if not run.notes:
        of_losses = heldout_epsilon(ledger) if ledger.private else None
        spends |= {"epsilon_executed": run.epsilon_executed, "epsilon_planned": run.epsilon_planned}
        spends |= {"heldout_epsilon": of_losses}
    for name, found in spends.items():
        key, least = f"{PRIVACY_FILE}: {name}", published[name]
        if (least is None) != (found is None):
            run.faults.append(f"{key} = {least}, but the ledger gives {found}")
        elif found is not None and least < found * (1 - _SLACK):  # a curve's next point is above
            run.faults.append(f"{key} = {least:.6g}, but its steps spend {found:.6g}")
    if log.count and not held and ledger.audit is None:  # an audit keeps none
        run.notes.append(UNVERIFIED)
    if is_locked(folder):
        run.notes.append("a run is training in it: until it ends, unsaved steps count as lost")
    return run


def check_checkpoint(run: Run, log: RunLog, step: int, folder: str) -> None:
    """Add to `run.faults` where a checkpoint's ledger contradicts `privacy.json` or the logs."""
    name, ledger = f"checkpoint step-{step}", run.ledger
    try:
        kept = read_ledger(folder)
    except ValueError as error:
        run.faults.append(f"{name}: {error}")
        return
    change = kept.settings.changed(ledger.settings) if kept.run == ledger.run else ""
    is_further = kept.steps > ledger.steps
    for contradicts, fault in (
        (not log.knows(kept.start), f"was saved by a start that {STARTS_FILE} lacks"),
        (kept.run != ledger.run, f"is of another run, {kept.run}"),
        (kept.steps != step, f"its ledger counts {kept.steps} steps"),
        (kept.steps > log.count, f"{EXECUTED_FILE} has {log.count} steps"),
        (ledger.private and not kept.private, f"is not private, but {PRIVACY_FILE} is"),
        (kept.planned_steps > ledger.planned_steps, f"has more planned steps than {PRIVACY_FILE}"),
        (is_further, f"is further than the {ledger.steps} steps of {PRIVACY_FILE}"),
        (change and not is_further, f"its terms are not those of {PRIVACY_FILE}: {change}"),
    ):
        if contradicts:
            run.faults.append(f"{name}: {fault}")
    for what, lost in (
        ("a caveat", set(kept.caveats) - set(ledger.caveats)),
        ("an ancestor", {a.run for a in set(kept.ancestors) - set(ledger.ancestors)}),
    ):
        if lost:
            run.faults.append(f"{PRIVACY_FILE}: lacks {what} of {name}: {min(lost)}")
