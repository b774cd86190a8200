"""Chooses the mesh, checkpointing and method of a run by predicted seconds among what fits.

Seconds of a setting are a closed form (`roofline`), its memory is predicted by the real step: the
fastest settings first, until enough of them fit. A setting that needs more than one that does not
fit is not tried. A choice follows from the configuration, the sample's length and the machine,
which are public, and epsilon does not depend on it.
"""

import contextlib
import itertools
import math
import multiprocessing
import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, TextIO
from unittest import mock

from torchtitan_dp.checkpoint.plan import expected_rounds
from torchtitan_dp.config import JobConfig
from torchtitan_dp.config.derived import DEGREES, mesh_degrees
from torchtitan_dp.config.load import Keys, command_line, load_config
from torchtitan_dp.distributed.devices import has_accelerator
from torchtitan_dp.models.hugging_face import parameter_count, shape
from torchtitan_dp.plan.memory import GIB, WITHOUT_DEVICES, communicators, limit_bytes
from torchtitan_dp.plan.prediction import step_peak
from torchtitan_dp.plan.roofline import RANKS_A_NODE, Machine, StepSeconds, step_seconds

SHOWN = 5
WAVE = 2  # settings whose memory is predicted side by side
FEWEST = 2048  # tokens of a sample on a rank, that are worth a ring between nodes
SHORT = 4096  # tokens, up to which several samples make a microbatch

_REPLICATE, _SHARD, _CP = (f"parallelism.{key}" for key in DEGREES)
_KEPT, _MBS = "parallelism.keep_weights_gathered", "training.local_batch_size"
_MODE, _OFFLOADS = "activation_checkpoint.mode", "activation_checkpoint.offload_inputs"
_METHOD = "privacy.gradient_method"


@dataclass(frozen=True)
class Choice:
    """A setting that fits, and what is predicted of it."""

    keys: Keys
    peak_bytes: float
    step: StepSeconds

    def for_programs(self, steps: int) -> dict[str, Any]:
        gib = {"peak_memory_gib": self.peak_bytes / GIB}
        return {"keys": self.keys, **gib, **self.step.for_programs(steps)}


