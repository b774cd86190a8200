"""Figures of three kinds in Markdown, such that none can be taken for another.

A column holds one kind alone, says which in its head, and writes it in a way that the others are
not: the paper's plainly, what was measured in bold, what was predicted in italics with a wave.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from .paper_figures import OOM, Figure
from .tables import markdown

Row = dict[str, Any]
Key = tuple[Any, ...]
PAPER, MEASURED, PREDICTED = "paper", "measured", "predicted"
_WRITTEN: dict[str, Callable[[str], str]] = {
    PAPER: lambda text: text,
    MEASURED: lambda text: f"**{text}**",
    PREDICTED: lambda text: f"*≈ {text}*",
}


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
