"""Counts operations' FLOPs and bytes, as a dispatch mode.

FLOPs are those of `torch.utils.flop_counter`, of which causal masks save nothing. Bytes are those
that an operation reads and writes: views move none, nor does memory that is only allocated; an
expanded tensor counts what it has in memory. A kernel that does the work of several operations
counts once if, and only if, it is one operation here.
"""

import contextlib
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

import torchtitan_dp.gradients.operands  # noqa: F401  registers its operators
from torchtitan_dp.base import torch_private
from torchtitan_dp.base.torch_private import tree_iter
from torchtitan_dp.plan.fake_step import LocalOperators

aten = torch.ops.aten
# Ours: their results are written to (`write_product_`), or added to, in one GEMM.
OWN_PRODUCTS = {torch.ops.torchtitan_dp.write_product_, torch.ops.torchtitan_dp.add_product_}
# Written, and not read: their first argument.
_OVERWRITES = {aten.copy_, aten.fill_, aten.zero_, aten.normal_, aten.uniform_, aten.empty_like}
_OVERWRITES |= {torch.ops.torchtitan_dp.write_product_}
_ALLOCATES = {aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty}
_ALLOCATES |= {aten.new_empty_strided, aten.resize_, aten.set_}
FORWARD, BACKWARD = (
    operator.overloadpacket for operator in torch_private.attention_operators("cpu")
)


class Counts(LocalOperators):
    """Keeps, as a mode, the FLOPs of products and of attention, and the bytes of all operations."""

    def __init__(self) -> None:
        super().__init__()
        self.flops: Counter[str] = Counter()
        self.bytes = 0
        self._times = 1

    @contextlib.contextmanager
    def repeated(self, times: int) -> Iterator[None]:
        """Let what runs within the block stand for so many passes that are alike."""
        self._times *= times
        try:
            yield
        finally:
            self._times //= times

    def start_over(self) -> None:
        """Forget what was counted so far."""
        self.flops.clear()
        self.bytes = 0

    def ran(self, func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> None:
        kind = "attention" if func.overloadpacket in (FORWARD, BACKWARD) else "products"
        self.flops[kind] += self._times * flops_of(func, args, kwargs, result)
        self.bytes += self._times * bytes_of(func, args, kwargs, result)


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
        func.namespace in ("prim", "profiler")  # (prim: asks for a tensor's device or layout)
        or func.overloadpacket in _ALLOCATES
        or _is_view(func)
    ):
        return 0
    reads = [*args, *(value for name, value in kwargs.items() if name != "out")]
    if func.overloadpacket in _OVERWRITES:
        reads = reads[1:]
    written = [x for x in tree_iter(result) if isinstance(x, torch.Tensor)]
    known = {id(x) for x in written}
    for argument, value in zip(func._schema.arguments, args, strict=False):
        if argument.alias_info is not None and argument.alias_info.is_write:
            written += [x for x in tree_iter(value) if id(x) not in known]
    return _size(reads) + _size(written)


def _is_view(func: Any) -> bool:
    """Return whether an operator's result lies in memory of its arguments, and is not written."""
    if func.overloadpacket == aten._unsafe_view:
        return True
    aliases = [r.alias_info for r in func._schema.returns if r.alias_info is not None]
    return bool(aliases) and not any(alias.is_write for alias in aliases)


def _size(values: Any) -> int:
    return sum(_bytes(x) for x in tree_iter(values) if isinstance(x, torch.Tensor))


def _bytes(x: torch.Tensor) -> int:
    if isinstance(x, DTensor):
        x = x.to_local()
    numel = 1
    for size, stride in zip(x.shape, x.stride(), strict=True):
        numel *= size if stride != 0 else 1
    return numel * x.element_size()
