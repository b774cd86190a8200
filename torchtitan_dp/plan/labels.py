"""Labels for a step's memory: of FSDP2, the ring, the loss head and the gradient methods.

The functions that allocate it are wrapped while a step is tracked; each label is a category of the
plan's table (`plan.memory`).
"""

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch

import torchtitan_dp.distributed  # noqa: F401  lets TorchTitan import without a GPU

# isort: split
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

from torchtitan_dp.distributed import ring
from torchtitan_dp.gradients.clipped_sum import ClippedSum, GradientMethod
from torchtitan_dp.gradients.fsdp import ReduceScatterOverCP, RowLayout
from torchtitan_dp.gradients.methods import METHODS
from torchtitan_dp.models import loss_head
from torchtitan_dp.plan.tracker import MemoryTracker, wrapped

GATHERED = "gathered"  # the label of weights that FSDP2 has gathered


@contextlib.contextmanager
def tracking(*, like_cuda: bool = True) -> Iterator[MemoryTracker]:
    """Enter a tracker that labels storages of FSDP2, the ring, the loss head and the gradient
    methods by `memory.CATEGORIES`, and "gathered"."""
    workspace = _flash_workspace if like_cuda else None
    tracker = MemoryTracker("activations", workspace, apart=GATHERED)

    def label(name: str) -> Any:
        return lambda *_, **__: tracker.labelled(name)

    with contextlib.ExitStack() as stack:
        for owner, name, around in (
            (FSDPParamGroup, "unshard", label("communication")),
            (FSDPParamGroup, "wait_for_unshard", label(GATHERED)),
            (FSDPParamGroup, "post_backward", functools.partial(_reduction, tracker)),
            (ring.PassedAround, "send", label("communication")),
            (ring.GatheredAtOnce, "send", label("communication")),
            (ReduceScatterOverCP, "__call__", functools.partial(_shards, tracker)),
            (ClippedSum, "add", functools.partial(_samples, tracker)),
            (ClippedSum, "add_group", functools.partial(_group, tracker)),
            (ClippedSum, "lay_out", label("accumulator")),
            *(
                (kind, name, functools.partial(_formed, tracker))
                for kind in {method.kind for method in METHODS.values()}
                for name in kind.makes_gradients
            ),
            (RowLayout, "allocate", label("communication")),
            (loss_head, "_chunk", label("loss_head")),
        ):
            stack.enter_context(wrapped(owner, name, around))
        stack.enter_context(tracker)
        yield tracker


@contextlib.contextmanager
def _reduction(tracker: MemoryTracker, group: FSDPParamGroup, *_: Any) -> Iterator[None]:
    """Label whole gradients that FSDP2 is about to reduce, and then frees."""
    unsharded = [getattr(p, "_unsharded_param", None) for p in group.fsdp_params]
    whole = [p.grad for p in unsharded if p is not None and p.grad is not None]
    tracker.relabel(whole, "communication")
    with tracker.labelled("communication"):
        yield


@contextlib.contextmanager
def _shards(
    tracker: MemoryTracker,
    reduction: ReduceScatterOverCP,
    output_tensor: torch.Tensor,
    input_tensor: torch.Tensor,
    **__: Any,
) -> Iterator[None]:
    """Label what becomes this rank's shard of one sample's gradient: FSDP2's output, or input."""
    kept = [output_tensor, input_tensor] if reduction.keeps_input else [output_tensor]
    tracker.relabel(kept, "per_sample_shards")
    with tracker.labelled("per_sample_shards"):
        yield


@contextlib.contextmanager
def _samples(
    tracker: MemoryTracker, _: ClippedSum, shards: list[torch.Tensor], __: torch.Tensor
) -> Iterator[None]:
    tracker.end_stretch("first")
    tracker.relabel(shards, "per_sample_shards")
    with tracker.labelled("per_sample_shards"):
        yield


@contextlib.contextmanager
def _group(
    tracker: MemoryTracker, _: ClippedSum, __: int, parts: dict[str, torch.Tensor], *___: Any
) -> Iterator[None]:
    tracker.relabel(parts.values(), "per_sample_shards")
    with tracker.labelled("per_sample_shards"):
        yield


@contextlib.contextmanager
def _formed(
    tracker: MemoryTracker, gradients: GradientMethod, *_: Any, **__: Any
) -> Iterator[None]:
    with tracker.labelled("per_sample_shards"):
        yield
    tracker.relabel_storages(gradients.held(), "per_sample_shards")


def _flash_workspace(operator: Any, args: Any) -> int:
    """Count what FlashAttention 2's backward takes on CUDA: dQ in fp32, a number a row, and dK and
    dV of every query head where heads share them. The CPU's kernel takes next to nothing.
    """
    aten = torch.ops.aten
    if operator is not aten._scaled_dot_product_flash_attention_for_cpu_backward.default:
        return 0
    query, key = args[1], args[2]  # (B, heads, T, head_dim)
    shared = 0
    if query.shape[1] != key.shape[1]:
        expanded = key.numel() // key.shape[1] * query.shape[1]
        shared = 2 * expanded * key.element_size()
    return int(4 * query.numel() + 4 * query.numel() // query.shape[-1] + shared)
