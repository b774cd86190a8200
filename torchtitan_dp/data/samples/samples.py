"""From one privacy unit to one sample: cut or padded, never packed with others, never split.

Labels are shifted here, before any sharding over context-parallel ranks, so that no rank needs
its neighbour's first token (hazard rows 6 and 7).

Guarantee:
    A draw of a unit makes one sample (or a public number, `windows`), each a function of that
    unit's records and of randomness independent of all records, whatever their number and lengths.
"""

import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Literal

import numpy as np
import torch

from torchtitan_dp.data.records.store import RecordStore
from torchtitan_dp.data.samples.conversations import Answers, Reading
from torchtitan_dp.data.samples.excerpts import Excerpt, Excerpts
from torchtitan_dp.data.samples.tokenizer import Tokenizer
from torchtitan_dp.data.units import RecordUnits, Units
from torchtitan_dp.privacy.sampling import Choices

CACHE_BYTES = 2**29
"""The bound for one store of samples; training and validation have one each."""
ENTRY_BYTES = 512
"""An upper bound on an entry's memory beside its ids and targets."""


class TokenCache:
    """The token ids of the most recently used sources, in memory alone. Thread-safe.

    PRIVATE, like the records that its ids spell out. It is never written anywhere.

    Guarantee:
        `get` returns the value `put` for the same source, or None, so that samples do not depend on
        the cache. It takes at most `most_bytes`, a public bound, and evicts the least recently
        used.
    """

    def __init__(self, most_bytes: int = CACHE_BYTES) -> None:
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


IGNORE_INDEX = -100  # the default of F.cross_entropy
NOTHING = Excerpt(np.empty(0, dtype=np.int64), 0)


