"""What the plan and the counts say of the rows of the paper's tables: predictions, no measurement.

A rank's real step runs on fake tensors (`torchtitan_dp.plan.fake_step`; plain TorchTitan's in
`plain_step`), in a process that sees no device. Layers are alike: bytes of memory (a stretch of the
step at a time, as `torchtitan_dp.plan.peaks` does), bytes moved and FLOPs are told from models of
four and of five layers, for any length itself.
"""

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from .arms import ARMS, Arm
from .counts import Case
from .journal import Journal

MEMORY_GIB = 80.0
SHORTEST, LONGEST = 64, 2**21  # tokens of a sample, that are tried
FSDP, CP = "FSDP", "cp"  # which ranks share a sample: none, all
GIB = 2**30


@dataclass(frozen=True)
class Task:
    """One arm, model and shape; without a length, the longest is sought, from `first` on."""

    model: str
    arm: str
    world_size: int
    mesh: str  # FSDP or CP
    local_batch_size: int
    seq_len: int | None = None
    first: int = 4096
    counted: bool = True  # FLOPs and bytes, too

    def case(self, n_layers: int | None = None) -> Case:
        """Put it as the counts know it."""
        arm, cp = ARMS[self.arm], self.mesh == CP
        overrides = (
            f"--parallelism.context_parallel_degree={self.world_size if cp else 1}",
            f"--parallelism.data_parallel_shard_degree={1 if cp else self.world_size}",
            f"--training.global_batch_size={4 * self.local_batch_size * self.world_size}",
            *arm.overrides,
        )
        method = _method(arm)
        size, mbs = self.world_size, self.local_batch_size
        return Case(self.model, method, mbs, size, overrides=overrides, n_layers=n_layers)


def _method(arm: Arm) -> str:
    key = "--privacy.gradient_method="
    named = [o.removeprefix(key) for o in arm.overrides if o.startswith(key)]
    return named[0] if named else "plain"


def predict(tasks: list[Task], journal: Journal, say: Callable[[str], None]) -> Iterator[Any]:
    """Predict each task in a process of its own; yields (task, found) as they come.

    Args:
        journal: what it holds is not predicted again.

    Raises:
        RuntimeError: nothing could be predicted.
    """
    keys = {task: json.dumps(["predicted", asdict(task), torch.__version__]) for task in tasks}
    missing = [task for task in tasks if not journal.of(keys[task])]
    new = _in_a_process(missing) if missing else iter(())
    for task in tasks:
        if not journal.of(keys[task]):
            say(f"predicting {task}")
            journal.add(keys[task], next(new))
        yield task, journal.of(keys[task])[-1]


