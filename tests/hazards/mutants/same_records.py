"""Faults of ranks that hold other records: row 48."""

from tests.hazards.mutants.table import Mutant

SAME = "hazards/test_same_records.py::"
CONTENTS = "data/records/test_hashing.py::"
KEPT = "data/samples/test_token_cache.py::"
FIRST = "test_row48_other_contents_are_another_fingerprint"

MUTANTS = [
    Mutant(
        48,
        "only the first leaf hashed",
        "data/records/hashing.py",
        "        root.update(digest)\n",
        "        if leaf.begin == 0:\n            root.update(digest)\n",
        (f"{CONTENTS}test_order_within_a_file_is_told[None]",),
        quick=True,
    ),
    Mutant(
        48,
        "the fingerprint is of names and sizes",
        "data/records/record_format.py",
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
        "an unreadable file has the digest of an empty one",
        "data/records/hashing.py",
        "_UNREADABLE = bytes(DIGEST_BYTES)\n",
        '_UNREADABLE = hashlib.blake2b(b"", digest_size=32, person=b"leaf").digest()\n',
        (f"{CONTENTS}test_an_unreadable_empty_file_is_told_too",),
        quick=True,
    ),
    Mutant(
        48,
        "an unreadable file stops the run",
        "data/records/text.py",
        "read_contents(files, skip_unreadable=True)",
        "read_contents(files)",
        (f"{CONTENTS}test_an_unreadable_text_file_stops_nothing_and_is_one_constant[13]",),
        quick=True,
    ),
    Mutant(
        48,
        "a file that could not be hashed is read",
        "data/records/text.py",
        "        if index in self._unreadable:\n",
        "        if index in self._unreadable and index < 0:\n",
        (f"{CONTENTS}test_an_unreadable_text_file_stops_nothing_and_is_one_constant[13]",),
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
    Mutant(
        48,
        "a hash kept for other contents",
        "data/records/text.py",
        '{TEXTS_VERSION}-{files.place_hash}.npy"',
        '{TEXTS_VERSION}-{files.listing_hash}.npy"',
        (f"{CONTENTS}test_contents_changed_under_the_old_size_and_time_are_hashed_anew[text]",),
        quick=True,
    ),
    Mutant(
        43,
        "token ids kept of exchanged files",
        "data/samples/samples.py",
        "        if self.records.are_as_listed(members[: self.seq_len + 1]):",
        "        if len(members):",
        (f"{KEPT}test_row43_what_is_read_of_exchanged_files_is_not_kept",),
        quick=True,
    ),
    Mutant(
        48,
        "a record that cannot be read just now is kept as nothing",
        "data/samples/samples.py",
        "        if self._cache is None or head.undecodable:\n",
        "        if self._cache is None:\n",
        (f"{KEPT}test_what_cannot_be_read_just_now_is_not_kept_as_nothing",),
        quick=True,
    ),
]
