"""Whether a rank failed to make a sample: told to all of them before anything comes of the step."""

import os
import traceback

import torch
import torch.distributed as dist

from torchtitan_dp.process import Fault


class Verdict:
    """Asks all ranks whether one of them failed; the answer is read later, without a wait.

    On a CUDA device the question is asked before the last microbatch is computed, and the answer
    copied at once, so that `require` waits for no kernel that is launched in between.
    """

    def __init__(self, failure: BaseException | None, device: torch.device) -> None:
        """Ask. Collective: an all-reduce of one number over the world, if there is a process group.

        Args:
            failure: what this rank could not do, if anything.
            device: what the process group sends from.
        """
        self._failure = failure
        # Filled in on the device: a copy from here would be waited for.
        failed = torch.full((1,), int(failure is not None), dtype=torch.int32, device=device)
        if dist.is_initialized():
            dist.all_reduce(failed, op=dist.ReduceOp.MAX)
        self._copied: torch.cuda.Event | None = None
        if device.type == "cuda":
            self._failed = torch.empty_like(failed, device="cpu", pin_memory=True)
            self._failed.copy_(failed, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record()
        else:
            self._failed = failed

    def require(self) -> None:
        """Refuse the step if a rank failed.

        Raises:
            Fault: on all ranks; where it happened, it says what.
        """
        if self._copied is not None:
            self._copied.synchronize()
        if not self._failed.item():
            return
        if self._failure is None:
            raise Fault("a sample could not be made on another rank, whose own line says why")
        # What is raised may speak of a record.
        raise Fault(
            f"a sample could not be made (not private: {_described(self._failure)})"
        ) from self._failure


def _described(error: BaseException) -> str:
    """Say on one line what was raised, and where."""
    last = traceback.extract_tb(error.__traceback__)[-1:]
    where = "".join(f" ({os.path.basename(frame.filename)}, line {frame.lineno})" for frame in last)
    return f"{type(error).__name__}: {error}{where}"
