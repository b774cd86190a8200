"""`--table 2|3|4|5`: LongShield's tables, beside what is predicted and what was measured.

For the paper's own lines the plan's memory is predicted on any machine: a rank's real step runs on
fake tensors, in a process that sees no device. `--parts measured` times and weighs the same lines
(of Tables 3 to 5) on the paper's machine, four CUDA devices of 80 GB.

What is found goes into the file that `--json` names, to what is there of other tables and models:
an entry is what one command measured or predicted.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import Any

import torch

from . import results
from .arms import ARMS, choose, label
from .counts import Case, alone
from .measure import Journal, Repetitions, make_setting, measure, show
from .results import markdown

PAPER, MEASURED, PREDICTED = "paper", "measured", "predicted"
TABLES, PARTS, MODELS = ("2", "3", "4", "5"), (MEASURED, PREDICTED), ("1B", "3B", "8B")
CONFIGS = {"1B": "llama3_1b_64k", "3B": "llama3_3b_32k", "8B": "llama3_8b_16k"}
PAPER_DEVICES, MEMORY_GIB = 4, 80.0
MANY = 256  # GPUs, in the place of infinitely many: the model's share is next to nothing
SHORTEST, LONGEST, GIB = 64, 2**21, 2**30  # tokens of a sample, that are tried
FSDP, CP = "FSDP", "cp"  # which ranks share a sample: none, all
ARMS_OF = {  # in the paper's order; `microbatch` is ours, for an MBS of 1
    "2": ("non-DP", "ghost", "V2", "microbatch"),
    "3": ("non-DP", "ghost"),
    "4": ("non-DP", "V1", "V2", "microbatch"),
    "5": ("non-DP", "non-DP + AC", "V2", "V2 + AC", "microbatch + AC"),
}
Row = dict[str, Any]
Stored = dict[str, Any]  # by table: by "measured", "predicted": by model: an entry

# The paper's figures: https://openreview.net/forum?id=1Q2NVxcSuS, sections 2 and 4, by its authors'
# code on four H100 of 80 GB. Its ZeRO-DP+ is our arm `ghost`, its V3 `V2 + AC`. A line has GPUs (or
# the model), MBS (and T), then the columns that its head names.
FIGURES = {
    "2": """GPUs MBS ghost:T ghost:T ghost:T (of 1B, 3B, 8B)
1 1 16384 4096 OOM
1 2 8192 2048 OOM
1 4 4096 1024 OOM
1 8 2048 512 OOM
4 1 16384 8192 4096
4 2 8192 4096 2048
4 4 4096 2048 1024
4 8 2048 1024 512
256 1 16384 8192 4096
256 2 8192 4096 2048
256 4 4096 2048 1024
256 8 2048 1024 512""",
    "3": """model MBS T non-DP:tokens/s ghost:tokens/s ghost:gap
1B 1 16k 28.8k 25.0k 1.15
1B 2 8k 35.7k 24.2k 1.48
1B 4 4k 40.8k 29.1k 1.40
1B 8 2k 44.1k 22.6k 1.95
3B 1 8k 14.2k 11.3k 1.26
3B 2 4k 15.7k 11.8k 1.33
3B 4 2k 16.8k 7.22k 2.33
3B 8 1k 17.9k 9.70k 1.84
8B 1 4k 7.18k 4.30k 1.67
8B 2 2k 7.64k 2.98k 2.56
8B 4 1k 7.79k 3.90k 2.0
8B 8 512 7.91k 4.47k 1.77""",
    "4": """model MBS T non-DP:tokens/s ghost:tokens/s V1:tokens/s V2:tokens/s V1:gap V2:gap \
non-DP:GB V1:GB V2:GB V1:GB/non-DP V2:GB/non-DP
1B 1 64k 11.8k OOM 11.4k 11.6k 1.04 1.02 69.0 70.6 66.2 1.02 0.96
1B 2 32k 16.4k OOM 15.1k 15.8k 1.09 1.04 68.4 70.5 66.7 1.03 0.98
1B 4 16k 20.9k OOM 18.1k 19.4k 1.15 1.08 68.0 71.2 66.4 1.05 0.98
3B 1 32k 6.47k OOM 5.95k 6.08k 1.09 1.06 67.0 75.1 66.2 1.12 0.99
3B 2 16k 8.31k OOM 7.02k 7.42k 1.18 1.12 67.0 75.1 66.0 1.12 0.99
3B 4 8k 9.34k OOM 5.87k 7.91k 1.59 1.18 66.9 76.9 66.0 1.15 0.99
8B 1 16k 4.44k OOM OOM 4.08k N/A 1.09 73.2 OOM 72.2 N/A 0.99
8B 2 8k 4.82k OOM OOM 4.09k N/A 1.18 73.3 OOM 76.4 N/A 1.04
8B 4 4k 4.99k OOM OOM 2.20k N/A 2.27 73.3 OOM 76.6 N/A 1.05""",
    "5": """model MBS T non-DP:tokens/s non-DP+AC:tokens/s V2:tokens/s V2+AC:tokens/s \
