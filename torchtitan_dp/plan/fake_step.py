"""One training step on one rank under a `MemoryTracker`: with fake tensors, nothing is computed.

It builds what `DPTrainer` builds and runs its step. Fake tensors know shapes and dtypes only, and a
fake process group answers at once for any number of ranks, so a rank of an 8B run fits a laptop.
The tracker counts each new storage once, under the label in force when it was made, until it is
freed. Labels are those of the source (`gradients.labels`); `tracking` adds FSDP2's.
"""

import contextlib
import copy
import functools
import math
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor

import torchtitan_dp.distributed  # noqa: F401  lets TorchTitan import without a GPU

# isort: split
from torchtitan.distributed import ParallelDims

from torchtitan_dp.base import torch_private
from torchtitan_dp.base.torch_private import DispatchMode, tree_iter, unsharded_gradients
from torchtitan_dp.config import JobConfig
from torchtitan_dp.config.derived import mesh_degrees
from torchtitan_dp.distributed import host_memory, windows
from torchtitan_dp.gradients import norms, optimizer
from torchtitan_dp.gradients.clipped_sum import ClippedSum
from torchtitan_dp.gradients.fsdp import ReductionGroups, RowLayout
from torchtitan_dp.gradients.labels import TRACKER
from torchtitan_dp.gradients.operands import tiles
from torchtitan_dp.gradients.optimizer import MomentumSGD
from torchtitan_dp.gradients.step import build_step
from torchtitan_dp.models import feed_forward, loss
from torchtitan_dp.models.causal_lm import formulas
from torchtitan_dp.models.causal_lm.model import CausalLM
from torchtitan_dp.models.causal_lm.settings import ModelArgs
from torchtitan_dp.models.ema import ema_of
from torchtitan_dp.models.loss import SampleLosses, shard_of
from torchtitan_dp.models.parallelize import parallelize, trained_fsdp_modules
from torchtitan_dp.models.parameters import local_part, trainable_parameters
from torchtitan_dp.privacy.banded import StepNoise
from torchtitan_dp.privacy.clipping import Clip


