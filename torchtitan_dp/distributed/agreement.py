"""What ranks settle with each other: a start's root key, the terms of a run, whether to stop; and
the report of a rank whose peers hang or are gone."""

import contextlib
import datetime
import hashlib
import os
import re
import signal
import threading
import traceback
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torchtitan.config import JobConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.utils import set_pg_timeouts
from torchtitan.tools.utils import device_type

from torchtitan_dp.base.process import STOP_SIGNAL, Fault
from torchtitan_dp.base.torch_private import set_timeout
from torchtitan_dp.distributed.devices import cuda_devices
from torchtitan_dp.privacy.keys import RootKey

GRACE_S = 5.0
"""How long a worker that got SIGTERM waits for `STOP_SIGNAL` too."""

# Gloo's RuntimeErrors differ in their text alone; NCCL raises DistBackendErrors.
_LOST = re.compile(
    "closed by peer|reset by peer|broken pipe|timed out waiting|timeout caused pair closure|"
    "connectfullmesh failed|ncclremoteerror|communicator was aborted on rank",
    re.IGNORECASE,
)
_PACKAGE = str(Path(__file__).parents[1]) + os.sep


def join_ranks(backend: str | None = None, timeout_s: float | None = None) -> torch.device:
    """Join torchrun's process group, or start one of this process alone; return this rank's device,
    which is then the current one. `backend` None is the device's own."""
    device, alone = torch.device("cpu"), dict[str, Any]()
    if device_type != "cpu":
        index = int(os.environ.get("LOCAL_RANK", "0")) % cuda_devices()
        torch.accelerator.set_device_index(index)
        device = torch.device(device_type, index)
    if "WORLD_SIZE" not in os.environ:
        os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1")
        alone = {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    timeout = None if timeout_s is None else datetime.timedelta(seconds=timeout_s)
    dist.init_process_group(backend, timeout=timeout, **alone)
    return device


def shared_root_key(device: torch.device, debug_seed: int | None) -> RootKey:
    """Share a fresh root key from rank 0's operating system, or derive one from a debug seed.

    Collective: a broadcast of 32 bytes over the world, from `device`, without a seed. The key is in
    the ranks' memory only.
    """
    if debug_seed is not None:
        return RootKey.from_debug_seed(debug_seed)
    shared = torch.frombuffer(bytearray(RootKey.from_os().reveal()), dtype=torch.uint8).to(device)
    dist.broadcast(shared, src=0)
    return RootKey(shared.cpu().numpy().tobytes())


def broadcast_from_rank0(text: str) -> str:
    """Return rank 0's text on all ranks. Collective: a broadcast over the world."""
    shared: list[str] = [text]
    dist.broadcast_object_list(shared, src=0)
    return shared[0]


def require_agreement(terms: Mapping[str, object]) -> None:
    """Refuse, by the same Fault on all ranks, to train if ranks see other records or terms: one
    record could count twice.

    Terms, by their names in the error, are compared by their `repr`. Collective: an all-gather over
    the world of 32 bytes for each term.

    Guarantee:
        No term's content leaves its rank: only SHA-256 digests are sent, only names printed.
    """
    own = [hashlib.sha256(repr(term).encode()).digest() for term in terms.values()]
    gathered: list[list[bytes]] = [own] * dist.get_world_size()
    dist.all_gather_object(gathered, own)
    others = [rank for rank, digests in enumerate(gathered) if digests != gathered[0]]
    if not others:
        return
    by_term = zip(*gathered, strict=True)
    differing = [name for name, digests in zip(terms, by_term, strict=True) if len({*digests}) > 1]
    raise Fault(
        f"ranks disagree on {' and '.join(differing)} (rank {others[0]} is the first to differ "
        "from rank 0): training.dataset_path, initial weights, job.dump_folder, the configuration, "
        "the installed packages and the kind of device must be the same on every node"
    )


class StopRequest:
    """Whether this run was asked to stop, by signals.

    A scheduler may send SIGTERM to launcher and workers; the launcher then sends `STOP_SIGNAL`.
    SIGTERM alone comes from torchrun, which ends the workers whose peer has failed: this process
    ends too. A thread listens, so that a collective in the main thread delays nothing.
    """

    def __init__(self) -> None:
        self._asked = threading.Event()

    def listen(self) -> None:
        """Listen from now on: call in the main thread, once in a process, before the first step. A
        signal ends a process that does not listen, also one that waits for another in vain."""
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        for number in (STOP_SIGNAL, signal.SIGTERM):
            signal.signal(number, lambda *_: None)
            signal.siginterrupt(number, False)  # other libraries' system calls are restarted
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # it is the launcher that answers it
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

    def agree(self, overflow: Tensor) -> tuple[bool, bool]:
        """Return whether any rank was asked, and whether weights overflow on any (`overflow` is 1.0
        where this rank's do), by an all-reduce of two numbers over the world.

        The first depends on signals alone. Where a clock sends them, the step at which a run stops
        depends on how long steps take, and so on the lengths of records: `ledger.steps` keeps that
        out of `privacy.json`, `ledger.spending` out of the claims of a run that ended there.
        """
        asked = torch.tensor(float(self._asked.is_set()), device=overflow.device)
        both = torch.stack([asked, overflow])
        dist.all_reduce(both, op=dist.ReduceOp.MAX)
        is_asked, overflows = both.bool().tolist()
        return is_asked, overflows


def shorten_timeouts(
    config: JobConfig, parallel_dims: ParallelDims, groups: Iterable[dist.ProcessGroup | None]
) -> None:
    """Set all groups' timeouts to `comm.train_timeout_seconds`, after the first step of a start:
    TorchTitan does so after step 1 only, and not for `groups`, those of our reductions. Collective:
    a barrier over the world."""
    timeout = datetime.timedelta(seconds=config.comm.train_timeout_seconds)
    set_pg_timeouts(timeout, parallel_dims)
    for group in groups:
        if group is not None:
            set_timeout(timeout, group)


def is_lost_rank(error: BaseException) -> bool:
    """Check whether a collective, or the store, failed because of another rank."""
    if isinstance(error, dist.DistNetworkError | dist.DistStoreError):
        return True
    return isinstance(error, RuntimeError) and bool(_LOST.search(str(error)))


@contextlib.contextmanager
def lost_ranks_as_faults() -> Iterator[None]:
    """Report a lost rank, which has a log of its own, as one line without a traceback."""
    try:
        yield
    except RuntimeError as error:
        if not is_lost_rank(error):
            raise
        first = f"{type(error).__name__}: {str(error).partition('. ')[0]}"
        raise Fault(
            f"another rank is gone or hangs ({first}{_place(error)}): its own "
            "log has the reason; the same command resumes from the newest checkpoint"
        ) from error


def _place(error: BaseException) -> str:
    """Describe the line of this package that called the collective; empty if none did."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if frame.filename.startswith(_PACKAGE)]
    if not ours:
        return ""
    return f", at {ours[-1].filename.removeprefix(_PACKAGE)}, line {ours[-1].lineno}"
