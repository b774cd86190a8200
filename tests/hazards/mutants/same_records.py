"""Faults of ranks that hold other records: row 48."""

from tests.hazards.mutants.table import Mutant

SAME = "hazards/test_same_records.py::"
CONTENTS = "data/records/test_hashing.py::"
FIRST = "test_row48_other_contents_are_another_fingerprint"

MUTANTS = [
    Mutant(
        48,
        "the fingerprint is of names and sizes",
        "data/records/format.py",
        "\\0{records}\\0{contents}",
        "\\0{records}\\0{len(contents)}",
        (f"{SAME}{FIRST}[files of equal size swapped]",),
        quick=True,
    ),
    Mutant(
        48,
        "the order of what is hashed does not count",
        "data/records/hashing.py",
        "        root.update(digest)\n",
        "        total = getattr(progress, 'total', 0) + int.from_bytes(digest, 'big')\n"
        "        progress.total = total\n"
        "        root = hashlib.blake2b(str(total).encode(), digest_size=DIGEST_BYTES)\n",
        (f"{SAME}{FIRST}[files of equal size swapped]",),
        quick=True,
    ),
    Mutant(
        48,
        "a file that changes while it is hashed goes unnoticed",
        "data/records/hashing.py",
        "last[1] != stamp:\n",
        "last[1] is stamp:\n",
        (f"{CONTENTS}test_a_file_that_changes_while_it_is_read_is_refused[is rewritten-text]",),
        quick=True,
    ),
]
