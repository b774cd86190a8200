"""Stores of small data sets, and writers of the same rows in each format."""

import csv
import json
import os
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from tests.data.chats import PLAIN
from torchtitan_dp.data.dataset import Records
from torchtitan_dp.data.prepare import Source, prepared
from torchtitan_dp.data.reading import ChatTemplate, Reading
from torchtitan_dp.data.store import Store, Units
from torchtitan_dp.data.tokenizer import ByteTokenizer, Tokenizer

Row = str | bytes | dict[str, Any]


def source(
    path: str | os.PathLike[str] | Sequence[str],
    format: str = "text",
    *,
    unit_field: str | Sequence[str] | None = None,
    not_owners: Sequence[str] = (),
    tokenizer: Tokenizer | None = None,
    template: str = PLAIN,
    **fields: str | None,
) -> Source:
    """Describe files and how they are read: of bytes by default, chats by a Jinja template."""
    chats = ChatTemplate(template, {"bos_token": "<|begin_of_text|>"})
    how = Reading(**fields, template=chats if fields.get("messages_field") else None)
    units = unit_field, not_owners
    paths = [str(path)] if isinstance(path, str | os.PathLike) else path
    return Source(format, paths, how, tokenizer or ByteTokenizer(), *units)


def store_of(
    data: str | os.PathLike[str] | Sequence[Row],
    tmp_path: Path,
    format: str | None = None,
    **how: Any,
) -> Store:
    """Prepare, in `tmp_path`, a `source` of files, by default texts, or of rows of JSON Lines."""
    if not isinstance(data, str | os.PathLike):
        folder = Path(tempfile.mkdtemp(dir=tmp_path))
        write(folder, {"a.jsonl": as_lines(data)})
        data, format = folder, format or "jsonl"
    return prepared(source(data, format or "text", **how), str(tmp_path / "store"))


def records_in(wanted: Source, place: str, *, in_groups: bool = False, **terms: Any) -> Records:
    """Open the records of a source, prepared in `place`, as `preflight.check.open_records` does."""
    if terms.get("number_is_secret"):
        wanted.refuse_names_by_position(terms.get("heldout_fraction", 0.0), in_groups)
    files = wanted.files()
    return Records.of(wanted, files, prepared(wanted, place, files), **terms)


def left(place: Path) -> list[str]:
    """List what is in the folder of all stores, but for their locks."""
    return sorted(path.name for path in place.iterdir() if path.suffix != ".lock")


class Stored(NamedTuple):
    """One record in a store."""

    ids: tuple[int, ...]  # as stored: those that are no targets negative
    first: int
    unit: int  # hash
    reason: str | None  # why it has no ids


def stored(store: Store) -> list[Stored]:
    """List the records of a store."""
    of = store.units
    units = np.repeat(of.hashes, np.diff(of.starts))[np.argsort(of.members)].tolist()
    reasons = [None, *(f"{lack['setting']}: {lack['what']}" for lack in store.facts["lacks"])]
    found = []
    for i, unit in enumerate(units):
        ids = tuple(store.ids(i, 0, store.length(i)).tolist())
        found.append(Stored(ids, int(store.firsts[i]), unit, reasons[int(store.reasons[i])]))
    return found


def records_of(units: Units) -> list[list[int]]:
    """List the records of each unit."""
    return [of.tolist() for of in np.split(units.members, units.starts[1:-1])]


def texts(store: Store, tokenizer: Tokenizer | None = None) -> list[str | None]:
    """Decode the records of a store: None for one that was not readable, "" for an empty one."""
    tokenizer = tokenizer or ByteTokenizer()
    empty = "training.dataset_path: are empty"
    return [
        tokenizer.decode(i if i >= 0 else ~i for i in one.ids)
        if one.reason in (None, empty)
        else None
        for one in stored(store)
    ]


def write(root: Path, files: dict[str, bytes]) -> Path:
    """Write files below a folder."""
    for name, data in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(data)
    return root


def as_lines(rows: Iterable[Row]) -> bytes:
    """Write JSON Lines: bytes as they are, a text as `{"text": …}`."""

    def line(row: Row) -> bytes:
        if isinstance(row, bytes):
            return row
        return json.dumps({"text": row} if isinstance(row, str) else row).encode()

    return b"".join(line(row) + b"\n" for row in rows)


def as_jsonl(root: Path, rows: Sequence[Row]) -> Path:
    return write(root, {"a.jsonl": as_lines(rows)})


def as_csv(root: Path, rows: Sequence[dict[str, Any]]) -> Path:
    root.mkdir(parents=True, exist_ok=True)
    with open(root / "a.csv", "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return root


def as_parquet(root: Path, rows: Any, **options: Any) -> Path:
    """Write `a.parquet`, of rows or a table, in row groups of seven."""
    pq.write_table(_table(root, rows), root / "a.parquet", **{"row_group_size": 7, **options})
    return root


def as_arrow(root: Path, rows: Any, name: str = "a.arrow", new: Any = pa.ipc.new_file) -> Path:
    """Write an Arrow file in batches of nine."""
    table = _table(root, rows)
    with pa.OSFile(str(root / name), "wb") as file, new(file, table.schema) as writer:
        writer.write_table(table, max_chunksize=9)
    return root


def as_hf(root: Path, rows: Any) -> Path:
    """Write an Arrow stream, as `Dataset.save_to_disk` does."""
    name = "data-00000-of-00001.arrow"
    write(root, {"state.json": state(name), "cache-1.arrow": b"no data of the set"})
    return as_arrow(root, rows, name, pa.ipc.new_stream)


def state(*names: str) -> bytes:
    """Write the list of files of a data set as `datasets` does."""
    return json.dumps({"_data_files": [{"filename": name} for name in names]}).encode()


WRITERS: dict[str, Callable[..., Path]] = {"jsonl": as_jsonl, "csv": as_csv, "hf": as_hf}
WRITERS |= {"parquet": as_parquet, "arrow": as_arrow}


def _table(root: Path, rows: Any) -> Any:
    root.mkdir(parents=True, exist_ok=True)
    return rows if isinstance(rows, pa.Table) else pa.Table.from_pylist(rows)
