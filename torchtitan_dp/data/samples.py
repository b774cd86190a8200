"""From one privacy unit to one sample: cut or padded, never packed with others, never split.

Labels are shifted here, before any sharding over context-parallel ranks, so that no rank needs
its neighbour's first token (hazard rows 6 and 7).

Guarantee:
    A draw of a unit gives one sample, a function of that unit's records and of randomness that is
    independent of all records, whatever the unit's number of records and their lengths.
"""

from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch

from torchtitan_dp.data.excerpts import (
    WINDOW_LOOKS,
    Excerpt,
    Excerpts,
    most_bytes,
    most_parsed,
)
from torchtitan_dp.data.store import RecordStore
from torchtitan_dp.data.token_cache import TokenCache
from torchtitan_dp.data.tokenizer import Tokenizer
from torchtitan_dp.data.units import RecordUnits, Units

IGNORE_INDEX = -100  # the default of F.cross_entropy
_NOTHING = Excerpt(np.empty(0, dtype=np.int64), 0)


class SampleStore:
    """Makes samples of `seq_len` tokens from the units of a record store.

    `undecodable` counts the undecodable records met in samples that were handed out, repeats
    included. It is computed from private records: for the log, labelled not private.
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
        cache: TokenCache | None = None,
    ) -> None:
        """
        Args:
            units: by default each record is one.
            unit_sampling: whether a sample is made of all of a unit's records, one after the other,
                or of one of them, each equally likely.
            long_records: of what is longer than a sample, the beginning or a random window.
            cache: of the same records, tokenizer, `seq_len` and sources.
        """
        self.records, self.tokenizer, self.seq_len = records, tokenizer, seq_len
        self.units = RecordUnits(records) if units is None else units
        self.pad_id = tokenizer.eos_id or 0
        self.is_random = unit_sampling == "random" or long_records == "window"
        self._one_record, self._window = unit_sampling == "random", long_records == "window"
        self._excerpts, self._cache = Excerpts(records, tokenizer, seq_len + 1), cache
        self.undecodable = 0

    @property
    def looks(self) -> int:
        """Count how often making one sample may look at its unit; `tokens` looks once."""
        return WINDOW_LOOKS if self._window else 1

    @property
    def most_bytes(self) -> int:
        """Bound the text that making one sample hands to the tokenizer: a function of `seq_len` and
        of how samples are made, whatever the records.
        """
        return self.looks * most_bytes(self.seq_len + 1)

    @property
    def most_parsed(self) -> int:
        """Bound the bytes of JSON that making one sample parses: 0 for other formats."""
        if not self.records.reads_whole:
            return 0
        return self.looks * most_parsed(self.seq_len + 1)

    @property
    def sources(self) -> int:
        """Count the different `source`s."""
        return len(self.records) if self._one_record else len(self.units)

    def source(self, unit: int, rng: np.random.Generator | None = None) -> int:
        """Give a number to what a sample of the unit is made of: all of the unit, or one record.

        Args:
            rng: of this unit and this draw; needed if `is_random`.
        """
        if not self._one_record:
            return unit
        assert rng is not None
        places = self.units.places(unit)
        return places[int(rng.integers(len(places)))]

    def tokens(self, source: int) -> int:
        """Count the tokens, padding left out, of a sample made of `source`. Whatever the window, it
        is the number of the source's tokens up to seq_len; 0 if it has no text tokens. Any thread
        may ask.
        """
        return max(len(self._head(source).ids) - 1, 0)

    def excerpt(self, unit: int, rng: np.random.Generator | None = None) -> Excerpt:
        """Take the ids of one sample, int64, at most seq_len + 1 with marks. Any thread may ask.

        Args:
            unit: -1 is padding, which has none.
            rng: of this unit and this draw, like new; needed if `is_random`.

        Raises `IndexError` for a unit below -1 or beyond the store.
        """
        if unit == -1:
            return _NOTHING
        source = self.source(unit, rng)
        head = self._head(source)
        if not self._window or len(head.ids) <= self.seq_len:
            return head
        assert rng is not None
        place = rng.random()
        return head._replace(ids=self._excerpts.window(self._members(source), place, head.ids))

    def lay_out(self, ids: np.ndarray, tokens_T: np.ndarray, labels_T: np.ndarray) -> None:
        """Fill in a sample of these ids: tokens, and labels that are the tokens after them."""
        ids = ids[: len(tokens_T) + 1]
        targets = max(len(ids) - 1, 0)
        tokens_T[:targets], tokens_T[targets:] = ids[:-1], self.pad_id
        labels_T[:targets], labels_T[targets:] = ids[1:], IGNORE_INDEX

    def hand_out(self, units: np.ndarray) -> None:
        """Take note that these units' samples, or padding (-1), go into the next microbatch."""

    def sample(
        self, unit: int, length: int | None = None, rng: np.random.Generator | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Make `(tokens_T, labels_T)` of one unit: int64 (seq_len,), or the first `length`.

        With ids = [bos] + text + [eos] (marks that exist; of each record, if there are several),
        cut to seq_len + 1: tokens are all but the last id, labels all but the first; tokens are
        padded with eos (or 0), labels with `IGNORE_INDEX`. A unit without text tokens (empty,
        undecodable, or unit -1, which is the padding of a draw) has labels that are all ignored:
        it contributes exactly 0.

        Only about as much of a huge unit is read and tokenized as `seq_len` tokens need. Within
        that part the ids are those of the whole text, except that a tokenizer whose merges reach
        more than 64 tokens ahead may choose others: still a fixed function of the unit.

        Args:
            rng: of this unit and this draw, like new; needed if `is_random`.

        Raises `IndexError` for a unit below -1 or beyond the store.
        """
        both = np.empty((2, self.seq_len if length is None else length), dtype=np.int64)
        excerpt = self.excerpt(unit, rng)
        self.undecodable += excerpt.undecodable
        self.lay_out(excerpt.ids, both[0], both[1])
        tokens_T, labels_T = torch.from_numpy(both)
        return tokens_T, labels_T

    def batch(
        self,
        units: Sequence[int] | np.ndarray,
        length: int | None = None,
        rngs: Sequence[np.random.Generator | None] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Make `(tokens_BT, labels_BT)`, int64 (len(units), seq_len or `length`), of `sample`s."""
        shape = len(units), self.seq_len if length is None else length
        tokens_BT = torch.empty(shape, dtype=torch.int64)
        labels_BT = torch.empty_like(tokens_BT)
        self.hand_out(np.asarray(units))
        for row, unit in enumerate(units):
            rng = None if rngs is None else rngs[row]
            tokens_BT[row], labels_BT[row] = self.sample(int(unit), length, rng)
        return tokens_BT, labels_BT

    def _members(self, source: int) -> np.ndarray:
        if self._one_record:
            return np.array([self.units.record(source)])
        return self.units.records(source)

    def _head(self, source: int) -> Excerpt:
        if self._cache is not None and (ids := self._cache.get(source)) is not None:
            return Excerpt(ids, 0)
        members = self._members(source)
        head = self._excerpts.head(members)
        # A file that could not be read just now is taken for undecodable: it may be read again. And
        # one that was exchanged since it was listed may be another unit's: kept, it would be taken
        # for this one's by a later run, long after the files were put back.
        if self._cache is None or head.undecodable:
            return head
        if self.records.are_as_listed(members[: self.seq_len + 1]):
            self._cache.put(source, head.ids)
        return head
