"""`--table tiles`: what a feed-forward in tiles computes and moves, against full recomputation
without tiles, counted as in `counts`."""

from typing import Any

from .counts import Case, count
from .tables import markdown

SHAPES = ((65536, 4), (1048576, 8))  # T, ranks
TRAINED = {"all weights": (), "LoRA": ("--lora.rank=16",)}


def tile_rows(models: list[str], shapes: tuple[tuple[int, int], ...] = SHAPES) -> list[Any]:
    """Rows of the JSON, one a model, what is trained, and T."""
    rows = []
    for model in models:
        for trained, overrides in TRAINED.items():
            for seq_len, world_size in shapes:
                totals = []
                for chunk in ("0", "auto"):
                    more = ("--activation_checkpoint.mode=full", *overrides)
                    more += (f"--training.feed_forward_chunk={chunk}",)
                    case = Case(model, "microbatch", 1, world_size, overrides=more)
                    found = count(case, [seq_len])["microbatch"][seq_len]
                    totals.append((sum(found.flops.values()), sum(found.bytes.values())))
                (flops, moved), (flops_in_tiles, moved_in_tiles) = totals
                rows.append(
                    {
                        "model": model,
                        "trained": trained,
                        "seq_len": seq_len,
                        "world_size": world_size,
                        "flops_vs_no_tiles": flops_in_tiles / flops,
                        "bytes_vs_no_tiles": moved_in_tiles / moved,
                        "flops": flops_in_tiles,
                        "bytes": moved_in_tiles,
                    }
                )
    return rows


def tile_table(rows: list[dict[str, Any]]) -> str:
    """All rows, in Markdown."""
    head = ["model", "trained", "T", "ranks", "FLOPs, tiles / none", "bytes, tiles / none"]
    lines = [
        [
            row["model"],
            row["trained"],
            f"{row['seq_len']:,}",
            str(row["world_size"]),
            f"{row['flops_vs_no_tiles']:.4f}",
            f"{row['bytes_vs_no_tiles']:.4f}",
        ]
        for row in rows
    ]
    return markdown(head, lines)
