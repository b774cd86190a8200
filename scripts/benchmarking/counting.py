"""Counts operations' FLOPs and bytes, and the bytes that collectives send, as dispatch modes.

They are counted as `torchtitan_dp.plan.work` has them. FLOPs are those of
`torch.utils.flop_counter`, of which causal masks save nothing. A kernel that does the work of
several operations counts once if, and only if, it is one operation here.
"""

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch

from torchtitan_dp.plan.tracker import LocalOperators, wrapped
from torchtitan_dp.plan.work import (
    BACKWARD,
    FORWARD,
    OWN_PRODUCTS,
    Repeated,
    bytes_of,
    flops_of,
    transfer_of,
)

aten = torch.ops.aten
_TRAVELS = ("collectives", "FSDP2's copies")  # they may overlap with any part
_MATMULS = {aten.mm, aten.addmm, aten.addmm_, aten.bmm, aten.baddbmm} | OWN_PRODUCTS
_COPIES = {aten.copy_, aten._to_copy, aten.clone, aten.cat, aten.stack}


class Counts(LocalOperators):
    """Keeps, as a mode, the FLOPs and bytes of each part of a program."""

    def __init__(self) -> None:
        super().__init__()
        self.flops: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()
        self.base: str | None = None  # of what no `part` is open for; None: by kind of operation
        self._parts: list[str] = []
        self.repeated = Repeated()

    def start_over(self) -> None:
        """Forget what was counted so far."""
        for counter in (self.flops, self.bytes):
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
        part, times = self._part_of(func), self.repeated.times
        self.flops[part] += times * flops_of(func, args, kwargs, result)
        self.bytes[part] += times * bytes_of(func, args, kwargs, result)

    def _part_of(self, func: Any) -> str:
        if self._parts:
            return self._parts[-1]
        kind = _kind(func)
        return kind if self.base is None or kind in _TRAVELS else self.base


def _kind(func: Any) -> str:
    packet = func.overloadpacket
    if func.namespace in ("c10d", "_c10d_functional"):
        return "collectives"
    if func.namespace == "fsdp":
        return "FSDP2's copies"
    kinds: list[tuple[str, set[Any]]] = [
        ("matrix products", _MATMULS),
        ("copies", _COPIES),
        ("attention", {FORWARD, BACKWARD}),
    ]
    return next((name for name, packets in kinds if packet in packets), "elementwise, norms, RoPE")


def counted(owner: Any, name: str, counts: Counts, part: str) -> Any:
    """Patch a function of `owner` to count for `part`."""
    around: Callable[..., Any] = lambda *_, **__: counts.part(part)  # noqa: E731
    return wrapped(owner, name, around)


class BytesSent(LocalOperators):
    """While entered, adds up in `by_kind` what this rank's collectives send, backward's too."""

    def __init__(self) -> None:
        super().__init__()
        self.by_kind: Counter[str] = Counter()

    def ran(self, func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> None:
        sends = func.namespace in ("c10d", "_c10d_functional")
        if sends and (transfer := transfer_of(func, args, kwargs)) is not None:
            self.by_kind[transfer.kind] += transfer.bytes
