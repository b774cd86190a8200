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
from collections.abc import Iterator
from typing import Any

import torch

from . import paper_figures, results
from .arms import ARMS, Arm
from .journal import Journal
from .measure import Measured, Repetitions, make_setting, measure, read_config
from .paper_predictions import CP, FSDP, Task, longest, predict
from .paper_shapes import (
    PAPER_DEVICES,
    Shape,
    is_the_papers_machine,
    paper_shapes,
    predicted_tasks,
    scaled_shapes,
)
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
_MESH = {FSDP: (1, -1), CP: (-1, 1)}  # degrees of cp and of dp_shard
Row = dict[str, Any]
Stored = dict[str, Any]  # by table: by "cpu", "cuda", "predicted": by model: an entry


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
