"""Faults of sampling: rows 15 to 17, 19, 20, 32 and 41 to 43."""

from tests.hazards.mutants.table import Mutant

DRAWS = "privacy/test_sampling.py::"
LOADER = "hazards/test_sampling.py::"
TRAINER = "hazards/test_trainer.py::"
LEDGERS = "hazards/test_ledgers.py::"
FEED = "data/test_feed.py::"
DATASET = "data/test_dataset.py::"

SAMPLING = "privacy/sampling.py"

MUTANTS = [
    Mutant(
        15,
        "a resumed run forgets its terms",
        "bookkeeping.py",
        "plan_start(config, len(units), start, earlier_ledger(folder))",
        "plan_start(config, len(units), start, None)",
        (f"{LEDGERS}test_row15_and_31_and_45_a_start_goes_on_from_the_folders_ledger",),
    ),
    Mutant(
        16,
        "an empty draw skips the step",
        "train.py",
        "        for microbatch in feed.microbatches(",
        "        if len(draw.positions) == 0:\n            return\n"
        "        for microbatch in feed.microbatches(",
        (f"{TRAINER}test_row16_an_empty_draw_is_a_step",),
        quick=True,
    ),
    Mutant(
        17,
        "padding microbatches not run",
        SAMPLING,
        "    return list(slots.reshape(microbatches, batch_size, ranks)[:, :, rank].copy())\n",
        "    mine = slots.reshape(microbatches, batch_size, ranks)[:, :, rank].copy()\n"
        "    return [micro for micro in mine if (micro >= 0).any()]\n",
        (f"{DRAWS}test_dealing_covers_each_drawn_record_once",),
        quick=True,
    ),
    Mutant(
        19,
        "a draw cut to a largest size",
        SAMPLING,
        "    return np.sort(drawn).astype(np.int64, copy=False)\n",
        "    return np.sort(drawn).astype(np.int64, copy=False)"
        "[: int(2 * population * sample_rate) + 1]\n",
        (f"{DRAWS}test_sizes_are_binomial_and_units_alike",),
        quick=True,
    ),
    Mutant(
        19,
        "only the rank that failed is told",
        "data/feed.py",
        "    if failed:\n",
        "    if failed and failure is not None:\n",
        (f"{FEED}test_row19_a_failing_read_ends_the_step_on_all_ranks_in_one_line",),
    ),
    Mutant(
        61,
        "a next draw that nobody compares",
        "data/feed.py",
        "require_same_step(self._failure, drawn, self.device)",
        "require_same_step(self._failure, NO_DRAW, self.device)",
        (f"{FEED}test_row61_ranks_that_draw_different_units_all_refuse_the_step[whole-next]",),
    ),
    Mutant(
        20,
        "a private step given shuffled batches",
        "train.py",
        "        return self.feed\n",
        "        return iter(data_iterable)\n",
        (f"{TRAINER}test_row20_a_private_step_is_given_the_feed_not_the_loaders_shuffled_batches",),
        quick=True,
    ),
    Mutant(
        32,
        "ranks that see other records train on",
        "distributed/agreement.py",
        "    if not others:\n",
        "    if gathered:\n",
        ("distributed/test_agreement.py::test_ranks_that_see_other_records_refuse_to_train",),
    ),
    Mutant(
        41,
        "the rate in fp32",
        SAMPLING,
        "float(sample_rate))\n",
        "np.float32(sample_rate))\n",
        (f"{DRAWS}test_expected_inclusions_at_one_in_ten_million",),
        quick=True,
    ),
    Mutant(
        41,
        "drawn at another rate than accounted",
        "bookkeeping.py",
        "len(group), mechanism.draw_rate",
        "len(group), self.settings.expected_batch_size / 10",
        (f"{TRAINER}test_row41_the_sampler_is_given_the_ledgers_rate_and_all_units",),
        quick=True,
    ),
    Mutant(
        42,
        "undecodable records left out of the population",
        "data/dataset.py",
        "        train, heldout = split(store.units.hashes, heldout_fraction)\n",
        "        train, heldout = split((units := store.units).hashes, heldout_fraction)\n"
        "        train = train[[store.length(int(units.records(u)[0])) > 0 for u in train]]\n",
        (f"{LOADER}test_row42_a_run_trains_on_as_many_units_as_there_are_records",),
        quick=True,
    ),
    Mutant(
        42,
        "a broken row is dropped",
        "data/prepare.py",
        '            record = f"{name}:{number}" if facts.fields else name\n',
        "            if fields is None:\n                continue\n"
        '            record = f"{name}:{number}" if facts.fields else name\n',
        (f"{LOADER}test_row42_bad_records_stay_in_the_store_and_have_no_targets",),
        quick=True,
    ),
    Mutant(
        43,
        "one unit twice in a draw",
        SAMPLING,
        "size=count, replace=False,",
        "size=count, replace=True,",
        (f"{DRAWS}test_a_draw_is_a_sorted_set_of_indices_and_repeats_by_key",),
        quick=True,
    ),
    Mutant(
        43,
        "held out records trained on",
        "data/units.py",
        "    return np.flatnonzero(~mask), np.flatnonzero(mask)\n",
        "    return np.arange(len(mask)), np.flatnonzero(mask)\n",
        (f"{DATASET}test_row43_training_and_held_out_units_are_disjoint_and_all",),
        quick=True,
    ),
    Mutant(
        43,
        "every record is a unit of its own",
        "data/prepare.py",
        "(singles if source.unit_field is None else group)(hashes_R2)\n",
        "singles(hashes_R2)\n",
        (f"{LOADER}test_row43_one_sample_a_unit_and_draw[concat-head]",),
        quick=True,
    ),
    Mutant(
        43,
        "a records number names its unit",
        "data/prepare.py",
        "else unit_hash(unit)\n",
        "else unit_hash(str(number))\n",
        (f"{LOADER}test_row43_one_sample_a_unit_and_draw[random-window]",),
        quick=True,
    ),
    Mutant(
        43,
        "a unit drawn by each of its records",
        "data/dataset.py",
        "        train, heldout = split(store.units.hashes, heldout_fraction)\n",
        "        train, heldout = split((units := store.units).hashes, heldout_fraction)\n"
        "        train = np.repeat(train, [len(units.places(int(unit))) for unit in train])\n",
        (f"{LOADER}test_row43_q_is_batch_over_units_and_the_ledger_names_the_unit",),
        quick=True,
    ),
    Mutant(
        60,
        "a file in no folder is trained on",
        "data/prepare.py",
        "                if unit is None and fields is not None:\n",
        "                if unit is None:\n                    pass\n                elif False:\n",
        (f"{LOADER}test_row60_a_file_in_no_folder_reads_as_nothing",),
        quick=True,
    ),
    Mutant(
        72,
        "a store is opened without a look at the files",
        "data/prepare.py",
        "    if stores.contents_hash(hashes) != store.contents:\n",
        "    if store is None:\n",
        (f"{DATASET}test_row48_the_fingerprint_is_of_contents_fields_and_split",),
        quick=True,
    ),
]
