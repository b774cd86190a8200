"""Training with privacy against plain TorchTitan: the same records, processes, model, optimizer.

    python scripts/benchmark.py [--config FILE] [--devices N] [--arms a,b] [--batch_sizes 1,4]
        [--rounds R] [--steps S] [--microbatches M] [--table arms|lengths|ranks|data|all|counts]
        [--json FILE] [--markdown FILE] [--plot FILE.png] [--section.key value …]

Arms: plain TorchTitan (`non-DP`), `microbatch`, LongShield's `V1` (per-sample gradients, whole on
each rank) and `V2` (sharded), each also with full activation checkpointing (`+ AC`; V2 + AC is the
paper's V3), and on one process Opacus itself (`Opacus hooks`, `Opacus ghost`).

Time: all arms live in the same processes and take turns, so that a machine whose speed drifts
treats them alike; medians of the rounds, and medians of the rounds' ratios. Every step of every
arm has exactly M microbatches: a private arm's Poisson draws are replaced, in these processes, by
draws of that fixed size. For timing only; norms, clipping and noise are real. Memory and bytes:
each arm alone in fresh processes; on CPU the process's resident set (with freed memory given back
at once), on CUDA its tensors. `--table data` is told in benchmarking/data.py.

What `--json` and `--markdown` name is written anew after each arm. A run that was cut off goes on
where it was, by the same command: what it had measured lies in `<--json>.partial` until the end.
"""

import argparse
import itertools
import json
import os
import platform
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from benchmarking import arms as catalogue
from benchmarking import counts, plot, results, tables
from benchmarking.arms import Setting
from benchmarking.data import data_table, measure_data
from benchmarking.journal import Journal
from benchmarking.measure import (
    Measured,
    Repetitions,
    make_setting,
    measure,
    read_config,
)
from benchmarking.worker import show

from torchtitan_dp.config.load import exit_on_mistake, fail

ROOT = Path(__file__).resolve().parent.parent
RANKS = (1, 2, 4)
LENGTH_FACTORS = (1, 2, 4)
SET_HERE = {
    "training.local_batch_size": "--batch_sizes",
    "training.global_batch_size": "--microbatches",
    "privacy.gradient_method": "--arms",
    "activation_checkpoint.mode": "--arms",
}


def main() -> None:
    options, overrides = _parse()
    with exit_on_mistake():
        _check(options, overrides)
        journal = Journal(options.json and options.json.with_name(options.json.name + ".partial"))
        if journal.resumed:
            show(f"{journal.resumed} measurements of {journal.path} are not repeated")
        arms = [_count(options)] if options.table == "counts" else _run(options, overrides, journal)
        for result in arms:
            _write(options, result)
    print(_markdown(result))
    journal.remove()
    if options.plot:
        plot.draw(result["arms"], result["machine"], options.plot)


def _write(options: argparse.Namespace, result: dict[str, Any]) -> None:
    """Write what is there so far."""
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    if options.markdown:
        options.markdown.write_text(_markdown(result) + "\n", encoding="utf-8")


def _parse() -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").splitlines()[0], allow_abbrev=False
    )
    parser.add_argument("--config", metavar="FILE", help="default: train_configs/llama3_debug.toml")
    parser.add_argument(
        "--devices",
        type=int,
        help="processes; default: the CUDA devices, else 2, and one more table on 1",
    )
    parser.add_argument("--arms", help=f"from: {', '.join(catalogue.ARMS)}; default: all")
    parser.add_argument(
        "--batch_sizes", help="MBS, one row each; default: the configuration's, or 1,4 without one"
    )
    parser.add_argument("--rounds", type=int, default=3, help="timed turns of each arm")
    parser.add_argument("--steps", type=int, default=1, help="optimizer steps in a turn")
    parser.add_argument("--warm_up", type=int, default=1, help="steps of each arm before")
    parser.add_argument(
        "--microbatches", type=int, help="in a step; default: 4 at MBS 1 and 2 at any other"
    )
    tables_ = ("arms", "lengths", "ranks", "data", "all", "counts")
    parser.add_argument("--table", choices=tables_, default="arms")
    parser.add_argument("--models", default=",".join(counts.MODELS), help="of --table counts")
    parser.add_argument(
        "--seq_lens", default=",".join(map(str, counts.SEQ_LENS)), help="of --table counts"
    )
    for output in ("--json", "--markdown", "--plot"):
        parser.add_argument(output, type=Path, metavar="FILE")
    options, overrides = parser.parse_known_args()
    options.is_default = options.config is None
    options.config = options.config or str(ROOT / "train_configs/llama3_debug.toml")
    return options, overrides


