"""Faults of ranks that hold other records: row 48."""

from tests.hazards.mutants.table import Mutant

SAME = "hazards/test_same_records.py::"
CONTENTS = "data/test_contents.py::"
DRAWN = f"{SAME}test_row48_the_first_draw_that_meets_another_sample_is_refused"
FIRST = "test_row48_other_contents_are_another_fingerprint"

MUTANTS = [
    Mutant(
        48,
        "the fingerprint is of names and sizes",
        "data/record_bytes.py",
        "\\0{records}\\0{contents}",
        "\\0{records}\\0{len(contents)}",
        (f"{SAME}{FIRST}[files of equal size swapped]",),
        quick=True,
    ),
    Mutant(
        48,
        "contents of lines not asked for",
        "preflight/check.py",
        'data.verify_records == "contents"',
        'data.verify_records == "contents" and config.training.dataset == "text"',
        (f"{SAME}{FIRST}[equal-length lines in another order]",),
        quick=True,
    ),
    Mutant(
        48,
        "only the first leaf hashed",
        "data/contents.py",
        "        root.update(digest)\n",
        "        if leaf.begin == 0:\n            root.update(digest)\n",
        (f"{CONTENTS}test_order_within_a_file_is_told[None]",),
        quick=True,
    ),
    Mutant(
        48,
        "the order of what is hashed does not count",
        "data/contents.py",
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
        "data/contents.py",
        "_UNREADABLE = bytes(DIGEST_BYTES)\n",
        '_UNREADABLE = hashlib.blake2b(b"", digest_size=32, person=b"leaf").digest()\n',
        (f"{CONTENTS}test_an_unreadable_empty_file_is_told_too",),
        quick=True,
    ),
    Mutant(
        48,
        "an unreadable file stops the run",
        "data/index.py",
        "read_contents(files, skip_unreadable=True)",
        "read_contents(files)",
        (f"{CONTENTS}test_an_unreadable_text_file_stops_nothing_and_is_one_constant[13]",),
        quick=True,
    ),
    Mutant(
        48,
        "a file that could not be hashed is read",
        "data/text_records.py",
        "        if index in self._unreadable:\n",
        "        if index in self._unreadable and not path:\n",
        (f"{CONTENTS}test_an_unreadable_text_file_stops_nothing_and_is_one_constant[13]",),
        quick=True,
    ),
    Mutant(
        48,
        "a file that changes while it is hashed goes unnoticed",
        "data/contents.py",
        "last[1] != stamp:\n",
        "last[1] is stamp:\n",
        (f"{CONTENTS}test_a_file_that_changes_while_it_is_read_is_refused[is rewritten-text]",),
        quick=True,
    ),
    Mutant(
        48,
        "a hash kept for other contents",
        "data/index.py",
        '{TEXTS_VERSION}-{files.place_hash}.npy"',
        '{TEXTS_VERSION}-{files.listing_hash}.npy"',
        (f"{CONTENTS}test_contents_changed_under_the_old_size_and_time_are_hashed_anew[text]",),
        quick=True,
    ),
    Mutant(
        48,
        "samples not compared",
        "data/feed.py",
        "            comparison.require_alike()\n",
        "            assert comparison\n",
        (f"{DRAWN}[text-cp]",),
    ),
    Mutant(
        48,
        "samples compared within a cp group alone",
        "data/sharing.py",
        "        if position not in made_here\n",
        "        if position not in made_here and position < 0\n",
        (f"{DRAWN}[text-dp]",),
    ),
    Mutant(
        48,
        "only the first token compared",
        "data/comparison.py",
        "    for array_T in (tokens_T, labels_T):\n",
        "    for array_T in (tokens_T[:1],):\n",
        (f"{DRAWN}[text-cp]",),
    ),
    Mutant(
        48,
        "half of the digests compared",
        "data/comparison.py",
        "    return bool(((highest == -lowest) | is_unknown).all())\n",
        "    return bool(((highest == -lowest) | is_unknown)[::2].all())\n",
        (f"{SAME}test_row48_what_one_rank_does_not_know_is_no_difference",),
    ),
    Mutant(
        48,
        "a rank sees its own difference alone",
        "data/comparison.py",
        "    dist.all_reduce(both, op=dist.ReduceOp.MAX)\n    highest",
        "    if dist.get_rank() == 0:\n        both[0], both[1] = 1, -1\n"
        "    dist.all_reduce(both, op=dist.ReduceOp.MIN)\n    highest",
        (f"{SAME}test_row48_what_one_rank_does_not_know_is_no_difference",),
    ),
    Mutant(
        48,
        "only empty draws compared",
        "data/feed.py",
        "            comparison.require_alike()\n",
        "            assert len(draw.positions) > 0 or comparison.require_alike() is None\n",
        (f"{SAME}test_row48_a_refused_step_is_not_begun_and_changes_no_weights",),
        quick=True,
    ),
]
