"""The mesh, checkpointing and method of a run, chosen by predicted seconds among what fits.

Every number of ranks that may share a sample is predicted, with as little recomputation as fits;
then, for the fastest, one further setting at a time: weights replicated or kept gathered, several
samples a microbatch. A choice follows from the configuration, the sample's length and the machine,
which are public, and epsilon does not depend on it.
"""

import contextlib
import itertools
import multiprocessing
import os
import sys
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

from rich.console import Console
from rich.table import Column, Table

from torchtitan_dp.config import JobConfig
from torchtitan_dp.config.derived import mesh_degrees
from torchtitan_dp.config.keys import Keys, command_line, replaced
from torchtitan_dp.config.load import load_config
from torchtitan_dp.distributed.cpu import has_accelerator
from torchtitan_dp.models.hugging_face import shape
from torchtitan_dp.plan.cost import expected_rounds
from torchtitan_dp.plan.machines import Machine
from torchtitan_dp.plan.memory import GIB, WITHOUT_DEVICES, communicators, limit_bytes
from torchtitan_dp.plan.peaks import fits
from torchtitan_dp.plan.seconds import WEIGHTS, StepSeconds, predict_step
from torchtitan_dp.process import write_atomically

SHOWN = 5
FURTHER = 2  # of the fastest meshes, for which further settings are tried
WORTH = 0.05  # of a step: transfers of weights that take less are left as they are
WAVE = 2  # meshes that are predicted side by side, before the next are worth it or not
WIDTH = 140  # of the table, at least
FEWEST = 2048  # tokens of a sample on a rank, that are worth a ring between nodes
SHORT = 4096  # tokens, up to which several samples make a microbatch

_CP, _MBS = "parallelism.context_parallel_degree", "training.local_batch_size"
_ACTIVATIONS = "activation_checkpoint.mode", "activation_checkpoint.offload_inputs"


@dataclass(frozen=True)
class Draws:
    """Who may be drawn in a step: so many units, each with this probability."""

    units: int
    rate: float


@dataclass(frozen=True)
class Choice:
    """A setting, and what is predicted of it."""

    keys: Keys
    peak_bytes: float
    limit_bytes: int
    step: StepSeconds

    @property
    def fits(self) -> bool:
        return self.peak_bytes <= self.limit_bytes

    def for_programs(self, steps: int) -> dict[str, Any]:
        gib = {"peak_memory_gib": self.peak_bytes / GIB}
        return {"keys": self.keys, **gib, **self.step.for_programs(steps)}


def choose(
    overrides: list[str],
    ranks: int,
    machine: Machine,
    memory_gib: float,
    draws: Draws,
    *,
    given: bool = False,
) -> list[Choice]:
    """Predict settings, and return those that fit, the fastest first; or the `given` one alone,
    whether it fits or not.

    `overrides` are a command line without a mistake. Raises ValueError, one line, if none fits.
    """
    config = load_config(overrides, ranks)
    task = _Task(overrides, ranks, machine, memory_gib, draws)
    with processes() as pool:
        if given:
            (one,) = pool.map(task.predict, [{}])
            return [one]
        tried, every = list[Choice](), list(meshes(config, ranks, machine))
        for start in range(0, len(every), WAVE):
            wave = every[start : start + WAVE]
            hopeful = [[keys for keys in mesh if task.promising(keys, tried)] for mesh in wave]
            tried += itertools.chain(*pool.map(task.fastest, hopeful))
        more = [keys for one in fitting(tried)[:FURTHER] for keys in variants(config, one)]
        tried += itertools.chain(*pool.map(task.fastest, more))
    if not tried:
        shape(load_config([*overrides, *command_line(every[0][0])], ranks))  # raises why
    if not (found := fitting(tried)):
        least = min(one.peak_bytes for one in tried)
        raise ValueError(
            f"--gpus = {ranks}: no setting fits in {memory_gib:g} GiB; the smallest needs "
            f"{least / GIB:.1f}: more GPUs, LoRA (lora.rank), or a smaller training.seq_len"
        )
    return found


