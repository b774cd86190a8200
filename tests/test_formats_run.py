"""The same records in every format of rows: the same weights, bit by bit."""

import csv
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.data.stores import state
from tests.processes.runs import train, with_sigma
from tests.test_meshes import arguments, read_weights

FORMATS = {"jsonl": "jsonl", "csv": "csv", "parquet": "parquet", "arrow": "arrow", "hf": "saved"}


def write(folder: Path) -> None:
    """Write records of six users, some longer than a sample, in all formats."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    rng = np.random.default_rng(0)
    words = ["naïve", "12", "of,", 'a "quote"', "line\nbreak", "word"]
    rows = [
        {"user": f"u{i % 6}", "text": " ".join(rng.choice(words, size=int(rng.integers(1, 90))))}
        for i in range(24)
    ]
    for name in FORMATS.values():
        (folder / name).mkdir(parents=True)
    (folder / "jsonl/a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    with open(folder / "csv/a.csv", "w", encoding="utf-8", newline="") as file:
        lines = csv.DictWriter(file, ["user", "text"])
        lines.writeheader()
        lines.writerows(rows)
    table = pa.Table.from_pylist(rows)
    pq.write_table(table, folder / "parquet/a.parquet", row_group_size=5)
    with pa.ipc.new_file(str(folder / "arrow/a.arrow"), table.schema) as file:
        file.write_table(table, max_chunksize=7)
    (folder / "saved/state.json").write_bytes(state("data-00000-of-00001.arrow"))
    with pa.ipc.new_stream(str(folder / "saved/data-00000-of-00001.arrow"), table.schema) as out:
        out.write_table(table)


@pytest.mark.slow
def test_weights_are_those_of_every_format(tmp_path: Path) -> None:
    """Units of several records, of which each draw takes two windows."""
    write(tmp_path / "data")
    found = {}
    for format, name in FORMATS.items():
        out = tmp_path / format
        command = arguments(
            out,
            tmp_path / "data" / name,
            f"--training.dataset={format}",
            *("--data.unit_field=user", "--data.long_records=window", "--data.windows_per_draw=2"),
            *("--training.steps=2", "--training.global_batch_size=3", "--checkpoint.interval=2"),
            *(*with_sigma(0.5), "--privacy.debug_seed=1"),
            "--parallelism.data_parallel_shard_degree=1",
            "--parallelism.context_parallel_degree=1",
        )
        train(command, log=tmp_path / f"{format}.log", world_size=1)
        found[format] = read_weights(out / "checkpoint/step-2")
    expected = found.pop("jsonl")
    for format, weights in found.items():
        assert weights.keys() == expected.keys()
        for key, weight in weights.items():
            assert torch.equal(weight, expected[key]), (format, key)
