"""Counts the bytes that this rank sends in collectives, by kind, as a dispatch mode.

Counted as ring algorithms send them, n being the group's size: all-gather (n - 1) / n of its
output, reduce-scatter (n - 1) / n of its input, all-reduce twice that, all-to-all what is addressed
to other ranks. A broadcast counts as one copy, on its root. Backends may do otherwise.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

_NOTHING_SENT = {
    "barrier",
    "check_for_nan",
    "monitored_barrier_",
    "recv_",
    "wait_tensor",
    "_wrap_tensor_autograd",
}


class BytesSent(TorchDispatchMode):
    """While entered, adds up in `by_kind` what this rank's collectives send, backward's too."""

    def __init__(self) -> None:
        super().__init__()
        self.by_kind: Counter[str] = Counter()

    def __torch_dispatch__(
        self,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented  # first to local tensors, so that its own collectives are seen
        kwargs = kwargs or {}
        if func.namespace in ("c10d", "_c10d_functional"):
            given = _by_name(func, args, kwargs)
            name = func._schema.name.split("::")[1]
            if name not in _NOTHING_SENT:
                kind, count = _RULES[name]
                self.by_kind[kind] += round(count(given, _group(given)))
        return func(*args, **kwargs)


Given = dict[str, Any]


def _by_name(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Given:
    names = [argument.name for argument in func._schema.arguments]
    return {**dict(zip(names, args, strict=False)), **kwargs}


def _group(given: Given) -> dist.ProcessGroup:
    group: Any = given.get("process_group", given.get("group_name"))
    if isinstance(group, str):
        return torch._C._distributed_c10d._resolve_process_group(group)  # type: ignore[arg-type]
    return group if isinstance(group, dist.ProcessGroup) else dist.ProcessGroup.unbox(group)


def _bytes(value: Any) -> int:
    """Of a tensor, or of lists of them."""
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()
    return sum(_bytes(part) for part in value)


def _others(size: int) -> float:
    """The share of a whole that one of `size` ranks passes on."""
    return (size - 1) / size


def _share_of(argument: str, times: int = 1) -> Callable[[Given, dist.ProcessGroup], float]:
    return lambda given, group: times * _bytes(given[argument]) * _others(group.size())


def _gathered(given: Given, group: dist.ProcessGroup) -> float:
    """An all-gather of which only the input is given."""
    return _bytes(given.get("input", given.get("inputs"))) * (group.size() - 1)


def _exchanged(given: Given, group: dist.ProcessGroup) -> float:
    """All-to-all of one tensor: with split sizes (of dim 0), all but this rank's own part."""
    sent = given["input"]
    splits = list(given["input_split_sizes"])
    if not splits or not sum(splits):
        return _bytes(sent) * (_others(group.size()) if not splits else 0)
    return _bytes(sent) * (1 - splits[group.rank()] / sum(splits))


def _from_root(given: Given, group: dist.ProcessGroup) -> float:
    root = given["root_rank"] if "root_rank" in given else given["src"]
    sent = given["tensors"] if "tensors" in given else given["input"]
    return _bytes(sent) if group.rank() == root else 0


def _to_one(given: Given, group: dist.ProcessGroup) -> float:
    return _bytes(given["tensors"])


# An operation that is missing here fails the count (KeyError) rather than go unseen.
_RULES: dict[str, tuple[str, Callable[[Given, dist.ProcessGroup], float]]] = {
    "_allgather_base_": ("all_gather", _share_of("output_tensor")),
    "allgather_": ("all_gather", _share_of("output_tensors")),
    "allgather_coalesced_": ("all_gather", _share_of("output_lists")),
    "allgather_into_tensor_coalesced_": ("all_gather", _share_of("outputs")),
    "all_gather_into_tensor": ("all_gather", _gathered),
    "all_gather_into_tensor_out": ("all_gather", _gathered),
    "all_gather_into_tensor_coalesced": ("all_gather", _gathered),
    "_reduce_scatter_base_": ("reduce_scatter", _share_of("input_tensor")),
    "reduce_scatter_": ("reduce_scatter", _share_of("input_tensors")),
    "reduce_scatter_tensor_coalesced_": ("reduce_scatter", _share_of("inputs")),
    "reduce_scatter_tensor": ("reduce_scatter", _share_of("input")),
    "reduce_scatter_tensor_out": ("reduce_scatter", _share_of("input")),
    "reduce_scatter_tensor_coalesced": ("reduce_scatter", _share_of("inputs")),
    "allreduce_": ("all_reduce", _share_of("tensors", times=2)),
    "allreduce_coalesced_": ("all_reduce", _share_of("tensors", times=2)),
    "all_reduce": ("all_reduce", _share_of("input", times=2)),
    "all_reduce_": ("all_reduce", _share_of("input", times=2)),
    "all_reduce_coalesced": ("all_reduce", _share_of("inputs", times=2)),
    "all_reduce_coalesced_": ("all_reduce", _share_of("inputs", times=2)),
    "alltoall_": ("all_to_all", _share_of("input_tensors")),
    "alltoall_base_": ("all_to_all", _exchanged),
    "all_to_all_single": ("all_to_all", _exchanged),
    "broadcast_": ("broadcast", _from_root),
    "broadcast": ("broadcast", _from_root),
    "send": ("point_to_point", _to_one),
}
