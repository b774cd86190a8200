"""A memory prediction for people: a table, what to change if it does not fit, a bar chart.

    python -m torchtitan_dp.plan.report docs/plans.md

writes that page, for all of `train_configs/`: their memory, one block by tensor, and what steps of
long samples take.
"""

import os
import subprocess
import sys
from pathlib import Path

from rich.console import Console
from rich.padding import Padding
from rich.table import Column, Table

from torchtitan_dp.config import JobConfig
from torchtitan_dp.config.load import load_config
from torchtitan_dp.models.hugging_face import shape
from torchtitan_dp.plan import long_steps
from torchtitan_dp.plan.long_steps import LongStep
from torchtitan_dp.plan.memory import (
    CATEGORIES,
    COMMUNICATOR_GIB,
    GIB,
    HEADROOM,
    HIDDEN_DEVICES,
    LONGEST,
    MODES,
    MemoryPlan,
    predict,
)

TRAIN_CONFIGS = Path(__file__).resolve().parents[2] / "train_configs"
_ON_DEVICE = "--activation_checkpoint.no-offload_inputs"
_VARIANTS: dict[str, list[tuple[int, list[str]]]] = {
    "llama3_8b_512k_lora": [(1, [])],
    "llama3_8b_1m_lora": [(4, []), (8, []), (8, [_ON_DEVICE]), (8, ["--lora.rank=0"])],
    "llama3_8b_4m_lora": [(8, []), (8, ["--model.flavor=3B"]), (8, ["--model.flavor=1B"])],
}
"""Ranks and overrides of the rows of a configuration that is not for the page's ranks alone."""
_BLOCK = ("llama3_8b_1m_lora", 8)
"""The configuration and ranks whose block the page has by tensor."""


def report(memory: MemoryPlan, config: JobConfig, *, limited: bool) -> None:
    """Print the table, and what would fit if this does not.

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


_PAGE = """# Predicted memory of `train_configs/`

Every number here is a **prediction**, made without a GPU; none was measured on one. Written by

    python -m torchtitan_dp.plan.report docs/plans.md

For {ranks} ranks of {memory:g} GiB, unless a row has more: GiB of a rank at its peak. "fits"
leaves {headroom:.0%} free, for the CUDA context and fragmentation, and {communicator:g} GiB for
each NCCL communicator; both are estimates. What your own configuration takes:
`python -m torchtitan_dp.plan --job.config_file FILE --world_size {ranks} --memory_gib {memory:g}`.

Beside `llama3_8b_1m_lora` stand measurements of others, all weights, without privacy, with
checkpoints offloaded to the host: TRL took 56.2 GB a GPU for Qwen3-8B at 1,048,576 tokens on 8 H100
([trl#6846](https://github.com/huggingface/trl/pull/6846)); ALST trained a Llama 8B at 3.7M tokens
on 8 H100 and at 500k on one ([arXiv 2506.13996](https://arxiv.org/abs/2506.13996)).

| configuration | tokens | AC | {parts} | **peak** | fits |
| --- | --- | --- | {rule} | --- | --- |
"""


_BLOCK_SECTION = """
## One block by tensor

What is alive on a rank of `{name}`, {ranks} ranks, inputs offloaded, while one of its middle blocks
runs: GiB at the peak of each phase (**predicted**).

A row is what one module has made, in forward or in backward (`block +1` is the block after it); a
cell is empty where nothing of it is alive at that phase's peak. The block takes what its highest
column adds up to, so it shrinks with the largest rows of that column; "workspace" is what
FlashAttention takes on CUDA.

{table}
Of another configuration: `python -m torchtitan_dp.plan.timeline {ranks} --job.config_file FILE`.
"""


def block_section(folder: Path) -> str:
    """Write the section on one block, in a process that sees no accelerator, as predictions do."""
    name, ranks = _BLOCK
    command = [sys.executable, "-m", "torchtitan_dp.plan.timeline", str(ranks)]
    command += ["--job.config_file", str(folder / f"{name}.toml")]
    env = os.environ | HIDDEN_DEVICES
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=env)
    return _BLOCK_SECTION.format(name=name, ranks=ranks, table=done.stdout)


def write_page(path: str, folder: Path, *, ranks: int = 4, memory_gib: float = 80.0) -> None:
    """Write the predictions for each TOML of a folder, as a Markdown page."""
    rows, steps = [], []
    for toml in sorted(folder.glob("*.toml")):
        for number, more in _VARIANTS.get(toml.stem, [(ranks, [])]):
            overrides = ["--job.config_file", str(toml), *more]
            config = load_config(overrides, number)
            memory = predict(overrides, number, memory_gib, longest=False)
            sizes = [f"{size / GIB:.2f}" for size in memory.parts.values()]
            fits = "yes" if memory.fits else "no"
            checkpointing, peak = config.activation_checkpoint, memory.peak_bytes / GIB
            name = ", ".join([f"`{toml.stem}`", *(f"`{one}`" for one in more)])
            mode = checkpointing.mode
            if number != ranks:
                name += f", {number} rank" + "s" * (number > 1)
            if checkpointing.offload_inputs:
                mode += f", {memory.host_bytes / GIB:.0f} GiB a rank offloaded to the host"
            cells = [name, f"{memory.seq_len:,}", mode, *sizes, f"**{peak:.1f}**", fits]
            whole = memory.parts["parameters"] * number
            rows.append((whole, memory.seq_len, f"| {' | '.join(cells)} |"))
            of_step = ", ".join([toml.stem, *(one for one in more if one != _ON_DEVICE)])
            steps.append(LongStep.of(of_step, config, shape(config), number))
            print(rows[-1][-1], file=sys.stderr)
    page = _PAGE.format(
        ranks=ranks,
        memory=memory_gib,
        headroom=HEADROOM,
        communicator=COMMUNICATOR_GIB,
        parts=" | ".join(name.replace("_", " ") for name in CATEGORIES),
        rule=" | ".join("---" for _ in CATEGORIES),
    )
    page += "".join(f"{row}\n" for *_, row in sorted(rows))
    Path(path).write_text(page + block_section(folder) + long_steps.section(steps))


if __name__ == "__main__":
    write_page(sys.argv[1], TRAIN_CONFIGS)
