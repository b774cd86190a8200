"""The work of a step: its operations and transfers, counted while the fake step runs.

FLOPs are those of matrix products and of attention, half of its scores under a causal mask.
Bytes are those of the tensors that an operation reads and of those that it writes: views move none,
nor does memory that is only allocated; an expanded tensor counts what it has in memory. Transfers
are counted as ring algorithms send them, n being the group's size: all-gather (n - 1) / n of its
output, reduce-scatter (n - 1) / n of its input, all-reduce twice that, all-to-all what is addressed
to other ranks.
"""

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

import torchtitan_dp.gradients.operands  # noqa: F401  registers its operators
from torchtitan_dp import torch_private
from torchtitan_dp.torch_private import tree_iter

aten = torch.ops.aten
PRODUCT, ATTENTION, ATTENTION_BACKWARD = "products", "attention", "attention's backward"
MEMORY, NEW, RING, GATHER = "memory", "new tensors", "ring", "all_gather"

# Written, and not read: their first argument.
_OVERWRITES = {aten.copy_, aten.fill_, aten.zero_, aten.normal_, aten.uniform_, aten.empty_like}
_ALLOCATES = {
    aten.empty,
    aten.empty_like,
    aten.empty_strided,
    aten.new_empty,
    aten.new_empty_strided,
    aten.resize_,
    aten.set_,
}
# Ours: their results are written to (`write_product_`), or added to, in one GEMM.
OWN_PRODUCTS = {torch.ops.torchtitan_dp.write_product_, torch.ops.torchtitan_dp.add_product_}
_OVERWRITES |= {torch.ops.torchtitan_dp.write_product_}
FORWARD, BACKWARD = (
    operator.overloadpacket for operator in torch_private.attention_operators("cpu")
)


class Operation(NamedTuple):
    """An operation on local tensors."""

    kind: str  # `PRODUCT`, `ATTENTION`, `ATTENTION_BACKWARD`; `MEMORY`, or `NEW` if it allocates
    dtype: str  # of its result, as "float32"
    flops: int
    bytes: int


class Transfer(NamedTuple):
    """A collective, as one of its ranks takes part in it."""

    kind: str  # "all_gather", "reduce_scatter", "all_reduce", …; "ring" of keys and values
    bytes: int  # that this rank sends
    ranks: int
    stride: int  # from one rank of the group to the next, in the world


Work = defaultdict[Operation | Transfer, float]
"""How often a step, or a part of it, does what."""


class StepWork(NamedTuple):
    """The work of a step's parts on one rank."""

    microbatch: Work
    update: Work
    trained_values: int

    def with_layers(self, more: "StepWork", layers: tuple[int, int], n_layers: int) -> "StepWork":
        """Extrapolate from the work of two numbers of layers, this one's first, to another.

        Of an operation over all layers at once, the smaller one is taken off as often as the larger
        one is added, so that its size grows by a line.
        """
        share = (n_layers - layers[0]) / (layers[1] - layers[0])

        def extrapolated(few: Work, more: Work) -> Work:
            every = few.keys() | more.keys()
            return Work(
                float, {done: few[done] + share * (more[done] - few[done]) for done in every}
            )

        values = self.trained_values + share * (more.trained_values - self.trained_values)
        return StepWork(
            extrapolated(self.microbatch, more.microbatch),
            extrapolated(self.update, more.update),
            round(values),
        )


class Repeated:
    """How often what runs now is repeated: a loop whose passes are alike takes one of them."""

    def __init__(self) -> None:
        self.times = 1

    @contextlib.contextmanager
    def __call__(self, times: int) -> Iterator[None]:
        """Let what runs within the block stand for so many passes."""
        self.times *= times
        try:
            yield
        finally:
            self.times //= times