non-DP:GB non-DP+AC:GB V2:GB V2+AC:GB
1B 1 64k 11.8k 9.29k 11.6k 9.16k 69.0 42.7 66.2 48.3
1B 1 128k OOM 5.92k OOM 5.79k OOM 61.9 OOM 75.3
1B 1 256k OOM OOM OOM OOM OOM OOM OOM OOM
3B 1 32k 6.47k 5.26k 6.08k 4.99k 67.0 35.9 66.2 38.8
3B 1 64k OOM 3.84k OOM 3.71k OOM 58.1 OOM 62.7
3B 1 128k OOM 2.45k OOM 2.31k OOM 76.7 OOM 76.9
8B 1 16k 4.44k 3.49k 4.08k 3.32k 73.2 50.4 72.2 52.5
8B 1 32k OOM 3.15k OOM 3.01k OOM 57.4 OOM 62.3
8B 1 64k OOM 2.32k OOM 2.26k OOM 73.4 OOM 75.5""",
}


@dataclass(frozen=True)
class Task:
    """One arm, model and shape; without a length, the longest is sought, from `first` on."""

    model: str
    arm: str
    world_size: int
    mesh: str  # FSDP or CP
    local_batch_size: int
    seq_len: int | None = None
    first: int = 4096

    def mesh_options(self) -> tuple[str, ...]:
        """The degrees, of which the rest is dp_shard."""
        cp = self.world_size if self.mesh == CP else 1
        return (
            f"--parallelism.context_parallel_degree={cp}",
            f"--parallelism.data_parallel_shard_degree={self.world_size // cp}",
            "--parallelism.data_parallel_replicate_degree=1",
        )

    def case(self) -> Case:
        """Put it as the counts know it."""
        arm, mbs, size = ARMS[self.arm], self.local_batch_size, self.world_size
        batch = f"--training.global_batch_size={4 * mbs * size}"
        key = "--privacy.gradient_method="
        named = [o.removeprefix(key) for o in arm.overrides if o.startswith(key)]
        overrides = (*self.mesh_options(), batch, *arm.overrides)
        return Case(self.model, (*named, "plain")[0], mbs, size, overrides=overrides)


def paper_figures(table: str) -> dict[tuple[Any, ...], dict[str, str]]:
    """Return the paper's figures: (model, GPUs, MBS, T or None, arm) -> {"tokens/s": "28.8k", …}.

    >>> paper_figures("4")["8B", 4, 1, 16384, "V2"]["gap"]
    '1.09'
    """
    head, *lines = FIGURES[table].splitlines()
    columns = [tuple(name.split(":")) for name in head.split() if ":" in name]
    found: dict[tuple[Any, ...], dict[str, str]] = {}
    for line in lines:
        first, mbs, *figures = line.split()
        if table == "2":
            for model, figure in zip(MODELS, figures, strict=True):
                found[model, int(first), int(mbs), None, "ghost"] = {"T": figure}
            continue
        seq_len, *figures = figures
        tokens = int(seq_len.removesuffix("k")) * (1024 if seq_len.endswith("k") else 1)
        for (arm, what), figure in zip(columns, figures, strict=True):
            key = first, PAPER_DEVICES, int(mbs), tokens, arm.replace("+", " + ")
            found.setdefault(key, {})[what] = figure
    return found


# The lines.


def paper_tasks(
    table: str, models: Iterable[str], asked: str | None, gpus: tuple[int, ...]
) -> list[Task]:
    """List the paper's lines with each arm; of Table 2 for these numbers of GPUs.

    >>> [task.seq_len for task in paper_tasks("3", ["8B"], "non-DP", (4,))]
    [4096, 2048, 1024, 512]
    """
    figures, tasks = paper_figures(table), []
    mesh = FSDP if table in ("2", "3") else CP
    for model, size, mbs, seq_len in dict.fromkeys(key[:4] for key in figures):
        if model in models and size in gpus:
            on_four = model, PAPER_DEVICES, mbs, None, "ghost"
            first = int(figures[on_four]["T"]) if table == "2" else 4096
            terms = size, mesh, mbs, seq_len, first
            tasks += [Task(model, arm, *terms) for arm in arms_of(table, mbs, asked, size)]
    return sorted(tasks, key=lambda task: gpus.index(task.world_size))


def arms_of(table: str, local_batch_size: int, asked: str | None, devices: int) -> tuple[str, ...]:
    """Return the arms of a line: the paper's and ours, or those that `--arms` names."""
    names = ARMS_OF[table] if asked is None else [arm.name for arm in choose(asked, devices)]
    return tuple(n for n in names if local_batch_size == 1 or not n.startswith("microbatch"))


