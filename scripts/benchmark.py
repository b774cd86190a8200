"""Training with privacy against plain TorchTitan, on the same records, processes and model.

    python scripts/benchmark.py [--config FILE] [--devices N] [--json FILE] [--section.key value …]

Throughput: both trainers live in the same processes and take turns, a few steps each, so that a
machine whose speed drifts treats them alike; medians of the rounds are reported, and the median of
the rounds' ratios. A step of the private arm has a Poisson-distributed number of microbatches whose
mean is the plain arm's number; tokens are counted as processed. Peak memory: each arm in processes
of its own; the process's resident set on CPU, reserved device memory on CUDA.
"""

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

ROOT = Path(__file__).resolve().parent.parent
ARMS = {  # name: overrides
    "plain TorchTitan": ["--privacy.no-enable"],
    "microbatch": ["--privacy.target_epsilon=None", "--privacy.noise_multiplier=1.0"],
}
BASELINE = "plain TorchTitan"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--config", default=str(ROOT / "train_configs/llama3_debug.toml"))
    parser.add_argument("--devices", type=int, default=torch.cuda.device_count() or 2)
    parser.add_argument("--rounds", type=int, default=9, help="timed turns of each arm")
    parser.add_argument("--steps", type=int, default=4, help="optimizer steps in a turn")
    parser.add_argument("--microbatches", type=int, default=4, help="mean number in a step")
    parser.add_argument("--json", metavar="FILE")
    options, overrides = parser.parse_known_args()

    timed = _in_processes(options, overrides, list(ARMS), options.rounds)
    memory = {arm: _in_processes(options, overrides, [arm], 1)["memory"] for arm in ARMS}
    rows = [_row(arm, timed, memory) for arm in ARMS]
    result = {"machine": _machine(options.devices), "command": " ".join(sys.argv), "arms": rows}
    print(_table(rows))
    if options.json:
        Path(options.json).write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


def _in_processes(
    options: argparse.Namespace, overrides: list[str], arms: list[str], rounds: int
) -> dict[str, Any]:
    """Run the arms, in turns, in fresh processes; what rank 0 measured."""
    context = mp.get_context("spawn")
    queue = context.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29517", OMP_NUM_THREADS="1")
        arguments = (options, overrides, arms, rounds, folder, queue)
        mp.spawn(_worker, arguments, nprocs=options.devices)
        return queue.get()


def _worker(
    rank: int,
    options: argparse.Namespace,
    overrides: list[str],
    arms: list[str],
    rounds: int,
    folder: str,
    queue: Any,
) -> None:
    size = str(options.devices)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=size, LOCAL_WORLD_SIZE=size)
    threads = max((os.cpu_count() or 1) // options.devices, 1)
    torch.set_num_threads(threads)
    from torchtitan_dp.train_spec import register

    register()
    trainers = {arm: _build(arm, options, overrides, folder) for arm in arms}
    iterators = {a: t.batch_generator(t.dataloader) for a, t in trainers.items()}
    for arm in arms:  # warm up: lazy initialization, compilation
        _turn(trainers[arm], iterators[arm], 2)
    rates: dict[str, list[float]] = {arm: [] for arm in arms}
    for round_ in range(rounds):
        for arm in arms if round_ % 2 == 0 else reversed(arms):
            rates[arm].append(_turn(trainers[arm], iterators[arm], options.steps))
    config = next(iter(trainers.values())).job_config
    peak = torch.tensor([_peak_memory()], dtype=torch.float64)
    peak = peak.cuda() if torch.cuda.is_available() else peak
    dist.all_reduce(peak, op=dist.ReduceOp.MAX)
    if rank == 0:
        shape = {
            "seq_len": config.training.seq_len,
            "local_batch_size": config.training.local_batch_size,
            "world_size": options.devices,
        }
        queue.put({"rates": rates, "memory": peak.item(), "shape": shape})
    dist.barrier()
    dist.destroy_process_group()


def _build(arm: str, options: argparse.Namespace, overrides: list[str], folder: str) -> Any:
    """A trainer as `torchtitan_dp.train` builds it, without outputs."""
    from torchtitan_dp.cli import load_config  # first: lets TorchTitan import without a GPU

    # isort: split
    from torchtitan_dp.train import build_trainer

    quiet = [
        "--checkpoint.no-enable",
        "--validation.no-enable",
        "--metrics.no-enable-tensorboard",
        "--metrics.log_freq=1000000",
        "--training.steps=1000",
        f"--training.global_batch_size={options.microbatches}",
        f"--job.dump_folder={folder}/{arm.replace(' ', '_')}",
    ]
    arguments = ["--job.config_file", options.config, *quiet, *overrides, *ARMS[arm]]
    config = load_config(arguments, options.devices)
    os.makedirs(config.job.dump_folder, exist_ok=True)
    return build_trainer(config)


def _turn(trainer: Any, iterator: Any, steps: int) -> float:
    """Tokens per second over some steps, all devices together."""
    trainer.metrics_processor.ntokens_since_last_log = 0
    dist.barrier()
    start = time.perf_counter()
    for _ in range(steps):
        trainer.step += 1
        trainer.train_step(iterator)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    dist.barrier()
    elapsed = time.perf_counter() - start
    config = trainer.job_config.parallelism
    replicas = config.data_parallel_replicate_degree * config.data_parallel_shard_degree
    return trainer.metrics_processor.ntokens_since_last_log * replicas / elapsed


def _peak_memory() -> float:
    """Bytes."""
    if torch.cuda.is_available():
        return float(torch.cuda.max_memory_reserved())
    from torchtitan_dp.distributed.cpu import peak_memory_bytes

    return float(peak_memory_bytes())


def _row(arm: str, timed: dict[str, Any], memory: dict[str, float]) -> dict[str, Any]:
    rates, plain = timed["rates"][arm], timed["rates"][BASELINE]
    ratios = [a / b for a, b in zip(rates, plain, strict=True)]
    return {
        "name": arm,
        **timed["shape"],
        "tokens_per_second": statistics.median(rates),
        "throughput_vs_non_dp": statistics.median(ratios),
        "throughput_vs_non_dp_rounds": sorted(ratios),
        "peak_memory_gib": memory[arm] / 2**30,
        "memory_vs_non_dp": memory[arm] / memory[BASELINE],
    }


def _machine(devices: int) -> str:
    if torch.cuda.is_available():
        return f"{devices} x {torch.cuda.get_device_name()}, torch {torch.__version__}"
    return (
        f"CPU, {os.cpu_count()} cores, {platform.machine()}, {devices} gloo processes, "
        f"torch {torch.__version__}, Python {platform.python_version()}"
    )


def _table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| arm | T | MBS | devices | tokens/s | vs plain | peak GiB | vs plain |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        lines.append(
            f"| {row['name']} | {row['seq_len']} | {row['local_batch_size']} | "
            f"{row['world_size']} | {row['tokens_per_second']:,.0f} | "
            f"{row['throughput_vs_non_dp']:.3f} | {row['peak_memory_gib']:.3f} | "
            f"{row['memory_vs_non_dp']:.3f} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