def fewest_ranks(overrides: list[str], ranks: int, memory_gib: float) -> list[str]:
    """Return, for a command line whose degree is `auto`, the fewest ranks that share a sample and
    fit; all that the other degrees leave if fewer do not. ValueError, one line, if the setting is
    refused."""
    most = load_config(overrides, ranks).parallelism.context_parallel_degree
    fewer = [cp for cp in range(1, most) if most % cp == 0]
    suffices = partial(_fits, overrides, ranks, memory_gib)
    if has_accelerator():
        with processes() as pool:
            found = pool.map(suffices, fewer)
            fewest = next((cp for cp, fits in zip(fewer, found, strict=True) if fits), most)
            pool.shutdown(cancel_futures=True)
    else:  # this process sees no device either, and has imported all that the plan needs
        fewest = next(filter(suffices, fewer), most)
    key = f"parallelism.context_parallel_degree={fewest}"
    print(f"      {key}: the fewest ranks that fit share a sample", file=sys.stderr)
    return [f"--{key}"]


def _fits(overrides: list[str], ranks: int, memory_gib: float, cp: int) -> bool:
    try:
        config = load_config([*overrides, f"--parallelism.context_parallel_degree={cp}"], ranks)
    except ValueError:
        return False
    return fits(config, shape(config), ranks, memory_gib)


@contextlib.contextmanager
def processes() -> Iterator[ProcessPoolExecutor]:
    """Start processes for predictions, which see no device."""
    workers, spawn = len(os.sched_getaffinity(0)), multiprocessing.get_context("spawn")
    with mock.patch.dict(os.environ, WITHOUT_DEVICES), ProcessPoolExecutor(workers, spawn) as pool:
        yield pool


def fitting(choices: Iterable[Choice]) -> list[Choice]:
    """Return the choices that fit, the fastest first."""
    return sorted((one for one in choices if one.fits), key=lambda one: one.step.total)


