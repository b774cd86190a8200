"""The token ids of a unit's sample: the first ones, or a random window.

A unit's ids are those of its records, one after the other, each with its marks: [bos] text [eos]
(marks that exist; without marks, a blank line separates records). Records without text tokens,
empty or undecodable, are left out; one whose text, in the part that is read, has no tokens is
undecodable too. Only about as much is read and tokenized as `limit` ids need,
however large a record and however many there are: one look at a unit hands at most `most_bytes` to
the tokenizer, over all its records and over text that is read again.

Guarantee:
    An excerpt is a function of one unit's records and of one random number; its length is one of
    the records alone: a window has as many ids as the head. How much is read and tokenized for it
    is bounded by `limit` alone, which is public, so that no record keeps the other ranks waiting
    for longer than they wait for any.
"""

from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np

from torchtitan_dp.data.console import Progress
from torchtitan_dp.data.records.store import RecordStore
from torchtitan_dp.data.samples.tokenizer import Tokenizer

EDGE_TOKENS = 64  # the tokens next to a cut may differ from those of the whole text
EDGE_BYTES = 8  # more than a byte order mark and a split character can take away
# What one look may cost, in bytes of text that a tokenizer takes, about a microsecond each. A token
# has 3 or 4 bytes in most texts; those of blanks or zeros may have a hundred: their samples have
# fewer tokens than the unit.
TOKEN_BYTES = 24
LEAST_BYTES = 2**17
RECORD_BYTES = 256  # for a record's opening
READ_BYTES = 64  # are read while one is tokenized
PARSED_BYTES = 4  # are parsed as JSON while one is tokenized
RENDERED_BYTES = 64  # are written by a chat template while one is tokenized
_NO_IDS = np.empty(0, dtype=np.int64)


def most_bytes(limit: int) -> int:
    """Bound the text that one look at a unit hands to the tokenizer, for `limit` ids.

    >>> most_bytes(1025), most_bytes(2**17 + 1)
    (131072, 3147288)
    """
    return max(LEAST_BYTES, TOKEN_BYTES * (limit + EDGE_TOKENS))


class Excerpt(NamedTuple):
    """Token ids of a unit, and how many undecodable records were read for them."""

    ids: np.ndarray  # int64
    undecodable: int
    """The number of undecodable records: for the log, labelled not private."""
    targets: np.ndarray | None = None
    """Which ids are targets, bool; None: all."""

    @property
    def learned(self) -> int:
        """The number of targets that a sample has: nothing predicts the first id."""
        return max(len(self.ids) - 1, 0) if self.targets is None else int(self.targets[1:].sum())


class Budget:
    """The remaining budget of one look at a unit."""

    def __init__(self, limit: int, most_row_bytes: int | None) -> None:
        """
        Args:
            most_row_bytes: the store's (`RecordStore`).
        """
        self._most_row_bytes = most_row_bytes
        self.text = most_bytes(limit)
        # The last row to be parsed may exceed it, and may be parsed twice more.
        self.read = self.text * (READ_BYTES if most_row_bytes is None else PARSED_BYTES)
        self.rendered = RENDERED_BYTES * self.text

    def open(self, records: RecordStore, record: int, max_bytes: int) -> None:
        """Charge for opening a record to read at most `max_bytes` of its text."""
        stored = int(records.stored_bytes(np.array([record]))[0])
        row = self._most_row_bytes
        self.read -= min(stored, max_bytes if row is None else row)
        self.text -= RECORD_BYTES

    @property
    def is_spent(self) -> bool:
        return self.text <= 0 or self.read <= 0 or self.rendered <= 0


