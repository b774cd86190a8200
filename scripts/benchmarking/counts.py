"""`--table counts`: what a step computes and moves, in figures that no noise touches: private
against plain TorchTitan.

One rank's microbatch (forward, backward, and with privacy: norm, clip, add) is run on fake tensors
in a fake process group, as the plan does, with kernels counted as CUDA has them (`counting`). Plain
TorchTitan is the baseline trainer's model, loss and accumulation.
"""

import gc
import json
import os
import subprocess
import sys
import unittest.mock
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torchtitan_dp.config.derived import automatic
from torchtitan_dp.plan.memory import WITHOUT_DEVICES

from .processes import show

MODELS = ("1B", "3B", "8B")
SEQ_LENS = (4096, 16384, 65536)


@dataclass(frozen=True)
class Case:
    """One model, method and shape."""

    model: str
    method: str  # "plain", or one of `gradient_method`
    local_batch_size: int
    world_size: int
    overrides: tuple[str, ...] = ()  # of the configuration, which come last
    n_layers: int | None = None  # instead of all

    def arguments(self, seq_len: int) -> list[str]:
        """The command line, for `config.load.load_config`."""
        private = [f"--privacy.gradient_method={self.method}", "--privacy.enable"]
        return [
            "--model.name=llama3",
            f"--model.flavor={self.model}",
            "--privacy.noise_multiplier=1",
            "--privacy.delta=1e-5",
            "--training.dataset_path=python-stdlib",
            f"--training.seq_len={seq_len}",
            f"--training.local_batch_size={self.local_batch_size}",
            "--training.global_batch_size=64",
            "--training.mixed_precision_param=bfloat16",
            f"--parallelism.context_parallel_degree={self.world_size}",
            "--parallelism.data_parallel_shard_degree=1",
            "--parallelism.context_parallel_rotate_method=alltoall",
            "--activation_checkpoint.mode=none",
            *(["--privacy.no-enable"] if self.method == "plain" else private),
            *self.overrides,
        ]


@dataclass(frozen=True)
class Count:
    """What one rank computes and moves in a microbatch, not the first of a step."""

    products: int  # FLOPs
    attention: int
    bytes: int

    @property
    def flops(self) -> int:
        return self.products + self.attention


def alone(module: str, task: Any) -> Any:
    """Run a module of this package in a process that sees no device; JSON in, JSON out.

    Raises:
        RuntimeError: it failed.
    """
    done = subprocess.run(
        [sys.executable, "-m", f"scripts.benchmarking.{module}"],
        input=json.dumps(task),
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
        env={**os.environ, **WITHOUT_DEVICES},
    )
    if done.returncode != 0:
        raise RuntimeError(f"{task} could not be predicted or counted:\n{done.stderr[-4000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def count(case: Case, seq_lens: list[int]) -> list[Count]:
    """Count microbatches of these lengths, in a process of its own."""
    return [Count(**one) for one in alone("counts", [asdict(case), seq_lens])]


def count_rows(
    models: Iterable[str], seq_lens: list[int], batch_sizes: list[int], world_size: int
) -> list[dict[str, Any]]:
    """Rows of the JSON, one a model, MBS and T: the automatic method against plain TorchTitan."""
    rows = []
    for model in models:
        for mbs in batch_sizes:
            show(f"counting {model}, MBS {mbs}, T {', '.join(map(str, seq_lens))}")
            plain, private = (
                count(Case(model, method, mbs, world_size), seq_lens)
                for method in ("plain", automatic(mbs))
            )
            for seq_len, base, one in zip(seq_lens, plain, private, strict=True):
                row = {"model": model, "method": automatic(mbs), "seq_len": seq_len}
                row |= {"local_batch_size": mbs, "world_size": world_size}
                row |= {"flops_vs_non_dp": one.flops / base.flops, "flops": one.flops}
                row |= {"bytes_vs_non_dp": one.bytes / base.bytes, "bytes": one.bytes}
                rows.append(row | {"non_dp_bytes": base.bytes})
    return rows


def count_here(case: Case, seq_lens: list[int]) -> list[Count]:
    """Count in this process, which has no process group: what `count` returns."""
    import torchtitan_dp.distributed  # noqa: F401  lets TorchTitan import without a GPU

    # isort: split
    from torchtitan_dp.config.load import load_config
    from torchtitan_dp.models import parallelize
    from torchtitan_dp.models.hugging_face import shape
    from torchtitan_dp.plan.fake_step import MemoryTracker, Step, fake_world

    from .counting import Counts
    from .plain_step import PlainStep

    config = load_config(case.arguments(max(seq_lens)), case.world_size)
    args = shape(config)
    args.n_layers = case.n_layers or args.n_layers
    make: Any = PlainStep if case.method == "plain" else Step
    found, counts = [], Counts()
    # Copies for gloo alone are left out.
    as_on_cuda = unittest.mock.patch.object(parallelize, "_sum_reductions_only")
    with fake_world(case.world_size, repeated=counts.repeated), as_on_cuda, counts:
        step = make(config, args, MemoryTracker("activations"))
        step.microbatch(min(seq_lens))  # lays out what is kept, and makes later ones accumulate
        for seq_len in seq_lens:
            counts.start_over()
            step.microbatch(seq_len)
            flops = counts.flops
            found.append(Count(flops["products"], flops["attention"], counts.bytes))
    gc.collect()
    return found


if __name__ == "__main__":
    case_, seq_lens_ = json.load(sys.stdin)
    print(json.dumps([asdict(one) for one in count_here(Case(**case_), seq_lens_)]))
