"""Faults by which one record changes how others are read: row 68."""

from tests.hazards.mutants.table import Mutant

EACH = "hazards/test_other_records.py::test_row68_every_other_record_reads_as_before"
TABLES = "data/records/tables.py"

MUTANTS = [
    Mutant(
        68,
        "a row that cannot be decoded takes its batch along",
        TABLES,
        "    return [row for i in range(len(sizes)) for row in _rows(batch.slice(i, 1))]\n",
        "    return [None] * len(sizes)\n",
        (f"{EACH}[parquet-not UTF-8 within]",),
        quick=True,
    ),
    Mutant(
        68,
        "a row is validated together with its batch",
        TABLES,
        "        if sizes.sum() <= MOST_ROW_BYTES:\n",
        "        batch.validate(full=True)\n        if sizes.sum() <= MOST_ROW_BYTES:\n",
        (f"{EACH}[hf-not UTF-8 within]",),
        quick=True,
    ),
    Mutant(
        68,
        "the size of a row is the mean of its group",
        TABLES,
        "        return np.asarray(self._sizes[indices])\n",
        "        return np.full(len(indices), int(np.mean(self._sizes)))\n",
        (f"{EACH}[parquet-huge]",),
        quick=True,
    ),
    Mutant(
        68,
        "a batch that fails is not read again row by row",
        TABLES,
        "+ (rows, 1):\n",
        "+ (1000,):\n",
        (
            "hazards/test_other_records.py::"
            "test_row68_rows_before_a_damaged_page_are_read_one_by_one",
        ),
        quick=True,
    ),
    Mutant(
        68,
        "values that pages repeat are written out",
        TABLES,
        "        for way in ((None,) if largest > MOST_ROW_BYTES else ()) + (rows, 1):\n",
        "        for way in (rows, 1):\n",
        ("hazards/test_other_records.py::test_row68_a_bomb_of_gigabytes_is_never_decoded[True]",),
    ),
    Mutant(
        68,
        "a line above the limit ends the pass over lines",
        "data/records/jsonl.py",
        "        file.seek(size, os.SEEK_CUR)\n",
        "",
        (f"{EACH}[jsonl-huge]",),
        quick=True,
    ),
]
