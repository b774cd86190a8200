"""A bounded cache of token ids in memory: a unit that is drawn again needs no tokenizer.

PRIVATE, like the records, which it spells out. It is never written anywhere, and ends with the
process.

Guarantee:
    `get` returns what was `put` for the same source, or nothing, so no sample depends on what is
    cached. It takes at most `most_bytes`, a public bound; the least recently used give way.
"""

import threading
from collections import OrderedDict

from torchtitan_dp.data.samples.excerpts import Excerpt

MOST_BYTES = 2**29
"""Of one store of samples; training and validation have one each."""
ENTRY_BYTES = 512
"""An upper bound on what an entry takes beside its ids and targets."""


class TokenCache:
    """The heads of sources that were used last. Any thread may ask."""

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self._most_bytes, self._bytes = most_bytes, 0
        self._heads: OrderedDict[int, Excerpt] = OrderedDict()  # ids in int32; the latest last
        self._lock = threading.Lock()

    def get(self, source: int) -> Excerpt | None:
        """Return a copy of a source's head; None if it is not kept."""
        with self._lock:
            head = self._heads.get(source)
            if head is None:
                return None
            self._heads.move_to_end(source)
        targets = None if head.targets is None else head.targets.copy()
        return Excerpt(head.ids.astype("int64"), head.undecodable, targets)

    def put(self, source: int, head: Excerpt) -> None:
        """Keep a copy of a source's head, if it has room at all."""
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