def choose(
    overrides: list[str], ranks: int, machine: Machine, memory_gib: float, units: int, rate: float
) -> list[Choice]:
    """Return the settings that fit, the fastest `SHOWN` first.

    `overrides` are a command line without a mistake; each of `units` is drawn in a step with
    probability `rate`. Raises ValueError, one line, if none fits.
    """
    settings = list[tuple[StepSeconds, Keys]]()
    refusal = None
    for keys in candidates(load_config(overrides, ranks), ranks):
        try:
            config = load_config([*overrides, *command_line(keys)], ranks)
            args = shape(config)
        except ValueError as error:  # this mesh is not allowed
            refusal = error
            continue
        rounds = expected_rounds(units, rate, ranks // keys[_CP] * keys[_MBS])
        settings.append((step_seconds(config, args, machine, rounds), keys))
    if not settings:
        raise refusal or AssertionError("there is a mesh of any number of ranks")
    settings.sort(key=lambda setting: setting[0].total)
    found, failed, least = list[Choice](), list[Keys](), float("inf")
    with processes() as pool:
        while settings and len(found) < SHOWN:
            wave, settings = settings[:WAVE], settings[WAVE:]
            held = [one.keys for one in found]  # whose inputs need not go to the host
            wave = [
                (step, keys)
                for step, keys in wave
                if not any(needs_more(keys, other) for other in failed)
                and keys | {_OFFLOADS: False} not in held
            ]
            peaks = pool.map(partial(_peak, overrides, ranks), [keys for _, keys in wave])
            for (step, keys), (peak, groups) in zip(wave, peaks, strict=True):
                least = min(least, peak)
                if peak <= limit_bytes(memory_gib, groups):
                    found.append(Choice(keys, peak, step))
                else:
                    failed.append(keys)
    if not found:
        raise ValueError(
            f"--gpus = {ranks}: no setting fits in {memory_gib:g} GiB; the smallest tried needs "
            f"{least / GIB:.1f}: more GPUs, LoRA (lora.rank), or a smaller training.seq_len"
        )
    return found[:SHOWN]


def candidates(config: JobConfig, ranks: int) -> Iterator[Keys]:
    """Yield settings: every number of ranks for a sample (beyond a node each has `FEWEST` tokens or
    more), weights sharded over the rest of a node or replicated, gathered again or kept, three
    ways to hold activations, and, of short samples, several at a time."""
    seq_len = config.training.seq_len
    most = min(ranks, max(RANKS_A_NODE, seq_len // FEWEST))
    batches = [(1, "microbatch")] + [(4, "grad_sample")] * (seq_len <= SHORT)
    activations = ("none", False), ("full", False), ("full", True)
    for cp in (n for n in range(1, most + 1) if ranks % n == 0):
        shards = {max(min(ranks, RANKS_A_NODE) // cp, 1), 1}
        if cp > 1 and seq_len % (2 * cp):
            continue
        every = itertools.product(sorted(shards), (False, True), activations, batches)
        for shard, kept, (mode, offloads), (size, method) in every:
            if ranks % (cp * shard) == 0:
                degrees = {_REPLICATE: ranks // (cp * shard), _SHARD: shard, _CP: cp}
                held = {_KEPT: kept, _MODE: mode, _OFFLOADS: offloads}
                yield degrees | held | {_MBS: size, _METHOD: method}


def needs_more(keys: Keys, other: Keys) -> bool:
    """Return whether a setting needs at least as much memory as another."""

    def appetite(keys: Keys) -> list[int]:
        held = 2 if keys[_MODE] == "none" else 1 - keys[_OFFLOADS]
        return [-keys[_CP], keys[_REPLICATE], keys[_KEPT], keys[_MBS], held]

    return all(a >= b for a, b in zip(appetite(keys), appetite(other), strict=True))


def _peak(overrides: list[str], ranks: int, keys: Keys) -> tuple[float, int]:
    """Predict a setting's peak bytes; also returns its communicators."""
    config = load_config([*overrides, *command_line(keys)], ranks)
    return step_peak(config, shape(config), ranks), communicators(mesh_degrees(config))


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
    return [f"--{_CP}={fewest}"]


def _fits(overrides: list[str], ranks: int, memory_gib: float, cp: int) -> bool:
    try:
        config = load_config([*overrides, f"--{_CP}={cp}"], ranks)
    except ValueError:
        return False
    args, samples = shape(config), config.training.local_batch_size
    each = 400 * args.dim * args.n_layers + 16 * args.vocab_size  # bytes of a token, generously
    rough = (32 + 4 * samples) * parameter_count(args) + each * samples * config.training.seq_len
    if 4 * rough < memory_gib * GIB:  # a prediction takes seconds
        return True
    groups = communicators(mesh_degrees(config))
    return step_peak(config, args, ranks) <= limit_bytes(memory_gib, groups)


@contextlib.contextmanager
def processes() -> Iterator[ProcessPoolExecutor]:
    """Start processes for predictions, which see no device."""
    workers, spawn = len(os.sched_getaffinity(0)), multiprocessing.get_context("spawn")
    with mock.patch.dict(os.environ, WITHOUT_DEVICES), ProcessPoolExecutor(workers, spawn) as pool:
        yield pool


def show_choices(choices: list[Choice], steps: int, machine: Machine, out: TextIO) -> None:
    """Print the settings, and the keys of the first."""
    heads = "replicate x shard x cp, recomputed, weights, method, GiB, s a step, hours, most of it"
    rows = [heads.split(", ")]
    for one in choices:
        keys = one.keys
        rows.append(
            [
                " x ".join(str(keys[key]) for key in (_REPLICATE, _SHARD, _CP)),
                keys[_MODE] + ", inputs on the host" * keys[_OFFLOADS],
                "kept gathered" if keys[_KEPT] else "gathered again",
                f"{keys[_METHOD]}, MBS {keys[_MBS]}",
                f"{one.peak_bytes / GIB:.1f}",
                digits(one.step.total),
                digits(one.step.hours(steps)),
                one.step.limit,
            ]
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    ranks = math.prod(int(choices[0].keys[key]) for key in (_REPLICATE, _SHARD, _CP))
    head = f"predicted for {ranks} x {machine.name} ({machine.limits()}), the fastest that fit:"
    print(head, *lines, "chosen: " + " ".join(command_line(choices[0].keys)), sep="\n", file=out)


def digits(value: float) -> str:
    """Write a number of a table: whole from 100 on, else three digits."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
