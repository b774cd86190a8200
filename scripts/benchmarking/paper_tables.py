"""`--table 2|3|4|5`: LongShield's tables, measured on the devices at hand and predicted.

On four CUDA devices of 80 GB the paper's own models, MBS and T are measured. Elsewhere a grid of
the same form is, scaled: N devices in the place of four, and as many tokens in a microbatch of one
device as the configuration's `training.seq_len` (1B at 16,384 on CUDA). For the paper's own rows
the plan and the counts predict memory, FLOPs and bytes (`paper_predictions`), on any machine.

What is found goes into the file that `--json` names, to what is there of other tables, devices
(`cpu`, `cuda`) and models: an entry is what one command measured or predicted.
"""

import argparse
import json
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from . import paper_figures, results
from .arms import ARMS, Arm, choose
from .journal import Journal
from .measure import Measured, Repetitions, make_setting, measure, read_config
from .paper_predictions import CP, FSDP, Task, longest, predict
from .wanted import numbers
from .worker import show

TABLES = ("2", "3", "4", "5")
PARTS = ("measured", "predicted")
CONFIGS = {
    "1B": "train_configs/llama3_1b_64k.toml",
    "3B": "train_configs/llama3_3b_32k.toml",
    "8B": "train_configs/llama3_8b_16k.toml",
}
SCALED_ON_CUDA = 16384  # tokens of 1B that the paper fits into one GPU
BUDGET_MIB = 128.0  # that a CPU process may allocate in Table 2, in the place of 80 GB
BATCH_SIZES = "1,2,4"
PAPER_DEVICES, PAPER_BYTES = 4, 75e9  # of a device that is sold as one of 80 GB
MANY = 256  # GPUs, in the place of infinitely many: the model's share is next to nothing
COUNTED = ("3", "4")  # FLOPs and bytes too; AC adds to Table 4's a forward pass, on both sides
ARMS_OF = {  # in the paper's order; `microbatch` is ours, for an MBS of 1
    "2": ("non-DP", "ghost", "V2", "microbatch"),
    "3": ("non-DP", "ghost"),
    "4": ("non-DP", "V1", "V2", "microbatch"),
    "5": ("non-DP", "non-DP + AC", "V2", "V2 + AC", "microbatch + AC"),
}
_MESH = {FSDP: (1, -1), CP: (-1, 1)}  # degrees of cp and of dp_shard
Row = dict[str, Any]
Stored = dict[str, Any]  # by table: by "cpu", "cuda", "predicted": by model: an entry


@dataclass(frozen=True)
class Shape:
    """One line of a table: what its arms share."""

    model: str
    mesh: str
    world_size: int
    local_batch_size: int
    seq_len: int  # in Table 2 the first that is tried
    arms: tuple[str, ...]


def run(options: argparse.Namespace, overrides: list[str], journal: Journal) -> Iterator[Stored]:
    """Measure and predict one table; yields all that is stored, as it grows.

    Raises:
        ValueError: one line on the user's mistake.
    """
    stored: Stored = {}
    if options.json is not None and options.json.exists():
        stored = json.loads(options.json.read_text(encoding="utf-8"))["paper_tables"]
    command = " ".join(["scripts/benchmark.py", *sys.argv[1:]])
    parts = _chosen("--parts", options.parts, PARTS)
    models = _chosen("--models", options.models, paper_figures.MODELS)
    here = stored.setdefault(options.table, {})
    if "measured" in parts:
        kind = "cuda" if torch.cuda.is_available() else "cpu"
        for model, entry in _measured(options, overrides, journal, models):
            here.setdefault(kind, {})[model] = {**entry, "command": command}
            yield stored
    if "predicted" in parts:
        versions = {"torch": torch.__version__, "command": command}
        rows: dict[str, list[Row]] = {}
        tasks = predicted_tasks(options.table, models, options.arms)
        for task, found in predict(tasks, journal, show):
            rows.setdefault(task.model, []).append(_named(task, found))
            here.setdefault("predicted", {})[task.model] = {**versions, "rows": rows[task.model]}
            yield stored
    yield stored


