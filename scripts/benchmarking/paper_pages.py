"""The page that sets the paper's tables beside ours, from their JSON (`paper_tables`).

Three kinds of figures: the paper's, ours that were measured, and ours that were predicted. A column
holds one kind alone, says which in its head, and writes it in a way that the others are not.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from . import paper_figures
from .arms import ARMS, label
from .paper_figures import INFINITE, OOM, Figure
from .paper_tables import ARMS_OF, COUNTED, MANY, PAPER_DEVICES, TABLES
from .tables import markdown

Row = dict[str, Any]
Key = tuple[Any, ...]
PAPER, MEASURED, PREDICTED = "paper", "measured", "predicted"
_WRITTEN: dict[str, Callable[[str], str]] = {
    PAPER: lambda text: text,
    MEASURED: lambda text: f"**{text}**",
    PREDICTED: lambda text: f"*≈ {text}*",
}
_TITLES = {
    "2": "Table 2: the longest samples by FSDP alone",
    "3": "Table 3: ghost norms (ZeRO-DP+) by FSDP alone",
    "4": "Table 4: context parallelism",
    "5": "Table 5: activation checkpointing",
}
_INTRODUCTION = """# LongShield's tables

Three kinds of figures stand on this page, and no column holds two of them:

- `paper`: what the paper prints: four H100 of 80 GB, its authors' code. Plain figures.
- `measured`: ours, on the machine that stands above them. **Bold**. Where the head says "4 GPUs",
  cells are empty until somebody runs the command that stands there.
- `predicted`: ours, without a device: the plan's memory of one rank's tensors, and FLOPs and bytes
  that are counted, on fake tensors. *≈ Italic, with a wave*. Neither time nor what the allocator
  reserves beyond tensors is predicted, so that a ratio of FLOPs is no gap of throughput. Where a
  cell is empty nothing was predicted yet: `--parts predicted` goes on.

A *gap* is non-DP's throughput over the arm's. T is `training.seq_len`, MBS
`training.local_batch_size`. `ghost` is our ZeRO-DP+, `microbatch` our method for one sample at a
time. 80 GB are 80 GiB, 5% of which stay free where we predict that a sample fits. For infinitely
many GPUs we predict 256."""

_SAID_OF_COUNTS = """FLOPs and bytes are those of a microbatch. A private step can move fewer bytes
than plain TorchTitan's, whose loss passes over whole fp32 logits several times."""


def page(stored: dict[str, Any]) -> str:
    """The whole page, of all tables that are stored."""
    parts = [_INTRODUCTION]
    for table in TABLES:
        if table in stored:
            parts += _section(table, stored[table])
    return "\n\n".join(parts)


def _section(table: str, entries: dict[str, Any]) -> list[str]:
    command = (
        f"python scripts/benchmark.py --table {table} --devices 4 --parts measured "
        "--json docs/benchmarks/paper_tables.json"
    )
    parts = [
        f"## {_TITLES[table]}",
        f"To fill what is measured on four GPUs of 80 GB:\n\n    {command}",
    ]
    predicted = entries.get("predicted", {})
    if predicted:
        commands = sorted({one["command"].partition(" --json")[0] for one in predicted.values()})
        versions = sorted({one["torch"] for one in predicted.values()})
        parts.append(
            f"Predicted with torch {', '.join(versions)} by "
            f"{', '.join(f'`{command}`' for command in commands)}."
        )
    measured = {m: one for m, one in entries.get("cuda", {}).items() if one["grid"] == "paper"}
    for model, entry in measured.items():
        parts.append(f"{model} was measured on {entry['machine']} by `{entry['command']}`.")
    found = _Found(_by_line(predicted), _by_line(measured))
    parts += _longest(found) if table == "2" else _rows(int(table), found)
    for kind in ("cpu", "cuda"):
        for model, entry in entries.get(kind, {}).items():
            if entry["grid"] == "scaled":
                parts += _on_another_machine(table, model, entry)
    return parts


class _Found:
    """Looks up what was predicted, and measured on the paper's machine, for the paper's lines."""

    def __init__(self, predicted: dict[Key, Row], measured: dict[Key, Row]) -> None:
        self._predicted, self._measured = predicted, measured

    def predicted(self, name: str, *line: Any) -> Row | None:
        return self._predicted.get((*line, name))

    def measured(self, name: str, *line: Any) -> Row | None:
        return self._measured.get((*line, name))

    def arms(self, usual: Iterable[str]) -> list[str]:
        """The usual ones, and all that were predicted or measured."""
        present = {line[-1] for line in (*self._predicted, *self._measured)} | set(usual)
        return [name for name in ARMS if name in present]


def _by_line(entries: dict[str, Any]) -> dict[Key, Row]:
    """By (model, world size, MBS, T or None, arm)."""
    return {
        (
            model,
            row["world_size"],
            row["local_batch_size"],
            row.get("seq_len"),
            row["name"],
        ): row
        for model, entry in entries.items()
        for row in entry["rows"]
    }


