"""The microbatches of one rank, step after step; ranks agree on each step before its update.

Guarantee:
    Microbatches are those of `RecordLoader.microbatches`, in the same order and bit by bit, on
    every rank of a context-parallel group: each slices the same store, which ranks compare at the
    start. A sample that cannot be read (a failing disk) aborts the step on all ranks before the
    update; until they have agreed it is padding, so that no collective blocks. Different draws on
    different ranks abort it too: a draw is compared before any collective that depends on it,
    together with the agreement on the previous step, or alone if there is none.
"""

import os
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.distributed as dist

from torchtitan_dp.data.batching import Dealt, Draw, Microbatch, RecordLoader
from torchtitan_dp.process import Fault

NO_DRAW = 0  # the fingerprint where no step follows


@dataclass(eq=False)
class Feed:
    """The microbatches of one rank, step after step."""

    loader: RecordLoader  # this data-parallel rank's
    ladder: tuple[int, ...]  # padded lengths of samples, rising
    device: torch.device  # of microbatches and of the process groups
    _agreed: Draw | None = field(default=None, init=False)
    _failure: OSError | None = field(default=None, init=False)

    def padding(self, length: int) -> Microbatch:
        """Make a microbatch of padding, without reading a record."""
        slots = np.full(self.loader.batch_size * self.loader.windows, -1)
        return self._on_device(self.loader.microbatch(Dealt(length, slots)))

    def microbatches(self, draw: Draw, following: Draw | None = None) -> Iterator[Microbatch]:
        """Yield this rank's share of a draw: of the previous step's `following`, if there was one.

        Collective, on every rank alike, over the world: three numbers (`require_same_step`, which
        may raise Fault) before the last microbatch is yielded, and before the first of a draw that
        was not a step's `following`.
        """
        if draw is not self._agreed:
            require_same_step(None, draw.fingerprint(), self.device)
        every = self.loader.deal(draw, self.ladder)
        for dealt in every[:-1]:
            yield self._made(dealt, draw.key)
        last = [self._made(dealt, draw.key) for dealt in every[-1:]]
        drawn = NO_DRAW if following is None else following.fingerprint()
        require_same_step(self._failure, drawn, self.device)
        self._agreed = following
        yield from last

    def _made(self, dealt: Dealt, key: bytes) -> Microbatch:
        try:
            return self._on_device(self.loader.microbatch(dealt, key))
        except OSError as error:
            self._failure = self._failure or error
            return self.padding(dealt.length)

    def _on_device(self, microbatch: Microbatch) -> Microbatch:
        if self.device.type != "cuda":
            return microbatch
        tokens_BT, labels_BT, valid_B = (tensor.pin_memory() for tensor in microbatch[:3])
        return Microbatch(tokens_BT, labels_BT, valid_B, microbatch.positions_B).to(self.device)


def require_same_step(failure: BaseException | None, drawn: int, device: torch.device) -> None:
    """Refuse the step on all ranks, by Fault, if one of them failed to read a sample, or if they
    drew different units for the next one: `drawn` is its `Draw.fingerprint`, or `NO_DRAW`. SECRET:
    neither in the message nor kept.

    Collective: an all-reduce of three int64 over the world, if there is a process group; read at
    once, since the sizes of the next collectives depend on the draw.

    Guarantee:
        If no rank raises, all hold the same draw (different ones pass with probability 2^-62), each
        of whose units is dealt out once: numpy's binomial, whose logarithms are each machine's own
        libm's, need not be equal. Exact: the largest must equal minus the largest negated one.
    """
    mine = torch.tensor([failure is not None, drawn, -drawn], dtype=torch.int64, device=device)
    if dist.is_initialized():
        dist.all_reduce(mine, op=dist.ReduceOp.MAX)
    failed, highest, negated_lowest = mine.tolist()
    if failure is not None:
        last = traceback.extract_tb(failure.__traceback__)[-1:]
        where = "".join(f" ({os.path.basename(of.filename)}, line {of.lineno})" for of in last)
        reason = f"{type(failure).__name__}: {failure}{where}"  # may contain private data
        raise Fault(f"a sample could not be read (not private: {reason})") from failure
    if failed:
        raise Fault("a sample could not be read on another rank, whose own line says why")
    if highest != -negated_lowest:
        raise Fault(
            "the ranks drew different units from one key, so their machines compute random numbers "
            "differently (another CPU, libm or numpy), and the step was not taken: train on "
            "machines that are alike"
        )
