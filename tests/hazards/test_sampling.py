"""Hazards of sampling as the trainer wires it, by row: 19, 20, 32 and 42.

The draw itself (rows 20, 40 and 41) is held by tests/privacy/test_sampling.py.
"""

import hashlib

import numpy as np
import pytest
import torch

from tests.ranks import on_ranks
from torchtitan_dp.data.loading import RecordLoader
from torchtitan_dp.data.records import open_records
from torchtitan_dp.data.samples import SampleStore
from torchtitan_dp.data.tokenizer import ByteTokenizer
from torchtitan_dp.privacy.keys import RootKey
from torchtitan_dp.privacy.sampling import poisson_draw

RECORDS = 40


@pytest.fixture
def store(tmp_path):
    """Record i holds the character number 48 + i; one is empty and one is no text."""
    for i in range(RECORDS):
        (tmp_path / f"{i:03}.txt").write_text(chr(48 + i))
    (tmp_path / "007.txt").write_text("")
    (tmp_path / "008.txt").write_bytes(b"\xff\xfe\xff")
    return open_records("text", str(tmp_path))


def loader(store, ranks: int, rank: int, units: np.ndarray | None = None) -> RecordLoader:
    units = np.arange(len(store)) if units is None else units
    samples = SampleStore(store, ByteTokenizer(), 4)
    return RecordLoader(samples, units, ranks=ranks, rank=rank, batch_size=2)


def processed(one: RecordLoader, draw: np.ndarray) -> list[int]:
    """Which records a rank's microbatches hold, read from their tokens; -1 where there is none."""
    rows = []
    for microbatch in one.microbatches(draw):
        for tokens_T, valid in zip(microbatch.tokens_BT, microbatch.valid_B, strict=True):
            if valid:
                character = int(tokens_T[1])
                rows.append(character - 48 if character < 256 else -1)
    return rows


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_row19_what_is_drawn_is_what_is_processed(store, ranks):
    """200 draws; none is cut to a maximum, nothing is processed twice or by two ranks."""
    keys = RootKey.from_debug_seed(0).stream("sampling")
    loaders = [loader(store, ranks, rank) for rank in range(ranks)]
    for step in range(200):
        draw = poisson_draw(keys.take(step), RECORDS, 0.3)
        seen = sorted(r for one in loaders for r in processed(one, draw))
        blank = sorted(-1 if r in (7, 8) else int(r) for r in draw)
        assert seen == blank


def test_row42_bad_records_stay_in_the_index_and_hold_no_targets(store):
    assert len(store) == RECORDS
    (batch,) = loader(store, 1, 0).microbatches(np.array([7, 8]))
    assert batch.valid_B.all()  # drawn like any other
    assert (batch.labels_BT == -100).all()


def test_units_are_looked_up_through_the_split(store):
    """A draw names positions among the training units, not records."""
    units = np.array([3, 10, 30])
    assert processed(loader(store, 1, 0, units), np.array([0, 2])) == [3, 30]


def drawn_on_this_rank():
    """The hash of what this rank's trainer would draw: its key arrives by broadcast."""
    secret = torch.frombuffer(bytearray(RootKey.from_os().reveal()), dtype=torch.uint8)
    torch.distributed.broadcast(secret, src=0)
    keys = RootKey(secret.numpy().tobytes()).stream("sampling")
    draws = [poisson_draw(keys.take(step), 1000, 0.05) for step in range(20)]
    return hashlib.sha256(np.concatenate(draws).tobytes()).hexdigest()


def test_row32_all_ranks_draw_the_same_records():
    assert len(set(on_ranks(4, drawn_on_this_rank))) == 1
    first, second = on_ranks(2, drawn_on_this_rank)[0], on_ranks(2, drawn_on_this_rank)[0]
    assert first != second  # and other ones at the next start
