"""From one record to one sample: cut or padded, never packed, never split.

Labels are shifted here, before any sharding over context-parallel ranks, so that no rank needs
its neighbour's first token (hazard rows 6 and 7).
"""

from collections.abc import Iterable, Sequence

import numpy as np
import torch

from torchtitan_dp.data.records import RecordStore
from torchtitan_dp.data.tokenizer import Tokenizer

IGNORE_INDEX = -100  # the default of F.cross_entropy
EDGE_TOKENS = 64  # the last tokens of a prefix may differ from those of the whole text
EDGE_BYTES = 8  # more than a byte order mark and a split character can take away
_NO_IDS = np.empty(0, dtype=np.int64)


class SampleStore:
    """Samples of `seq_len` tokens over a record store.

    `undecodable` counts the samples made of undecodable records so far, repeats included. It is
    computed from private records: for the log, labelled not private.
    """

    def __init__(self, records: RecordStore, tokenizer: Tokenizer, seq_len: int) -> None:
        self.records, self.tokenizer, self.seq_len = records, tokenizer, seq_len
        self.pad_id = tokenizer.eos_id or 0
        self.undecodable = 0

    def sample(self, index: int, length: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """`(tokens_T, labels_T)`, int64 (seq_len,), of one record; their first `length` if given.

        With ids = [bos] + text + [eos] (marks that exist), cut to seq_len + 1: tokens are all but
        the last id, labels all but the first; tokens are padded with eos (or 0), labels with
        `IGNORE_INDEX`. A record without text tokens (empty, undecodable, or index -1, which is
        the padding of a draw) has labels that are all ignored: it contributes exactly 0.

        Only about as much of a huge record is read and tokenized as `seq_len` tokens need. Within
        that prefix the ids are those of the whole text, except that a tokenizer whose merges
        reach more than 64 tokens ahead may choose others: still a fixed function of the record.

        Raises `IndexError` for an index below -1 or beyond the store.
        """
        length = self.seq_len if length is None else length
        tokens_T = torch.full((length,), self.pad_id, dtype=torch.int64)
        labels_T = torch.full((length,), IGNORE_INDEX, dtype=torch.int64)
        ids = self._text_ids(index) if index != -1 else _NO_IDS
        if ids is None:
            self.undecodable += 1
        elif len(ids) > 0:
            marked = self._marked(ids)[: length + 1]
            tokens_T[: len(marked) - 1] = marked[:-1]
            labels_T[: len(marked) - 1] = marked[1:]
        return tokens_T, labels_T

    def tokens(self, index: int) -> int:
        """How many of a record's `tokens_T` are not padding: 0 if it has no text tokens."""
        ids = self._text_ids(index)
        return len(self._marked(ids)) - 1 if ids is not None and len(ids) > 0 else 0

    def batch(
        self, indices: Sequence[int] | np.ndarray, length: int | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`(tokens_BT, labels_BT)`, int64 (len(indices), seq_len or `length`); see `sample`."""
        shape = len(indices), self.seq_len if length is None else length
        tokens_BT = torch.empty(shape, dtype=torch.int64)
        labels_BT = torch.empty_like(tokens_BT)
        for row, index in enumerate(indices):
            tokens_BT[row], labels_BT[row] = self.sample(int(index), length)
        return tokens_BT, labels_BT

    def _marked(self, ids: np.ndarray) -> torch.Tensor:
        """At most seq_len + 1 ids, marks included."""
        bos, eos = (
            np.array([] if mark is None else [mark], dtype=np.int64)
            for mark in (self.tokenizer.bos_id, self.tokenizer.eos_id)
        )
        marked = np.concatenate([bos, ids[: self.seq_len + 1], eos])
        return torch.from_numpy(marked[: self.seq_len + 1])

    def _text_ids(self, index: int) -> np.ndarray | None:
        """The ids of the text, or of a prefix that certainly has more than seq_len of them.

        `None` for an undecodable record.
        """
        edge = 0 if self.tokenizer.bytes_per_token == 1 else EDGE_TOKENS
        needed = self.seq_len + 1 + edge
        limit = needed * self.tokenizer.bytes_per_token + EDGE_BYTES
        while True:
            text = self.records.read(index, max_bytes=limit)
            if text is None:
                return None
            ids = self.tokenizer.encode(text)
            if len(ids) >= needed or len(text.encode("utf-8")) < limit - EDGE_BYTES:
                return ids
            limit *= 2  # long tokens (runs of spaces, base64): the prefix was too short


def scan_undecodable(store: RecordStore, indices: Iterable[int]) -> int:
    """How many of these records are undecodable, each read whole: for `data.on_undecodable` =
    "error". Not private: what depends on it (stopping) is outside the guarantee."""
    return sum(not store.is_decodable(int(index)) for index in indices)
