"""A memory prediction for people: a table, what to change if it does not fit, a bar chart."""

import sys

from rich.console import Console
from rich.padding import Padding
from rich.table import Column, Table

from torchtitan_dp.config import JobConfig
from torchtitan_dp.plan.memory import GIB, LONGEST, MODES, MemoryPlan


def show_memory(memory: MemoryPlan, config: JobConfig, *, limited: bool) -> None:
    """Print the table on stderr, and what would fit if this does not.

    Args:
        limited: the user said how much memory there is.

    Raises:
        ValueError: one line for the user, if `limited` and it does not fit.
    """
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    console.print(
        verdict(memory), Padding.indent(table(memory), 6), *advice(memory, config), sep="\n"
    )
    if memory.fits:
        return
    line = misfit(memory, config)
    if limited:
        raise ValueError(line)
    print(f"warning: {line}", file=sys.stderr)


def verdict(memory: MemoryPlan) -> str:
    """Say how much a rank takes, and whether it fits."""
    return (
        f"peak memory per rank, of {memory.world_size} (predicted): "
        f"{memory.peak_bytes / GIB:.1f} GiB: {'fits' if memory.fits else 'does NOT fit'} "
        f"in {memory.memory_gib:g} GiB with {memory.headroom_gib:g} GiB left free"
    )


def table(memory: MemoryPlan) -> Table:
    """List the peak by category, the largest first."""
    rows = Table("part", Column("GiB", justify="right"), Column("share", justify="right"))
    for name, size in sorted(memory.parts.items(), key=lambda part: -part[1]):
        share = size / max(memory.peak_bytes, 1)
        rows.add_row(name.replace("_", " "), f"{size / GIB:.2f}", f"{share:.0%}")
    return rows


def advice(memory: MemoryPlan, config: JobConfig) -> list[str]:
    """Say what would shrink the largest part, and which longest samples fit, a line each."""
    lines = [f"      largest: {shrink(memory.largest, config)}"]
    if memory.fits and (size := memory.kept_gathered_bytes) is not None:
        fits = "it fits; set parallelism.keep_weights_gathered = true"
        lines.append(
            f"      keeping the weights gathered within a step needs at most {size / GIB:.1f} GiB: "
            f"{fits if size <= memory.limit_bytes else 'it does not fit'}"
        )
    for mode in MODES:
        length = memory.longest_seq_len.get(mode)
        found = "none fits" if length is None else f"{length:,} tokens"
        more = " or more" if length == LONGEST else ""
        lines.append(
            f"      longest sample with activation_checkpoint.mode = '{mode}': {found}{more}"
        )
    return lines


def shrink(category: str, config: JobConfig) -> str:
    """Name the setting that makes a category smaller."""
    settings = {
        "parameters": "more ranks in parallelism.context_parallel_degree or data_parallel_shard",
        "optimizer": "more ranks in parallelism.context_parallel_degree or data_parallel_shard",
        "accumulator": "a larger parallelism.context_parallel_degree (data_parallel_shard_degree "
        "does not help)",
        "per_sample_shards": "a smaller training.local_batch_size, or privacy.gradient_method = "
        "'ghost' with ghost_passes = 'two'",
        "activations": _shrink_activations(config),
        "loss_head": "a smaller training.loss_chunk_tokens (0 disables chunks)",
        "communication": _shrink_communication(config),
    }
    return f"{category.replace('_', ' ')}; to shrink it: {settings[category]}"


def _shrink_communication(config: JobConfig) -> str:
    parallelism = config.parallelism
    if parallelism.keep_weights_gathered:
        return "parallelism.keep_weights_gathered = false"
    gathers = parallelism.context_parallel_rotate_method == "allgather"
    if gathers and parallelism.context_parallel_degree > 1:
        return "parallelism.context_parallel_rotate_method = 'alltoall'"
    return "parallelism.fsdp_reshard_after_forward = 'always'"


def _shrink_activations(config: JobConfig) -> str:
    if config.activation_checkpoint.mode != "full":
        return "activation_checkpoint.mode = 'full'"
    if not config.activation_checkpoint.offload_inputs:
        return "activation_checkpoint.offload_inputs = true, or more context_parallel_degree"
    return "a larger parallelism.context_parallel_degree or a smaller training.seq_len"


def misfit(memory: MemoryPlan, config: JobConfig) -> str:
    """Say in one line why it does not fit, and the nearest settings that do."""
    nearest = []
    own = config.activation_checkpoint.mode
    with_ac = memory.longest_seq_len.get("full")
    if own != "full" and with_ac is not None and with_ac >= memory.seq_len:
        nearest.append("activation_checkpoint.mode = 'full'")
    if (length := memory.longest_seq_len.get(own)) is not None:
        nearest.append(f"training.seq_len = {length}")
    elif with_ac is not None and with_ac < memory.seq_len:
        nearest.append(f"activation_checkpoint.mode = 'full' with training.seq_len = {with_ac}")
    if memory.fitting_world_size is not None:
        nearest.append(f"{memory.fitting_world_size} ranks")
    return (
        f"predicted {memory.peak_bytes / GIB:.1f} GiB per rank do not fit in "
        f"{memory.memory_gib:g} GiB less {memory.headroom_gib:g}: largest part: "
        f"{shrink(memory.largest, config)}; would fit: " + (", or ".join(nearest) or "nothing near")
    )


def plot(memory: MemoryPlan, path: str) -> None:
    """Plot a bar for each category, and a line where the memory ends. Needs matplotlib.

    Raises:
        ValueError: one line for the user.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ValueError("--plot needs matplotlib: pip install matplotlib") from None
    parts = sorted(memory.parts.items(), key=lambda part: part[1])
    figure = Figure(figsize=(7, 3.2), layout="constrained")
    axes = figure.subplots()
    bars = axes.barh([name.replace("_", " ") for name, _ in parts], [s / GIB for _, s in parts])
    axes.bar_label(bars, fmt="%.2f", padding=3)
    axes.set_xlabel("GiB a rank (predicted)")
    axes.margins(x=0.15)
    axes.set_title(
        f"{memory.peak_bytes / GIB:.1f} of {memory.memory_gib:g} GiB: {memory.world_size} ranks, "
        f"{memory.seq_len:,} tokens a sample"
    )
    figure.savefig(path, dpi=150)