class Excerpts:
    """Excerpts of at most `limit` ids. Stateless, hence thread-safe."""

    def __init__(self, records: RecordStore, tokenizer: Tokenizer, limit: int) -> None:
        self._records, self._tokenizer, self._limit = records, tokenizer, limit
        self._edge = 0 if tokenizer.bytes_per_token == 1 else EDGE_TOKENS
        self._bos, self._eos = (
            _NO_IDS if mark is None else np.array([mark], dtype=np.int64)
            for mark in (tokenizer.bos_id, tokenizer.eos_id)
        )
        self._between = _NO_IDS
        if len(self._bos) == len(self._eos) == 0:
            between = tokenizer.encode("\n\n")
            self._between = _NO_IDS if between is None else between

    def head(self, members: np.ndarray) -> Excerpt:
        """Take the first `limit` ids of a unit, or all if there are fewer.

        Args:
            members: its records; those beyond `limit` are not read, even if many are empty.
        """
        found = self._first(members, self._limit)
        return found._replace(ids=found.ids[: self._limit])

    def window(self, members: np.ndarray, place: float, head: np.ndarray) -> np.ndarray:
        """Take `limit` consecutive ids from a random place, int64, or all if there are fewer.

        Where it begins is uniform in bytes as stored, from about a window's length before the
        first byte to the last, and is then moved inside: ids near both ends are taken up to twice
        as often as others, none never. A window that begins within a text has no bos.

        Args:
            place: uniform in [0, 1).
            head: the ids of their `head`. The text that it looked at decides the length alone:
                text further on may be undecodable, or not empty.
        """
        if len(head) < self._limit:
            return head
        ends = np.cumsum(self._records.stored_bytes(members[:]))
        width = self._limit * min(self._tokenizer.bytes_per_token, 4)
        at = int(place * (int(ends[-1]) + width)) - width
        if at <= 0:
            return head
        first = int(np.searchsorted(ends, at, side="right"))
        before = int(ends[first - 1]) if first > 0 else 0
        share = (at - before) / (int(ends[first]) - before)
        start = int(share * self._records.size(int(members[first])))
        ids = self._first(members[first:], self._limit, start=start).ids
        if len(ids) < self._limit:
            ids = self._last(members, self._limit)
        # Text that cannot be decoded further on, and hundreds of empty records, end here.
        return ids[: self._limit] if len(ids) >= self._limit else head

    def _first(self, members: np.ndarray, needed: int, *, start: int = 0) -> Excerpt:
        """Take `needed` ids or more, from byte `start` of the first record on; or all, or as many
        as the budget allows.
        """
        pieces: list[np.ndarray] = []
        have, undecodable, budget = 0, 0, self._budget()
        for record in members[:needed].tolist():
            ids = self._text_ids(record, needed - have, start, budget)
            if ids is None:
                undecodable += 1
            elif len(ids) > 0:
                between, bos = self._between if pieces else _NO_IDS, self._bos
                pieces.append(
                    np.concatenate([between, bos if start == 0 else _NO_IDS, ids, self._eos])
                )
                have += len(pieces[-1])
            if have >= needed or budget.is_spent:
                break
            start = 0
        return Excerpt(np.concatenate(pieces) if pieces else _NO_IDS, undecodable)

    def _last(self, members: np.ndarray, needed: int) -> np.ndarray:
        """Take the last `needed` ids, or all, or as many as the budget allows."""
        pieces: list[np.ndarray] = []
        have, budget = 0, self._budget()
        for record in members[-needed:][::-1].tolist():
            ids, is_whole = self._tail_ids(record, needed - have, budget)
            if len(ids) > 0:
                between, bos = self._between if pieces else _NO_IDS, self._bos
                pieces.append(
                    np.concatenate([bos if is_whole else _NO_IDS, ids, self._eos, between])
                )
                have += len(pieces[-1])
            if have >= needed or budget.is_spent:
                break
        return np.concatenate(pieces[::-1])[-needed:] if pieces else _NO_IDS

    def _text_ids(self, record: int, needed: int, start: int, budget: Budget) -> np.ndarray | None:
        """Encode the text from a byte on: all its ids, or the first `needed` or more.

        `None` for an undecodable record.
        """
        needed += self._edge
        limit = needed * self._tokenizer.bytes_per_token + EDGE_BYTES
        while True:
            limit = min(limit, budget.text)
            text = self._read(record, limit, start, budget)
            ids = None if text is None else self._tokenizer.encode(text)
            if text is None or ids is None:
                return None
            is_all = len(text.encode("utf-8")) < limit - EDGE_BYTES
            if is_all or len(ids) >= needed or budget.is_spent or budget.text <= limit:
                return ids
            limit = _longer(limit, len(ids), needed)

    def _tail_ids(self, record: int, needed: int, budget: Budget) -> tuple[np.ndarray, bool]:
        """Encode the end of the text: its last `needed` ids or more, and whether these are all."""
        needed += self._edge
        size = self._records.size(record)
        limit = needed * self._tokenizer.bytes_per_token + EDGE_BYTES
        while True:
            limit = min(limit, budget.text)
            start = max(size - limit, 0)
            text = self._read(record, limit, start, budget)
            ids = None if text is None else self._tokenizer.encode(text)
            if ids is None:
                return _NO_IDS, False
            is_spent = budget.is_spent or budget.text <= limit
            if start == 0 or len(ids) >= needed or is_spent:
                return ids, start == 0
            limit = _longer(limit, len(ids), needed)

    def _budget(self) -> Budget:
        return Budget(self._limit, self._records.most_row_bytes)

    def _read(self, record: int, max_bytes: int, start: int, budget: Budget) -> str | None:
        budget.open(self._records, record, max_bytes)
        if start == 0:
            text = self._records.read(record, max_bytes=max_bytes)
        else:
            text = self._records.read(record, max_bytes=max_bytes, start=start)
        if text is not None:
            budget.text -= len(text.encode("utf-8"))
        return text


def _longer(read: int, tokens: int, needed: int) -> int:
    """Decide how much to read instead, where `read` bytes had too few tokens (of blanks, zeros)."""
    return max(2 * read, 5 * read * needed // (4 * max(tokens, 1)))


def scan_undecodable(
    is_decodable: Callable[[int], bool], indices: Iterable[int], total: int = 0
) -> int:
    """Count the undecodable among these records, reading each whole, for `data.on_undecodable` =
    "error". The count is not private: what depends on it (stopping) is outside the guarantee.

    Args:
        is_decodable: the test of a record, by its index.
    """
    progress, bad = Progress("reading records", total, "records"), 0
    for index in indices:
        bad += not is_decodable(int(index))
        progress.add(1)
    progress.end()
    return bad
