"""A rehearsal before step 1: padding of every length a step may have, and an empty update.

A lack of memory on the longest sample, a missing kernel or a failed compilation would end a run
when the first record of that length is drawn, and the published number of steps would reveal the
draw (hazard row 47). So each length of `ladder` runs first, on padding: no record is read, and
failures do not depend on records.

Guarantee:
    Training's state is unchanged: weights, optimizer state (created if missing, all zeros), LR
    schedule, clipped sum, key streams, ledgers, RNG. If it passes, no later step allocates more on
    the device: a microbatch of padding runs the same operators on the same shapes as one of
    samples, beside the optimizer's state and the accumulator.

Assumed, as crashes that do not depend on records:
    - this process's free memory stays the same, and a device's allocator finds room again for
      earlier allocations (the orders of lengths differ);
    - the host has room, beside `check.host_memory`, for some 60 bytes a record (read before), 24
      a token of two microbatches, padding included, and 32 a sample for a step's statistics;
    - checkpoints, validation and `privacy.json`, whose shapes are public, take the same memory;
    - time: the longest microbatch on an accelerator is compared here with
      `comm.train_timeout_seconds`; a sample is read from the disk in less than the rest;
    - the machine: power, hardware, network, disks, drivers.
"""

import contextlib
import json
import math
import re
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import numpy as np
import torch

import torchtitan_dp.distributed  # noqa: F401  lets TorchTitan import without a GPU

# isort: split
from torchtitan.tools.logging import logger

from torchtitan_dp.base.process import Fault
from torchtitan_dp.checkpoint.plan import expected_rounds
from torchtitan_dp.config import JobConfig
from torchtitan_dp.config.derived import ladder
from torchtitan_dp.data.batching import Draw, Microbatch
from torchtitan_dp.distributed.agreement import is_lost_rank
from torchtitan_dp.gradients.fsdp import free_gathered
from torchtitan_dp.train.processor import SampleStatistics

# Microbatches that a device may lag behind its host: launches queue about 1,000 deep.
_MICROBATCHES_BEHIND = 4
_KINDS_OF_TOKENS = 64  # fewer than any vocabulary has
_LOOKED_AT = 1000  # units, of whose lengths a run's seconds are expected
_OUT_OF_MEMORY = re.compile(
    "out of memory|can't allocate memory|cannot allocate memory|bad_alloc|alloc_failed"
)


def rehearse(trainer: Any) -> None:
    """Run padding of every length on a `DPTrainer`, and an update that changes nothing; log what
    each takes. Collective over the world: three microbatches of the shortest length and two of each
    other, and two updates. Fault: one line that names what failed and what would fit."""
    config, metrics = trainer.job_config, trainer.metrics_processor
    rungs = ladder(config)
    begun = time.perf_counter()
    lengths = ", ".join(f"{rung:,}" for rung in rungs)
    logger.info(f"trying each length on padding, before any record is drawn: {lengths} tokens")
    statistics = SampleStatistics()
    trainer.gradients.start_step(bytes(32))  # a public key: padding contributes nothing

    def microbatch(length: int, fits: int) -> float:
        """Return the seconds of one."""
        start = time.perf_counter()
        with _failing_in_one_line(_microbatch(config, length), config, fits):
            trainer.accumulate(_padding(trainer, length), statistics)
            _wait_for(trainer.device)
        return time.perf_counter() - start

    def update() -> float:
        start = time.perf_counter()
        with _failing_in_one_line("an update (noise and optimizer)", config, None):
            column = trainer.books.settings.mechanism.column
            trainer.dp_optimizer.rehearse(trainer.clipped_sum.take(), column)
            _wait_for(trainer.device)
        return time.perf_counter() - start

    passed, seconds = 0, dict[int, float]()
    # Run the optimizer once after the first length, so that later lengths are measured with the
    # accumulator and the optimizer state allocated. Each runs twice: the first call compiles.
    for number, length in enumerate((rungs[0], *rungs)):
        cold = microbatch(length, passed)
        passed = length
        if number == 0:
            update()
        else:
            seconds[length] = min(cold, microbatch(length, length))
    _check_timeout(trainer, passed, seconds[passed])
    of_update = update()
    trainer.clipped_sum.reset()
    free_gathered(trainer.model_parts[0])
    _wait_for(trainer.device)
    elapsed = time.perf_counter() - begun
    metrics.time_last_log += elapsed  # the first logged throughput is of training
    metrics.device_memory_monitor.reset_peak_stats()
    logger.info(f"rehearsal: done in {elapsed:.1f} s")
    _log_seconds(trainer, seconds, of_update)