def _check(options: argparse.Namespace, overrides: list[str]) -> None:
    """Refuse now what would fail after minutes of measuring, or be overridden unseen."""
    for name in ("rounds", "steps", "warm_up", "microbatches", "devices"):
        value = getattr(options, name)
        if value is not None and value < 1:
            fail(f"--{name} {value}: must be at least 1")
    if (options.warm_up + options.rounds * options.steps) > 900:
        fail("--rounds times --steps: at most 900 steps")
    if options.plot:
        try:
            import matplotlib  # noqa: F401
        except ModuleNotFoundError:
            fail("--plot needs matplotlib: pip install matplotlib")
    if options.table == "counts" and (options.config is not None and not options.is_default):
        fail("--config: --table counts has its own; use --models")
    if options.table == "counts" and overrides:
        fail(f"{overrides[0]}: --table counts takes no configuration keys")
    for key, instead in SET_HERE.items():
        if any(override.partition("=")[0] == f"--{key}" for override in overrides):
            fail(f"--{key}: set here for every arm; use {instead}")
    for path in (options.json, options.markdown, options.plot):
        if path is not None and not path.parent.is_dir():
            fail(f"{path}: no such folder")


def _run(
    options: argparse.Namespace, overrides: list[str], journal: Journal
) -> Iterator[dict[str, Any]]:
    """Measure the tables that were asked for; yields the result so far, and in the end all of it.

    Raises:
        ValueError: the user's mistake, before anything is measured.
    """
    devices = options.devices or torch.cuda.device_count() or 2
    settings = {
        "arms": _compare_arms,
        "lengths": _compare_lengths,
        "ranks": _compare_ranks,
    }
    asked = {
        table: list(compare(options, overrides, devices))
        for table, compare in settings.items()
        if options.table in (table, "all")
    }
    found: dict[str, list[Measured]] = {table: [] for table in settings}
    for table, wanted in asked.items():
        for arms, setting, repetitions in wanted:
            found[table].append(Measured(setting, arms))
            for found[table][-1] in measure(arms, setting, repetitions, journal):
                yield _result(options, found, devices, [])
    yield _result(options, found, devices, [])
    if options.table in ("data", "all"):
        with tempfile.TemporaryDirectory() as folder:
            for rows in measure_data(folder, lambda line: print(f"data: {line}", file=sys.stderr)):
                yield _result(options, found, devices, rows)


def _result(
    options: argparse.Namespace,
    found: dict[str, list[Measured]],
    devices: int,
    data: list[dict[str, Any]],
) -> dict[str, Any]:
    skipped = {
        (arm, one.setting.devices): reason
        for one in itertools.chain(*found.values())
        for arm, reason in one.skipped.items()
    }
    return {
        "machine": _machine(devices),
        "command": " ".join(["scripts/benchmark.py", *sys.argv[1:]]),
        "draws": "draws of a fixed size, for timing only",
        "rounds": options.rounds,
        "steps_per_round": options.steps,
        "arms": [row for one in found["arms"] for row in results.arm_rows(one)],
        "lengths": [row for one in found["lengths"] for row in results.length_rows(one)],
        "ranks": [row for one in found["ranks"] for row in results.rank_rows(one)],
        "data": data,
        "skipped": [
            {"name": arm, "world_size": n, "reason": reason} for (arm, n), reason in skipped.items()
        ],
    }


def _count(options: argparse.Namespace) -> dict[str, Any]:
    sizes, devices = options.batch_sizes or "1,4", options.devices or 4
    seq_lens = _numbers("--seq_lens", options.seq_lens)
    rows = counts.count_rows(
        options.models.split(","), seq_lens, _numbers("--batch_sizes", sizes), devices
    )
    command = " ".join(["scripts/benchmark.py", *sys.argv[1:]])
    return {"command": command, "torch": torch.__version__, "counts": rows}


Wanted = tuple[list[catalogue.Arm], Setting, Repetitions | None]