def _in_a_process(tasks: list[Task]) -> Iterator[dict[str, Any]]:
    hidden = {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(
            [sys.executable, "-m", "scripts.benchmarking.paper_predictions"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            cwd=Path(__file__).parents[2],
            env={**os.environ, **hidden},
        ) as process,
    ):
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(json.dumps([asdict(task) for task in tasks]))
            process.stdin.close()
            for task in tasks:
                line = process.stdout.readline()
                if not line:
                    errors.seek(0)
                    raise RuntimeError(f"{task} could not be predicted:\n{errors.read()[-4000:]}")
                yield json.loads(line)
        finally:
            process.kill()


def predict_here(task: Task) -> dict[str, Any]:
    """Predict in this process, which has no process group.

    Returns:
        of a row: its peak in GiB (tensors alone), whether it fits and, if they are counted, FLOPs
        and bytes moved by one microbatch; without a length: the longest, and the peaks at it and
        at twice as many tokens
    """
    from torchtitan_dp.plan.memory import limit_bytes

    limit = limit_bytes(MEMORY_GIB)
    if task.seq_len is not None:
        peak = peak_bytes(task, task.seq_len)
        found = {"peak_memory_gib": peak / GIB, "fits": peak <= limit}
        return {**found, **work(task)} if task.counted else found
    known: dict[int, float] = {}

    def at(seq_len: int) -> float:
        if seq_len not in known:
            known[seq_len] = peak_bytes(task, seq_len)
        return known[seq_len]

    found = longest(lambda seq_len: at(seq_len) <= limit, task.first)
    beyond = SHORTEST if found is None else 2 * found
    return {
        "longest_seq_len": found,
        "peak_memory_gib": None if found is None else at(found) / GIB,
        "peak_memory_gib_beyond": at(beyond) / GIB,
    }


def longest(
    fits: Callable[[int], bool], first: int, shortest: int = SHORTEST, most: int = LONGEST
) -> int | None:
    """Find the largest number of tokens that fits, in steps of 2 from the first that is tried; a
    longer sample takes no less.

    >>> [longest(lambda seq_len: seq_len <= 5000, first) for first in (256, 65536)]
    [4096, 4096]
    """
    seq_len = first
    if fits(seq_len):
        while 2 * seq_len <= most and fits(2 * seq_len):
            seq_len *= 2
        return seq_len
    while seq_len // 2 >= shortest:
        seq_len //= 2
        if fits(seq_len):
            return seq_len
        if seq_len == first // 2 and not fits(shortest):
            return None  # nothing does
    return None


def peak_bytes(task: Task, seq_len: int) -> float:
    """Predict the most bytes that tensors take at once on rank 0, in a microbatch or an update."""
    import torchtitan_dp.distributed  # noqa: F401  lets TorchTitan import without a GPU

    # isort: split
    from torchtitan_dp.config.load import load_config
    from torchtitan_dp.models.hugging_face import shape
    from torchtitan_dp.plan.fake_step import Step, fake_world
    from torchtitan_dp.plan.peaks import FEW_LAYERS, MakeStep, Model, of_layers

    from .plain_step import PlainStep

    case = task.case()
    config = load_config(case.arguments(seq_len), task.world_size)
    args, make = shape(config), _made_by(case, PlainStep, Step)
    mode, whole = config.activation_checkpoint.mode, args.n_layers

    def stretches(n_layers: int, make: MakeStep = make) -> dict[str, int]:
        with fake_world(task.world_size):
            model = Model(config, dataclasses.replace(args, n_layers=n_layers), mode, make)
            found = model.stretches(seq_len)
            model.close()
        return found

    if whole <= max(FEW_LAYERS):
        return max(stretches(whole).values())
    few, more = (stretches(n_layers) for n_layers in FEW_LAYERS)
    both = few.keys() & more.keys()
    return max(of_layers(whole, few[name], more[name]) for name in both)


def _made_by(case: Case, plain: Any, private: Any) -> Any:
    return plain if case.method == "plain" else private


def work(task: Task) -> dict[str, float]:
    """Count one microbatch's FLOPs and the bytes that it moves, on one rank."""
    from torchtitan_dp.config.load import load_config
    from torchtitan_dp.models.hugging_face import shape
    from torchtitan_dp.plan.peaks import FEW_LAYERS, of_layers

    from .counts import count_here

    assert task.seq_len is not None
    config = load_config(task.case().arguments(task.seq_len), task.world_size)
    whole = shape(config).n_layers
    layers = (whole,) if whole <= max(FEW_LAYERS) else FEW_LAYERS
    counted = [
        count_here(task.case(n_layers), [task.seq_len])["microbatch"][task.seq_len]
        for n_layers in layers
    ]
    totals = {
        "flops": [float(sum(one.flops.values())) for one in counted],
        "bytes": [float(sum(one.bytes.values())) for one in counted],
    }
    return {
        name: found[0] if len(found) == 1 else of_layers(whole, *found)
        for name, found in totals.items()
    }


def _main() -> None:
    for task in json.load(sys.stdin):
        print(json.dumps(predict_here(Task(**task))), flush=True)


if __name__ == "__main__":
    _main()
