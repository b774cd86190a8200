"""The memory that a rank will need, and how long a sample may be: predicted without a GPU, shown.

The real step runs on fake tensors (`prediction`) in a process of its own, so that nothing of it
stays here. What no tensor shows is left free: `HEADROOM` for the CUDA context, the workspaces of
cuBLAS and fragmentation, `COMMUNICATOR_GIB` for the buffers of each NCCL communicator, which lie
outside PyTorch's allocator. Both are estimates, not measured here.
"""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.table import Column, Table

from torchtitan_dp.config import JobConfig

GIB = 2**30
DEFAULT_GIB = 80.0  # of a device
HEADROOM = 0.05  # of a device's memory
COMMUNICATOR_GIB = 0.5
LONGEST = 2**22  # no longer samples are tried
WITHOUT_DEVICES = {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
"""The environment of a prediction: without an accelerator in sight everything is laid out on the
CPU; fake tensors are as large."""
MODES = ("none", "full")  # of activation checkpointing, that the longest T is sought for

# In the order of tables.
CATEGORIES = (
    "parameters",
    "optimizer",
    "accumulator",
    "earlier_noise",
    "per_sample_shards",
    "activations",
    "loss_head",
    "communication",
)


@dataclass(frozen=True)
class MemoryPlan:
    """The predicted memory of a rank at its peak."""

    world_size: int
    seq_len: int
    parts: dict[str, int]  # bytes, by category
    memory_gib: float  # of one device
    longest_seq_len: dict[str, int | None]  # by AC mode; None: not even the shortest
    fitting_world_size: int | None = None  # of more ranks, if these do not suffice
    communicators: int = 0  # that a rank takes part in
    host_bytes: int = 0  # page-locked, of a rank

    @property
    def peak_bytes(self) -> int:
        return sum(self.parts.values())

    @property
    def fits(self) -> bool:
        return self.peak_bytes <= self.limit_bytes

    @property
    def limit_bytes(self) -> int:
        return limit_bytes(self.memory_gib, self.communicators)

    @property
    def headroom_gib(self) -> float:
        return headroom_gib(self.memory_gib, self.communicators)

    @property
    def largest(self) -> str:
        return max(self.parts, key=lambda name: self.parts[name])

    def for_programs(self) -> dict[str, Any]:
        return {
            "peak_memory_gib": self.peak_bytes / GIB,
            "memory_gib": {name: size / GIB for name, size in self.parts.items()},
            "host_memory_gib": self.host_bytes / GIB,
            "device_memory_gib": self.memory_gib,
            "headroom_gib": self.headroom_gib,
            "fits": self.fits,
            "longest_seq_len": self.longest_seq_len,
        }


def headroom_gib(memory_gib: float, communicators: int) -> float:
    """Estimate the memory that no tensor shows, of a rank in so many communicators.

    >>> headroom_gib(80, 5)
    6.5
    """
    return memory_gib * HEADROOM + COMMUNICATOR_GIB * communicators


def limit_bytes(memory_gib: float, communicators: int = 0) -> int:
    """Limit what a rank's tensors may take of a device's memory."""
    return int((memory_gib - headroom_gib(memory_gib, communicators)) * GIB)


def communicators(degrees: tuple[int, int, int]) -> int:
    """Count the process groups of a rank of a mesh (dp_replicate, dp_shard, cp): NCCL has a
    communicator for each.

    They are the world's; of more ranks also TorchTitan's `loss`, which is the world again, its
    `fsdp` and `cp`, and those of the clipped sum (`gradients.fsdp`).

    >>> [communicators(degrees) for degrees in ((1, 1, 1), (1, 1, 4), (1, 4, 1), (2, 2, 2))]
    [1, 5, 4, 7]
    """
    _, dp_shard, cp = degrees
    if max(degrees) == 1:
        return 1
    fsdp, ring = dp_shard * cp > 1, cp > 1
    return 2 + fsdp + ring + sum(degree > 1 for degree in degrees)


@contextlib.contextmanager
def predicting(
    overrides: list[str], world_size: int, memory_gib: float, *, longest: bool = True
) -> Iterator[Callable[[], MemoryPlan]]:
    """Predict, while the block runs, the memory of rank 0, which has as much as any other.

    `overrides` are a command line without a mistake, `memory_gib` is of one device; `longest` also
    seeks the longest samples that fit. Yields a function that waits for the prediction, and
    returns it or raises RuntimeError; once.
    """
    task = json.dumps([overrides, world_size, memory_gib, longest])
    command = [sys.executable, "-m", "torchtitan_dp.plan.prediction"]
    pipe, env = subprocess.PIPE, {**os.environ, **WITHOUT_DEVICES}
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=errors, text=True, env=env
        ) as process,
    ):
        assert process.stdin is not None
        process.stdin.write(task)
        process.stdin.close()

        def finish() -> MemoryPlan:
            assert process.stdout is not None
            last = "{}"
            for last in process.stdout:
                if not last.startswith("{"):
                    _show_progress(last.rstrip())
            _show_progress("")
            if process.wait() != 0:
                errors.seek(0)
                raise RuntimeError(f"memory could not be predicted:\n{errors.read()[-4000:]}")
            return MemoryPlan(**json.loads(last))

        try:
            yield finish
        finally:
            process.kill()


def predict(
    overrides: list[str], world_size: int, memory_gib: float, *, longest: bool = True
) -> MemoryPlan:
    """Predict as `predicting` does, and wait."""
    with predicting(overrides, world_size, memory_gib, longest=longest) as finish:
        return finish()


def _show_progress(doing: str) -> None:
    """Replace the line on a terminal that says what is being predicted; "" clears it."""
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\033[K{doing and f'memory: {doing}…'}")
        sys.stderr.flush()


def show_memory(memory: MemoryPlan, config: JobConfig, *, limited: bool) -> None:
    """Print the table on stderr, and what would fit if this does not; ValueError, one line, in
    that case if the user has `limited` the memory."""
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
    ranks = "more ranks in parallelism.context_parallel_degree or data_parallel_shard"
    settings = {
        "parameters": ranks,
        "optimizer": ranks,
        "accumulator": "a larger parallelism.context_parallel_degree (data_parallel_shard_degree "
        "does not help)",
        "earlier_noise": f"fewer privacy.bands, or {ranks}",
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
