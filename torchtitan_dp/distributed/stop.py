"""A run that is asked to stop, or whose peers hang: signals, and how long a collective may wait."""

import datetime
import os
import signal
import threading
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torchtitan.config import JobConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.utils import set_pg_timeouts

from torchtitan_dp.process import STOP_SIGNAL

GRACE_S = 5.0
"""How long a worker that got SIGTERM waits for `STOP_SIGNAL` too."""


class StopRequest:
    """Remembers whether this run was asked to stop.

    A scheduler may send SIGTERM to every process, launcher and workers, and the launcher then sends
    `STOP_SIGNAL`. SIGTERM alone is torchrun's, which ends workers whose peer has failed: this
    process ends too. Heard by a thread, so that a main thread in a collective does not delay it.
    """

    def __init__(self) -> None:
        """Call in the main thread, once in a process."""
        self._asked = threading.Event()
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        for number in (STOP_SIGNAL, signal.SIGTERM):
            signal.signal(number, lambda *_: None)
            signal.siginterrupt(number, False)  # system calls of other libraries go on
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        threading.Thread(target=self._listen, args=(reader,), daemon=True).start()

    def _listen(self, reader: int) -> None:
        while True:
            for number in os.read(reader, 64):
                if number == STOP_SIGNAL:
                    self._asked.set()
                elif number == signal.SIGTERM:
                    threading.Thread(target=self._end_unless_asked, daemon=True).start()

    def _end_unless_asked(self) -> None:
        if not self._asked.wait(GRACE_S):
            os._exit(128 + signal.SIGTERM)

    def is_agreed(self, device: torch.device) -> bool:
        """Return whether any rank was asked; the same on all.

        Collective: one number over the world.

        It depends on signals alone. Where a clock sends them, the step at which a run stops follows
        from how long steps take, and so from the lengths of records: `ledger.steps` keeps that out
        of `privacy.json`, and `ledger.caveats` out of the claims of a run that ended there.
        """
        asked = torch.tensor(float(self._asked.is_set()), device=device)
        dist.all_reduce(asked, op=dist.ReduceOp.MAX)
        return bool(asked.item())


def shorten_timeouts(
    config: JobConfig, parallel_dims: ParallelDims, groups: Iterable[dist.ProcessGroup | None]
) -> None:
    """Have collectives wait for `comm.train_timeout_seconds`, once a start's first step is done.

    TorchTitan does so after step 1 alone, which a resumed run never takes, and for its own groups
    alone. Collective.

    Args:
        groups: those of our own reductions.
    """
    timeout = datetime.timedelta(seconds=config.comm.train_timeout_seconds)
    set_pg_timeouts(timeout, parallel_dims)
    for group in groups:
        if group is not None:
            _set_timeout(timeout, group)


def _set_timeout(timeout: datetime.timedelta, group: dist.ProcessGroup) -> None:
    """Set one group's timeout: PyTorch has no public name for it, and TorchTitan uses this one."""
    distributed_c10d._set_pg_timeout(timeout, group)