def meshes(config: JobConfig, ranks: int, machine: Machine) -> Iterator[list[Keys]]:
    """Yield every number of ranks for a sample, each with the ways to hold its activations, the
    fastest first; FSDP2 spans the sample's ranks and the rest of a node's. Beyond a node a rank has
    `FEWEST` tokens or more."""
    most = max(machine.ranks_a_node, config.training.seq_len // FEWEST)
    for cp in (n for n in range(1, min(ranks, most) + 1) if ranks % n == 0):
        shard = max(min(ranks, machine.ranks_a_node) // cp, 1)
        if ranks % (cp * shard) or (cp > 1 and config.training.seq_len % (2 * cp)):
            continue
        yield [
            {
                "parallelism.data_parallel_replicate_degree": ranks // (cp * shard),
                "parallelism.data_parallel_shard_degree": shard,
                _CP: cp,
                "parallelism.keep_weights_gathered": False,
                "activation_checkpoint.mode": mode,
                "activation_checkpoint.offload_inputs": offloads,
                _MBS: 1,
                "privacy.gradient_method": "microbatch",
            }
            for mode, offloads in (("none", False), ("full", False), ("full", True))
        ]


def variants(config: JobConfig, one: Choice) -> Iterator[list[Keys]]:
    """Yield what differs from a setting in one respect, and may be faster."""
    keys = one.keys
    replicate, shard = (
        f"parallelism.data_parallel_{kind}_degree" for kind in ("replicate", "shard")
    )
    if one.step.parts[WEIGHTS] > WORTH * one.step.total:
        if keys[shard] > 1:
            yield [keys | {replicate: keys[replicate] * keys[shard], shard: 1}]
        yield [keys | {"parallelism.keep_weights_gathered": True}]
    if config.training.seq_len <= SHORT:
        for method in ("grad_sample", "ghost"):
            yield [keys | {_MBS: 4, "privacy.gradient_method": method}]


@dataclass(frozen=True)
class _Task:
    """A configuration whose settings are predicted, in processes that have no process group."""

    overrides: list[str]
    ranks: int
    machine: Machine
    memory_gib: float
    draws: Draws

    def promising(self, keys: Keys, tried: list[Choice]) -> bool:
        """Return whether a setting could fit, and be among the fastest, if more ranks a sample
        shared all memory and all time of fewer evenly."""
        shown = fitting(tried)[:SHOWN]
        for one in tried:
            if any(one.keys[key] != keys[key] for key in _ACTIVATIONS):
                continue
            share = one.keys[_CP] / keys[_CP]
            total = share * one.step.total * self.rounds(keys) / self.rounds(one.keys)
            slower = len(shown) == SHOWN and total > shown[-1].step.total
            if slower or share * one.peak_bytes > one.limit_bytes:
                return False
        return True

    def rounds(self, keys: Keys) -> float:
        """Return the expected microbatches of a data-parallel rank."""
        slots = self.ranks // keys[_CP] * keys[_MBS]
        return expected_rounds(self.draws.units, self.draws.rate, slots)

    def fastest(self, settings: list[Keys]) -> list[Choice]:
        """Predict settings, the fastest first, until one fits; those that are allowed."""
        found = list[Choice]()
        for keys in settings:
            with contextlib.suppress(ValueError):
                found.append(self.predict(keys))
                if found[-1].fits:
                    break
        return found

    def predict(self, keys: Keys) -> Choice:
        """Predict one setting; ValueError, one line, if it is refused."""
        config = load_config([*self.overrides, *command_line(keys)], self.ranks)
        args, degrees = shape(config), mesh_degrees(config)
        limit = limit_bytes(self.memory_gib, communicators(degrees))
        rounds = self.rounds({_CP: degrees[2], _MBS: config.training.local_batch_size})
        peak, step = predict_step(config, args, self.ranks, self.machine, rounds)
        return Choice(keys, peak, limit, step)


def show_choices(choices: list[Choice], steps: int, machine: Machine) -> None:
    """Print the fastest settings and the keys of the first on stderr; of a given one its time."""
    first, *_ = choices
    wide = max(Console().width, WIDTH)
    console = Console(stderr=True, highlight=False, soft_wrap=True, width=wide)
    if not first.keys:
        console.print(f"      predicted for {machine.name}: {first.step.describe(steps)}")
        return
    numbers = (Column(name, justify="right") for name in ("GiB", "s a step", "hours"))
    rows = Table(
        "replicate x shard x cp", "recomputed", "weights", "method", *numbers, "most of it"
    )
    for one in choices[:SHOWN]:
        keys = one.keys
        mesh = [value for key, value in keys.items() if key.endswith("_degree")]
        offloads = ", inputs on the host" * keys["activation_checkpoint.offload_inputs"]
        rows.add_row(
            " x ".join(map(str, mesh)),
            keys["activation_checkpoint.mode"] + offloads,
            "kept gathered" if keys["parallelism.keep_weights_gathered"] else "gathered again",
            f"{keys['privacy.gradient_method']}, MBS {keys['training.local_batch_size']}",
            f"{one.peak_bytes / GIB:.1f}",
            digits(one.step.total),
            digits(one.step.hours(steps)),
            one.step.limit,
        )
    console.print(f"predicted for {machine.name}, the fastest that fit:")
    console.print(rows)
    console.print("chosen: " + " ".join(command_line(first.keys)))


def digits(value: float) -> str:
    """Write a number of a table: whole from 100 on, else three digits."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def write(path: str, toml: str | None, keys: Keys) -> None:
    """Write a TOML with these keys in the place of its own, all else as it is.

    Raises:
        ValueError: one line for the user: there is something at `path`.
    """
    text = Path(toml).read_text(encoding="utf-8") if toml else ""
    if os.path.exists(path):
        raise ValueError(f"--write = '{path}': is there already; name another file, or move it")
    write_atomically(path, replaced(text, keys).encode())
