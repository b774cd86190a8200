"""The memory that a rank will need, and how long a sample may be: predicted without a GPU, shown.

The real step runs on fake tensors (`prediction`) in a process of its own, so that nothing of it
stays here. What no tensor shows is left free: `HEADROOM` for the CUDA context, the workspaces of
cuBLAS and fragmentation, `COMMUNICATOR_GIB` for the buffers of each NCCL communicator, which lie
outside PyTorch's allocator. Both are estimates, not measured here.
"""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from typing import Any, TextIO

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
    communicators: int = 0  # that a rank takes part in
    host_bytes: int = 0  # page-locked, of a rank

    @property
    def peak_bytes(self) -> int:
        return sum(self.parts.values())

    @property
    def fits(self) -> bool:
        return self.peak_bytes <= limit_bytes(self.memory_gib, self.communicators)

    @property
    def headroom_gib(self) -> float:
        return headroom_gib(self.memory_gib, self.communicators)

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


def predict(
    overrides: list[str], world_size: int, memory_gib: float, *, longest: bool = True
) -> MemoryPlan:
    """Predict the memory of rank 0, which has as much as any other.

    `overrides` are a command line without a mistake, `memory_gib` is of one device; `longest` also
    seeks the longest samples that fit. Raises RuntimeError if it cannot be predicted.
    """
    done = subprocess.run(
        [sys.executable, "-m", "torchtitan_dp.plan.prediction"],
        input=json.dumps([overrides, world_size, memory_gib, longest]),
        capture_output=True,
        text=True,
        env={**os.environ, **WITHOUT_DEVICES},
    )
    if done.returncode != 0:
        raise RuntimeError(f"memory could not be predicted:\n{done.stderr[-4000:]}")
    return MemoryPlan(**json.loads(done.stdout.splitlines()[-1]))


def show_memory(memory: MemoryPlan, config: JobConfig, out: TextIO, *, limited: bool) -> None:
    """Print the table, and what would fit if this does not; ValueError, one line, in
    that case if the user has `limited` the memory."""
    lines = [
        f"peak memory per rank, of {memory.world_size} (predicted): "
        f"{_amount(memory.peak_bytes)}: {'fits' if memory.fits else 'does NOT fit'} "
        f"in {memory.memory_gib:g} GiB with {memory.headroom_gib:g} GiB kept free"
    ]
    for name, size in sorted(memory.parts.items(), key=lambda part: -part[1]):
        share = size / max(memory.peak_bytes, 1)
        lines.append(f"      {name.replace('_', ' '):18}{_amount(size):>14}{share:6.0%}")
    for mode, length in memory.longest_seq_len.items():
        found = "none fits" if length is None else f"{length:,} tokens"
        more = " or more" if length == LONGEST else ""
        lines.append(f"      longest sample, activation_checkpoint.mode = '{mode}': {found}{more}")
    print(*lines, sep="\n", file=out)
    if not memory.fits and limited:
        raise ValueError(misfit(memory, config))
    if not memory.fits:
        print(f"warning: {misfit(memory, config)}", file=sys.stderr)


def _amount(size: float) -> str:
    return f"{size / GIB:.2f} GiB" if size >= GIB else f"{size / 2**20:.1f} MiB"


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
    if own == "full" and not config.activation_checkpoint.offload_inputs:
        nearest.append("perhaps activation_checkpoint.offload_inputs = true")
    largest = max(memory.parts, key=lambda name: memory.parts[name]).replace("_", " ")
    return (
        f"predicted {memory.peak_bytes / GIB:.1f} GiB per rank do not fit in "
        f"{memory.memory_gib:g} GiB less {memory.headroom_gib:g} (largest part: {largest}); would "
        f"fit: {', or '.join([*nearest, 'more ranks'])}"
    )
