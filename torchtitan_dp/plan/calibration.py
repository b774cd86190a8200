"""Measures this machine's rates, so that a plan predicts for it what it predicts for listed ones.

Operands are many enough to lie outside of caches, and launches are those of a small training step,
as in a run.
"""

import dataclasses
import functools
import itertools
import math
import time
from collections.abc import Callable, Iterable
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import torchtitan_dp.distributed  # noqa: F401  lets TorchTitan import without a GPU

# isort: split
from torchtitan.models.attention import ScaledDotProductAttentionWrapper

from torchtitan_dp.collectives import pass_on
from torchtitan_dp.distributed.attention import (
    apply_ring_attention,
    configure_ring,
    mesh_of_this_rank,
)
from torchtitan_dp.distributed.ring import Shard
from torchtitan_dp.models.rms_norm import use_lean_norms
from torchtitan_dp.plan.machines import Curve, Machine, read
from torchtitan_dp.plan.seconds import parts_of
from torchtitan_dp.plan.tracker import MemoryTracker
from torchtitan_dp.plan.work import (
    ATTENTION,
    ATTENTION_BACKWARD,
    GATHER,
    MEMORY,
    NEW,
    PRODUCT,
    RING,
    Counting,
    Transfer,
    Work,
)
from torchtitan_dp.privacy.noise import add_gaussian_noise_
from torchtitan_dp.torch_private import context_parallel_handlers


