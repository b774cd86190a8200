"""Faults of ranks that hold other records, and of stores of other tokens: rows 48 and 72."""

from tests.hazards.mutants.table import Mutant

FIRST = "hazards/test_same_records.py::test_row48_other_contents_are_another_fingerprint"
CHANGES = "data/test_prepare.py::test_a_file_that_changes_while_it_is_read_is_refused"
PREPARED = "hazards/test_prepared.py::"

MUTANTS = [
    Mutant(
        48,
        "the fingerprint is of names and sizes",
        "data/dataset.py",
        "        terms = source.format, store.contents, named,",
        "        terms = source.format, named,",
        (f"{FIRST}[files of equal size swapped]",),
        quick=True,
    ),
    Mutant(
        48,
        "the order of what is hashed does not count",
        "data/store.py",
        '_hash([" ".join(hashes).encode()]',
        '_hash([" ".join(sorted(hashes)).encode()]',
        (f"{FIRST}[files of equal size swapped]",),
        quick=True,
    ),
    Mutant(
        48,
        "a file that changes while it is read goes unnoticed",
        "data/prepare.py",
        "        if before != after:\n",
        "        if before is None:\n",
        (f"{CHANGES}[is rewritten-first.jsonl]",),
        quick=True,
    ),
    Mutant(
        48,
        "ranks do not compare their tokens",
        "bookkeeping.py",
        '                "the tokens": loader.samples.store.fingerprint,\n',
        "",
        ("distributed/test_agreement.py::test_ranks_that_differ_refuse_to_train[the tokens]",),
    ),
    Mutant(
        72,
        "another tokenizer has the same store",
        "data/store.py",
        "json.dumps([VERSION, dict(terms)]",
        'json.dumps([VERSION, {**terms, "tokenizer": None}]',
        (f"{PREPARED}test_row72_other_settings_are_another_store[another tokenizer]",),
        quick=True,
    ),
    Mutant(
        72,
        "a store is not compared with the hash of its tokens",
        "data/store.py",
        "        return _tokens_hash(store.facts, tokens) == store.fingerprint\n",
        "        return True\n",
        (f"{PREPARED}test_row72_one_byte_that_changed_in_the_store_is_never_read[tokens]",),
        quick=True,
    ),
    Mutant(
        72,
        "the facts of a store are not compared with their hash",
        "data/store.py",
        '(facts.pop("digest"), facts["arrays"]) != (_digest(facts), ',
        '(facts.pop("digest"), facts["arrays"])[1:] != (',
        (f"{PREPARED}test_row72_one_byte_that_changed_in_the_store_is_never_read[facts.json]",),
        quick=True,
    ),
    Mutant(
        72,
        "a prompt that is the unit's field too is not among the terms of a store",
        "data/prepare.py",
        '"fields": self.reading.keys, "unit_field"',
        '"fields": self.keys, "unit_field"',
        ("hazards/test_attacks.py::test_a_prompt_that_is_the_unit_has_a_store_of_its_own",),
        quick=True,
    ),
    Mutant(
        72,
        "a file that was rewritten under its old time goes unnoticed",
        "data/files.py",
        "    times = status.st_mtime_ns, status.st_ctime_ns\n",
        "    times = status.st_mtime_ns, 0\n",
        (f"{PREPARED}test_row72_changed_files_are_prepared_again[same size and time-None]",),
        quick=True,
    ),
]
