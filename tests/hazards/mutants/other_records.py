"""Faults by which one record changes how others are read: row 68."""

from tests.hazards.mutants.table import Mutant

OTHERS = "hazards/test_other_records.py::"
EACH = f"{OTHERS}test_row68_every_other_record_reads_as_before"
FORMATS, TABLES = "data/formats.py", "data/tables.py"

MUTANTS = [
    Mutant(
        68,
        "a value that cannot be read takes its batch along",
        TABLES,
        "    return [value for i in range(len(column)) for value in _values(column.slice(i, 1))]\n",
        "    return [BROKEN] * len(column)\n",
        (f"{EACH}[hf-not UTF-8]", f"{EACH}[parquet-not UTF-8]"),
        quick=True,
    ),
    Mutant(
        68,
        "rows behind a damaged page are left out",
        TABLES,
        "            yield from [None] * (group.num_rows - done)\n",
        "",
        ("data/test_formats.py::test_rows_behind_a_damaged_page_keep_their_places",),
        quick=True,
    ),
    Mutant(
        68,
        "a line above the limit ends the pass over lines",
        FORMATS,
        "            is_whole = len(line) <= MOST_LINE_BYTES\n",
        "            is_whole = len(line) <= MOST_LINE_BYTES\n"
        "            if not is_whole:\n"
        "                return\n",
        (f"{EACH}[jsonl-huge]",),
        quick=True,
    ),
    Mutant(
        68,
        "a blank line is left out",
        FORMATS,
        "            yield _parsed(line) if is_whole else None\n",
        "            if line.strip():\n                yield _parsed(line) if is_whole else None\n",
        (f"{EACH}[jsonl-empty]",),
        quick=True,
    ),
    Mutant(
        68,
        "a row with too few values is left out",
        FORMATS,
        "                yield dict(zip(names, values, strict=True)) if fits else None\n",
        "                if fits:\n"
        "                    yield dict(zip(names, values, strict=True))\n",
        (f"{EACH}[csv-too few]",),
        quick=True,
    ),
    Mutant(
        68,
        "a value that is not UTF-8 ends the pass over rows",
        FORMATS,
        'errors="surrogateescape"',
        'errors="strict"',
        (f"{EACH}[csv-not UTF-8]",),
        quick=True,
    ),
    Mutant(
        68,
        "a text that the tokenizer refuses takes its batch along",
        "data/tokenizer.py",
        "            if len(texts) == 1:\n                return [None]\n",
        "            return [None] * len(texts)\n",
        (f"{OTHERS}test_row68_what_the_tokenizer_refuses_touches_no_other_record",),
        quick=True,
    ),
]