def _chosen(option: str, given: str, known: tuple[str, ...]) -> list[str]:
    names = given.split(",")
    for name in names:
        if name not in known:
            raise ValueError(f"{option} {name}: choose from {', '.join(known)}")
    return names


def _named(task: Task, found: Row) -> Row:
    terms = {
        "name": task.arm,
        "local_batch_size": task.local_batch_size,
        "world_size": task.world_size,
        "mesh": task.mesh,
    }
    return {**terms, **({} if task.seq_len is None else {"seq_len": task.seq_len}), **found}


def _measured(
    options: argparse.Namespace, overrides: list[str], journal: Journal, models: list[str]
) -> Iterator[tuple[str, Row]]:
    """Measure the grid that fits this machine; yields (model, its entry so far)."""
    table = options.table
    devices = options.devices or torch.cuda.device_count() or 2
    sizes = numbers("--batch_sizes", options.batch_sizes or BATCH_SIZES)
    grid = "paper" if is_the_papers_machine(devices) else "scaled"
    if grid == "paper":
        shapes = paper_shapes(table, models, options.arms, (1, PAPER_DEVICES))
        configs = {model: options.root / CONFIGS[model] for model in models}
    elif torch.cuda.is_available() and options.is_default:
        shapes = scaled_shapes(table, "1B", devices, SCALED_ON_CUDA, sizes, options.arms)
        configs = {"1B": options.root / CONFIGS["1B"]}
    else:
        config = read_config(options.config, overrides, devices)
        model, tokens = config.model.flavor, config.training.seq_len
        shapes = scaled_shapes(table, model, devices, tokens, sizes, options.arms)
        configs = {model: options.config}
    how_often = Repetitions(options.rounds, options.steps, options.warm_up)
    entries: dict[str, Row] = {}
    for shape in shapes:
        entry = entries.setdefault(
            shape.model,
            {
                "machine": options.machine(devices),
                "grid": grid,
                "rounds": options.rounds,
                "rows": [],
            },
        )
        done = list(entry["rows"])
        config_file = str(configs[shape.model])
        rows_of = _longest_rows if table == "2" else _timed_rows
        for rows in rows_of(shape, config_file, overrides, how_often, journal, options):
            entry["rows"] = done + rows
            yield shape.model, entry


def _setting(
    shape: Shape, config_file: str, overrides: list[str], seq_len: int, microbatches: int | None
) -> Any:
    cp, dp_shard = _MESH[shape.mesh]
    mesh = [
        f"--parallelism.context_parallel_degree={cp}",
        f"--parallelism.data_parallel_shard_degree={dp_shard}",
        "--parallelism.data_parallel_replicate_degree=1",
    ]
    return make_setting(
        config_file,
        [*overrides, *mesh, f"--training.seq_len={seq_len}"],
        shape.world_size,
        local_batch_size=shape.local_batch_size,
        microbatches=microbatches or 2,
    )


def _timed_rows(
    shape: Shape,
    config_file: str,
    overrides: list[str],
    how_often: Repetitions,
    journal: Journal,
    options: argparse.Namespace,
) -> Iterator[list[Row]]:
    setting = _setting(shape, config_file, overrides, shape.seq_len, options.microbatches)
    arms = [ARMS[name] for name in shape.arms]
    for found in measure(arms, setting, how_often, journal):
        yield [{**row, "mesh": shape.mesh} for row in results.arm_rows(found)]


def _longest_rows(
    shape: Shape,
    config_file: str,
    overrides: list[str],
    _: Repetitions,
    journal: Journal,
    options: argparse.Namespace,
) -> Iterator[list[Row]]:
    """Table 2: each arm alone, with longer samples until they do not fit."""
    budget = None if torch.cuda.is_available() else BUDGET_MIB * 2**20
    rows = []
    for name in shape.arms:

        def fits(seq_len: int, arm: Arm = ARMS[name]) -> bool:
            setting = _setting(shape, config_file, overrides, seq_len, options.microbatches)
            *_, found = measure([arm], setting, None, journal)
            return within(found, arm.name, budget)

        rows.append(
            {
                "name": name,
                "local_batch_size": shape.local_batch_size,
                "world_size": shape.world_size,
                "mesh": shape.mesh,
                "budget_mib": None if budget is None else BUDGET_MIB,
                "longest_seq_len": longest(fits, shape.seq_len, shortest=16),
            }
        )
        yield list(rows)


