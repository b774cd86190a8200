"""Names for what memory is allocated for: the plan's tracker reads them, training does not."""

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from typing import Protocol

from torch import Tensor


class Tracker(Protocol):
    """Counts memory by label."""

    def labelled(self, label: str) -> AbstractContextManager[None]: ...

    def relabel(self, tensors: Iterable[Tensor], label: str) -> None: ...


TRACKER: ContextVar[Tracker | None] = ContextVar("tracker", default=None)
_NOTHING = nullcontext()


def label(name: str, tensors: Iterable[Tensor] = ()) -> AbstractContextManager[None]:
    """Give a name to the memory that is allocated within the block, and to that of `tensors`."""
    tracker = TRACKER.get()
    if tracker is None:
        return _NOTHING
    tracker.relabel(tensors, name)
    return tracker.labelled(name)
