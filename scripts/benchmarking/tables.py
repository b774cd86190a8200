"""Markdown tables in the form of LongShield's Tables 4 and 5, from the JSON's rows."""

from collections.abc import Callable
from itertools import combinations, pairwise
from typing import Any

from .arms import ARMS, CHECKPOINTED, label

Row = dict[str, Any]
Cell = Callable[[Row], str]
MIB = 2**20


def arms_tables(rows: list[Row]) -> str:
    """Throughput and memory of the arms without checkpointing (Table 4), then with it (Table 5)."""
    parts = []
    for devices in sorted({row["world_size"] for row in rows}, reverse=True):
        here = [row for row in rows if row["world_size"] == devices]
        plain = [row for row in here if CHECKPOINTED not in row["name"]]
        on = f"{devices} process{'es' if devices > 1 else ''}"
        if plain:
            parts += [
                _titled(f"Throughput, tokens/s per device, {on}", plain, _throughput, _speed_gap),
                _titled(f"Peak memory, GiB a process, {on}", plain, _peak, _memory_gap),
                _titled(f"Of which allocated by PyTorch, GiB, {on}", plain, _allocated),
            ]
        if len(here) > len(plain):
            kept = {row["name"].removesuffix(CHECKPOINTED) for row in here if row not in plain}
            both = [row for row in here if row["name"].removesuffix(CHECKPOINTED) in kept]
            title = f"Activation checkpointing (AC): throughput, tokens/s per device, {on}"
            parts += [
                _titled(title, both, _throughput, _speed_gap, gaps_of_checkpointed=True),
                _titled(f"AC: peak memory, GiB a process, {on}", both, _peak),
                _titled(f"AC: allocated by PyTorch, GiB, {on}", both, _allocated),
            ]
    return "\n\n".join(parts)


def _titled(title: str, rows: list[Row], cell: Cell, gap: Cell | None = None, **which: bool) -> str:
    return f"### {title}\n\n{_by_shape(rows, cell, gap, **which)}"


def _by_shape(
    rows: list[Row], cell: Cell, gap: Cell | None, *, gaps_of_checkpointed: bool = False
) -> str:
    """One line a (MBS, T), one column an arm, then the private arms' gaps to non-DP."""
    present = {row["name"] for row in rows}
    names = [name for name in ARMS if name in present]
    gaps = [n for n in names if gap and n != ARMS[n].baseline]
    if gaps_of_checkpointed:
        gaps = [n for n in gaps if ARMS[n].checkpointed]
    head = ["MBS", "T", *map(label, names), *(f"{label(name)} gap" for name in gaps)]
    lines = []
    for mbs, seq_len in sorted({(row["local_batch_size"], row["seq_len"]) for row in rows}):
        by_name = {
            row["name"]: row
            for row in rows
            if (row["local_batch_size"], row["seq_len"]) == (mbs, seq_len)
        }
        cells = [_cell(by_name.get(name), cell) for name in names]
        cells += [_cell(by_name.get(name), gap) for name in gaps if gap]
        lines.append([str(mbs), f"{seq_len:,}", *cells])
    return markdown(head, lines)


def _cell(row: Row | None, cell: Cell) -> str:
    if row is None:
        return "–"
    return cell(row) if row["status"] == "ok" else row["status"]


def _throughput(row: Row) -> str:
    return _number(row["tokens_per_second_per_device"], ",.0f")


def _speed_gap(row: Row) -> str:
    return _number(row["gap_to_non_dp"], ".2f")


def _peak(row: Row) -> str:
    return _number(row["peak_memory_gib"], ".3f")


def _allocated(row: Row) -> str:
    return _number(row["peak_allocated_gib"], ".3f")


def _memory_gap(row: Row) -> str:
    return _number(row["memory_vs_non_dp"], ".2f")


