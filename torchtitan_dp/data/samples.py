"""From one privacy unit to one sample: cut or padded, never packed with others, never split.

Labels are shifted here, before any sharding over context-parallel ranks, so that no rank needs
its neighbour's first token (hazard rows 6 and 7).

A unit's ids are those of its records, one after the other, without those that have nothing to
learn. A sample begins where they begin, or is a random window of them. Of a record with answers
that is longer than a sample, the window is taken that begins a quarter of a sample before the first
target, or earlier if the record ends within it: a long prompt is cut at its beginning, an answer
only where it has no room beside a quarter of prompt, and every record with a target shows one.

Guarantee:
    A draw of a unit makes one sample (or a public number, `windows`), each a function of that
    unit's records and of randomness that is independent of all records. The number of samples
    depends on no record.
"""

from collections.abc import Sequence

import numpy as np
import torch

from torchtitan_dp.data.store import Store
from torchtitan_dp.privacy.sampling import Choices

IGNORE_INDEX = -100  # the default of F.cross_entropy
PROMPT_SHARE = 4
"""A prompt that is cut keeps one part in so many of the window, or what the answer leaves."""
NOTHING = np.empty(0, dtype=np.int64)


class Samples:
    """Samples of `seq_len` tokens from the units of a store."""

    def __init__(
        self,
        store: Store,
        seq_len: int,
        *,
        one_record: bool = False,
        window: bool = False,
        has_answers: bool = False,
        pad_id: int = 0,
    ) -> None:
        """
        Args:
            one_record: whether a sample is of one of a unit's records, each equally likely; else of
                all of them, concatenated.
            window: whether a sample of a longer text is a random window of it; else its beginning.
            has_answers: whether only answers are targets (`reading`).
            pad_id: the token of padding.
        """
        assert not (window and has_answers)
        self.store, self.units, self.seq_len = store, store.units, seq_len
        self.one_record, self.window = one_record, window
        self.has_answers, self.pad_id = has_answers, pad_id
        self.is_random = one_record or window
        self._between = store.between
        # Ids of each record that a sample may take, by its place in the row of units' records.
        lengths = store.lengths()[self.units.members]
        if has_answers:
            lengths = np.minimum(lengths, seq_len + 1 + self._between)
        self._ends = np.concatenate([[0], np.cumsum(lengths)])

    def learned(self, units: np.ndarray) -> np.ndarray:
        """Return which units have a target: bool, like `units`. Nothing predicts the first id."""
        starts = self.units.starts
        lengths = self._ends[starts[units + 1]] - self._ends[starts[units]]
        if self.one_record:
            longest = np.maximum.reduceat(np.diff(self._ends), starts[:-1])
            lengths = longest[units]
        return np.asarray(lengths - self._between > 1)

    def tokens(self, unit: int, rng: Choices | None = None, windows: int = 1) -> int:
        """Count the tokens of a unit's sample, or of the longest of its samples, without padding.

        Args:
            rng, windows: as for `ids`.
        """
        found = max(self._length(places) for places in self._chosen(unit, rng, windows))
        return max(min(found, self.seq_len + 1) - 1, 0)

    def ids(
        self, unit: int, rng: Choices | None = None, window: int = 0, windows: int = 1
    ) -> np.ndarray:
        """Read the ids of one sample, int64, at most seq_len + 1; those that are no targets as
        their complement.

        Args:
            unit: -1 is padding, which has none.
            rng: of this unit and this draw, like new; needed if `is_random`.
            window: the index of the sample among the unit's `windows`. Those of one long text begin
                in different ones of as many equal parts of it; a text no longer than one sample,
                and a unit with fewer records, has no ids for the last ones.

        Raises:
            IndexError: a unit below -1 or beyond the store.
            OSError: the disk failed.
        """
        if unit == -1:
            return NOTHING
        chosen, limit = self._chosen(unit, rng, windows), self.seq_len + 1
        if self.one_record and window >= len(chosen):
            return NOTHING
        places = chosen[window if self.one_record else 0]
        length = self._length(places)
        if not self.window or length < limit:
            return self._read(places, 0) if self.one_record or window == 0 else NOTHING
        assert rng is not None
        place = float(rng.random(windows)[window])
        if not self.one_record:
            place = (window + place) / windows
        # From a window before the first id to the last, and then moved inside: ids near both ends
        # are taken up to twice as often as others, none never.
        start = int(place * (length + limit)) - limit
        return self._read(places, min(max(start, 0), length - limit))

    def _chosen(self, unit: int, rng: Choices | None, windows: int) -> list[range]:
        """Choose the places of the unit's samples: all of the unit, or single records."""
        places = self.units.places(unit)
        if not self.one_record:
            return [places]
        assert rng is not None
        if windows == 1:
            found = np.array([int(rng.integers(len(places)))])
        else:
            found = rng.choice(len(places), size=min(windows, len(places)), replace=False)
        return [range(places[i], places[i] + 1) for i in found.tolist()]

    def _length(self, places: range) -> int:
        return max(int(self._ends[places.stop] - self._ends[places.start]) - self._between, 0)

    def _read(self, places: range, start: int) -> np.ndarray:
        """Read the ids of records, from `start` on, as many as a sample has at most."""
        limit = self.seq_len + 1
        at = int(self._ends[places.start]) + self._between + start
        place = int(np.searchsorted(self._ends, at, side="right")) - 1
        found, skip = [NOTHING], at - int(self._ends[place])
        needed = limit
        while needed > 0 and place < places.stop:
            ids = (
                self._record(place)[skip : skip + needed]
                if self.has_answers
                else self.store.ids(int(self.units.members[place]), skip, needed)
            )
            found.append(ids)
            needed, place, skip = needed - len(ids), place + 1, 0
        return np.concatenate(found)

    def _record(self, place: int) -> np.ndarray:
        """Read what a sample may take of a record with answers, and what stands before it."""
        record, limit = int(self.units.members[place]), self.seq_len + 1
        length = self.store.length(record) - self._between
        first, start = int(self.store.firsts[record]), 0
        if length > limit:
            # At least one id before it: the first of a sample is never predicted.
            start = max(min(first - max(limit // PROMPT_SHARE, 1), length - limit), 0)
        between = self.store.ids(record, 0, self._between)
        return np.concatenate([between, self.store.ids(record, self._between + start, limit)])

    def lay_out(self, ids: np.ndarray, tokens_T: np.ndarray, labels_T: np.ndarray) -> None:
        """Write a sample of these ids: tokens, and shifted labels where these are targets."""
        ids = ids[: len(tokens_T) + 1]
        count = max(len(ids) - 1, 0)
        tokens_T[:count], tokens_T[count:] = np.where(ids < 0, ~ids, ids)[:-1], self.pad_id
        labels_T[:count], labels_T[count:] = ids[1:], IGNORE_INDEX
        labels_T[:count][ids[1:] < 0] = IGNORE_INDEX

    def sample(
        self,
        unit: int,
        length: int | None = None,
        rng: Choices | None = None,
        window: int = 0,
        windows: int = 1,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Make `(tokens_T, labels_T)` of one unit: int64 (seq_len,), or the first `length`.

        Tokens are all ids but the last, labels all but the first; tokens are padded with `pad_id`,
        labels with `IGNORE_INDEX`. A unit without ids (empty, undecodable, or -1, a draw's padding)
        has ignored labels only and contributes exactly 0.

        Args:
            rng, window, windows: as for `ids`.
        """
        both = np.empty((2, self.seq_len if length is None else length), dtype=np.int64)
        self.lay_out(self.ids(unit, rng, window, windows), both[0], both[1])
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
        shape = 2, len(units), self.seq_len if length is None else length
        both = np.empty(shape, dtype=np.int64)
        for row, unit in enumerate(units):
            rng = None if rngs is None else rngs[row]
            self.lay_out(self.ids(int(unit), rng, row % windows, windows), *both[:, row])
        tokens_BT, labels_BT = torch.from_numpy(both)
        return tokens_BT, labels_BT
