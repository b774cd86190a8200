"""The lines of the paper's tables: model, mesh, MBS, T and arms; the paper's, and scaled ones."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from . import arms as catalogue
from . import paper_figures
from .paper_predictions import CP, FSDP, Task

PAPER_DEVICES, PAPER_BYTES = 4, 75e9  # of a device that is sold as one of 80 GB
MANY = 256  # GPUs, in the place of infinitely many: the model's share is next to nothing
COUNTED = ("3", "4")  # FLOPs and bytes too; AC adds to Table 4's a forward pass, on both sides
ARMS_OF = {  # in the paper's order; `microbatch` is ours, for an MBS of 1
    "2": ("non-DP", "ghost", "V2", "microbatch"),
    "3": ("non-DP", "ghost"),
    "4": ("non-DP", "V1", "V2", "microbatch"),
    "5": ("non-DP", "non-DP + AC", "V2", "V2 + AC", "microbatch + AC"),
}


@dataclass(frozen=True)
class Shape:
    """One line of a table: what its arms share."""

    model: str
    mesh: str
    world_size: int
    local_batch_size: int
    seq_len: int  # in Table 2 the first that is tried
    arms: tuple[str, ...]


def arms_of(table: str, local_batch_size: int, asked: str | None, devices: int) -> tuple[str, ...]:
    """The arms of a line: those of the paper and ours, or those that `--arms` names."""
    if asked is not None:
        names = tuple(arm.name for arm in catalogue.choose(asked, devices))
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