def within(found: Measured, name: str, budget: float | None) -> bool:
    """Tell whether an arm ran and, on CPU, what PyTorch allocated stayed within the budget.

    Raises:
        ValueError: it is not built for this setting.
    """
    if name in found.skipped:
        raise ValueError(f"--arms {name}: {found.skipped[name]}")
    if name not in found.weighed:
        return False
    return budget is None or found.weighed[name]["peak_allocated_bytes"] <= budget


def arms_of(table: str, local_batch_size: int, asked: str | None, devices: int) -> tuple[str, ...]:
    """The arms of a line: those of the paper and ours, or those that `--arms` names."""
    if asked is not None:
        names = tuple(arm.name for arm in choose(asked, devices))
    else:
        names = ARMS_OF[table]
    return tuple(n for n in names if local_batch_size == 1 or not n.startswith("microbatch"))


def predicted_tasks(table: str, models: Iterable[str], asked: str | None) -> list[Task]:
    """The paper's own lines, with each arm."""
    return [
        Task(
            shape.model,
            arm,
            shape.world_size,
            shape.mesh,
            shape.local_batch_size,
            *((None, shape.seq_len) if table == "2" else (shape.seq_len,)),
            counted=table in COUNTED,
        )
        for shape in paper_shapes(table, models, asked, (PAPER_DEVICES, 1, MANY))
        for arm in shape.arms
    ]


def paper_shapes(
    table: str, models: Iterable[str], asked: str | None, gpus: tuple[int, ...]
) -> list[Shape]:
    """The paper's lines; of Table 2 for these numbers of GPUs, and in tokens the paper's T.

    >>> [shape.seq_len for shape in paper_shapes("3", ["8B"], None, (4,))]
    [4096, 2048, 1024, 512]
    """

    def shape(model: str, mbs: int, seq_len: int, size: int = PAPER_DEVICES) -> Shape:
        mesh = FSDP if table in ("2", "3") else CP
        return Shape(model, mesh, size, mbs, seq_len, arms_of(table, mbs, asked, size))

    if table != "2":
        return [
            shape(row.model, row.local_batch_size, row.seq_len)
            for row in paper_figures.rows(int(table))
            if row.model in models
        ]
    longest = paper_figures.longest()
    sizes = sorted({mbs for _, _, mbs in longest})
    return [
        shape(model, mbs, int(longest[model, "4", mbs] or 0), size)
        for size in gpus
        for model in models
        for mbs in sizes
    ]


def scaled_shapes(
    table: str, model: str, devices: int, tokens: int, batch_sizes: list[int], asked: str | None
) -> list[Shape]:
    """A grid of the same form for `devices` ranks, each with `tokens` in a microbatch.

    With cp the ranks share samples that are as many times as long; Table 5 has these at MBS 1, and
    twice as long.

    Raises:
        ValueError: an MBS above the number of tokens.
    """
    for mbs in batch_sizes:
        if tokens // mbs < 2:
            raise ValueError(f"--batch_sizes {mbs}: too many for {tokens} tokens in a microbatch")

    def shape(mbs: int, seq_len: int, size: int = devices) -> Shape:
        mesh = FSDP if table in ("2", "3") else CP
        return Shape(model, mesh, size, mbs, seq_len, arms_of(table, mbs, asked, size))

    if table == "2":
        sizes = sorted({1, devices})
        return [shape(mbs, tokens // mbs, size) for size in sizes for mbs in batch_sizes]
    if table == "3":
        return [shape(mbs, tokens // mbs) for mbs in batch_sizes]
    if table == "4":
        return [shape(mbs, devices * tokens // mbs) for mbs in batch_sizes]
    return [shape(1, factor * devices * tokens) for factor in (1, 2)]


def is_the_papers_machine(devices: int) -> bool:
    """Tell whether these are four CUDA devices of 80 GB, or more of them."""
    if not torch.cuda.is_available() or devices < PAPER_DEVICES:
        return False
    return bool(torch.cuda.get_device_properties(0).total_memory >= PAPER_BYTES)
