"""Hazards of sampling as the trainer wires it: rows 42, 43 and 60; the draw itself (rows 20, 40 and
41) is held by tests/privacy/test_sampling.py."""

import json
import os

import numpy as np
import pytest

from tests.data.drawn import dealt, sample
from tests.data.stores import records_in, records_of, source, store_of, texts, write
from tests.processes.runs import arguments
from torchtitan_dp.checkpoint.plan import settings_of
from torchtitan_dp.config.load import load_config
from torchtitan_dp.data.batching import Draw, RecordLoader
from torchtitan_dp.privacy.keys import RootKey
from torchtitan_dp.privacy.sampling import poisson_draw
from torchtitan_dp.train.check import build_samples, open_records

RECORDS = 40


@pytest.fixture
def store(tmp_path):
    """Records of which one is empty and one is no text."""
    files = {f"{i:03}.txt": b"text" for i in range(RECORDS)}
    files |= {"007.txt": b"", "008.txt": b"\xff\xfe\xff"}
    return store_of(write(tmp_path / "d", files), tmp_path)


def test_row42_a_run_trains_on_as_many_units_as_there_are_records(store):
    records = records_in(source(store.facts["path"]), os.path.dirname(store.folder))
    assert records.train.tolist() == list(range(RECORDS))


USERS = 30


@pytest.fixture
def users(tmp_path, own_cache):
    """The file of 200 records of 30 users, in no order; a record's text is its user's letter."""
    who = np.random.default_rng(0).integers(USERS, size=200).tolist()
    lines = [
        json.dumps({"user": f"u{u}", "text": chr(65 + u) * (1 + i % 9)}) for i, u in enumerate(who)
    ]
    path = tmp_path / "notes.jsonl"
    path.write_text("\n".join(lines))
    assert len(set(who)) == USERS
    return path


def by_user(path, *overrides):
    """The configuration of a run whose unit is the user, and its data."""
    config = load_config(
        [
            *arguments(path.parent / "out", path, "--training.dataset=jsonl"),
            *("--data.unit_field=user", "--training.seq_len=64", *overrides),
        ],
        world_size=1,
    )
    return config, open_records(config)


CHOICES = [("concat", "head"), ("random", "head"), ("concat", "window"), ("random", "window")]


@pytest.mark.parametrize("unit_sampling, long_records", CHOICES)
def test_row43_one_sample_a_unit_and_draw(users, unit_sampling, long_records):
    """200 draws: as many samples as units were drawn, each of one unit, none of a unit twice."""
    config, records = by_user(
        users, f"--data.unit_sampling={unit_sampling}", f"--data.long_records={long_records}"
    )
    samples = build_samples(records, config)
    loaders = [
        RecordLoader(samples, records.train, ranks=2, rank=rank, batch_size=2) for rank in (0, 1)
    ]
    root, counts = RootKey.from_debug_seed(0), np.zeros(USERS)
    keys, choices = root.stream("sampling"), root.stream("window")
    for step in range(200):
        draw = poisson_draw(keys.take(step), len(records.train), 0.2)
        key, seen = choices.take(step), []
        for one in loaders:
            for microbatch in dealt(one, Draw(draw, key)):
                for labels_T in microbatch.labels_BT[microbatch.valid_B]:
                    users_of = set(labels_T[(labels_T >= 65) & (labels_T < 65 + USERS)].tolist())
                    assert len(users_of) == 1  # no other unit's text in it
                    seen.append(users_of.pop() - 65)
        assert len(seen) == len(set(seen)) == len(draw)
        counts[seen] += 1
    # every unit with probability q, however many records it has
    assert abs(counts - 40).max() < 5 * np.sqrt(200 * 0.2 * 0.8)


def test_row43_q_is_batch_over_units_and_the_ledger_names_the_unit(users):
    config, records = by_user(users, "--training.global_batch_size=3")
    settings = settings_of(config, len(records.train), 1.0)
    assert settings.mechanism.sample_rate == 3 / USERS
    assert settings.privacy_unit == "unit of data.unit_field 'user'"
    assert "number of training units" in settings.sample_rate_source


# Row 60: a record of no known unit.


def test_row60_a_file_in_no_folder_reads_as_nothing(tmp_path):
    """It stays in the count, which is public, and is trained on under nobody's name."""
    files = {"ann/1": b"one", "ann/2": b"two", "bob/1": b"three", "loose": b"whose?"}
    data = write(tmp_path / "d", files)
    place = f"--data.store={tmp_path / 'store'}"
    config = load_config(
        arguments(tmp_path / "out", data, "--data.unit_field=folder", place), world_size=1
    )
    records = open_records(config)
    units = records.store.units
    assert len(units) == len(records.train) == 3
    assert texts(records.store) == ["one", "two", "three", None]
    loose = records_of(units).index([3])
    samples = build_samples(records, config)
    read = [
        (sample(samples, unit, rng=np.random.default_rng(0))[1] != -100).any() for unit in range(3)
    ]
    assert [bool(one) for one in read] == [unit != loose for unit in range(3)]
    (warning,) = records.warnings
    assert warning.startswith("1 of 4 files have no usable data.unit_field = 'folder'")
    assert "check are against 3 units" in warning
