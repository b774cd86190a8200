"""Measures arms in one setting: first each alone (memory, bytes), then in turns (time)."""

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torchtitan_dp.config import JobConfig
from torchtitan_dp.config.derived import mesh_degrees
from torchtitan_dp.config.load import load_config

from . import worker
from .arms import Arm, Setting
from .processes import Journal, OutOfMemory, key_of, on_processes, show


@dataclass(frozen=True)
class Repetitions:
    """How often each arm is timed: `rounds` turns of `steps` steps, after `warm_up` steps."""

    rounds: int
    steps: int
    warm_up: int


@dataclass
class Measured:
    """What was found in one setting, by arm; an arm is in `weighed`, `no_memory` or `skipped`."""

    setting: Setting
    arms: list[Arm]
    weighed: dict[str, dict[str, Any]] = field(default_factory=dict)
    seconds: dict[str, list[float]] = field(default_factory=dict)  # a step's, by round
    no_memory: set[str] = field(default_factory=set)
    skipped: dict[str, str] = field(default_factory=dict)  # why
    in_turns: bool = False


def read_config(config_file: str, overrides: list[str], devices: int) -> JobConfig:
    """The baseline's configuration as the user gives it.

    Raises:
        ValueError: one line on the user's mistake.
    """
    arguments = ["--job.config_file", config_file, *overrides, "--privacy.no-enable"]
    return load_config(arguments, devices)


def make_setting(
    config_file: str,
    overrides: list[str],
    devices: int,
    *,
    local_batch_size: int,
    microbatches: int,
) -> Setting:
    """A setting, as the configuration has it: its sequence length and mesh.

    Raises:
        ValueError: one line on the user's mistake.
    """
    config = read_config(config_file, overrides, devices)
    dp_replicate, dp_shard, _ = mesh_degrees(config)
    return Setting(
        config_file,
        tuple(overrides),
        devices,
        dp_replicate * dp_shard,
        config.training.seq_len,
        local_batch_size,
        microbatches,
    )


def measure(
    arms: list[Arm], setting: Setting, repetitions: Repetitions, journal: Journal
) -> Iterator[Measured]:
    """Weigh all arms and time them; yields after each arm.

    Args:
        journal: what it holds is not measured again.
    """
    found = Measured(setting, arms)
    runnable = [arm for arm in arms if _is_built(arm, found)]
    for place, arm in enumerate(runnable, start=1):
        show(f"{setting}: {arm.name} alone ({place} of {len(runnable)})")
        _weigh(arm, found, journal)
        yield found
    runnable = [arm for arm in runnable if arm.name in found.weighed]
    if runnable:
        show(f"{setting}: {len(runnable)} arms in turns")
        _time(runnable, found, repetitions, journal)
    yield found


def _is_built(arm: Arm, found: Measured) -> bool:
    if arm.opacus is not None and found.setting.devices > 1:
        return _skip(arm, "runs on one process only", found)
    try:
        with tempfile.TemporaryDirectory() as folder:
            load_config(found.setting.arguments(arm, folder), found.setting.devices)
    except ValueError as error:
        if arm.name == arm.baseline:
            raise
        return _skip(arm, str(error), found)
    return True


def _skip(arm: Arm, reason: str, found: Measured) -> bool:
    found.skipped[arm.name] = reason
    show(f"skipped: {arm.name}: {reason}")
    return False


def _weigh(arm: Arm, found: Measured, journal: Journal) -> None:
    key = key_of("weigh", found.setting, arm)
    try:
        if not journal.of(key):
            ranks = on_processes(found.setting.devices, worker.weigh, arm, found.setting)
            journal.add(key, max(ranks, key=lambda rank: float(rank["peak_bytes"])))
    except OutOfMemory:
        found.no_memory.add(arm.name)
        show(f"out of memory: {arm.name}")
    except NotImplementedError as error:
        _skip(arm, str(error), found)
    else:
        found.weighed[arm.name] = journal.of(key)[-1]


def _time(arms: list[Arm], found: Measured, repetitions: Repetitions, journal: Journal) -> None:
    """All in turns in the same processes; one after the other where they do not fit together."""
    try:
        found.seconds |= _seconds(arms, found, repetitions, journal)
        found.in_turns = True
    except OutOfMemory:
        show(f"{found.setting}: the arms do not fit into memory together; one after the other")
        for arm in arms:
            try:
                found.seconds |= _seconds([arm], found, repetitions, journal)
            except OutOfMemory:
                found.no_memory.add(arm.name)
                del found.weighed[arm.name]


def _seconds(
    arms: list[Arm], found: Measured, repetitions: Repetitions, journal: Journal
) -> dict[str, list[float]]:
    """A step's seconds by arm and round: those of the journal, and those that it lacks."""
    setting, how_often = found.setting, vars(repetitions)
    key = key_of("time", setting, *arms, steps=repetitions.steps, warm_up=repetitions.warm_up)
    if len(journal.of(key)) < repetitions.rounds:
        with tempfile.TemporaryDirectory() as folder:
            path = journal.path or Path(folder) / "rounds"
            written = Journal(path)
            on_processes(
                setting.devices, worker.time_in_turns, arms, setting, written, key, **how_often
            )
            rounds = Journal(path).of(key)
    else:
        rounds = journal.of(key)
    rounds = rounds[: repetitions.rounds]
    return {arm.name: [seconds[arm.name] for seconds in rounds] for arm in arms}