def _longest(found: _Found) -> list[str]:
    """Table 2, a table for each number of GPUs."""
    paper, parts = paper_figures.longest(), []
    arms = found.arms(ARMS_OF["2"])

    def longest_of(look_up: Callable[..., Row | None], arm: str, size: int) -> Any:
        return lambda key: of_longest(look_up(arm, key[0], size, key[1], None))

    for gpus, size in (("1", 1), ("4", PAPER_DEVICES), (INFINITE, MANY)):

        def of_the_paper(key: Key, gpus: str = gpus) -> str | None:
            return figure(paper[key[0], gpus, key[1]], ",.0f")

        devices = f"{gpus} GPU{'s' if size > 1 else ''}"
        columns = [Column(PAPER, "ZeRO-DP+", of_the_paper)]
        columns += [
            Column(PREDICTED, label(arm), longest_of(found.predicted, arm, size)) for arm in arms
        ]
        if gpus != INFINITE:
            columns += [
                Column(MEASURED, f"{label(arm)}, {devices}", longest_of(found.measured, arm, size))
                for arm in arms
            ]
        keys = [(model, mbs) for model, number, mbs in paper if number == gpus]
        keys = sorted(keys, key=lambda key: (paper_figures.MODELS.index(key[0]), key[1]))
        parts.append(f"### Longest T, {devices}")
        parts.append(table_of(["model", "MBS"], keys, columns))
    return parts


def _rows(table: int, found: _Found) -> list[str]:
    """Tables 3 to 5: throughput, what privacy costs, memory."""
    paper = {
        (row.model, row.local_batch_size, row.seq_len): row for row in paper_figures.rows(table)
    }
    keys: list[Key] = list(paper)
    arms = found.arms(ARMS_OF[str(table)])
    private = [arm for arm in arms if arm != ARMS[arm].baseline]

    def of_paper(part: str, arm: str, form: Callable[[Figure], str | None]) -> Any:
        return lambda key: form(getattr(paper[key], part).get(arm))

    def measured(arm: str, name: str, form: str) -> Any:
        def of(key: Key) -> str | None:
            row = found.measured(arm, key[0], PAPER_DEVICES, *key[1:])
            return None if row is None else of_row(row, name, form)

        return of

    def ratio(arm: str, name: str) -> Any:
        def of(key: Key) -> str | None:
            line = key[0], PAPER_DEVICES, *key[1:]
            one, base = (found.predicted(n, *line) for n in (arm, ARMS[arm].baseline))
            return None if one is None or base is None else f"{one[name] / base[name]:.2f}"

        return of

    def peak(arm: str) -> Any:
        def of(key: Key) -> str | None:
            row = found.predicted(arm, key[0], PAPER_DEVICES, *key[1:])
            if row is None:
                return None
            return f"{row['peak_memory_gib']:.1f}" + ("" if row["fits"] else f" {OOM}")

        return of

    speeds = [
        Column(PAPER, _papers_name(arm), of_paper("throughput", arm, thousands))
        for arm in paper_figures.THROUGHPUT[table]
    ]
    speeds += [
        Column(
            MEASURED, f"{label(arm)}, 4 GPUs", measured(arm, "tokens_per_second_per_device", ",.0f")
        )
        for arm in arms
    ]
    costs = [
        Column(
            PAPER,
            f"{_papers_name(arm)} gap",
            of_paper("speed_gap", arm, lambda one: figure(one, ".2f")),
        )
        for arm in paper_figures.GAPS[table]
    ]
    for what in ("flops", "bytes") if str(table) in COUNTED else ():
        said = "FLOPs" if what == "flops" else what
        costs += [
            Column(PREDICTED, f"{said}, {label(a)} / non-DP", ratio(a, what)) for a in private
        ]
    costs += [
        Column(MEASURED, f"{label(arm)} gap, 4 GPUs", measured(arm, "gap_to_non_dp", ".2f"))
        for arm in private
    ]
    memory = [
        Column(
            PAPER,
            f"{_papers_name(arm)}, GB",
            of_paper("memory", arm, lambda one: figure(one, ".1f")),
        )
        for arm in paper_figures.MEMORY[table]
    ]
    memory += [Column(PREDICTED, f"{label(arm)}, GiB", peak(arm)) for arm in arms]
    memory += [
        Column(MEASURED, f"{label(arm)}, GiB, 4 GPUs", measured(arm, "peak_reserved_gib", ".1f"))
        for arm in arms
    ]
    names = ["model", "MBS", "T"]
    return [
        "### Throughput, tokens/s per GPU",
        table_of(names, keys, speeds),
        "### What privacy costs",
        _SAID_OF_COUNTS if str(table) in COUNTED else "With AC both sides have it.",
        table_of(names, keys, costs),
        "### Peak memory of a GPU",
        "The paper's and the measured figures are what the allocator reserved; predicted are "
        "tensors alone.",
        table_of(names, keys, memory),
    ]


