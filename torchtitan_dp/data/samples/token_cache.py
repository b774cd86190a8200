"""A bounded cache of token ids in memory, so that a unit is tokenized once.

PRIVATE, like the records that its ids spell out. It is never written anywhere.

Guarantee:
    `get` returns the value `put` for the same source, or None, so that samples do not depend on the
    cache. It takes at most `most_bytes`, a public bound, and evicts the least recently used.
"""

import threading
from collections import OrderedDict

from torchtitan_dp.data.samples.excerpts import Excerpt

MOST_BYTES = 2**29
"""The bound for one store of samples; training and validation have one each."""
ENTRY_BYTES = 512
"""An upper bound on an entry's memory beside its ids and targets."""


class TokenCache:
    """The heads of the most recently used sources. Thread-safe."""

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self._most_bytes, self._bytes = most_bytes, 0
        self._heads: OrderedDict[int, Excerpt] = OrderedDict()  # ids in int32; the latest last
        self._lock = threading.Lock()

    def get(self, source: int) -> Excerpt | None:
        """Return a copy of a source's head, or None."""
        with self._lock:
            head = self._heads.get(source)
            if head is None:
                return None
            self._heads.move_to_end(source)
        targets = None if head.targets is None else head.targets.copy()
        return Excerpt(head.ids.astype("int64"), head.undecodable, targets)

    def put(self, source: int, head: Excerpt) -> None:
        """Keep a copy of a source's head, if it fits."""
        targets = None if head.targets is None else head.targets.copy()
        kept = Excerpt(head.ids.astype("int32"), head.undecodable, targets)
        if _size(kept) > self._most_bytes:
            return
        with self._lock:
            if (before := self._heads.pop(source, None)) is not None:
                self._bytes -= _size(before)
            self._heads[source] = kept
            self._bytes += _size(kept)
            while self._bytes > self._most_bytes:
                self._bytes -= _size(self._heads.popitem(last=False)[1])


def _size(head: Excerpt) -> int:
    return ENTRY_BYTES + head.ids.nbytes + (0 if head.targets is None else head.targets.nbytes)
