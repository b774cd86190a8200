"""Ranks agree, before the update, that all samples were made and which draw is next."""

import os
import traceback

import torch
import torch.distributed as dist

from torchtitan_dp.process import Fault

NO_DRAW = 0
"""The fingerprint where no step follows."""


def require_same_step(failure: BaseException | None, drawn: int, device: torch.device) -> None:
    """Refuse the step on all ranks if one of them failed, or if they drew different units.

    Collective: an all-reduce of three int64 over the world, if there is a process group; read at
    once, since the sizes of the next collectives depend on the draw.

    Args:
        failure: why this rank could not make a sample; None if it made all of them.
        drawn: `feed.Draw.fingerprint` of the next draw, 0 to 2^62 - 1; `NO_DRAW` without one.
            SECRET: neither in the message nor kept.
        device: the process group's.

    Raises:
        Fault: on all ranks alike. The line of the rank that failed has the reason.

    Guarantee:
        If no rank raises, all hold the same draw (different ones pass with probability 2^-62), so
        that each drawn unit is dealt out once. Without this check, equal draws would rest on
        numpy's binomial, whose logarithms come from each machine's own libm. The comparison of
        62-bit integers is exact: the largest must equal minus the largest negated one.
    """
    mine = torch.tensor([failure is not None, drawn, -drawn], dtype=torch.int64, device=device)
    if dist.is_initialized():
        dist.all_reduce(mine, op=dist.ReduceOp.MAX)
    failed, highest, negated_lowest = mine.tolist()
    if failure is not None:
        # The exception's text may contain private data.
        raise Fault(f"a sample could not be made (not private: {_described(failure)})") from failure
    if failed:
        raise Fault("a sample could not be made on another rank, whose own line says why")
    if highest != -negated_lowest:
        raise Fault(
            "the ranks drew different units from one key, so their machines compute random numbers "
            "differently (another CPU, libm or numpy), and the step was not taken: train on "
            "machines that are alike"
        )


def _described(error: BaseException) -> str:
    """Describe an exception and its place on one line."""
    last = traceback.extract_tb(error.__traceback__)[-1:]
    where = "".join(f" ({os.path.basename(frame.filename)}, line {frame.lineno})" for frame in last)
    return f"{type(error).__name__}: {error}{where}"