def _papers_name(arm: str) -> str:
    return {"ghost": "ZeRO-DP+", "V2 + AC": "V3"}.get(arm, arm)


def _on_another_machine(table: str, model: str, entry: Row) -> list[str]:
    """Write what was measured on a machine other than the paper's, in shapes of its own."""
    rows = entry["rows"]
    parts = [
        f"### Measured on another machine, scaled: Table {table}, model {model}",
        f"{entry['machine']}. `{entry['command']}`",
    ]
    if table == "2":
        parts.append(_scaled_longest(rows))
        return parts
    by_line = {(r["local_batch_size"], r["seq_len"], r["name"]): r for r in rows}
    keys: list[Key] = sorted({line[:2] for line in by_line})
    arms = [name for name in ARMS if any(line[2] == name for line in by_line)]
    private = [arm for arm in arms if arm != ARMS[arm].baseline]

    def column(head: str, arm: str, name: str, form: str, factor: float = 1.0) -> Column:
        def of(key: Key) -> str | None:
            row = by_line.get((*key, arm))
            return None if row is None else of_row(row, name, form, factor)

        return Column(MEASURED, f"{label(arm)}{head}", of)

    speed = [column("", arm, "tokens_per_second_per_device", ",.0f") for arm in arms]
    speed += [column(" gap", arm, "gap_to_non_dp", ".2f") for arm in private]
    memory = [column(", MiB", arm, "peak_allocated_gib", ",.1f", 1024) for arm in arms]
    sizes = sorted({row["world_size"] for row in rows})
    mesh = " and ".join(sorted({row["mesh"] for row in rows}))
    return [
        *parts,
        f"{entry['rounds']} rounds, medians; {mesh} over {', '.join(map(str, sizes))} processes. "
        "Tokens/s per process; a gap is non-DP's over the arm's, both with or both without AC:",
        table_of(["MBS", "T"], keys, speed),
        "Allocated by PyTorch at the peak of a step, a process:",
        table_of(["MBS", "T"], keys, memory),
    ]


def _scaled_longest(rows: list[Row]) -> str:
    by_line = {(r["world_size"], r["local_batch_size"], r["name"]): r for r in rows}
    keys: list[Key] = sorted({line[:2] for line in by_line})
    budget = rows[0]["budget_mib"]
    within = "memory" if budget is None else f"{budget:.0f} MiB that PyTorch may allocate"

    def column(arm: str) -> Column:
        def of(key: Key) -> str | None:
            return of_longest(by_line.get((*key, arm)))

        return Column(MEASURED, label(arm), of)

    arms = [name for name in ARMS if any(line[2] == name for line in by_line)]
    return (
        f"The longest T, a power of two times the first one tried, within {within} a process:\n\n"
        + table_of(["processes", "MBS"], keys, [column(arm) for arm in arms])
    )


@dataclass(frozen=True)
class Column:
    """Figures of one kind, by the line's key; None where there is none."""

    kind: str
    head: str
    figure: Callable[[Key], str | None]

    def cells(self, keys: Iterable[Key]) -> list[str]:
        """Write each figure as its kind is written."""
        found = [self.figure(key) for key in keys]
        return ["" if one is None else _WRITTEN[self.kind](one) for one in found]


def table_of(names: list[str], keys: list[Key], columns: list[Column]) -> str:
    """A table in Markdown: the line's key, then columns that say of which kind they are."""
    head = [*names, *(f"{column.kind}: {column.head}" for column in columns)]
    cells = [column.cells(keys) for column in columns]
    lines = [
        [*(f"{part:,}" if isinstance(part, int) else str(part) for part in key), *line]
        for key, *line in zip(keys, *cells, strict=True)
    ]
    return markdown(head, lines)


def of_row(row: Row, name: str, form: str, factor: float = 1.0) -> str | None:
    """A measured figure, or why there is none."""
    if row.get(name) is None:
        return None if row["status"] == "ok" else str(row["status"])
    return format(row[name] * factor, form)


def of_longest(row: Row | None) -> str | None:
    """Table 2's figure: the longest sample in tokens, or that not even the shortest fits."""
    if row is None:
        return None
    return OOM if row["longest_seq_len"] is None else f"{row['longest_seq_len']:,}"


def figure(one: Figure, form: str) -> str | None:
    """A figure of the paper; None where it has none."""
    return format(one, form) if isinstance(one, float) else one


def thousands(one: Figure) -> str | None:
    """Throughput as the paper writes it.

    >>> thousands(5950.0), thousands(28800.0), thousands("OOM")
    ('5.95k', '28.8k', 'OOM')
    """
    return f"{one / 1000:#.3g}k" if isinstance(one, float) else one
