"""What one process of the benchmark does: build arms, warm up, and time or weigh their steps."""

import contextlib
import ctypes
import functools
import gc
import itertools
import os
import statistics
import time
import unittest.mock
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor

from .arms import Arm, Setting
from .processes import Journal, show

Step = Callable[[], None]


def time_in_turns(
    arms: list[Arm],
    setting: Setting,
    journal: Journal,
    key: str,
    folder: str,
    *,
    rounds: int,
    steps: int,
    warm_up: int,
) -> None:
    """Seconds a step of each arm: all live in these processes and take turns.

    Rank 0 writes each round down as it comes. Rounds that are there already are not repeated.
    """
    done = len(journal.of(key))
    with draws_of_fixed_size(setting.records):
        step_of = {arm.name: build(arm, setting, folder) for arm in arms}
        for step in step_of.values():
            seconds_of(step, warm_up)
        for round_ in range(done, rounds):
            names, seconds = list(step_of), {}
            for name in names if round_ % 2 == 0 else reversed(names):
                seconds[name] = seconds_of(step_of[name], steps) / steps
            if int(os.environ["RANK"]) == 0:
                journal.add(key, seconds)
                show(f"{setting}: round {round_ + 1} of {rounds}")


def weigh(arm: Arm, setting: Setting, folder: str) -> dict[str, Any]:
    """One arm alone: its memory.

    The peak is of this process, from its start to the end of the second step (the first one with
    AdamW's state); what PyTorch allocated is of a third.
    """
    map_tensors_alone()
    with draws_of_fixed_size(setting.records):
        step = build(arm, setting, folder)
        step()  # creates lazily what later steps keep
        step()
        peak, reserved = peak_bytes(), peak_reserved_bytes()
        allocated = allocated_peak_bytes(step)
    return {"peak_bytes": peak, "peak_reserved_bytes": reserved, "peak_allocated_bytes": allocated}


def time_alone(arm: Arm, setting: Setting, folder: str, *, steps: int) -> dict[str, Any]:
    """One arm alone, timed and weighed in one process: for a device that is lent for minutes."""
    with draws_of_fixed_size(setting.records):
        step = build(arm, setting, folder)
        seconds_of(step, 2)
        seconds = statistics.median(seconds_of(step, 1) for _ in range(steps))
    gib = {"allocated": peak_bytes(), "reserved": peak_reserved_bytes() or 0.0}
    return {"seconds": seconds} | {f"{of}_gib": round(n / 2**30, 2) for of, n in gib.items()}


def build(arm: Arm, setting: Setting, folder: str) -> Step:
    """Build a trainer as a run does, without outputs, and return what takes one step."""
    from torchtitan_dp.config.load import load_config  # first: lets TorchTitan import without a GPU

    # isort: split
    from torchtitan.protocols.train_spec import _extra_train_specs

    from torchtitan_dp.checkpoint.start import decision
    from torchtitan_dp.train.spec import register
    from torchtitan_dp.train.trainer import build_trainer

    config = load_config(setting.arguments(arm, folder), setting.devices)
    os.makedirs(config.job.dump_folder, exist_ok=True)
    with unittest.mock.patch.dict(_extra_train_specs):  # which take a name once
        register(config)
        if arm.opacus is not None:
            from .opacus_arms import OpacusTrainer

            return OpacusTrainer(config, arm.opacus).train_step  # type: ignore[arg-type]
        with stock_modules() if arm.stock else contextlib.nullcontext():
            trainer = build_trainer(config, decision(config))
    loader = trainer.batch_generator(trainer.dataloader)
    return functools.partial(_train_step, trainer, loader)


@contextlib.contextmanager
def stock_modules() -> Iterator[None]:
    """Build models with PyTorch's norms, each block a group of FSDP2 that is gathered and freed."""
    from torchtitan_dp.models import parallelize
    from torchtitan_dp.models.causal_lm import formulas

    with (
        unittest.mock.patch.object(formulas, "use_lean_norms", return_value=None),
        unittest.mock.patch.object(parallelize, "IN_ONE_GROUP", 0),
    ):
        yield