def lengths_table(rows: list[Row]) -> str:
    """What privacy adds as the sequence grows; by token it must not grow."""
    head = ["arm", "MBS", "T", "non-DP s/step", "s/step", "extra s/step", "extra µs/token"]
    lines = [
        [
            label(row["name"]),
            str(row["local_batch_size"]),
            f"{row['seq_len']:,}",
            f"{row['non_dp_seconds_per_step']:.3f}",
            f"{row['seconds_per_step']:.3f}",
            f"{row['extra_seconds_per_step']:.3f}",
            f"{row['extra_microseconds_per_token']:.2f}",
        ]
        for row in sorted(rows, key=lambda row: (row["name"], row["seq_len"]))
    ]
    return "### Cost as the sequence grows\n\n" + markdown(head, lines)


def ranks_table(rows: list[Row]) -> str:
    """What a rank holds and sends as context-parallel ranks grow."""
    kinds = ["all_gather", "reduce_scatter", "all_reduce", "all_to_all"]
    words = [kind.replace("_", "-") for kind in kinds]
    head = ["arm", "MBS", "cp", "per-sample gradients MiB", "sent MiB/step", *words]
    lines = []
    for row in sorted(rows, key=lambda row: (row["name"], row["context_parallel_degree"])):
        sent, by_kind = row["bytes_sent_per_step"], row["bytes_sent_by_kind"] or {}
        failed = row["status"] != "ok"
        lines.append(
            [
                label(row["name"]),
                str(row["local_batch_size"]),
                str(row["context_parallel_degree"]),
                row["status"] if failed else _mib(row["per_sample_gradient_bytes"]),
                *([row["status"]] * 5 if failed else [_mib(sent)]),
                *([] if failed else [_mib(by_kind.get(kind, 0)) for kind in kinds]),
            ]
        )
    return "### A rank's share as context-parallel ranks grow\n\n" + markdown(head, lines)


def _mib(size: float | None) -> str:
    return "–" if size is None else f"{size / MIB:.2f}"


def _number(value: float | None, form: str) -> str:
    return "N/A" if value is None else format(value, form)


def markdown(head: list[str], lines: list[list[str]]) -> str:
    """A table in Markdown."""
    rule = ["---"] * len(head)
    return "\n".join("| " + " | ".join(cells) + " |" for cells in [head, rule, *lines])


def crossover_section(rows: list[Row]) -> str:
    """The tables of ever longer samples, and where arms change places."""
    lines = [f"- {line}" for line in crossings(rows)] or ["- nowhere"]
    title = "### Where private arms change places, beyond the rounds' scatter"
    return "\n\n".join([arms_tables(rows), title, "\n".join(lines)])


def crossings(rows: list[Row]) -> list[str]:
    """Say between which lengths one private arm overtakes another, in time and in memory.

    Told apart are times whose rounds, least to most, do not overlap, and memory by 2%.
    """
    rows = [row for row in rows if row["name"] != ARMS[row["name"]].baseline]
    found = []
    for what, bounds in (
        ("tokens/s", _speeds),
        ("memory allocated", _memories),
    ):
        arms = [name for name in ARMS if name in {row["name"] for row in rows}]
        ranges = {
            (row["name"], row["seq_len"]): bounds(row) for row in rows if bounds(row) is not None
        }
        for one, other in combinations(arms, 2):
            both = sorted(t for name, t in ranges if name == one and (other, t) in ranges)
            order = [(t, _order(ranges[one, t], ranges[other, t])) for t in both]
            for (short, before), (long, after) in pairwise((t, o) for t, o in order if o):
                if before != after:
                    more, less = (one, other) if after > 0 else (other, one)
                    found.append(
                        f"{what}: from T = {short:,} to {long:,} {label(more)} passes {label(less)}"
                    )
    return found


def _speeds(row: Row) -> tuple[float, float] | None:
    rounds = row.get("throughput_vs_non_dp_rounds")
    return None if rounds is None else (rounds[0], rounds[-1])


def _memories(row: Row) -> tuple[float, float] | None:
    peak = row.get("peak_allocated_gib")
    return None if peak is None else (0.99 * peak, 1.01 * peak)


def _order(one: tuple[float, float], other: tuple[float, float]) -> int:
    """1 where all of one is above all of the other, -1 where it is below, 0 where they overlap."""
    return (one[0] > other[1]) - (one[1] < other[0])
