"""`--table counts` and `tiles`: what a step computes and moves, in figures that no noise touches:
private against plain TorchTitan, and the feed-forward in tiles against none.

One rank's microbatch (forward, backward, and with privacy: norm, clip, add) and its update are run
on fake tensors in a fake process group, as the plan does, with kernels counted as CUDA has them
(`counting`). Plain TorchTitan is the baseline trainer's model, loss and accumulation.
"""

import contextlib
import functools
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

from torchtitan_dp.gradients.methods import automatic
from torchtitan_dp.plan.memory import WITHOUT_DEVICES

from .processes import show

MODELS = ("1B", "3B", "8B")
SEQ_LENS = (4096, 16384, 65536)
BATCH_SIZES = (1, 4)


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
    """What one rank computes and moves, by part."""

    flops: dict[str, int]
    bytes: dict[str, int]


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


def count(case: Case, seq_lens: list[int]) -> dict[str, dict[int, Count]]:
    """Count, in a process of its own, a microbatch of each length (not the first of a step) and
    an update.

    Returns:
        {"microbatch": by length, "update": by the longest length alone}
    """
    found = alone("counts", [asdict(case), seq_lens])
    return {
        what: {int(seq_len): Count(**one) for seq_len, one in by_length.items()}
        for what, by_length in found.items()
    }


def count_rows(
    models: Iterable[str], seq_lens: list[int], batch_sizes: list[int], world_size: int
) -> list[dict[str, Any]]:
    """Rows of the JSON, one a model, MBS and T: the automatic method against plain TorchTitan."""
    rows = []
    for model in models:
        for mbs in batch_sizes:
            show(f"counting {model}, MBS {mbs}, T {', '.join(map(str, seq_lens))}")
            method = automatic(mbs)
            plain, private = (
                count(Case(model, one, mbs, world_size), seq_lens) for one in ("plain", method)
            )
            updates = [next(iter(found["update"].values())) for found in (plain, private)]
            for seq_len in seq_lens:
                pair = plain["microbatch"][seq_len], private["microbatch"][seq_len]
                rows.append(
                    {
                        "model": model,
                        "method": method,
                        "seq_len": seq_len,
                        "local_batch_size": mbs,
                        "world_size": world_size,
                        **_compared(*pair),
                        "update_bytes": [sum(one.bytes.values()) for one in updates],
                    }
                )
    return rows


def _compared(plain: Count, private: Count) -> dict[str, Any]:
    totals = [[sum(one.values()) for one in (x.flops, x.bytes)] for x in (plain, private)]
    (plain_flops, plain_bytes), (flops, moved) = totals
    return {
        "flops_vs_non_dp": flops / plain_flops,
        "bytes_vs_non_dp": moved / plain_bytes,
        "flops": flops,
        "non_dp_flops": plain_flops,
        "bytes": moved,
        "non_dp_bytes": plain_bytes,
        "bytes_by_part": private.bytes,
        "non_dp_bytes_by_part": plain.bytes,
    }


TILED_SHAPES = ((65536, 4), (1048576, 8))  # T, ranks
TRAINED = {"all weights": (), "LoRA": ("--lora.rank=16",)}


def tile_rows(models: list[str], shapes: tuple[tuple[int, int], ...] = TILED_SHAPES) -> list[Any]:
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


def count_here(case: Case, seq_lens: list[int]) -> dict[str, dict[int, Count]]:
    """Count in this process, which has no process group: what `count` returns."""
    import torch

    import torchtitan_dp.distributed  # noqa: F401  lets TorchTitan import without a GPU

    # isort: split
    from torchtitan_dp import optimizer
    from torchtitan_dp.config.load import load_config
    from torchtitan_dp.models import parallelize
    from torchtitan_dp.models.hugging_face import shape
    from torchtitan_dp.plan.fake_step import fake_world

    from . import fused
    from .counting import Counts

    config = load_config(case.arguments(max(seq_lens)), case.world_size)
    args = shape(config)
    args.n_layers = case.n_layers or args.n_layers
    found: dict[str, dict[int, Count]] = {"microbatch": {}, "update": {}}
    counts = Counts()
    with contextlib.ExitStack() as stack:
        stack.enter_context(fake_world(case.world_size, repeated=counts.repeated))
        for owner, name, instead in (
            # For gloo and the CPU alone.
            (parallelize, "_sum_reductions_only", _nothing),
            # As on CUDA.
            (torch.nn.functional, "rms_norm", fused.rms_norm),
            (optimizer, "add_gaussian_noise_", fused.noise),
            (torch.optim, "AdamW", functools.partial(_fused, torch.optim.AdamW)),
        ):
            stack.enter_context(unittest.mock.patch.object(owner, name, instead))
        make = _plain_step if case.method == "plain" else _private_step
        with counts:
            microbatch, update = make(config, args, counts)
            microbatch(min(seq_lens))  # lays out what is kept, and makes later ones accumulate
            for seq_len in seq_lens:
                counts.start_over()
                microbatch(seq_len)
                found["microbatch"][seq_len] = _taken(counts)
            counts.start_over()
            update()
            found["update"][max(seq_lens)] = _taken(counts)
    gc.collect()
    return found


def _nothing(*_: Any) -> None:
    pass


def _fused(adamw: Any, parameters: Any, **_: Any) -> Any:
    """The optimizer as `optimizer.implementation` has it by default."""
    return adamw(parameters, fused=True)


def _taken(counts: Any) -> Count:
    return Count(dict(counts.flops), dict(counts.bytes))


def _private_step(config: Any, args: Any, counts: Any) -> Any:
    """The plan's step."""
    from torchtitan_dp.gradients.clipped_sum import ClippedSum
    from torchtitan_dp.plan.fake_step import Step
    from torchtitan_dp.plan.tracker import MemoryTracker

    from .counting import counted

    step = Step(config, args, MemoryTracker("activations"))
    _watch_loss_head(step.model.output, counts)

    def microbatch(seq_len: int) -> None:
        with contextlib.ExitStack() as stack:
            for name, part in (("squared_norms", "norm"), ("accumulate", "clip and add")):
                stack.enter_context(counted(ClippedSum, name, counts, part))
            step.microbatch(seq_len)

    return microbatch, step.update


def _plain_step(config: Any, args: Any, counts: Any) -> Any:
    """What `BaselineTrainer` does in a step, which is TorchTitan's."""
    from torchtitan_dp.plan.tracker import MemoryTracker

    from .plain_step import PlainStep

    step = PlainStep(config, args, MemoryTracker("activations"))
    _watch_loss_head(step.model.output, counts)

    def microbatch(seq_len: int) -> None:
        step.microbatch(seq_len)
        counts.base = None

    return microbatch, step.update


def _watch_loss_head(output: Any, counts: Any) -> None:
    """Count for the loss head from its call on, until backward has passed its input."""

    def enter(_: Any, inputs: Any) -> None:
        counts.base = "loss head"
        inputs[0].register_hook(lambda _: setattr(counts, "base", None))

    output.register_forward_pre_hook(enter)


if __name__ == "__main__":
    case_, seq_lens_ = json.load(sys.stdin)
    counted_ = count_here(Case(**case_), seq_lens_)
    print(json.dumps({w: {t: asdict(one) for t, one in by.items()} for w, by in counted_.items()}))