def calibrate(device: torch.device, name: str, memory_gib: float) -> Machine:
    """Measure this machine in half a minute: a rank's rates, all ranks at once.
    Collective over the world, within one node."""
    timed = _Clock(device)
    is_cuda = device.type == "cuda"
    sizes = (512, 1024, 2048, 4096, 8192) if is_cuda else (32, 64, 128, 256, 512, 1024)
    rates: dict[str, list[tuple[float, float]]] = {}
    for dtype in (torch.float32, torch.bfloat16) if is_cuda else (torch.float32,):
        word = str(dtype).removeprefix("torch.")
        for n in sizes:
            flops, shape = 2.0 * n**3, (_many(n * n * dtype.itemsize), n, n)
            squares = torch.randn(shape, dtype=dtype, device=device)
            seconds = timed(_in_turn(torch.mm, squares, squares.roll(1, 0)), _calls(flops))
            rates.setdefault(f"{PRODUCT} {word}", []).append((flops, flops / seconds))
        if is_cuda and dtype == torch.float32:
            continue  # no attention of 32 bits is asked for where 16 are at hand
        for tokens in (2048, 16384) if is_cuda else (128, 512, 2048):
            for kind, flops, seconds in _attention(timed, tokens, dtype, device):
                rates.setdefault(f"{kind} {word}", []).append((flops, flops / seconds))
    for size in (2**22, 2**28) if is_cuda else (2**12, 2**15, 2**18, 2**21, 2**24, 2**26, 2**28):
        x, moved = torch.ones(_many(size), size // 4, device=device), 2.0 * size
        for kind, multiply in ((MEMORY, Tensor.mul_), (NEW, Tensor.mul)):
            seconds = timed(_in_turn(multiply, x, [1.0] * len(x)), _calls(moved))
            rates.setdefault(kind, []).append((moved, moved / seconds))
    rates["noise"] = [(0, _noise(timed, device))]
    launch = _launch(timed)
    curves = {kind: tuple(points) for kind, points in rates.items()}
    alone = Machine(name, memory_gib, dist.get_world_size(), curves, launch, overlaps=is_cuda)
    return dataclasses.replace(alone, rates=curves | _transfers(timed, alone))


class _Clock:
    """Times a function on all ranks at once: the median of several rounds, the mean of ranks."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def __call__(self, function: Callable[[], object], calls: int = 1, rounds: int = 5) -> float:
        """Return the seconds of a call, of so many a round."""
        function()
        seconds = []
        for _ in range(rounds):
            dist.barrier()
            self._wait()
            start = time.perf_counter()
            for _ in range(calls):
                function()
            self._wait()
            seconds.append((time.perf_counter() - start) / calls)
        found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(found, sorted(seconds)[rounds // 2])
        return float(sum(found) / len(found))

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def _many(size: int) -> int:
    """Return how many tensors of so many bytes do not fit into caches, as in a step; up to as many
    as are used."""
    return max(min(2**26 // size, 1000), 1)


def _in_turn(function: Callable[..., object], *operands: Iterable[Any]) -> Callable[[], object]:
    """Return a call of a function with the next of its operands, over and over."""
    every = itertools.cycle(list(zip(*operands, strict=True)))
    return lambda: function(*next(every))


def _calls(size: float) -> int:
    """Return how many operations of a size a round is made of."""
    return max(1, min(100, int(3e7 / size)))


def _attention(
    timed: _Clock, tokens: int, dtype: torch.dtype, device: torch.device
) -> list[tuple[str, float, float]]:
    """Time attention of 8 heads of 64 in the blocks of a rank's ring, each of equally many scores,
    forward and backward: kind, FLOPs and seconds of a block."""
    shape = (_many(3 * 8 * tokens * 64 * dtype.itemsize), 3, 1, 8, tokens, 64)
    inputs = [
        [x.requires_grad_() for x in qkv] for qkv in torch.randn(shape, dtype=dtype, device=device)
    ]
    ranks, attend = dist.get_world_size(), F.scaled_dot_product_attention

    def blocks(query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
        of_another = query, key[:, :, : tokens // 2], value[:, :, : tokens // 2]
        others = [attend(*of_another) for _ in range(1, ranks)]
        return [attend(query, key, value, is_causal=True), *others]

    outputs = [blocks(*qkv) for qkv in inputs]
    forward = _in_turn(blocks, *zip(*inputs, strict=True))
    differentiate = functools.partial(torch.autograd.grad, retain_graph=True)
    ones = ([*map(torch.ones_like, of_blocks)] for of_blocks in outputs)
    backward = _in_turn(differentiate, outputs, inputs, ones)
    products = 2 * 8 * tokens**2 * 64 / 2
    return [
        (ATTENTION, 2 * products, timed(forward, _calls(products)) / ranks),
        (ATTENTION_BACKWARD, 5 * products, timed(backward, _calls(products)) / ranks),
    ]


def _launch(timed: _Clock) -> float:
    """Time a small operation in a training step: under autograd, in modules, in one FSDP2 group, as
    a small model is."""
    mesh = mesh_of_this_rank(timed.device.type, "alone")
    width, layers = 32, 8

    def block() -> nn.Module:
        first, last = nn.Linear(width, width), nn.Linear(width, width)
        return nn.Sequential(nn.RMSNorm(width, eps=1e-5), first, nn.SiLU(), last)

    model = nn.Sequential(*(block() for _ in range(layers))).to(timed.device)
    if timed.device.type == "cpu":
        use_lean_norms(model)
    fully_shard(model, mesh=mesh)
    x = torch.ones(width, width, device=timed.device)
    work, seconds = _counted(timed, lambda: model(x).sum(), calls=3)
    return seconds / sum(work.values())


def _noise(timed: _Clock, device: torch.device) -> float:
    """Measure the values of noise that a second adds."""
    flat = torch.zeros(2**20, device=device)
    terms = dict(std=1.0, key=bytes(32), name="calibration", start=0)
    return flat.numel() / timed(lambda: add_gaussian_noise_(flat, **terms))  # type: ignore[arg-type]


def _transfers(timed: _Clock, alone: Machine) -> dict[str, Curve]:
    """Time the transfers of a ring and of FSDP2, by the bytes that a rank sends.

    Those of FSDP2 share the time of a step, less that of its operations (`alone`) where nothing
    overlaps: in a step ranks wait for each other, and hooks take time. So do those of a ring there.
    """
    ranks, world = dist.get_world_size(), dist.group.WORLD
    if world is None or ranks == 1:
        return {}
    passed = []
    for sent in (2**6, 2**14, 2**18, 2**20, 2**22, 2**24):
        buffers = torch.zeros(_many(sent), sent // 4, device=timed.device)
        pass_one = _in_turn(lambda buffer: pass_on(buffer, world).wait(), buffers)
        passed.append((float(sent), sent / timed(pass_one, _calls(sent))))

    def in_a_step(own: Work, seconds: float) -> tuple[float, float]:
        sent_by = {done: own.pop(done) for done in [*own] if isinstance(done, Transfer)}
        moved = math.fsum(done.bytes * times for done, times in sent_by.items())
        of_one = moved / sum(sent_by.values())
        if not alone.overlaps:
            least = moved / read(tuple(passed), of_one)  # operations were timed by others
            seconds = max(seconds - math.fsum(parts_of(own, alone).values()), least)
        return of_one, moved / seconds

    if alone.overlaps:  # few tokens, so that next to nothing hides transfers
        grouped = [in_a_step(*_sharded_step(timed, n, 8)) for n in (128, 1024, 4096, 8192)]
    else:
        grouped = [in_a_step(*_sharded_step(timed, n, 256)) for n in (8, 128, 512, 1024, 2048)]
        passed = [in_a_step(*_ring_step(timed, n)) for n in (64, 128, 512, 2048)]
    return {RING: tuple(passed), GATHER: tuple(grouped)}


def _sharded_step(timed: _Clock, width: int, tokens: int) -> tuple[Work, float]:
    """Count and time a step of eight layers, each an FSDP2 group over all ranks."""
    mesh = init_device_mesh(timed.device.type, (dist.get_world_size(),))
    layers = (nn.Linear(width, width, bias=False, device=timed.device) for _ in range(8))
    model = nn.Sequential(*layers)
    for module in (*model, model):
        sharded = fully_shard(module, mesh=mesh)
        sharded.set_gradient_divide_factor(1.0)  # gloo sums alone
        sharded.set_force_sum_reduction_for_comms(True)
    x_TD = torch.ones(tokens, width, device=timed.device)
    return _counted(timed, lambda: model(x_TD).sum())


def _ring_step(timed: _Clock, width: int) -> tuple[Work, float]:
    """Count and time a step of eight layers, each with attention in heads of 64 by a ring over all
    ranks."""
    mesh = init_device_mesh(timed.device.type, (dist.get_world_size(),))
    x_BTD = torch.ones(1, 256, width, device=timed.device)
    layers = [nn.Linear(width, width, device=timed.device) for _ in range(8)]
    attention = ScaledDotProductAttentionWrapper()

    def loss() -> Tensor:
        made_BTD = x_BTD
        for layer in layers:
            heads = layer(made_BTD).unflatten(-1, (-1, 64)).transpose(1, 2)
            made_BTD = attention(heads, heads, heads).transpose(1, 2).flatten(2)
        return made_BTD.sum()

    with mock.patch.dict(context_parallel_handlers()):
        configure_ring(Shard(balanced=True))
        apply_ring_attention([attention], mesh, cudnn=False)
        found = _counted(timed, loss)
    apply_ring_attention([], mesh, cudnn=False)  # on the terms that this process had before
    return found


def _counted(timed: _Clock, loss: Callable[[], Tensor], calls: int = 1) -> tuple[Work, float]:
    """Count the work of a step that ends in a loss, and time it."""

    def step() -> None:
        loss().backward()

    step()
    counting = Counting()
    with MemoryTracker("", counts=counting):
        step()
    return counting.take(), timed(step, calls)
