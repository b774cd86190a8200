"""The mesh, checkpointing and method of a run, chosen by predicted seconds among what fits.

A grid of the ranks that share a sample, with and without recomputation, is predicted first; then,
for the fastest that fit, one further setting at a time: weights replicated or kept gathered, inputs
of blocks on the host, several samples a microbatch. A prediction is the fake step of few layers
(`peaks`), with its work counted. A choice follows from the configuration, the sample's length and
the machine, which are public, and epsilon does not depend on it.
"""

import copy
import functools
import itertools
import multiprocessing
import os
import re
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from rich.console import Console
from rich.table import Column, Table

from torchtitan_dp.config import JobConfig
from torchtitan_dp.config.derived import mesh_degrees
from torchtitan_dp.config.load import load_config
from torchtitan_dp.models.families import ModelArgs
from torchtitan_dp.models.hugging_face import shape
from torchtitan_dp.plan.cost import expected_rounds
from torchtitan_dp.plan.fake_step import fake_world
from torchtitan_dp.plan.machines import Machine
from torchtitan_dp.plan.memory import GIB, WITHOUT_DEVICES, communicators, limit_bytes
from torchtitan_dp.plan.peaks import Model, few_layers, of_layers
from torchtitan_dp.plan.seconds import StepSeconds, step_seconds
from torchtitan_dp.process import write_atomically

SHOWN = 5
FURTHER = 2  # of the grid's fastest, for which further settings are tried
WIDTH = 140  # of the table, at least
SHORT = 4096  # tokens, up to which several samples make a microbatch

Keys = dict[str, Any]
"""Values of a configuration's keys, by `section.key`."""


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
    predict = functools.partial(_predict, overrides, ranks, machine, memory_gib, draws)
    with (
        mock.patch.dict(os.environ, WITHOUT_DEVICES),
        ProcessPoolExecutor(
            len(os.sched_getaffinity(0)), multiprocessing.get_context("spawn")
        ) as pool,
    ):
        if given:
            return [one for one in pool.map(predict, [{}]) if one is not None]
        first = list(pool.map(predict, grid(config, ranks, machine)))
        best = fitting(first) or [min(filter(None, first), key=lambda one: one.peak_bytes)]
        more = itertools.chain(*(variants(config, one.keys) for one in best[:FURTHER]))
        found = fitting([*first, *pool.map(predict, more)])
    if not found:
        (nearest,) = best
        raise ValueError(
            f"--gpus = {ranks}: no setting fits in {memory_gib:g} GiB; the smallest needs "
            f"{nearest.peak_bytes / GIB:.1f}: more GPUs, LoRA (lora.rank), or a smaller "
            "training.seq_len"
        )
    return found


def fitting(choices: Iterable[Choice | None]) -> list[Choice]:
    """Return the choices that fit, the fastest first."""
    return sorted(
        (one for one in choices if one is not None and one.fits), key=lambda one: one.step.total
    )