def _compare_arms(
    options: argparse.Namespace, overrides: list[str], devices: int
) -> Iterator[Wanted]:
    chosen = {devices: catalogue.choose(options.arms, devices)}
    if options.is_default and options.devices is None and options.arms is None and devices > 1:
        chosen[1] = catalogue.choose(",".join(catalogue.ON_ONE_PROCESS), 1)
    sizes = _batch_sizes(options, overrides, devices)
    for n, arms in chosen.items():
        for mbs in sizes if n == devices else sizes[:1]:
            yield _wanted(options, overrides, n, arms, mbs)


def _compare_lengths(
    options: argparse.Namespace, overrides: list[str], devices: int
) -> Iterator[Wanted]:
    arms = catalogue.choose(options.arms or "microbatch,V2", devices)
    mbs = _batch_sizes(options, overrides, devices)[0]
    for factor in LENGTH_FACTORS:
        yield _wanted(options, overrides, devices, arms, mbs, factor)


def _compare_ranks(options: argparse.Namespace, overrides: list[str], _: int) -> Iterator[Wanted]:
    arms = catalogue.choose(options.arms or "microbatch,V1,V2", 2)
    all_cp = ["--parallelism.context_parallel_degree=-1"] + [
        f"--parallelism.data_parallel_{kind}_degree=1" for kind in ("shard", "replicate")
    ]
    overrides = [*overrides, *all_cp]
    most = torch.cuda.device_count() or max(RANKS)
    for mbs in _batch_sizes(options, overrides, 1):
        for n in RANKS:
            if n <= most:
                yield _wanted(options, overrides, n, arms, mbs, timed=False)


def _wanted(
    options: argparse.Namespace,
    overrides: list[str],
    devices: int,
    arms: list[catalogue.Arm],
    local_batch_size: int,
    seq_len_factor: int = 1,
    timed: bool = True,
) -> Wanted:
    setting = make_setting(
        options.config,
        overrides,
        devices,
        local_batch_size=local_batch_size,
        microbatches=options.microbatches or (4 if local_batch_size == 1 else 2),
        seq_len_factor=seq_len_factor,
    )
    repetitions = Repetitions(options.rounds, options.steps, options.warm_up)
    return arms, setting, repetitions if timed else None


def _batch_sizes(options: argparse.Namespace, overrides: list[str], devices: int) -> list[int]:
    if options.batch_sizes is None and not options.is_default:
        return [read_config(options.config, overrides, devices).training.local_batch_size]
    return _numbers("--batch_sizes", options.batch_sizes or "1,4")


def _numbers(option: str, given: str) -> list[int]:
    numbers = given.split(",")
    if not all(number.isdigit() and int(number) for number in numbers):
        raise ValueError(f"{option} {given}: numbers from 1, comma-separated")
    return [int(number) for number in numbers]


def _machine(devices: int) -> str:
    if torch.cuda.is_available():
        return f"{devices} x {torch.cuda.get_device_name()}, torch {torch.__version__}"
    return (
        f"CPU, {os.cpu_count()} cores, {platform.machine()}, {devices} gloo processes, "
        f"torch {torch.__version__}, Python {platform.python_version()}"
    )


def _markdown(result: dict[str, Any]) -> str:
    if "counts" in result:
        command = f"torch {result['torch']}. `{result['command']}`"
        return f"{command}\n\n{counts.counts_tables(result['counts'])}"
    parts = [f"{result['machine']}. `{result['command']}`"]
    if any(result[table] for table in ("arms", "lengths", "ranks")):
        parts.append(
            f"Medians of {result['rounds']} rounds; a gap is non-DP's throughput over the arm's, "
            f"or the arm's memory over non-DP's, both with or both without AC. Private arms have "
            f"{result['draws']}."
        )
    if result["arms"]:
        parts.append(tables.arms_tables(result["arms"]))
    if result["lengths"]:
        parts.append(tables.lengths_table(result["lengths"]))
    if result["ranks"]:
        parts.append(tables.ranks_table(result["ranks"]))
    if result["data"]:
        parts.append(data_table(result["data"]))
    parts += [
        f"Skipped on {one['world_size']}: {one['name']}: {one['reason']}"
        for one in result["skipped"]
    ]
    return "\n\n".join(parts)


if __name__ == "__main__":
    main()
