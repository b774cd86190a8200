"""How much memory a rank will need, and how long a sample may be: predictions, without a GPU.

They come from the real step, run on fake tensors (`prediction`) in a process of its own, so that
nothing of it stays here. What no tensor shows is left free: `HEADROOM` for the CUDA context, the
workspaces of cuBLAS and fragmentation, `COMMUNICATOR_GIB` for the buffers of each NCCL
communicator, which lie outside PyTorch's allocator. Both are estimates, not measured here.
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

GIB = 2**30
DEFAULT_GIB = 80.0  # of a device
HEADROOM = 0.05  # of a device's memory
COMMUNICATOR_GIB = 0.5
LONGEST = 2**22  # no longer samples are tried
HIDDEN_DEVICES = {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}
"""Environment of a process that sees no accelerator."""
MODES = ("none", "full")  # of activation checkpointing, that the longest T is sought for

# In the order of tables.
CATEGORIES = (
    "parameters",
    "optimizer",
    "accumulator",
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
    kept_gathered_bytes: int | None = None  # at most, with weights kept gathered; None if they are
    communicators: int = 0  # that a rank takes part in
    host_bytes: int = 0  # page-locked, of a rank

    @property
    def peak_bytes(self) -> int:
        return sum(self.parts.values())

    @property
    def fits(self) -> bool:
        """Whether the peak leaves the headroom free."""
        return self.peak_bytes <= self.limit_bytes

    @property
    def limit_bytes(self) -> int:
        """What tensors may take of a device's memory."""
        return limit_bytes(self.memory_gib, self.communicators)

    @property
    def headroom_gib(self) -> float:
        """What is left free of a device's memory."""
        return headroom_gib(self.memory_gib, self.communicators)

    @property
    def largest(self) -> str:
        """The category that takes most."""
        return max(self.parts, key=lambda name: self.parts[name])

    def for_programs(self) -> dict[str, Any]:
        """Put together what `--json` says of memory."""
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
    """Count the process groups of a rank of a mesh (dp_replicate, dp_shard, cp), as NCCL has a
    communicator for each that is used.

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

    Args:
        overrides: `--job.config_file FILE` and any `--section.key value`, without a mistake.
        memory_gib: of one device.
        longest: also seek the longest samples that fit.

    Yields:
        A function that waits for the prediction, and returns it or raises RuntimeError; once.
    """
    task = json.dumps([overrides, world_size, memory_gib, longest])
    # Without an accelerator in sight everything is laid out on the CPU; fake tensors are as large.
    hidden = {**HIDDEN_DEVICES, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "torchtitan_dp.plan.prediction"]
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env={**os.environ, **hidden},
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