class SampleStore:
    """Samples of `seq_len` tokens from the units of a record store.

    `undecodable` counts the undecodable records in samples that were made, repeats included: for
    the log, labelled not private.
    """

    def __init__(
        self,
        records: RecordStore,
        tokenizer: Tokenizer,
        seq_len: int,
        units: Units | None = None,
        *,
        unit_sampling: Literal["concat", "random"] = "concat",
        long_records: Literal["head", "window"] = "head",
        reading: Reading | None = None,
        cache: TokenCache | None = None,
    ) -> None:
        """
        Args:
            units: by default each record is one.
            unit_sampling: all of a unit's records, concatenated, or one of them, each equally
                likely.
            long_records: the beginning of a longer text, or a random window.
            reading: how to read records with answers, which are then the only targets; needs
                "head".
            cache: an empty one for this store alone; None caches nothing.
        """
        assert reading is None or long_records == "head"
        self.records, self.tokenizer, self.seq_len = records, tokenizer, seq_len
        self.units = RecordUnits(records) if units is None else units
        self.pad_id = tokenizer.eos_id or 0
        self.is_random = unit_sampling == "random" or long_records == "window"
        self._one_record, self._window = unit_sampling == "random", long_records == "window"
        self._excerpts, self._cache = Excerpts(records, tokenizer, seq_len + 1), cache
        self.reading, self._answers = reading, None
        if reading is not None:
            self._answers = Answers(records, tokenizer, seq_len + 1, reading)
        self.undecodable = 0

    @property
    def sources(self) -> int:
        """The number of `source`s."""
        return len(self.records) if self._one_record else len(self.units)

    def chosen(self, unit: int, rng: Choices | None, windows: int) -> np.ndarray:
        """Choose the sources of samples of the unit: all of the unit, or single records.

        Args:
            rng: of this unit and this draw, like new; needed if `is_random`.
            windows: how many samples are wanted.

        Returns:
            int64 (1,); with one record a sample, (n,) for n = min(`windows`, the unit's records)
            different records.
        """
        if not self._one_record:
            return np.array([unit])
        assert rng is not None
        places = self.units.places(unit)
        if windows == 1:
            return np.array([places[int(rng.integers(len(places)))]])
        count = min(windows, len(places))
        return places.start + rng.choice(len(places), size=count, replace=False)

    def tokens(self, source: int) -> int:
        """Count the tokens of a sample made of `source`, without padding: whatever the window, the
        source's tokens up to seq_len; 0 without text tokens. Thread-safe.
        """
        return max(len(self._head(source).ids) - 1, 0)

    def heads(self, unit: int) -> Iterator[Excerpt]:
        """Yield the heads of a unit's sources. A unit has a target if a head has one.

        A window of a longer text has as many ids as its head.
        """
        return map(self._head, self.units.places(unit) if self._one_record else (unit,))

    def excerpt(
        self,
        unit: int,
        rng: Choices | None = None,
        window: int = 0,
        windows: int = 1,
    ) -> Excerpt:
        """Take the ids of one sample, int64, at most seq_len + 1 with marks. Thread-safe.

        Args:
            unit: -1 is padding, which has none.
            rng: of this unit and this draw, like new; needed if `is_random`.
            window: the index of the sample among the unit's `windows`. Those of one long text begin
                in different ones of as many equal parts of it; a text no longer than one sample,
                and a unit with fewer records, has no ids for the last ones.

        Raises `IndexError` for a unit below -1 or beyond the store.
        """
        if unit == -1:
            return NOTHING
        sources = self.chosen(unit, rng, windows)
        if self._one_record and window >= len(sources):
            return NOTHING
        head = self._head(source := int(sources[window if self._one_record else 0]))
        if not self._window or len(head.ids) <= self.seq_len:
            return head if self._one_record or window == 0 else NOTHING
        assert rng is not None
        place = float(rng.random(windows)[window])
        if not self._one_record:
            place = (window + place) / windows
        return head._replace(ids=self._excerpts.window(self._members(source), place, head.ids))

    def lay_out(self, excerpt: Excerpt, tokens_T: np.ndarray, labels_T: np.ndarray) -> None:
        """Write a sample of these ids: tokens, and shifted labels where these are targets."""
        ids = excerpt.ids[: len(tokens_T) + 1]
        count = max(len(ids) - 1, 0)
        tokens_T[:count], tokens_T[count:] = ids[:-1], self.pad_id
        labels_T[:count], labels_T[count:] = ids[1:], IGNORE_INDEX
        if excerpt.targets is not None:
            labels_T[:count][~excerpt.targets[1 : count + 1]] = IGNORE_INDEX

    def hand_out(self, units: np.ndarray) -> None:
        """Note the units, or padding (-1), of the next microbatch; a no-op to override."""

    def sample(
        self,
        unit: int,
        length: int | None = None,
        rng: Choices | None = None,
        window: int = 0,
        windows: int = 1,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Make `(tokens_T, labels_T)` of one unit: int64 (seq_len,), or the first `length`.

        With ids = [bos] + text + [eos] (marks that exist; of each record, if there are several),
        cut to seq_len + 1: tokens are all but the last id, labels all but the first; tokens are
        padded with eos (or 0), labels with `IGNORE_INDEX`. A unit without text tokens (empty,
        undecodable, or -1, a draw's padding) has ignored labels only and contributes exactly 0.
        With a `reading`, ids and targets are those of `conversations`, and other labels are
        ignored; a unit without an answer contributes exactly 0.

        Of a huge unit, only about as much is read and tokenized as `seq_len` tokens need. Its ids
        are those of the whole text, unless a tokenizer's merges reach more than 64 tokens ahead;
        they are a fixed function of the unit all the same.

        Args:
            rng: of this unit and this draw, like new; needed if `is_random`.
            window, windows: index and number of the unit's samples (`excerpt`).

        Raises `IndexError` for a unit below -1 or beyond the store.
        """
        both = np.empty((2, self.seq_len if length is None else length), dtype=np.int64)
        excerpt = self.excerpt(unit, rng, window, windows)
        self.undecodable += excerpt.undecodable
        self.lay_out(excerpt, both[0], both[1])
        tokens_T, labels_T = torch.from_numpy(both)
        return tokens_T, labels_T

    def batch(
        self,
        units: Sequence[int] | np.ndarray,
        length: int | None = None,
        rngs: Sequence[Choices | None] | None = None,
        windows: int = 1,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Make `(tokens_BT, labels_BT)`, int64 (len(units), seq_len or `length`), of `sample`s.

        Args:
            windows: samples of each unit, which `units` repeats as often in a row.
        """
        shape = len(units), self.seq_len if length is None else length
        tokens_BT = torch.empty(shape, dtype=torch.int64)
        labels_BT = torch.empty_like(tokens_BT)
        self.hand_out(np.asarray(units)[::windows])
        for row, unit in enumerate(units):
            rng = None if rngs is None else rngs[row]
            which = row % windows, windows
            tokens_BT[row], labels_BT[row] = self.sample(int(unit), length, rng, *which)
        return tokens_BT, labels_BT

    def _members(self, source: int) -> np.ndarray:
        if self._one_record:
            return np.array([self.units.record(source)])
        return self.units.records(source)

    def _head(self, source: int) -> Excerpt:
        if self._cache is not None and (kept := self._cache.get(source)) is not None:
            return kept
        members = self._members(source)
        head = (self._answers or self._excerpts).head(members)
        # Not cached: a file that is unreadable now (undecodable) may be readable later, and one
        # replaced since it was listed may be another unit's, even after the files are put back.
        if self._cache is None or head.undecodable:
            return head
        if self.records.are_as_listed(members[: self.seq_len + 1]):
            self._cache.put(source, head)
        return head