# Measuring and predicting.


def run(options: argparse.Namespace, overrides: list[str], journal: Journal) -> Iterator[Stored]:
    """Measure and predict one table; yields all that is stored, as it grows.

    Raises:
        ValueError: one line on the user's mistake.
    """
    stored: Stored = {}
    if options.json is not None and options.json.exists():
        stored = json.loads(options.json.read_text(encoding="utf-8"))["paper_tables"]
    parts, models = options.parts.split(","), options.models.split(",")
    for option, given, known in (("--parts", parts, PARTS), ("--models", models, MODELS)):
        if wrong := [name for name in given if name not in known]:
            raise ValueError(f"{option} {wrong[0]}: choose from {', '.join(known)}")
    terms = {"command": " ".join(["scripts/benchmark.py", *sys.argv[1:]])}
    here = stored.setdefault(options.table, {})
    if "measured" in parts:
        for model, entry in _measured(options, overrides, journal, models):
            here.setdefault(MEASURED, {})[model] = entry | terms
            yield stored
    if "predicted" in parts:
        rows: dict[str, list[Row]] = {}
        gpus = (PAPER_DEVICES, 1, MANY)
        for task, found in predict(paper_tasks(options.table, models, options.arms, gpus), journal):
            rows.setdefault(task.model, []).append(_line(task) | found)
            entry = {"torch": torch.__version__, "rows": rows[task.model]} | terms
            here.setdefault("predicted", {})[task.model] = entry
            yield stored
    yield stored


def _line(task: Task) -> Row:
    keys = ("local_batch_size", "world_size", "mesh")
    line = {"name": task.arm} | {key: getattr(task, key) for key in keys}
    return line if task.seq_len is None else line | {"seq_len": task.seq_len}


def _measured(
    options: argparse.Namespace, overrides: list[str], journal: Journal, models: list[str]
) -> Iterator[tuple[str, Row]]:
    """Measure the paper's lines; yields (model, its entry so far)."""
    how_often = Repetitions(options.rounds, options.steps, options.warm_up)
    machine = {"machine": options.machine(PAPER_DEVICES), "rounds": options.rounds}
    done: dict[str, list[Row]] = {}
    tasks = paper_tasks(options.table, models, options.arms, (PAPER_DEVICES,))
    lines = groupby(tasks, key=lambda task: (task.model, task.local_batch_size, task.seq_len))
    for (model, mbs, seq_len), line in lines:
        first, *others = line
        setting = make_setting(
            str(options.root / "train_configs" / f"{CONFIGS[model]}.toml"),
            [*overrides, *first.mesh_options(), f"--training.seq_len={seq_len}"],
            PAPER_DEVICES,
            local_batch_size=mbs,
            microbatches=options.microbatches or 2,
        )
        rows: list[Row] = []
        for found in measure([ARMS[t.arm] for t in (first, *others)], setting, how_often, journal):
            rows = results.arm_rows(found)
            yield model, machine | {"rows": done.get(model, []) + rows}
        done[model] = done.get(model, []) + rows


def longest(
    fits: Callable[[int], bool], first: int, shortest: int = SHORTEST, most: int = LONGEST
) -> int | None:
    """Find the largest number of tokens that fits, in steps of 2 from the first that is tried; a
    longer sample takes no less.

    >>> [longest(lambda seq_len: seq_len <= 5000, first) for first in (256, 65536)]
    [4096, 4096]
    """
    seq_len = first
    if fits(seq_len):
        while 2 * seq_len <= most and fits(2 * seq_len):
            seq_len *= 2
        return seq_len
    while seq_len // 2 >= shortest:
        seq_len //= 2
        if fits(seq_len):
            return seq_len
        if seq_len == first // 2 and not fits(shortest):
            return None  # nothing does
    return None


def predict(tasks: list[Task], journal: Journal) -> Iterator[tuple[Task, Row]]:
    """Predict each task in a process of its own; yields (task, found) as they come, what the
    journal holds without predicting it again.

    Raises:
        RuntimeError: one could not be predicted.
    """
    for task in tasks:
        key = json.dumps(["predicted", asdict(task), torch.__version__])
        if not journal.of(key):
            show(f"predicting {task}")
            journal.add(key, alone("paper", asdict(task)))
        yield task, journal.of(key)[-1]


