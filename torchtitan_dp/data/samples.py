"""From one privacy unit to one sample: cut or padded, never packed with others, never split.

Labels are shifted here, before any sharding over context-parallel ranks, so that no rank needs
its neighbour's first token (hazard rows 6 and 7).

A sample begins where its unit's records begin, one after the other, or is a random window of them.
Of a record with answers that is longer than a sample, the window begins a quarter of a sample
before the first target, or earlier if the record ends within it.

Guarantee:
    A draw of a unit makes one sample (or a public number, `windows`), each a function of that
    unit's records and of randomness that is independent of all records.
"""

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass

import numpy as np
import torch

from torchtitan_dp.data.store import Store
from torchtitan_dp.privacy.sampling import Choices

IGNORE_INDEX = -100  # the default of F.cross_entropy
PROMPT_SHARE = 4  # a cut prompt keeps one part in so many of the window, or what the answer leaves
NOTHING = np.empty(0, dtype=np.int64)


@dataclass(eq=False)
class Samples:
    """Samples of `seq_len` tokens from the units of a store."""

    store: Store
    seq_len: int
    _: KW_ONLY
    one_record: bool = False  # whether a sample is of one of a unit's records, each equally likely
    window: bool = False  # whether one of a longer text is a random window; else its beginning
    has_answers: bool = False  # whether only answers are targets (`reading`)
    pad_id: int = 0  # the token of padding

    def __post_init__(self) -> None:
        assert not (self.window and self.has_answers)
        self.units, self.is_random = self.store.units, self.one_record or self.window
        self._between, limit = self.store.between, self.seq_len + 1
        # By place (`Units.places`): where the ids that samples take of a record begin in it, and
        # where they end, if those of all records lie in a row.
        lengths = self.store.lengths()[self.units.members]
        self._cuts = np.zeros_like(lengths)
        if self.has_answers:
            # At least one id before the target: the first of a sample is never predicted.
            begins = self.store.firsts[self.units.members] - max(limit // PROMPT_SHARE, 1)
            self._cuts = np.minimum(begins, lengths - self._between - limit).clip(min=0)
            lengths = np.minimum(lengths, limit + self._between)
        self._ends = np.concatenate([[0], np.cumsum(lengths)])

    def has_target(self, units: np.ndarray) -> np.ndarray:
        """Return which units have a target: bool, like `units`. Nothing predicts the first id."""
        starts, ends, begins = self.units.starts, self._ends[1:], self._ends[:-1]
        first = begins if self.one_record else np.repeat(begins[starts[:-1]], np.diff(starts))
        # Indices in the ids of a sample: of each record's last id, or of its first target.
        indices = ends - 1 - first - self._between
        if self.has_answers:
            targets = self.store.firsts[self.units.members] - self._cuts
            indices = np.where(ends > begins, begins - first + targets, 0)
            indices[indices > self.seq_len] = 0
        return np.logical_or.reduceat(indices > 0, starts[:-1])[units]

    def tokens(self, unit: int, rng: Choices | None = None, windows: int = 1) -> int:
        """Count the tokens of the longest of a unit's samples (`ids`), without padding."""
        found = max(self._length(places) for places in self._chosen(unit, rng, windows))
        return max(min(found, self.seq_len + 1) - 1, 0)

    def ids(
        self, unit: int, rng: Choices | None = None, window: int = 0, windows: int = 1
    ) -> np.ndarray:
        """Read the ids of one sample, int64, at most seq_len + 1; those that are no targets as
        their complement. Raises OSError if the disk failed.

        Unit -1 is padding, without ids. `rng`, a fresh generator of this unit and draw, is needed
        if `is_random`. The `windows` of a long text begin in as many equal parts of it; a text that
        fits one sample, or too few records, leave later windows without ids.
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
        share = float(rng.random(windows)[window])
        if not self.one_record:
            share = (window + share) / windows
        # From a window before the first id to the last, and then moved inside: ids near both ends
        # are taken up to twice as often as others, none never.
        start = int(share * (length + limit)) - limit
        return self._read(places, min(max(start, 0), length - limit))

    def _chosen(self, unit: int, rng: Choices | None, windows: int) -> list[range]:
        places = self.units.places(unit)
        if not self.one_record:
            return [places]
        assert rng is not None
        if windows == 1:
            found = [int(rng.integers(len(places)))]
        else:
            found = rng.choice(len(places), size=min(windows, len(places)), replace=False).tolist()
        return [places[i : i + 1] for i in found]

    def _length(self, places: range) -> int:
        return max(int(self._ends[places.stop] - self._ends[places.start]) - self._between, 0)

    def _read(self, places: range, start: int) -> np.ndarray:
        """Read the ids of records, from `start` on, as many as a sample has at most."""
        at = int(self._ends[places.start]) + self._between + start
        place = int(np.searchsorted(self._ends, at, side="right")) - 1
        found, skip, needed = [NOTHING], at - int(self._ends[place]), self.seq_len + 1
        while needed > 0 and place < places.stop:
            ids = self._record(place, skip, needed)
            found.append(ids)
            needed, place, skip = needed - len(ids), place + 1, 0
        return np.concatenate(found)

    def _record(self, place: int, skip: int, most: int) -> np.ndarray:
        """Read what a sample may take of a record, and what stands before it."""
        record, cut = int(self.units.members[place]), int(self._cuts[place])
        if cut == 0:
            return self.store.ids(record, skip, most)
        between = self.store.ids(record, skip, self._between - skip)
        start = cut + max(skip, self._between)
        return np.concatenate([between, self.store.ids(record, start, most - len(between))])

    def lay_out(self, ids: np.ndarray, tokens_T: np.ndarray, labels_T: np.ndarray) -> None:
        """Write a sample of these ids: tokens, and shifted labels where these are targets."""
        ids = ids[: len(tokens_T) + 1]
        count = max(len(ids) - 1, 0)
        tokens_T[:count], tokens_T[count:] = np.where(ids < 0, ~ids, ids)[:-1], self.pad_id
        labels_T[:count], labels_T[count:] = ids[1:], IGNORE_INDEX
        labels_T[:count][ids[1:] < 0] = IGNORE_INDEX

    def batch(
        self,
        units: Sequence[int] | np.ndarray,
        length: int | None = None,
        rngs: Sequence[Choices | None] | None = None,
        windows: int = 1,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Make `(tokens_BT, labels_BT)`, int64 (len(units), seq_len or `length`): `windows` samples
        of each unit, which `units` repeats as often in a row. Labels are padded with
        `IGNORE_INDEX`: a unit without ids (empty, undecodable, or -1) contributes exactly 0."""
        both = np.empty((2, len(units), length or self.seq_len), dtype=np.int64)
        for row, (unit, rng) in enumerate(zip(units, rngs or [None] * len(units), strict=True)):
            self.lay_out(self.ids(int(unit), rng, row % windows, windows), *both[:, row])
        tokens_BT, labels_BT = torch.from_numpy(both)
        return tokens_BT, labels_BT