def grid(config: JobConfig, ranks: int, machine: Machine) -> Iterator[Keys]:
    """Yield every number of ranks for a sample, with and without recomputation; FSDP2 spans the
    sample's ranks and the rest of a node's."""
    for cp in (n for n in range(1, ranks + 1) if ranks % n == 0):
        if cp > 1 and config.training.seq_len % (2 * cp):
            continue
        shard = max(min(ranks, machine.ranks_a_node) // cp, 1)
        if ranks % (cp * shard):
            continue
        for mode in ("none", "full"):
            yield {
                "parallelism.data_parallel_replicate_degree": ranks // (cp * shard),
                "parallelism.data_parallel_shard_degree": shard,
                "parallelism.context_parallel_degree": cp,
                "parallelism.keep_weights_gathered": False,
                "activation_checkpoint.mode": mode,
                "activation_checkpoint.offload_inputs": False,
                "training.local_batch_size": 1,
                "privacy.gradient_method": "microbatch",
            }


def variants(config: JobConfig, keys: Keys) -> Iterator[Keys]:
    """Yield what differs from a setting in one respect."""
    replicate, shard = (
        f"parallelism.data_parallel_{kind}_degree" for kind in ("replicate", "shard")
    )
    if keys[shard] > 1:
        yield keys | {replicate: keys[replicate] * keys[shard], shard: 1}
    yield keys | {"parallelism.keep_weights_gathered": True}
    if keys["activation_checkpoint.mode"] == "full":
        yield keys | {"activation_checkpoint.offload_inputs": True}
    if config.training.seq_len <= SHORT:
        for method in ("grad_sample", "ghost"):
            yield keys | {"training.local_batch_size": 4, "privacy.gradient_method": method}


def command_line(keys: Keys) -> list[str]:
    """Write a setting as the command line's overrides."""
    flags = {True: "", False: "no-"}
    return [
        f"--{key.replace('.', '.' + flags[value], 1)}"
        if isinstance(value, bool)
        else f"--{key}={value}"
        for key, value in keys.items()
    ]


def _predict(
    overrides: list[str],
    ranks: int,
    machine: Machine,
    memory_gib: float,
    draws: Draws,
    keys: Keys,
) -> Choice | None:
    """Predict a setting in a process that has no process group; None where it is refused."""
    try:
        config = load_config([*overrides, *command_line(keys)], ranks)
        args = shape(config)
        degrees = mesh_degrees(config)
        slots = degrees[0] * degrees[1] * config.training.local_batch_size
        rounds = expected_rounds(draws.units, draws.rate, slots)
        peak, step = predict_step(config, args, ranks, machine, rounds)
    except ValueError:
        return None
    return Choice(keys, peak, limit_bytes(memory_gib, communicators(degrees)), step)


def predict_step(
    config: JobConfig, args: ModelArgs, ranks: int, machine: Machine, rounds: float
) -> tuple[float, StepSeconds]:
    """Predict the peak bytes of a rank, and the seconds of a step of so many `rounds`, in a fake
    world of its own."""
    config = copy.deepcopy(config)
    config.compile.enable = False
    seq_len, mode = config.training.seq_len, config.activation_checkpoint.mode
    # Layers that are checkpointed in turn are no line.
    deep = args.n_layers > few_layers(args)[1] and mode in ("none", "full")
    layers = few_layers(args) if deep else (args.n_layers,)
    stretches, works = [], []
    with fake_world(ranks, like_cuda=machine.overlaps, every_tile=True):
        for n_layers in layers:
            few = copy.deepcopy(args)
            few.n_layers = n_layers
            model = Model(config, few, mode, counts=True)
            stretches.append(model.stretches(seq_len))
            works.append(model.work(seq_len))
            model.close()
    peak, work = float(max(stretches[0].values())), works[0]
    if len(layers) == 2:
        both = stretches[0].keys() & stretches[1].keys()
        pairs = ((stretches[0][name], stretches[1][name]) for name in both)
        peak = max(of_layers(args.n_layers, *pair, layers) for pair in pairs)
        work = work.with_layers(works[1], layers, args.n_layers)
    return peak, step_seconds(work, config, args.n_layers + 2, rounds, machine)


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
            f"{one.step.total:.3g}",
            f"{one.step.hours(steps):.3g}",
            one.step.limit,
        )
    console.print(f"predicted for {machine.name}, the fastest that fit:")
    console.print(rows)
    console.print("chosen: " + " ".join(command_line(first.keys)))


def write(path: str, toml: str | None, keys: Keys) -> None:
    """Write a TOML with these keys in the place of its own, all else as it is.

    Raises:
        ValueError: one line for the user: there is something at `path`.
    """
    text = Path(toml).read_text(encoding="utf-8") if toml else ""
    if os.path.exists(path):
        raise ValueError(f"--write = '{path}': is there already; name another file, or move it")
    write_atomically(path, replaced(text, keys).encode())


def replaced(toml: str, keys: Keys) -> str:
    """Replace the values of keys in a TOML's text."""
    for key, value in keys.items():
        section, name = key.split(".")
        text = str(value).lower() if isinstance(value, bool) else repr(value).replace("'", '"')
        line, header = f"{name} = {text}", rf"^\[{section}\][^\n]*\n"
        if not (found := re.search(header, toml, re.MULTILINE)):
            toml = f"{toml.rstrip()}\n\n[{section}]\n{line}\n"
            continue
        following = re.search(r"^\[", toml[found.end() :], re.MULTILINE)
        end = found.end() + following.start() if following else len(toml)
        body, times = re.subn(
            rf"^{name}\s*=[^\n]*", line, toml[found.end() : end], count=1, flags=re.MULTILINE
        )
        toml = toml[: found.end()] + ("" if times else f"{line}\n") + body + toml[end:]
    return toml