def predict_here(task: Task) -> Row:
    """Predict in this process, which has no process group.

    Returns:
        of a row: its peak in GiB (tensors alone), and whether it fits; without a length: the
        longest, and the peaks at it and at twice as many tokens
    """
    from torchtitan_dp.plan.memory import limit_bytes

    limit = limit_bytes(MEMORY_GIB)
    if task.seq_len is not None:
        peak = peak_bytes(task, task.seq_len)
        return {"peak_memory_gib": peak / GIB, "fits": peak <= limit}
    known: dict[int, float] = {}

    def at(seq_len: int) -> float:
        if seq_len not in known:
            known[seq_len] = peak_bytes(task, seq_len)
        return known[seq_len]

    best = longest(lambda seq_len: at(seq_len) <= limit, task.first)
    beyond = at(SHORTEST if best is None else 2 * best) / GIB
    return {
        "longest_seq_len": best,
        "peak_memory_gib": None if best is None else at(best) / GIB,
        "peak_memory_gib_beyond": beyond,
    }


def peak_bytes(task: Task, seq_len: int) -> float:
    """Predict the most bytes that tensors take at once on rank 0, in a microbatch or an update."""
    import torchtitan_dp.distributed  # noqa: F401  lets TorchTitan import without a GPU

    # isort: split
    from torchtitan_dp.config.load import load_config
    from torchtitan_dp.models.hugging_face import shape
    from torchtitan_dp.plan.fake_step import Step
    from torchtitan_dp.plan.prediction import step_peak

    from .plain_step import PlainStep

    config = load_config(task.case().arguments(seq_len), task.world_size)
    make: Any = PlainStep if task.case().method == "plain" else Step
    return step_peak(config, shape(config), task.world_size, make)


# The page.

COLUMNS = {  # of Tables 3 to 5; a row's key, and how it is written
    MEASURED: {
        "tokens/s": ("tokens_per_second_per_device", ",.0f"),
        "gap": ("gap_to_non_dp", ".2f"),
        "GiB reserved": ("peak_reserved_gib", ".1f"),
        "GiB allocated": ("peak_allocated_gib", ".3f"),
    },
    PREDICTED: {"GiB": ("peak_memory_gib", ".1f")},
}
_INTRODUCTION = """# LongShield's tables

`paper`: what the paper prints: four H100 of 80 GB, its authors' code. `measured`: ours, on the
machine that stands above. `predicted`: ours, without a device: the plan's memory of one rank's
tensors, not what the allocator reserves beyond them. A *gap* is non-DP's throughput over the
arm's. 80 GB are 80 GiB, 5% of which stay free where a sample fits. 256 GPUs stand for infinitely
many."""


def page(stored: Stored) -> str:
    """The whole page, of all tables that are stored."""
    parts = [_INTRODUCTION]
    for table in (table for table in TABLES if table in stored):
        kinds = stored[table]
        sources = {PAPER: paper_figures(table)}
        sources |= {kind: _figures(table, kinds.get(kind, {})) for kind in (PREDICTED, MEASURED)}
        machines = {entry["machine"] for entry in kinds.get(MEASURED, {}).values()}
        parts += [f"## Table {table}", *machines, _table(sources)]
    return "\n\n".join(parts)


def _figures(table: str, entries: dict[str, Row]) -> dict[tuple[Any, ...], dict[str, str]]:
    """Return figures as `paper_figures` does, of rows that were measured or predicted."""
    found = {}
    for model, entry in entries.items():
        keys = ("world_size", "local_batch_size", "seq_len", "name")
        by_line = {(model, *map(row.get, keys)): row for row in entry["rows"]}
        kind = MEASURED if "machine" in entry else PREDICTED
        for (*line, arm), row in by_line.items():
            if table == "2":
                fits = row["longest_seq_len"]
                found[(*line, arm)] = {"T": "OOM" if fits is None else f"{fits}"}
                continue
            figures = {
                head: format(row[key], form)
                for head, (key, form) in COLUMNS[kind].items()
                if row.get(key) is not None
            }
            if row.get("status", "ok") != "ok":
                figures["tokens/s"] = row["status"]
            if row.get("fits") is False:
                figures["GiB"] += " OOM"
            found[(*line, arm)] = figures
    return found


def _table(sources: dict[str, dict[tuple[Any, ...], dict[str, str]]]) -> str:
    """Write a line for each arm of each shape, and a column for each kind of figure."""
    keys = {key for found in sources.values() for key in found}
    arms = [*ARMS]
    order = sorted(keys, key=lambda k: (k[1], k[0], k[2], k[3] or 0, arms.index(k[4])))
    heads = [
        (kind, head)
        for kind, found in sources.items()
        for head in dict.fromkeys(head for figures in found.values() for head in figures)
    ]
    lines = [
        [*(str(part or "") for part in key[:4]), label(key[4])]
        + [sources[kind].get(key, {}).get(head, "") for kind, head in heads]
        for key in order
    ]
    names = ["model", "GPUs", "MBS", "T", "arm"]
    return markdown([*names, *(f"{kind}: {head}" for kind, head in heads)], lines)


if __name__ == "__main__":
    print(json.dumps(predict_here(Task(**json.load(sys.stdin)))))