def _train_step(trainer: Any, loader: Any) -> None:
    trainer.step += 1
    trainer.train_step(loader)


@contextlib.contextmanager
def draws_of_fixed_size(records: int) -> Iterator[None]:
    """Let private trainers draw exactly `records` a step, so that all arms do equal work.

    For timing only: such a run is not what its privacy settings say.
    """

    def draw(key: bytes, population: int, rate: float, *, secure: bool) -> np.ndarray:
        rng = np.random.default_rng(list(key))  # the key is the same on all ranks
        return np.sort(rng.choice(population, records, replace=records > population))

    import torchtitan_dp.checkpoint.bookkeeping

    with unittest.mock.patch.object(torchtitan_dp.checkpoint.bookkeeping, "poisson_draw", draw):
        yield


def seconds_of(step: Step, steps: int) -> float:
    """Of some steps, from all ranks ready to all ranks done."""
    gc.collect()  # TorchTitan turns automatic collection off
    _wait_for_all()
    start = time.perf_counter()
    for _ in range(steps):
        step()
    _wait_for_all()
    return time.perf_counter() - start


def _wait_for_all() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    if dist.is_initialized():
        dist.barrier()


# Memory.


def map_tensors_alone() -> None:
    """Have glibc map every larger block by itself, so that the resident set is what is alive.

    Otherwise it keeps what is freed, in pieces, and the peak tells more of the order of calls than
    of what an arm needs. Slower: for weighing only.
    """
    mmap_threshold = -3  # M_MMAP_THRESHOLD
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(mmap_threshold, 2**16)


def peak_bytes() -> float:
    """The largest resident set so far on CPU; on CUDA the most that tensors took."""
    if torch.cuda.is_available():
        return float(torch.cuda.max_memory_allocated())
    from torchtitan_dp.distributed.cpu import peak_memory_bytes

    return float(peak_memory_bytes())


def peak_reserved_bytes() -> float | None:
    """The most that the CUDA allocator reserved; None on CPU, where there is no such pool."""
    return float(torch.cuda.max_memory_reserved()) if torch.cuda.is_available() else None


def allocated_peak_bytes(step: Callable[[], None]) -> float:
    """The most bytes that PyTorch's allocator has out during a step: what CUDA calls allocated.

    Without Python, its libraries and what the C library keeps: fit to compare methods by.
    """
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
        step()
        return float(torch.cuda.max_memory_allocated())
    activities, name = [torch.profiler.ProfilerActivity.CPU], "measured step"
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        step()  # the profiler sees only the frees of what it saw allocated
        gc.collect()
        at_rest = live_tensor_bytes()
        with torch.profiler.record_function(name):
            step()
    profiler = profile.profiler
    assert profiler is not None
    events = sorted(profiler.kineto_results.events(), key=lambda event: event.start_ns())
    (start,) = (event.start_ns() for event in events if event.name() == name)
    measured = (e for e in events if e.name() == "[memory]" and e.start_ns() > start)
    return at_rest + float(max(itertools.accumulate((e.nbytes() for e in measured), initial=0)))


def live_tensor_bytes() -> int:
    """Bytes of the distinct storages, on the training device, of all tensors that Python holds."""
    device_type = "cuda" if torch.cuda.is_available() else "cpu"
    storages: dict[int, int] = {}
    for thing in gc.get_objects():
        # A DTensor's own storage is empty; the local tensor that it wraps is listed by itself.
        if issubclass(type(thing), torch.Tensor) and not isinstance(thing, DTensor | FakeTensor):
            tensor: torch.Tensor = thing
            if tensor.device.type == device_type and tensor.layout == torch.strided:
                storage = tensor.untyped_storage()
                storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())
