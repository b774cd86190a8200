"""Machines: what their devices compute, read and send in a second, listed or from a file.

The list has makers' peaks times the share that is reached in practice, an assumption with its
source. A file is one that `calibration` measured.
"""

import itertools
import json
import math
from dataclasses import dataclass
from pathlib import Path

from torchtitan_dp.plan.work import ATTENTION, ATTENTION_BACKWARD, MEMORY, NEW, PRODUCT

Curve = tuple[tuple[float, float], ...]
"""Rates a second by the size of an operation, rising; between two the logarithms lie on a line."""


@dataclass(frozen=True)
class Link:
    """A way from rank to rank."""

    bytes: float  # that a rank sends in a second
    seconds: float  # of a call that sends next to nothing


@dataclass(frozen=True)
class Machine:
    """What one device of a machine does in a second, and how its ranks are joined."""

    name: str
    memory_gib: float
    ranks_a_node: int
    rates: dict[str, Curve]
    """By kind and dtype, as "products float32": FLOPs by an operation's FLOPs. "memory" and "new
    tensors": bytes by an operation's bytes. "noise": values. Of a measured machine
    "all_gather", for the collectives of FSDP2, and "ring": bytes by the bytes that a rank sends."""

    launch: float  # seconds until an operation has begun
    within: Link | None = None  # a node; None where they were measured
    between: Link | None = None  # nodes; None where they were not measured
    overlaps: bool = True  # whether launches, kernels and transfers run side by side

    def rate(self, kind: str, dtype: str, size: float) -> float:
        """Return what a second does of operations of a size."""
        curve = self.rates.get(f"{kind} {dtype}") or self.rates[kind]
        return read(curve, size)


def read(curve: Curve, size: float) -> float:
    """Interpolate a curve; beyond its ends it is level.

    >>> read(((1.0, 10.0), (100.0, 1000.0)), 10.0)
    100.0
    """
    if size <= curve[0][0] or len(curve) == 1:
        return curve[0][1]
    for (low, below), (high, above) in itertools.pairwise(curve):
        if size <= high:
            share = math.log(size / low) / math.log(high / low)
            return below * (above / below) ** share
    return curve[-1][1]


# Shares of the peak that are reached, assumed: products as cuBLAS in bf16 at a GPU's power limit;
# attention as FlashAttention-2, which PyTorch has (on H100 335 to 370 TFLOP/s forward, Shah et al.
# 2024, arXiv 2407.08608, figure 5; on A100 50 to 73%, Dao 2023, arXiv 2307.08691); memory as a
# copy; links as NCCL's all-gather.
_PRODUCTS, _MEMORY, _LINK = 0.6, 0.85, 0.8
_CALL_S, _LAUNCH_S = 2e-5, 2e-5


def _gpu(
    name: str,
    *,
    gib: float,
    tflops: tuple[float, float],
    attention: tuple[float, float],
    memory: float,
    within: float,
    between: float = 50e9,
) -> Machine:
    """List a GPU: peaks of bf16 and fp32 in TFLOP/s, shares of attention forward and backward, and
    bytes a second of memory and links."""
    rates: dict[str, Curve] = dict.fromkeys((MEMORY, NEW), ((0, _MEMORY * memory),))
    for dtype, peak in zip(("bfloat16", "float32"), tflops, strict=True):
        for kind, share in zip(
            (PRODUCT, ATTENTION, ATTENTION_BACKWARD), (_PRODUCTS, *attention), strict=True
        ):
            rates[f"{kind} {dtype}"] = ((0, share * peak * 1e12),)
    # Philox and Box-Muller take some hundred operations of fp32 a value.
    rates["noise"] = ((0, tflops[1] * 1e12 / 400),)
    node, nodes = (Link(_LINK * rate, _CALL_S) for rate in (within, between))
    return Machine(name, gib, 8, rates, _LAUNCH_S, node, nodes)


MACHINES = {
    machine.name: machine
    for machine in (
        _gpu(
            "h100",
            gib=80,
            tflops=(989, 67),
            attention=(0.35, 0.3),
            memory=3.35e12,
            within=450e9,
        ),
        _gpu(
            "h100-pcie",
            gib=80,
            tflops=(756, 51),
            attention=(0.35, 0.3),
            memory=2.0e12,
            within=55e9,
            between=25e9,
        ),
        _gpu(
            "a100",
            gib=80,
            tflops=(312, 19.5),
            attention=(0.65, 0.55),
            memory=2.04e12,
            within=300e9,
            between=25e9,
        ),
        _gpu(
            "l40s",
            gib=48,
            tflops=(362, 91.6),
            attention=(0.5, 0.4),
            memory=0.864e12,
            within=28e9,
            between=25e9,
        ),
        _gpu(
            "b200",
            gib=180,
            tflops=(2250, 75),
            attention=(0.3, 0.25),
            memory=8e12,
            within=900e9,
        ),
    )
}


def machine_named(named: str) -> Machine:
    """Return a listed machine, or that of a calibration's file; ValueError, one line."""
    if named in MACHINES:
        return MACHINES[named]
    try:
        found = json.loads(Path(named).read_text(encoding="utf-8"))
        found["rates"] = {name: tuple(map(tuple, curve)) for name, curve in found["rates"].items()}
        links = {key: found[key] and Link(**found[key]) for key in ("within", "between")}
        return Machine(**found | links)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise ValueError(
            f"--machine = '{named}': neither one of {', '.join(MACHINES)} nor a file that "
            "--calibrate wrote"
        ) from None
