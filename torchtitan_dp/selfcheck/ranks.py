"""The processes that check together: how they start, and how they agree on what each has found."""

import contextlib
import datetime
import os
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

import torchtitan_dp.distributed  # noqa: F401  lets TorchTitan import without a GPU

# isort: split
from torchtitan.tools.utils import device_type

COLLECTIVE_S = 60  # how long a collective of a check may take
_AGREEMENT_S = 150  # how long a rank waits for the others' findings
_GRACE_S = 20  # how long a rank that cannot go on waits, before it ends all


@dataclass(frozen=True)
class Ranks:
    """Says which rank this is, where it computes, and how ranks tell each other."""

    device: torch.device
    group: dist.ProcessGroup | None = None
    """For findings alone, on gloo: a check that hangs does not keep it busy. None: the default."""

    @property
    def rank(self) -> int:
        return dist.get_rank()

    @property
    def world_size(self) -> int:
        return dist.get_world_size()

    def gather(self, told: Any) -> list[Any]:
        """Return what each rank tells, by rank. Collective over the world."""
        found: list[Any] = [None] * self.world_size
        dist.all_gather_object(found, told, group=self.group)
        return found

    def from_first(self, told: Any) -> Any:
        """Return what rank 0 tells. Collective over the world."""
        return self.gather(told)[0]

    @contextlib.contextmanager
    def ending_if_alone(self, line: str, *, waits: bool) -> Iterator[None]:
        """End this process with `line` if what is within does not come about.

        Args:
            waits: whether to wait for the others as long as they take. A rank that left a check
                does not: they may hang in a collective of it, and nobody else can tell.
        """

        def end() -> None:
            print(f"selfcheck: rank {self.rank}: {line}", file=sys.stderr, flush=True)
            os._exit(1)

        waiting = threading.Timer(_GRACE_S, end)
        waiting.daemon = True
        if not waits:
            waiting.start()
        try:
            yield
        except RuntimeError:  # another has ended
            end()
        finally:
            waiting.cancel()


def start(backend: str | None) -> Ranks:
    """Join torchrun's process group, or start one of this process alone.

    Args:
        backend: as of `init_process_group`; None is what fits the device.
    """
    device = torch.device("cpu")
    if device_type != "cpu":
        index = int(os.environ.get("LOCAL_RANK", "0")) % torch.accelerator.device_count()
        torch.accelerator.set_device_index(index)
        device = torch.device(device_type, index)
    timeout = datetime.timedelta(seconds=COLLECTIVE_S)
    if "WORLD_SIZE" in os.environ:
        dist.init_process_group(backend, timeout=timeout)
    else:
        os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1")
        store = dist.HashStore()
        dist.init_process_group(backend, store=store, rank=0, world_size=1, timeout=timeout)
    waits = datetime.timedelta(seconds=_AGREEMENT_S)
    return Ranks(device, dist.new_group(backend="gloo", timeout=waits))
