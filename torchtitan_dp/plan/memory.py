"""How much memory a rank will need, and how long a sample may be: predictions, without a GPU.

They come from the real step, run on fake tensors (`step`) in a process of its own, so that
nothing of it stays here. `HEADROOM` is left for what no tensor shows: the CUDA context, NCCL's
buffers, fragmentation.
"""

import dataclasses
import gc
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torchtitan_dp.config import JobConfig
from torchtitan_dp.config.load import load_config
from torchtitan_dp.models.hugging_face import shape

if TYPE_CHECKING:
    from torchtitan_dp.plan.fake_step import Step
    from torchtitan_dp.plan.tracker import MemoryTracker

GIB = 2**30
DEFAULT_GIB = 80.0  # of a device
HEADROOM = 0.05  # of a device's memory
LONGEST = 2**22  # no longer samples are tried
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
    """Holds what a rank is predicted to hold at the moment when it holds most."""

    world_size: int
    seq_len: int
    parts: dict[str, int]  # bytes, by category
    memory_gib: float  # of one device
    longest_seq_len: dict[str, int | None]  # by AC mode; None: not even the shortest

    @property
    def peak_bytes(self) -> int:
        return sum(self.parts.values())

    @property
    def fits(self) -> bool:
        """Tell whether `HEADROOM` stays free."""
        return self.peak_bytes <= limit_bytes(self.memory_gib)

    @property
    def largest(self) -> str:
        """Name the category that takes most."""
        return max(self.parts, key=lambda name: self.parts[name])

    def for_programs(self) -> dict[str, Any]:
        """Put together what `--json` says of memory."""
        return {
            "peak_memory_gib": self.peak_bytes / GIB,
            "memory_gib": {name: size / GIB for name, size in self.parts.items()},
            "device_memory_gib": self.memory_gib,
            "fits": self.fits,
            "longest_seq_len": self.longest_seq_len,
        }


def limit_bytes(memory_gib: float) -> int:
    """Limit what a rank may use of a device's memory."""
    return int(memory_gib * (1 - HEADROOM) * GIB)


def predict(
    overrides: list[str], world_size: int, memory_gib: float, *, longest: bool = True
) -> MemoryPlan:
    """Predict the memory of rank 0, which has as much as any other.

    Args:
        overrides: `--job.config_file FILE` and any `--section.key value`, found right already.
        memory_gib: of one device.
        longest: also seek the longest samples that fit.
    """
    task = json.dumps([overrides, world_size, memory_gib, longest])
    # Without an accelerator in sight everything is laid out on the CPU; fake tensors are as large.
    hidden = {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "torchtitan_dp.plan.memory"]
    done = subprocess.run(
        command, input=task, capture_output=True, text=True, env={**os.environ, **hidden}
    )
    if done.returncode != 0:
        raise RuntimeError(f"memory could not be predicted:\n{done.stderr[-4000:]}")
    return MemoryPlan(**json.loads(done.stdout.splitlines()[-1]))


class _Peaks:
    """Finds the peaks of a model that is built once, for samples of any length."""

    def __init__(self, step: "Step", tracker: "MemoryTracker", shortest: int) -> None:
        self._step, self._tracker = step, tracker
        step.microbatch(shortest)
        tracker.start_over()
        step.update()
        self._update = tracker.peak_bytes, tracker.peak
        self._known: dict[int, tuple[int, dict[str, int]]] = {}

    def at(self, seq_len: int) -> tuple[int, dict[str, int]]:
        """Find the peak in bytes, and what it is of: a microbatch after the first update, or the
        update.
        """
        if seq_len not in self._known:
            self._tracker.start_over()
            self._step.microbatch(seq_len)
            peak = self._tracker.peak_bytes, self._tracker.peak
            self._known[seq_len] = max(self._update, peak, key=lambda found: found[0])
        return self._known[seq_len]

    def longest(self, limit: int, unit: int) -> int | None:
        """Find the longest sample within `limit` bytes that is `unit` times a power of two."""
        if self._update[0] > limit:
            return None
        # From some thousand tokens a rank on, memory is a line in T.
        short, long = unit * 2**13, unit * 2**14
        slope = max((self.at(long)[0] - self.at(short)[0]) / (long - short), 1.0)
        guess = max(min(long + (limit - self.at(long)[0]) / slope, LONGEST), unit)
        power = (int(guess) // unit).bit_length() - 1
        while power >= 0 and self.at(unit * 2**power)[0] > limit:
            power -= 1
        return unit * 2**power if power >= 0 else None


def _measure(config: JobConfig, world_size: int, memory_gib: float, longest: bool) -> MemoryPlan:
    """Measure, in a process that is for this alone."""
    from torchtitan_dp.plan.fake_step import Step, fake_world, tracking

    config.compile.enable = False  # fused kernels need less, how much less is not predicted
    args, seq_len = shape(config), config.training.seq_len
    cp = config.parallelism.context_parallel_degree
    own = config.activation_checkpoint.mode
    parts: dict[str, int] = {}
    lengths: dict[str, int | None] = {}
    with fake_world(world_size):
        for mode in dict.fromkeys((own, *MODES) if longest else (own,)):
            config.activation_checkpoint.mode = mode
            with tracking() as tracker:
                peaks = _Peaks(Step(config, args, tracker), tracker, min(seq_len, 2048 * cp))
                if mode == own:
                    parts = peaks.at(seq_len)[1]
                if longest and mode in MODES:
                    lengths[mode] = peaks.longest(limit_bytes(memory_gib), 2 * cp)
            del peaks
            gc.collect()
    parts = {name: parts.get(name, 0) for name in CATEGORIES}
    return MemoryPlan(world_size, seq_len, parts, memory_gib, lengths)


def _main() -> None:
    overrides, world_size, memory_gib, longest = json.load(sys.stdin)
    config = load_config(overrides, world_size)
    print(json.dumps(dataclasses.asdict(_measure(config, world_size, memory_gib, longest))))


if __name__ == "__main__":
    _main()
