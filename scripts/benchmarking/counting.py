"""Counts floating-point operations and bytes moved, operation by operation, as a dispatch mode.

FLOPs are those of `torch.utils.flop_counter`: matrix products and attention, of which causal masks
save nothing. Bytes are those of the tensors that an operation reads and of those that it writes;
views move none, nor does memory that is only allocated. A tensor that was expanded counts what it
has in memory. So a kernel that does the work of several operations counts once if, and only if, it
is one operation here.
"""

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_iter
from torch.utils.flop_counter import (
    flop_registry,
    sdpa_backward_flop_count,
    sdpa_flop_count,
)

import torchtitan_dp.gradients.operands  # noqa: F401  registers its operators
from torchtitan_dp.plan.tracker import LocalOperators, wrapped

aten = torch.ops.aten

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
    aten._unsafe_view,
}
_TRAVELS = ("collectives", "FSDP2's copies")  # they may overlap with any part
_MATMULS = {aten.mm, aten.addmm, aten.addmm_, aten.bmm, aten.baddbmm}
# Ours: their results are written to (`products`), or added to, in one GEMM.
_PRODUCTS = {torch.ops.torchtitan_dp.write_product_, torch.ops.torchtitan_dp.add_product_}
_MATMULS |= _PRODUCTS
_OVERWRITES |= {torch.ops.torchtitan_dp.write_product_}
_COPIES = {aten.copy_, aten._to_copy, aten.clone, aten.cat, aten.stack}
_ATTENTION = {
    aten._scaled_dot_product_flash_attention_for_cpu,
    aten._scaled_dot_product_flash_attention_for_cpu_backward,
}


class Counts(LocalOperators):
    """Keeps, as a mode, the FLOPs and bytes of each part of a program."""

    def __init__(self) -> None:
        super().__init__()
        self.flops: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()
        self.by_operation: Counter[tuple[str, str]] = Counter()  # bytes by part and operation
        self.base: str | None = None  # of what no `part` is open for; None: by kind of operation
        self._parts: list[str] = []

    def start_over(self) -> None:
        """Forget what was counted so far."""
        for counter in (self.flops, self.bytes, self.by_operation):
            counter.clear()

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Count what runs within the block for this part."""
        self._parts.append(name)
        try:
            yield
        finally:
            self._parts.pop()

    def ran(self, func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> None:
        part = self._part_of(func)
        self.flops[part] += flops_of(func, args, kwargs, result)
        moved = bytes_of(func, args, kwargs, result)
        self.bytes[part] += moved
        self.by_operation[part, str(func)] += moved

    def _part_of(self, func: Any) -> str:
        if self._parts:
            return self._parts[-1]
        kind = _kind(func)
        return kind if self.base is None or kind in _TRAVELS else self.base


def flops_of(func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> int:
    """Count the FLOPs of one operation; those of the CPU's flash attention as of CUDA's."""
    packet = func.overloadpacket
    if packet == aten._scaled_dot_product_flash_attention_for_cpu:
        return int(sdpa_flop_count(*(x.shape for x in args[:3])))
    if packet == aten._scaled_dot_product_flash_attention_for_cpu_backward:
        return int(sdpa_backward_flop_count(*(x.shape for x in args[:4])))
    if packet in _PRODUCTS:
        _, left, right = args
        return 2 * left.numel() * right.shape[-1]
    formula = flop_registry.get(aten.addmm if packet == aten.addmm_ else packet)
    return 0 if formula is None else int(formula(*args, **kwargs, out_val=result))


def bytes_of(func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> int:
    """Count the bytes that one operation reads and writes."""
    if func.namespace == "prim" or func.overloadpacket in _ALLOCATES or _is_view(func):
        return 0  # (prim: asks for a tensor's device or layout)
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
    returns = func._schema.returns
    aliases = [r.alias_info for r in returns if r.alias_info is not None]
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


def _kind(func: Any) -> str:
    packet = func.overloadpacket
    if func.namespace in ("c10d", "_c10d_functional"):
        return "collectives"
    if func.namespace == "fsdp":
        return "FSDP2's copies"
    kinds: list[tuple[str, set[Any]]] = [
        ("matrix products", _MATMULS),
        ("copies", _COPIES),
        ("attention", _ATTENTION),
    ]
    return next((name for name, packets in kinds if packet in packets), "elementwise, norms, RoPE")


def counted(owner: Any, name: str, counts: Counts, part: str) -> Any:
    """Patch a function of `owner` to count for `part`."""
    around: Callable[..., Any] = lambda *_, **__: counts.part(part)  # noqa: E731
    return wrapped(owner, name, around)