class Counting:
    """Counts the operators that it is called with."""

    def __init__(self) -> None:
        self._work, self.repeated = Work(float), Repeated()

    def take(self) -> Work:
        """Return what has run since the last call."""
        taken, self._work = self._work, Work(float)
        return taken

    def __call__(self, func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> None:
        """Count an operator on local tensors, by its arguments and its result."""
        if (done := _done(func, args, kwargs, result)) is not None:
            self._work[done] += self.repeated.times


def _done(func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> Operation | Transfer | None:
    if func.namespace in ("c10d", "_c10d_functional"):
        transfer = transfer_of(func, args, kwargs)
        is_ring = func.namespace == "_c10d_functional"  # (`torchtitan_dp.collectives`)
        return transfer._replace(kind=RING) if transfer is not None and is_ring else transfer
    moved = bytes_of(func, args, kwargs, result)
    if flops := flops_of(func, args, kwargs, result):
        kind = {FORWARD: ATTENTION, BACKWARD: ATTENTION_BACKWARD}.get(func.overloadpacket)
        if kind and _by_name(func, args, kwargs).get("is_causal"):
            flops //= 2
        return Operation(kind or PRODUCT, _dtype(args), flops, moved)
    kind = MEMORY if any(torch_private.are_written(func)) else NEW
    return Operation(kind, _dtype(args), 0, moved) if moved else None


def flops_of(func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> int:
    """Count the FLOPs of one operation, with all scores of attention; those of the CPU's flash
    attention as of CUDA's."""
    packet = func.overloadpacket
    if packet == FORWARD:
        return int(sdpa_flop_count(*(x.shape for x in args[:3])))
    if packet == BACKWARD:
        return int(sdpa_backward_flop_count(*(x.shape for x in args[:4])))
    if packet in OWN_PRODUCTS:
        _, left, right = args
        return 2 * left.numel() * right.shape[-1]
    formula = flop_registry.get(aten.addmm if packet == aten.addmm_ else packet)
    return 0 if formula is None else int(formula(*args, **kwargs, out_val=result))


def bytes_of(func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> int:
    """Count the bytes that one operation reads and writes."""
    if (
        func.namespace in ("prim", "profiler")
        or func.overloadpacket in _ALLOCATES
        or torch_private.is_view(func)
    ):
        return 0  # (prim: asks for a tensor's device or layout)
    reads = [*args, *(value for name, value in kwargs.items() if name != "out")]
    if func.overloadpacket in _OVERWRITES:
        reads = reads[1:]
    written = [x for x in tree_iter(result) if isinstance(x, torch.Tensor)]
    known = {id(x) for x in written}
    for is_written, value in zip(torch_private.are_written(func), args, strict=False):
        if is_written:
            written += [x for x in tree_iter(value) if id(x) not in known]
    return _size(reads) + _size(written)


def _size(values: Any) -> int:
    return sum(_bytes(x) for x in tree_iter(values) if isinstance(x, torch.Tensor))


def _bytes(x: torch.Tensor) -> int:
    if isinstance(x, DTensor):
        x = x.to_local()
    numel = 1
    for size, stride in zip(x.shape, x.stride(), strict=True):
        numel *= size if stride != 0 else 1
    return numel * x.element_size()


def _dtype(args: Any) -> str:
    """Return the narrowest dtype of the tensors given, in which devices multiply."""
    tensors = (x for x in tree_iter(args) if isinstance(x, torch.Tensor))
    dtypes = [x.dtype for x in tensors if x.is_floating_point()]
    narrowest = min(dtypes, key=lambda dtype: dtype.itemsize, default=torch.float32)
    return str(narrowest).removeprefix("torch.")


_NOTHING_SENT = {
    "barrier",
    "check_for_nan",
    "monitored_barrier_",
    "recv_",
    "wait_tensor",
    "_wrap_tensor_autograd",
}


def transfer_of(func: Any, args: Any, kwargs: dict[str, Any]) -> Transfer | None:
    """Describe a collective; None for an operation of torch.distributed that sends nothing."""
    name = func.overloadpacket.__name__
    if name in _NOTHING_SENT:
        return None
    given = _by_name(func, args, kwargs)
    group = torch_private.group_of(given.get("process_group", given.get("group_name")))
    ranks = dist.get_process_group_ranks(group)
    kind, count = _RULES[name]
    stride = ranks[1] - ranks[0] if len(ranks) > 1 else 1
    return Transfer(kind, round(count(given, group)), len(ranks), stride)


Given = dict[str, Any]


def _by_name(func: Any, args: Any, kwargs: dict[str, Any]) -> Given:
    return dict(zip(torch_private.argument_names(func), args, strict=False)) | kwargs


def _others(size: int) -> float:
    """Return the share of a whole that one of `size` ranks passes on."""
    return (size - 1) / size


def _share_of(argument: str, times: int = 1) -> Callable[[Given, dist.ProcessGroup], float]:
    return lambda given, group: times * _size(given[argument]) * _others(group.size())


def _gathered(given: Given, group: dist.ProcessGroup) -> float:
    """Count an all-gather of which only the input is given."""
    return _size(given.get("input", given.get("inputs"))) * (group.size() - 1)


def _exchanged(given: Given, group: dist.ProcessGroup) -> float:
    """Count an all-to-all of one tensor: with split sizes (of dim 0), all but the own part."""
    splits = list(given["input_split_sizes"])
    if not splits or not sum(splits):
        return _size(given["input"]) * (_others(group.size()) if not splits else 0)
    return _size(given["input"]) * (1 - splits[group.rank()] / sum(splits))


def _from_root(given: Given, group: dist.ProcessGroup) -> float:
    root = given["root_rank"] if "root_rank" in given else given["src"]
    sent = given["tensors"] if "tensors" in given else given["input"]
    return _size(sent) if group.rank() == root else 0


# An operation that is missing here fails the count (KeyError) rather than go unseen.
_RULES: dict[str, tuple[str, Callable[[Given, dist.ProcessGroup], float]]] = {
    "_allgather_base_": (GATHER, _share_of("output_tensor")),
    "allgather_": (GATHER, _share_of("output_tensors")),
    "allgather_coalesced_": (GATHER, _share_of("output_lists")),
    "allgather_into_tensor_coalesced_": (GATHER, _share_of("outputs")),
    "all_gather_into_tensor": (GATHER, _gathered),
    "all_gather_into_tensor_out": (GATHER, _gathered),
    "all_gather_into_tensor_coalesced": (GATHER, _gathered),
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
    "send": ("point_to_point", lambda given, _: _size(given["tensors"])),
}
