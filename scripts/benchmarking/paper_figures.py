"""The figures of LongShield's Tables 2 to 5, as the paper prints them.

Source: "LongShield", https://openreview.net/forum?id=1Q2NVxcSuS, sections 2 and 4. Measured by its
authors, with their code (Opacus, TorchTitan) on four NVIDIA H100 of 80 GB; throughput in tokens per
second and GPU, memory as peak GB of a GPU. Arms have the names of `arms`: the paper's ZeRO-DP+ is
`ghost`, V3 is `V2 + AC`. Nothing here was measured or predicted by this project.
"""

from dataclasses import dataclass

OOM = "OOM"
MODELS = ("1B", "3B", "8B")
INFINITE = "infinite"
Figure = float | str | None  # OOM, or None where the paper says N/A or nothing

# Number of GPUs, MBS; the largest T for 1B, 3B, 8B, by FSDP alone. (For 8B on one GPU the three
# "OOM" of the text at hand stand for MBS 1, 2, 4; more samples cannot take less.)
_TABLE_2 = """
1 1 16384 4096 OOM
1 2 8192 2048 OOM
1 4 4096 1024 OOM
1 8 2048 512 OOM
4 1 16384 8192 4096
4 2 8192 4096 2048
4 4 4096 2048 1024
4 8 2048 1024 512
infinite 1 16384 8192 4096
infinite 2 8192 4096 2048
infinite 4 4096 2048 1024
infinite 8 2048 1024 512
"""

# Model, MBS, T; throughput of non-DP and ZeRO-DP+; the gap.
_TABLE_3 = """
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
8B 8 512 7.91k 4.47k 1.77
"""

# Model, MBS, T; throughput of non-DP, ZeRO-DP+, V1, V2, gaps of V1, V2; memory of non-DP, V1, V2,
# gaps of V1, V2.
_TABLE_4 = """
1B 1 64k 11.8k OOM 11.4k 11.6k 1.04 1.02 69.0 70.6 66.2 1.02 0.96
1B 2 32k 16.4k OOM 15.1k 15.8k 1.09 1.04 68.4 70.5 66.7 1.03 0.98
1B 4 16k 20.9k OOM 18.1k 19.4k 1.15 1.08 68.0 71.2 66.4 1.05 0.98
3B 1 32k 6.47k OOM 5.95k 6.08k 1.09 1.06 67.0 75.1 66.2 1.12 0.99
3B 2 16k 8.31k OOM 7.02k 7.42k 1.18 1.12 67.0 75.1 66.0 1.12 0.99
3B 4 8k 9.34k OOM 5.87k 7.91k 1.59 1.18 66.9 76.9 66.0 1.15 0.99
8B 1 16k 4.44k OOM OOM 4.08k N/A 1.09 73.2 OOM 72.2 N/A 0.99
8B 2 8k 4.82k OOM OOM 4.09k N/A 1.18 73.3 OOM 76.4 N/A 1.04
8B 4 4k 4.99k OOM OOM 2.20k N/A 2.27 73.3 OOM 76.6 N/A 1.05
"""

# Model, MBS, T; throughput of non-DP, non-DP with AC, V2, V3; memory of the same.
_TABLE_5 = """
1B 1 64k 11.8k 9.29k 11.6k 9.16k 69.0 42.7 66.2 48.3
1B 1 128k OOM 5.92k OOM 5.79k OOM 61.9 OOM 75.3
1B 1 256k OOM OOM OOM OOM OOM OOM OOM OOM
3B 1 32k 6.47k 5.26k 6.08k 4.99k 67.0 35.9 66.2 38.8
3B 1 64k OOM 3.84k OOM 3.71k OOM 58.1 OOM 62.7
3B 1 128k OOM 2.45k OOM 2.31k OOM 76.7 OOM 76.9
8B 1 16k 4.44k 3.49k 4.08k 3.32k 73.2 50.4 72.2 52.5
8B 1 32k OOM 3.15k OOM 3.01k OOM 57.4 OOM 62.3
8B 1 64k OOM 2.32k OOM 2.26k OOM 73.4 OOM 75.5
"""

THROUGHPUT = {
    3: ("non-DP", "ghost"),
    4: ("non-DP", "ghost", "V1", "V2"),
    5: ("non-DP", "non-DP + AC", "V2", "V2 + AC"),
}
GAPS = {3: ("ghost",), 4: ("V1", "V2"), 5: ()}
MEMORY = {3: (), 4: ("non-DP", "V1", "V2"), 5: THROUGHPUT[5]}
MEMORY_GAPS = {3: (), 4: ("V1", "V2"), 5: ()}


@dataclass(frozen=True)
class PaperRow:
    """One line of Tables 3 to 5, by arm."""

    table: int
    model: str
    local_batch_size: int
    seq_len: int
    throughput: dict[str, Figure]  # tokens/s and GPU
    speed_gap: dict[str, Figure]  # non-DP's throughput over the arm's
    memory: dict[str, Figure]  # GB
    memory_gap: dict[str, Figure]  # the arm's memory over non-DP's


def number(text: str) -> Figure:
    """Read a figure of the paper.

    >>> [number(text) for text in ("28.8k", "16384", "OOM", "N/A")]
    [28800.0, 16384.0, 'OOM', None]
    """
    if text in (OOM, "N/A"):
        return OOM if text == OOM else None
    return round(float(text.removesuffix("k")) * (1000 if text.endswith("k") else 1), 6)


def tokens(text: str) -> int:
    """Read a number of tokens, in which k is 1,024.

    >>> tokens("16k"), tokens("512")
    (16384, 512)
    """
    return int(text.removesuffix("k")) * (1024 if text.endswith("k") else 1)


def longest() -> dict[tuple[str, str, int], Figure]:
    """Return Table 2: the largest T by (model, number of GPUs, MBS)."""
    found = {}
    for line in _TABLE_2.split("\n")[1:-1]:
        gpus, mbs, *figures = line.split()
        for model, figure in zip(MODELS, figures, strict=True):
            found[model, gpus, int(mbs)] = number(figure)
    return found


def rows(table: int) -> list[PaperRow]:
    """Return the lines of Table 3, 4 or 5."""
    lines = {3: _TABLE_3, 4: _TABLE_4, 5: _TABLE_5}[table].split("\n")[1:-1]
    return [_row(table, *line.split()) for line in lines]


def _row(table: int, model: str, mbs: str, seq_len: str, *texts: str) -> PaperRow:
    figures = iter([number(text) for text in texts])
    parts = [
        {arm: next(figures) for arm in arms[table]}
        for arms in (THROUGHPUT, GAPS, MEMORY, MEMORY_GAPS)
    ]
    assert not [*figures], "a line has more figures than its table has columns"
    return PaperRow(table, model, int(mbs), tokens(seq_len), *parts)
