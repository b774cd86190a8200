"""What was measured of the paper's tables on other machines than the paper's, in Markdown."""

from .arms import ARMS, label
from .paper_cells import MEASURED, Column, Key, Row, of_longest, of_row, table_of


def section(table: str, model: str, entry: Row) -> list[str]:
    """What was measured on other machines than the paper's, in shapes of its own."""
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