class LocalOperators(DispatchMode):
    """A dispatch mode that calls `ran` after each operator on local tensors."""

    def __init__(self) -> None:
        super().__init__()
        self._paused = False
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Any:
        # DTensor tries operators on tensors of the whole shape, which exist nowhere.
        self._stack.enter_context(wrapped(*torch_private.shape_propagation(), self._pause))
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._stack.close()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # its local operators come next
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if not self._paused:
            self.ran(func, args, kwargs, result)
        return result

    def ran(self, func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> None:
        raise NotImplementedError

    @contextlib.contextmanager
    def _pause(self, *_: Any, **__: Any) -> Iterator[None]:
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before


class MemoryTracker(LocalOperators):
    """A dispatch mode that counts the current and the peak bytes of each label."""

    def __init__(self, label: str, workspace: Callable[[Any, Any], int] | None = None) -> None:
        """`label` is the default; `workspace` returns the bytes that a kernel takes and frees."""
        super().__init__()
        self.base, self._labels = label, list[str]()
        self._workspace = workspace
        self._total = self._peak_of_stretch = 0
        self.current: dict[str, int] = {}
        self.peak: dict[str, int] = {}
        self.peak_bytes = 0  # the most that were alive at once; `peak` has them by label
        self.stretches: dict[str, int] = {}  # the most in each, by name
        self._known: dict[int, tuple[weakref.ref[torch.UntypedStorage], str, int]] = {}

    def __enter__(self) -> "MemoryTracker":
        resize = torch.UntypedStorage.resize_

        def counted(storage: torch.UntypedStorage, size: int) -> Any:
            result = resize(storage, size)
            if known := self._known.get(id(storage)):
                reference, label, before = known
                self._known[id(storage)] = reference, label, storage.nbytes()
                self._change(label, storage.nbytes() - before)
            return result

        # FSDP2 frees what it gathered by resizing storages to 0, which no mode sees.
        self._stack.enter_context(mock.patch.object(torch.UntypedStorage, "resize_", counted))
        super().__enter__()
        return self

    def ran(self, func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> None:
        receives = func.namespace == "_c10d_functional"  # the operator makes what it receives
        with self.labelled("communication") if receives else contextlib.nullcontext():
            for value in tree_iter(result):
                if isinstance(value, Tensor):
                    self._count(value)
        if self._workspace is not None and (size := self._workspace(func, args)):
            self._change(self._label, size)
            self._change(self._label, -size)

    @property
    def _label(self) -> str:
        return self._labels[-1] if self._labels else self.base

    def start_over(self) -> None:
        """Forget the peak so far: the next is sought from what is alive now."""
        self.peak_bytes, self.peak = self._total, dict(self.current)
        self._peak_of_stretch = self._total
        self.stretches = {}

    def end_stretch(self, name: str) -> None:
        """Name what has run since the last stretch's end."""
        self.stretches[name] = max(self._peak_of_stretch, self.stretches.get(name, 0))
        self._peak_of_stretch = self._total

    @contextlib.contextmanager
    def labelled(self, label: str) -> Iterator[None]:
        self._labels.append(label)
        try:
            yield
        finally:
            self._labels.pop()

    def relabel(self, tensors: Iterable[Tensor], label: str) -> None:
        """Give these tensors' storages this label from now on, and count those that are new."""
        for tensor in map(local_part, tensors):
            self._count(tensor)
            key = id(tensor.untyped_storage())
            if known := self._known.get(key):
                reference, before, size = known
                self._known[key] = reference, label, size
                self.current[before] -= size
                self.current[label] = self.current.get(label, 0) + size

    def _count(self, tensor: Tensor) -> None:
        if tensor.device.type == "meta" or tensor.is_sparse:  # whose parts were counted before
            return
        storage = tensor.untyped_storage()
        key = id(storage)
        if key in self._known:
            return
        label, size = self._label, storage.nbytes()
        self._known[key] = weakref.ref(storage, functools.partial(self._forget, key)), label, size
        self._change(label, size)

    def _forget(self, key: int, _: object) -> None:
        _, label, size = self._known.pop(key)
        self._change(label, -size)

    def _change(self, label: str, size: int) -> None:
        self.current[label] = self.current.get(label, 0) + size
        self._total += size
        if self._total > self.peak_bytes:
            self.peak_bytes, self.peak = self._total, dict(self.current)
        self._peak_of_stretch = max(self._peak_of_stretch, self._total)


def wrapped(owner: Any, name: str, around: Callable[..., Any]) -> Any:
    """Patch a function of `owner` to run within the context manager `around(*its arguments)`."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def within(*args: Any, **kwargs: Any) -> Any:
        with around(*args, **kwargs):
            return original(*args, **kwargs)

    return mock.patch.object(owner, name, within)


@contextlib.contextmanager
def tracking(*, like_cuda: bool = True) -> Iterator[MemoryTracker]:
    """Enter a tracker of `memory.CATEGORIES`; `like_cuda` counts CUDA's workspaces too."""
    tracker = MemoryTracker("activations", _flash_workspace if like_cuda else None)

    def communicates(group: Any, *_: Any, **__: Any) -> Any:
        tracker.relabel(unsharded_gradients(group), "communication")
        return tracker.labelled("communication")

    fsdp_group = torch_private.fsdp_param_group()
    with contextlib.ExitStack() as stack:
        for name in ("unshard", "wait_for_unshard", "post_backward"):
            stack.enter_context(wrapped(fsdp_group, name, communicates))
        stack.callback(TRACKER.reset, TRACKER.set(tracker))
        yield stack.enter_context(tracker)


def _flash_workspace(operator: Any, args: Any) -> int:
    """Count what FlashAttention 2's backward takes on CUDA: dQ in fp32, a number a row, and dK and
    dV of every query head where heads share them."""
    _, backward = torch_private.attention_operators("cpu")
    if operator is not backward:
        return 0
    query, key = args[1], args[2]  # (B, heads, T, head_dim)
    shared = 0
    if query.shape[1] != key.shape[1]:
        shared = 2 * key.numel() // key.shape[1] * query.shape[1] * key.element_size()
    return int(4 * query.numel() + 4 * query.numel() // query.shape[-1] + shared)


Repeated = Callable[[int], contextlib.AbstractContextManager[None]]


class _RoomyClippedSum(ClippedSum):
    """Allocates the accumulator up front: the first microbatch is measured as any other."""

    def __init__(self, *args: Any, **terms: Any) -> None:
        super().__init__(*args, **terms)
        dp_shard, cp = self.groups.dp_shard_size, self.groups.cp_size
        shapes = (parameter.shape for parameter in self.parameters.values())
        shape = (dp_shard, sum(RowLayout(shape, dp_shard, cp).chunk_numel for shape in shapes))
        self._room: Tensor | None = torch.empty(shape, dtype=torch.float32)
        self.on_add: Callable[[], None] = lambda: None

    def lay_out(self, *args: Any) -> None:
        self._room = None
        super().lay_out(*args)

    def add(self, shards: list[Tensor], valid_B: Tensor) -> Clip:
        self.on_add()
        return super().add(shards, valid_B)

    def take(self) -> dict[str, Tensor]:
        if self._room is None:
            return super().take()
        # As large as any step's, also after a step without a microbatch.
        chunk_N = self._room[0]
        if self.groups.dp_shard is not None:
            chunk_N = torch.empty_like(chunk_N)
        return {
            name: chunk_N.narrow(0, 0, parameter.to_local().numel())  # type: ignore[attr-defined]
            for name, parameter in self.parameters.items()
        }


class Step:
    """Lays a model over a mesh and takes its step, within an entered tracker: updates and
    microbatches in any order; the first update makes AdamW's state."""

    def __init__(self, config: JobConfig, args: ModelArgs, tracker: MemoryTracker) -> None:
        self.config, self.tracker = config, tracker
        with torch_private.real_tensors():  # meshes are lists of ranks, which are looked at
            dims, degrees = parallel_dims(config)
            with torch.device("meta"):
                args = copy.deepcopy(args)
                args.max_seq_len = config.training.seq_len
                self.model = CausalLM(args)
            parallelize(self.model, dims, config)
            groups = ReductionGroups.build("cpu", degrees)
        with tracker.labelled("parameters"):
            self.model.to_empty(device="cpu")
            parameters = trainable_parameters(self.model)
            for parameter in parameters.values():
                nn.init.zeros_(parameter.to_local())  # type: ignore[attr-defined]
        with tracker.labelled("accumulator"):
            step = build_step(
                config.privacy,
                self.model,
                parameters,
                trained_fsdp_modules(self.model),
                groups,
                max_grad_norm=config.privacy.max_grad_norm,
                clipped_sum_type=_RoomyClippedSum,
            )
        self.clipped_sum, self.gradients = step.clipped_sum, step.gradients
        self.clipped_sum.on_add = lambda: tracker.end_stretch("first")  # type: ignore[attr-defined]
        self.gradients.start_step(bytes(32))
        # One parameter at a time: temporaries as small as those of the fused kernel's rank.
        inner: torch.optim.Optimizer
        if config.optimizer.name == MomentumSGD.__name__:
            inner = MomentumSGD(parameters.values(), lr=0.0)
        else:
            inner = torch.optim.AdamW(parameters.values(), fused=True)
        batch = config.training.global_batch_size
        with torch_private.real_tensors():  # it asks where its shards lie
            self.optimizer = step.optimizer(inner, noise_multiplier=1.0, expected_batch_size=batch)
        with tracker.labelled("optimizer"):
            self.average = ema_of(config, self.model)
        with tracker.labelled("earlier_noise"):
            numel = sum(p.to_local().numel() for p in parameters.values())  # type: ignore[attr-defined]
            bands = 1 if config.privacy.noise == "independent" else config.privacy.bands
            assert bands != "auto"
            self.earlier_noise = torch.empty(bands - 1, numel)
        self.model.output.register_forward_pre_hook(self._enter_loss_head)
        end_stretches_at_blocks(self.model, tracker)
        self.losses = SampleLosses(self.model, torch.device("cpu"), shard_of(dims, config))

    def microbatch(self, seq_len: int) -> None:
        """Run forward and backward, clip, and add to the sum."""
        self.model.model_args.max_seq_len = seq_len
        with torch.no_grad(), torch.device("cpu"), self.tracker.labelled("activations"):
            self.model.compute_buffers()
        samples = self.gradients.batch_size or self.config.training.local_batch_size
        tokens_BT = torch.zeros((samples, seq_len), dtype=torch.int64)
        if self.config.data.windows_per_draw > 1:  # a third needs no more than the second
            self.gradients.hold(self.losses(tokens_BT, torch.zeros_like(tokens_BT)))
        loss_B = self.losses(tokens_BT, torch.zeros_like(tokens_BT))
        valid_B = torch.ones(samples, dtype=torch.bool)
        self.gradients.accumulate_clipped(loss_B, valid_B, [-1] * samples)
        self.tracker.base = "activations"
        self.tracker.end_stretch("end")

    def _enter_loss_head(self, _: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        self.tracker.base = "loss_head"
        inputs[0].register_hook(lambda _: setattr(self.tracker, "base", "activations"))

    def update(self) -> None:
        with self.tracker.labelled("accumulator"):
            clipped_sum = self.clipped_sum.take()
        with self.tracker.labelled("optimizer"):
            self.optimizer.step(clipped_sum, StepNoise(bytes(32)))
            if self.average is not None:
                self.average.update()
        del clipped_sum
        self.clipped_sum.reset()


def end_stretches_at_blocks(model: nn.Module, tracker: MemoryTracker) -> None:
    """End a stretch of the microbatch after the loss head and after each block's backward. Blocks
    are named by their distance from either end, as those of a deeper model are."""
    blocks = list(model.layers.children())  # type: ignore[operator, union-attr]
    names = ["between"] * len(blocks)
    names[-2:], names[:2] = ["before last", "last"], ["first", "second"]
    if len(blocks) < 4:
        names = [f"block {place}" for place in range(len(blocks))]
    ended = ["head", *reversed(names[1:])]  # when the gradient of a block's output is there

    def watch(name: str) -> Any:
        def hook(_: nn.Module, __: Any, output: Tensor) -> None:
            output.register_hook(lambda _: tracker.end_stretch(name))

        return hook

    for block, name in zip(reversed(blocks), ended, strict=True):
        block.register_forward_hook(watch(name))


def parallel_dims(config: JobConfig) -> tuple[ParallelDims, tuple[int, int, int]]:
    """Build the meshes; also returns (dp_replicate, dp_shard, cp)."""
    degrees = mesh_degrees(config)
    dims = ParallelDims(*degrees, 1, 1, 1, 1, math.prod(degrees))
    dims.build_mesh()
    return dims, degrees


@contextlib.contextmanager
def fake_world(
    world_size: int, *, like_cuda: bool = True, repeated: Repeated | None = None
) -> Iterator[None]:
    """Simulate rank 0 of `world_size` on fake tensors, which keep what CUDA's kernels keep.

    `repeated` is entered around the tile that stands for all between the first and the last, with
    their number, to count operations. A window's tiles, no two alike, then all run.
    """
    dist.init_process_group("fake", rank=0, world_size=world_size)
    with contextlib.ExitStack() as stack:
        stack.callback(dist.destroy_process_group)

        def patch(owner: Any, name: str, replacement: Any) -> None:
            stack.enter_context(mock.patch.object(owner, name, replacement))

        def nothing(*_: Any, **__: Any) -> None:
            pass

        def on_no_device(numel: int, dtype: torch.dtype, _: torch.device) -> Tensor:
            return torch.empty(numel, dtype=dtype, device="meta")

        # Nothing is drawn or converted, in small parts that take next to no memory; and where a
        # storage would lie only distinguishes storages.
        for name in ("add_gaussian_noise_", "add_secure_gaussian_noise_"):
            patch(optimizer, name, nothing)
        patch(norms, "add_gaussian_noise_", nothing)
        patch(torch.UntypedStorage, "data_ptr", lambda storage: id(storage))
        # It returns the tensor that it waits for; its fake returns another.
        patch(torch_private.functional_collectives, "wait_tensor", lambda tensor: tensor)
        # The host's memory is another.
        patch(host_memory, "page_locked", on_no_device)
        for owner in (feed_forward, loss):
            patch(owner, "tiles", functools.partial(_some_tiles, repeated))
        if repeated is None:
            patch(windows, "tiles", functools.partial(_some_tiles, None))
        if like_cuda:
            patch(formulas, "use_lean_norms", nothing)
            patch(F, "rms_norm", lambda x, _, weight, __: _FusedRMSNorm.apply(x, weight))
        # Parameters are on the meta device until they are made fake.
        stack.enter_context(torch_private.fake_tensors())
        yield


def _some_tiles(repeated: Repeated | None, tokens: int, size: int) -> Iterator[slice]:
    # The first tile, the second for all between, and the last.
    every = list(tiles(tokens, size))
    yield from every[:1]
    if len(every) > 2:
        with repeated(len(every) - 2) if repeated else contextlib.nullcontext():
            yield every[1]
    yield from every[1:][-1:]


class _FusedRMSNorm(torch.autograd.Function):
    """What CUDA's fused kernel allocates: its results, and one number a row for backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(x, x.new_empty((*x.shape[:-1], 1), dtype=torch.float32), weight)
        return x.clone()  # read once, written once

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, _, weight = ctx.saved_tensors
        needs_x, needs_weight = ctx.needs_input_grad
        return (x + grad_y if needs_x else None, torch.empty_like(weight) if needs_weight else None)
