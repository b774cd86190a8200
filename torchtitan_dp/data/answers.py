"""Which token ids of a unit make its sample where only answers are targets, and which they are.

A unit's ids are those of its records, one after the other. Those of a record with a prompt are
[bos] prompt answer [eos] (marks that exist); those of a chat are what its template writes, marks
included. Each piece is tokenized by itself, as a model that is asked finds the prompt's tokens
before it writes its own. Records without a target, malformed ones among them, are left out.

What is longer than a sample: of each record, the window of `limit` ids that begins a quarter of a
window before the first target, or earlier if the record ends within it. So a long prompt is cut at
its beginning, an answer only where it has no room beside a quarter of prompt, and a target is seen
wherever there is one. What begins within a prompt has no bos; what ends within an answer no eos.
Of a unit's records that are together longer, the first `limit` ids.

Guarantee:
    Ids and targets are a function of one unit's records alone. How much is parsed, rendered and
    tokenized for them is bounded as `excerpts` bounds it, by `limit`.
"""

from typing import NamedTuple

import numpy as np

from torchtitan_dp.data.chat_template import Piece
from torchtitan_dp.data.dialogs import Dialog, Reading
from torchtitan_dp.data.excerpts import (
    EDGE_TOKENS,
    RECORD_BYTES,
    TOKEN_BYTES,
    Budget,
    Excerpt,
)
from torchtitan_dp.data.jsonl_records import MAX_LINE_BYTES
from torchtitan_dp.data.store import RecordStore
from torchtitan_dp.data.tokenizer import Tokenizer

PROMPT_SHARE = 4
"""A prompt that is cut keeps one part in so many of the window, or what the answer leaves."""

_NONE = np.empty(0, dtype=np.int64)


class Marked(NamedTuple):
    """Holds ids, and which of them are targets."""

    ids: np.ndarray  # int64 (n,)
    targets: np.ndarray  # bool (n,)

    @classmethod
    def of(cls, ids: np.ndarray, *, are_targets: bool) -> "Marked":
        return cls(ids, np.full(len(ids), are_targets))

    @classmethod
    def join(cls, parts: list["Marked"]) -> "Marked":
        return cls(
            np.concatenate([_NONE, *(part.ids for part in parts)]),
            np.concatenate([np.empty(0, dtype=bool), *(part.targets for part in parts)]),
        )

    def part(self, start: int, stop: int) -> "Marked":
        return Marked(self.ids[start:stop], self.targets[start:stop])


def cut(whole: Marked, limit: int) -> Marked:
    """Take `limit` ids of one record in a row, as above; all, if there are not more. What follows
    the last target is left out.

    >>> ids = np.arange(12)
    >>> cut(Marked(ids, ids >= 9), 8).ids  # a short answer: as much of the prompt as there is room
    array([ 4,  5,  6,  7,  8,  9, 10, 11])
    >>> cut(Marked(ids, ids >= 3), 8).ids  # a long one: a quarter
    array([1, 2, 3, 4, 5, 6, 7, 8])
    """
    places = np.flatnonzero(whole.targets)
    whole = whole.part(0, int(places[-1]) + 1)
    if len(whole.ids) <= limit:
        return whole
    first = int(places[0])
    # At least one id before it: the first of a sample is never predicted.
    start = min(first - max(limit // PROMPT_SHARE, 1), len(whole.ids) - limit)
    return whole.part(max(start, 0), max(start, 0) + limit)


class Answers:
    """Takes samples' ids from records with answers. It keeps nothing: any thread may ask."""

    def __init__(
        self, records: RecordStore, tokenizer: Tokenizer, limit: int, reading: Reading
    ) -> None:
        """
        Args:
            records: of a format with fields.
            limit: ids of a sample, at most.
        """
        self._records, self._tokenizer, self._reading = records, tokenizer, reading
        self._limit = limit
        self._edge = 0 if tokenizer.bytes_per_token == 1 else EDGE_TOKENS
        bos_id, eos_id = tokenizer.bos_id, tokenizer.eos_id
        if reading.has_marks:
            bos_id = eos_id = None
        self._bos = _NONE if bos_id is None else np.array([bos_id])
        self._eos = _NONE if eos_id is None else np.array([eos_id])
        self._between = _NONE
        if not reading.has_marks and bos_id is eos_id is None:
            between = tokenizer.encode("\n\n")
            self._between = _NONE if between is None else between

    def head(self, members: np.ndarray) -> Excerpt:
        """Take the ids and targets of a unit's sample.

        Args:
            members: its records. Of more than `limit` the rest is not looked at.
        """
        parts: list[Marked] = []
        have, undecodable = 0, 0
        budget = Budget(self._limit, parses=self._records.reads_whole)
        for record in members[: self._limit].tolist():
            found = self._of_record(record, budget)
            if found is None:
                undecodable += 1
            elif found.targets.any():
                if parts:
                    parts.append(Marked.of(self._between, are_targets=False))
                parts.append(cut(found, self._limit))
                have += len(found.ids)
            if have >= self._limit or budget.is_spent:
                break
        ids, targets = Marked.join(parts).part(0, self._limit)
        return Excerpt(ids, undecodable, targets)

    def _of_record(self, record: int, budget: Budget) -> Marked | None:
        """Tokenize a record; None if it is malformed, or has text that there are no tokens for."""
        stored = int(self._records.stored_bytes(np.array([record]))[0])
        budget.read -= min(stored, MAX_LINE_BYTES)
        budget.text -= RECORD_BYTES
        fields = self._records.fields(record)
        # A third before the answer, a third from there on, and a third for what a template adds.
        most = TOKEN_BYTES * (self._limit + EDGE_TOKENS) // 3
        if fields is None:
            return None
        dialog = self._reading.read(fields, min(most, max(budget.text, 0) // 3), budget.rendered)
        if dialog is None:
            return None
        budget.rendered -= dialog.cost  # whether it was refused or not
        return None if dialog.pieces is None else self._encode(dialog, dialog.pieces, budget)

    def _encode(self, dialog: Dialog, pieces: list[Piece], budget: Budget) -> Marked | None:
        parts = []
        for piece in pieces:
            budget.text -= len(piece.text.encode("utf-8"))
            if budget.text < 0:  # a template that writes more than there is
                return Marked.join([])
            ids = self._tokenizer.encode(piece.text) if piece.text else _NONE
            if ids is None:
                return None
            parts.append(Marked.of(ids, are_targets=piece.is_target))
        whole = Marked.join(parts)
        if not whole.targets.any():
            return Marked.join([])
        # Tokens next to a cut may differ from those of the whole text. Behind that of an answer
        # stands an end mark, too, which is not where the answer ends.
        start = 0 if dialog.begins else self._edge
        whole = whole.part(start, len(whole.ids) - (0 if dialog.ends else self._edge))
        bos = Marked.of(self._bos, are_targets=False)
        eos = Marked.of(self._eos, are_targets=True)
        return Marked.join([bos] * dialog.begins + [whole] + [eos] * dialog.ends)
