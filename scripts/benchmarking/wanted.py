"""Which arms in which settings each table of the benchmark is made of."""

import argparse
from collections.abc import Iterator

import torch

from . import arms as catalogue
from .arms import Arm, Setting
from .measure import Repetitions, make_setting, read_config

RANKS = (1, 2, 4)
LENGTH_FACTORS = (1, 2, 4)
CROSSOVER_PARTS = (16, 8, 4, 2, 1)  # of the configuration's length
CROSSOVER_BATCH_SIZE = 4
CROSSOVER_ARMS = ("non-DP", "microbatch", "V2", "ghost", "randomized")

Wanted = tuple[list[Arm], Setting, Repetitions | None]  # None: weighed, not timed


def compare_arms(
    options: argparse.Namespace, overrides: list[str], devices: int
) -> Iterator[Wanted]:
    """Every arm at every MBS; without a configuration on one process, too."""
    chosen = {devices: catalogue.choose(options.arms, devices)}
    if options.is_default and options.devices is None and options.arms is None and devices > 1:
        chosen[1] = catalogue.choose(",".join(catalogue.ON_ONE_PROCESS), 1)
    sizes = batch_sizes(options, overrides, devices)
    for n, arms in chosen.items():
        for mbs in sizes if n == devices else sizes[:1]:
            yield wanted(options, overrides, n, arms, mbs)


def compare_lengths(
    options: argparse.Namespace, overrides: list[str], devices: int
) -> Iterator[Wanted]:
    """T, 2T, 4T at one MBS."""
    arms = catalogue.choose(options.arms or "microbatch,V2", devices)
    mbs = batch_sizes(options, overrides, devices)[0]
    for factor in LENGTH_FACTORS:
        yield wanted(options, overrides, devices, arms, mbs, factor)


def compare_ranks(options: argparse.Namespace, overrides: list[str], _: int) -> Iterator[Wanted]:
    """What a rank holds, where 1, 2 and 4 share each sample."""
    arms = catalogue.choose(options.arms or "microbatch,V1,V2", 2)
    all_cp = ["--parallelism.context_parallel_degree=-1"] + [
        f"--parallelism.data_parallel_{kind}_degree=1" for kind in ("shard", "replicate")
    ]
    overrides = [*overrides, *all_cp]
    most = torch.cuda.device_count() or max(RANKS)
    for mbs in batch_sizes(options, overrides, 1):
        for n in RANKS:
            if n <= most:
                yield wanted(options, overrides, n, arms, mbs, timed=False)


def compare_crossover(
    options: argparse.Namespace, overrides: list[str], devices: int
) -> Iterator[Wanted]:
    """T / 16 to T, with as many tokens in each step as at T: shorter samples, more of them.

    `microbatch` takes the samples of a microbatch one by one, whatever MBS says, so that its steps
    are those of MBS 1.
    """
    names = options.arms or ",".join(name for name in CROSSOVER_ARMS if name in catalogue.ARMS)
    arms = catalogue.choose(names, devices)
    longest = read_config(options.config, overrides, devices).training.seq_len
    sizes = numbers("--batch_sizes", options.batch_sizes or str(CROSSOVER_BATCH_SIZE))
    for mbs in sizes:
        for part in CROSSOVER_PARTS:
            length = [f"--training.seq_len={longest // part}"]
            yield wanted(
                options,
                [*overrides, *length],
                devices,
                arms,
                mbs,
                microbatches=(options.microbatches or 1) * part,
            )


def wanted(
    options: argparse.Namespace,
    overrides: list[str],
    devices: int,
    arms: list[Arm],
    local_batch_size: int,
    seq_len_factor: int = 1,
    timed: bool = True,
    microbatches: int | None = None,
) -> Wanted:
    """One setting, with the repetitions that were asked for.

    Raises:
        ValueError: one line on the user's mistake.
    """
    setting = make_setting(
        options.config,
        overrides,
        devices,
        local_batch_size=local_batch_size,
        microbatches=microbatches or options.microbatches or (4 if local_batch_size == 1 else 2),
        seq_len_factor=seq_len_factor,
    )
    repetitions = Repetitions(options.rounds, options.steps, options.warm_up)
    return arms, setting, repetitions if timed else None


def batch_sizes(options: argparse.Namespace, overrides: list[str], devices: int) -> list[int]:
    """MBS: those that were asked for, or the configuration's."""
    if options.batch_sizes is None and not options.is_default:
        return [read_config(options.config, overrides, devices).training.local_batch_size]
    return numbers("--batch_sizes", options.batch_sizes or "1,4")


def numbers(option: str, given: str) -> list[int]:
    """Read numbers from 1, comma-separated.

    Raises:
        ValueError: one line for the user.
    """
    found = given.split(",")
    if not all(number.isdigit() and int(number) for number in found):
        raise ValueError(f"{option} {given}: numbers from 1, comma-separated")
    return [int(number) for number in found]