def _log_seconds(trainer: Any, seconds: dict[int, float], of_update: float) -> None:
    """Log what this machine takes: for people, and as JSON. A step is expected to have as many
    microbatches of each length as draws of these units give, which follows from records."""
    loader, left = trainer.feed.loader, trainer.job_config.training.steps - trainer.step
    rate, units = trainer.books.settings.mechanism.sample_rate, len(loader.units)
    looked_at = np.linspace(0, units - 1, min(units, _LOOKED_AT)).astype(np.int64)
    lengths = loader.lengths(Draw(looked_at), tuple(seconds))
    step, slots = of_update, loader.ranks * loader.batch_size
    for length, of_length in seconds.items():
        count = round(units * float(np.mean(lengths == length)))
        step += of_length * expected_rounds(count, rate, slots)
    found = ", ".join(f"{took:.3g} s of {length:,} tokens" for length, took in seconds.items())
    logger.info(f"rehearsal: a microbatch takes {found}; an update {of_update:.3g} s")
    logger.info(
        f"not private: expected: {timedelta(seconds=round(step * left))} for {left:,} steps, "
        f"{step:.3g} s each, without validation and checkpoints"
    )
    numbers = {"seconds_per_microbatch": seconds, "seconds_per_update": of_update}
    numbers |= {"seconds_per_step": step, "hours": step * left / 3600, "steps": left}
    logger.info(f"not private: rehearsal: {json.dumps(numbers)}")


def _padding(trainer: Any, length: int) -> Microbatch:
    """Make padding of several tokens: a router would send those of one kind to the same experts."""
    made: Microbatch = trainer.feed.padding(length)
    every = torch.arange(made.tokens_BT.numel(), device=made.tokens_BT.device)
    return made._replace(tokens_BT=every.remainder_(_KINDS_OF_TOKENS).view_as(made.tokens_BT))


def _check_timeout(trainer: Any, length: int, seconds: float) -> None:
    """Refuse a time-out that a device may exceed as it lags behind its host: NCCL counts from the
    launch of a collective. The time of padding is public, like its length."""
    config, timeout = trainer.job_config, trainer.job_config.comm.train_timeout_seconds
    if trainer.device.type != "cpu" and _MICROBATCHES_BEHIND * seconds > timeout:
        raise Fault(
            f"comm.train_timeout_seconds = {timeout}: {_microbatch(config, length)} takes "
            f"{seconds:.1f} s here, more than a quarter of it, and collectives wait for what was "
            f"launched before them; set it to {math.ceil(1.2 * _MICROBATCHES_BEHIND * seconds)} "
            "or more, or lower training.local_batch_size or training.seq_len"
        )


def _wait_for(device: torch.device) -> None:
    """Wait for the device, so that its failures are raised here."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


@contextlib.contextmanager
def _failing_in_one_line(what: str, config: JobConfig, fits: int | None) -> Iterator[None]:
    """Turn a failure within into one line; `fits` is the longest length that passed, or 0, and None
    for work without a length.
    """
    try:
        yield
    except AssertionError:
        raise  # ours: with its traceback
    except Exception as error:
        if is_lost_rank(error):
            raise  # nothing of this rank's failed
        text = str(error).strip()
        first = f"{type(error).__name__}: {text.splitlines()[0] if text else 'no message'}"
        where = f"rehearsal before the first step: {what}"
        found = isinstance(error, torch.OutOfMemoryError | MemoryError)
        if found or _OUT_OF_MEMORY.search(text.lower()):  # on a CPU it is a RuntimeError
            raise Fault(f"{where}: out of memory ({first}); {_remedy(config, fits)}") from error
        raise Fault(f"{where}: {first}") from error


def _remedy(config: JobConfig, fits: int | None) -> str:
    if fits is None:
        bands = "fewer privacy.bands, " if config.privacy.noise == "banded" else ""
        return f"what would fit: {bands}more ranks, or a smaller model"
    count, mode = config.training.local_batch_size, config.activation_checkpoint.mode
    remedies = {
        "parallelism.keep_weights_gathered = false": config.parallelism.keep_weights_gathered,
        f"training.seq_len = {fits} (samples of {fits:,} tokens passed)": fits > 0,
        f"activation_checkpoint.mode = 'full' (now '{mode}')": mode != "full",
        "activation_checkpoint.offload_inputs = true": mode == "full",
        f"a smaller training.local_batch_size (now {count})": count > 1,
        "more ranks": True,
    }
    return f"what would fit: {', or '.join(key for key, helps in remedies.items() if helps)}"


def _microbatch(config: JobConfig, length: int) -> str:
    count = config.training.local_batch_size
    samples = "1 sample" if count == 1 else f"{count} samples"
    return f"a microbatch of {samples} of {length:,} tokens"
