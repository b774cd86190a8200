"""A collective that fails because another rank is gone or hangs: one line, without a traceback."""

import contextlib
import os
import traceback
from collections.abc import Iterator

import torch.distributed as dist

import torchtitan_dp
from torchtitan_dp.process import Fault

# Gloo raises RuntimeErrors that differ in their text alone; NCCL, DistBackendErrors.
_LOST = (
    "closed by peer",
    "reset by peer",
    "broken pipe",
    "timed out waiting",
    "timeout caused pair closure",
    "connectfullmesh failed",
    "ncclremoteerror",
)
_PACKAGE = os.path.dirname(torchtitan_dp.__file__) + os.sep


def is_lost_rank(error: BaseException) -> bool:
    """Return whether a collective, or the store, failed because of another rank."""
    if isinstance(error, dist.DistNetworkError | dist.DistStoreError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error).lower() for words in _LOST)


@contextlib.contextmanager
def lost_ranks_as_faults() -> Iterator[None]:
    """Turn the end of another rank, which has its own log, into one line without a traceback."""
    try:
        yield
    except RuntimeError as error:
        if not is_lost_rank(error):
            raise
        raise Fault(
            f"another rank is gone or hangs ({_first_sentence(error)}{_place(error)}): its own "
            "log has the reason; the same command resumes from the newest checkpoint"
        ) from error


def _first_sentence(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).partition('. ')[0]}"


def _place(error: BaseException) -> str:
    """Return the line of this package that called the collective, if one did."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if frame.filename.startswith(_PACKAGE)]
    if not ours:
        return ""
    return f", at {ours[-1].filename.removeprefix(_PACKAGE)}, line {ours[-1].lineno}"
