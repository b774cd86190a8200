"""Every private name of PyTorch and TorchTitan that the package uses, each behind one function or
one import.

A reason stands with each, and the public way where a supported release has one. The names are those
of torch 2.11 to 2.15; `tests/test_seams.py` fails by the name that another release moves,
and finds private names in any other file.
"""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any, Literal, TypeVar
from unittest import mock

import torch
import torch._utils
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor
from torch.distributed import _functional_collectives
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.nn.modules.batchnorm import _NormBase
from torch.utils import _python_dispatch, _pytree

AttentionKernel = Literal["flash", "cudnn", "efficient", "cpu"]
ModuleT = TypeVar("ModuleT", bound=nn.Module)


# Processes and their groups.

functional_collectives = _functional_collectives
"""Collectives that may run within a compiled block, where those of `dist` cannot be traced."""


def cpu_alone() -> AbstractContextManager[Any]:
    """Let libraries that are imported meanwhile find the CPU and no other device.

    TorchTitan asks for the device as it is imported, and takes "cuda" where there is none.
    """
    return mock.patch.object(torch._utils, "_get_available_device_type", return_value="cpu")


def gloo_options(devices: list[Any], threads: int, timeout: timedelta) -> Any:
    """Return the options of a gloo group with so many threads; the public constructor has 2."""
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices, options._threads, options._timeout = devices, threads, timeout
    return options


def set_timeout(timeout: timedelta, group: dist.ProcessGroup) -> None:
    """Set a group's timeout; a public name is there from torch 2.15."""
    names = dist.distributed_c10d
    (getattr(names, "set_timeout", None) or names._set_pg_timeout)(timeout, group)


# Attention.


def attention_operators(kernel: AttentionKernel) -> tuple[Any, Any]:
    """Return a kernel's operators, forward and backward.

    A ring needs the logsumexp of each block, which `scaled_dot_product_attention` keeps to itself.
    """
    aten = torch.ops.aten
    forward = {
        "flash": aten._scaled_dot_product_flash_attention,
        "cudnn": aten._scaled_dot_product_cudnn_attention,
        "efficient": aten._scaled_dot_product_efficient_attention,
        "cpu": aten._scaled_dot_product_flash_attention_for_cpu,
    }[kernel]
    return forward.default, getattr(aten, f"{forward.__name__}_backward").default


def argument_names(operator: Any) -> list[str]:
    """Return the names of an operator's arguments, in their order."""
    return [argument.name for argument in operator._schema.arguments]


def context_parallel_handlers() -> dict[Any, Callable[..., Any]]:
    """Return the functions by which DTensors attend under TorchTitan's context parallelism, by
    operator: PyTorch's own, to be replaced. No public registry takes a whole operator."""
    from torch.distributed.tensor.experimental._context_parallel import _attention

    handlers: dict[Any, Callable[..., Any]] = _attention.custom_ops
    return handlers


def cudnn_versions() -> list[tuple[int, int, int]]:
    """List the cuDNN versions of PyTorch's build and of this machine; torch has only the second."""
    cudnn = torch._C._cudnn  # type: ignore[attr-defined]
    return [cudnn.getCompileVersion(), cudnn.getRuntimeVersion()]


# Tensors and modules.

NormOverSamples = _NormBase
"""The class of norms that share statistics between samples or tokens, lazy ones too; the public
classes have none in common."""

DispatchMode = _python_dispatch.TorchDispatchMode
"""The class of modes that see each operator. PyTorch documents it under this name alone."""

tree_iter = _pytree.tree_iter
"""Yields the tensors of an operator's arguments or results."""


def local_slices(tensor: DTensor) -> tuple[slice, ...]:
    """Return this rank's part of a whole tensor. DTensor publishes its shape, not its start."""
    shape, offset = compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements
    )
    return tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))


def sparse_rows(gradient: Tensor) -> tuple[Tensor, Tensor]:
    """Return an embedding's sparse gradient as its rows' numbers and its rows, in the order of the
    tokens. Public names want equal rows added up before."""
    return gradient._indices()[0], gradient._values()


def with_parameters(
    module: nn.Module,
    kind: type[ModuleT],
    replace: Callable[[str, nn.Parameter | None], Tensor | None],
) -> ModuleT:
    """Return a module of a class, with the attributes of another, and its parameters replaced.

    `torch.func.functional_call` replaces them in calls of `forward` alone.
    """
    copy = object.__new__(kind)
    copy.__dict__.update(module.__dict__)
    old = module._parameters
    copy._parameters = {name: replace(name, p) for name, p in old.items()}  # type: ignore[misc]
    return copy


# The plan, which runs a step on tensors without content. No public way has them.


def fake_tensors() -> AbstractContextManager[Any]:
    """Make tensors within the block fake: they have shapes, and no values."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode(allow_non_fake_inputs=True)


def real_tensors() -> AbstractContextManager[Any]:
    """Make tensors within the block real again, inside of `fake_tensors`."""
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    return unset_fake_temporarily()


def group_of(named: Any) -> dist.ProcessGroup:
    """Return the process group that a collective's operator was given: boxed, or by name."""
    if isinstance(named, str):
        from torch.distributed.distributed_c10d import _resolve_process_group

        return _resolve_process_group(named)  # type: ignore[arg-type]
    return named if isinstance(named, dist.ProcessGroup) else dist.ProcessGroup.unbox(named)


def shape_propagation() -> tuple[type, str]:
    """Return the class and the method by which DTensor runs an operator on fake tensors of the
    whole shape: they exist nowhere, and are not to be counted."""
    from torch.distributed.tensor._sharding_prop import ShardingPropagator

    return ShardingPropagator, "_propagate_tensor_meta_non_cached"


def fsdp_param_group() -> type:
    """Return the class whose `unshard`, `wait_for_unshard` and `post_backward` gather and reduce
    FSDP2's parameters: hooks of modules come too late to tell what they allocate."""
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

    return FSDPParamGroup


def unsharded_gradients(group: Any, *_: Any) -> Iterable[Tensor]:
    """Yield the whole gradients that an FSDP2 group is about to reduce, and then frees."""
    for parameter in group.fsdp_params:
        unsharded = getattr(parameter, "_unsharded_param", None)
        if unsharded is not None and unsharded.grad is not None:
            yield unsharded.grad


# TorchTitan.


def operations_to_save() -> set[Any]:
    """Return what TorchTitan's selective checkpointing saves; `apply_ac` has no list of its own."""
    from torchtitan.models.llama3.infra import parallelize

    return {*parallelize._op_sac_save_list}


def is_saved_at(manager: Any, step: int, last_step: bool = False) -> bool:
    """Return whether a `CheckpointManager` saves after a step. Its `save` does not say."""
    saved: bool = manager._should_save(step, last_step)
    return saved
