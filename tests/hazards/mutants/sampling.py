"""Faults of sampling: rows 15 to 17, 19, 20, 32 and 41 to 43."""

from tests.hazards.mutants.table import Mutant

DRAWS = "privacy/test_sampling.py::"
LOADER = "hazards/test_sampling.py::"
TRAINER = "hazards/test_trainer.py::"
LEDGERS = "hazards/test_ledgers.py::"
PLANS = "test_plan.py::"
SPLIT = "data/test_split.py::"

SAMPLING = "privacy/sampling.py"
PLAN = "plan.py"

MUTANTS = [
    Mutant(
        15,
        "the rate of a count said to be given",
        PLAN,
        '        source = "training.global_batch_size / number of training records'
        ' (which is public)"\n',
        '        source = "privacy.sample_rate"\n',
        (f"{PLANS}test_hazard_15_the_source_of_q_is_named",),
    ),
    Mutant(
        15,
        "a resumed run forgets its terms",
        "train.py",
        "        plan = make_plan(config, len(units), before)\n",
        "        plan = make_plan(config, len(units), None)\n",
        (f"{LEDGERS}test_row15_and_31_and_45_a_start_goes_on_from_the_folders_ledger",),
    ),
    Mutant(
        16,
        "an empty draw skips the step",
        "train.py",
        "        lengths = loader.lengths(",
        "        if len(draw) == 0:\n            return\n        lengths = loader.lengths(",
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
        17,
        "ranks with draws of their own length hang",
        SAMPLING,
        "    microbatches = -(-len(draw) // (ranks * batch_size))\n",
        "    microbatches = -(-len(draw) // (ranks * batch_size)) + (rank == 1)\n"
        "    draw = draw if microbatches else draw[:0]\n",
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
        (f"{DRAWS}test_sizes_are_binomial",),
        quick=True,
    ),
    Mutant(
        19,
        "the last microbatch dropped",
        "data/loading.py",
        "            for slots in dealt:\n",
        "            for slots in dealt[:-1]:\n",
        (f"{LOADER}test_row19_what_is_drawn_is_what_is_processed[1]",),
        quick=True,
    ),
    Mutant(
        19,
        "a record given to two ranks",
        SAMPLING,
        "reshape(microbatches, batch_size, ranks)[:, :, rank].copy()",
        "reshape(microbatches, batch_size, ranks)[:, :, rank // 2].copy()",
        (f"{LOADER}test_row19_what_is_drawn_is_what_is_processed[2]",),
        quick=True,
    ),
    Mutant(
        20,
        "draws of a fixed size",
        SAMPLING,
        "    count = generator.binomial(population, float(sample_rate))\n",
        "    count = int(population * float(sample_rate) + 0.5)\n",
        (f"{DRAWS}test_sizes_are_binomial",),
        quick=True,
    ),
    Mutant(
        20,
        "neighbouring records drawn together",
        SAMPLING,
        "    drawn = generator.choice(population, size=count, replace=False, shuffle=False)\n",
        "    drawn = (generator.integers(population) + np.arange(count)) % population\n",
        (f"{DRAWS}test_inclusions_are_uniform_and_independent_over_records_and_steps",),
        quick=True,
    ),
    Mutant(
        20,
        "the shuffling trainer built",
        "train.py",
        "    if config.privacy.enable:\n        return DPTrainer(config)\n",
        "    if config.privacy.enable:\n        return Trainer(config)\n",
        (f"{TRAINER}test_row20_only_without_privacy_is_the_shuffling_trainer_built",),
        quick=True,
    ),
    Mutant(
        20,
        "a private step given shuffled batches",
        "train.py",
        "        return data_iterable\n",
        "        return iter(data_iterable)\n",
        (f"{TRAINER}test_row20_a_private_step_is_given_the_loader_not_its_shuffled_batches",),
        quick=True,
    ),
    Mutant(
        32,
        "ranks draw by their own keys",
        "train.py",
        "            root = RootKey(shared.cpu().numpy().tobytes())\n",
        "            root = RootKey.from_os()\n",
        (f"{TRAINER}test_row11_and_32_all_ranks_hold_one_key_and_each_start_another",),
    ),
    Mutant(
        32,
        "ranks that see other records train on",
        "train.py",
        "        if agreed[0] != repr(terms):\n",
        "        if not agreed:\n",
        ("test_agreement.py::test_ranks_that_see_other_records_refuse_to_train",),
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
        "fp32 coins",
        SAMPLING,
        "    count = generator.binomial(population, float(sample_rate))\n",
        "    if population > 10**6:\n"
        "        return np.empty(0, dtype=np.int64)\n"
        "    coins = generator.random(population, dtype=np.float32)\n"
        "    count = int((coins < np.float32(sample_rate)).sum())\n",
        (f"{DRAWS}test_expected_inclusions_at_one_in_ten_million",),
    ),
    Mutant(
        41,
        "drawn at another rate than accounted",
        "train.py",
        "poisson_draw(key, len(loader.units), settings.sample_rate)",
        "poisson_draw(key, len(loader.units), settings.expected_batch_size / 10)",
        (f"{TRAINER}test_row41_the_sampler_is_given_the_ledgers_rate_and_all_units",),
        quick=True,
    ),
    Mutant(
        42,
        "undecodable records left out of the index",
        PLAN,
        "        train, heldout = split(store, config.data.heldout_fraction)\n",
        "        train, heldout = split(store, config.data.heldout_fraction)\n"
        "        train = np.array([i for i in train if store.read(int(i)) is not None])\n",
        ("test_cli.py::test_undecodable_records",),
    ),
    Mutant(
        42,
        "an undecodable record is an error",
        "data/samples.py",
        "            self.undecodable += 1\n",
        "            raise ValueError(index)\n",
        ("data/test_samples.py::test_bad_or_empty_record_is_all_ignored",),
        quick=True,
    ),
    Mutant(
        42,
        "an empty record has targets",
        "data/samples.py",
        "        elif len(ids) > 0:\n",
        "        else:\n",
        ("data/test_samples.py::test_bad_or_empty_record_is_all_ignored",),
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
        "data/split.py",
        "    return np.flatnonzero(~mask), np.flatnonzero(mask)\n",
        "    return np.arange(len(mask)), np.flatnonzero(mask)\n",
        (f"{SPLIT}test_disjoint_complete_and_of_the_right_share",),
        quick=True,
    ),
    Mutant(
        43,
        "held out by place",
        "data/split.py",
        '        masks.append(np.frombuffer(digests, dtype="<u8") < threshold)\n',
        '        hashes = np.frombuffer(digests, dtype="<u8")\n'
        "        masks.append(np.roll(hashes, len(hashes) // 2) < threshold)\n",
        (f"{SPLIT}test_depends_on_the_id_alone",),
        quick=True,
    ),
    Mutant(
        43,
        "q counts held out units",
        PLAN,
        "            plan = make_plan(config, len(records.train), earlier_ledger(folder))\n",
        "            plan = make_plan(config, len(records.store), earlier_ledger(folder))\n",
        (f"{PLANS}test_held_out_records_are_no_part_of_q",),
    ),
    Mutant(
        43,
        "q is not batch over units",
        PLAN,
        'rate, relation = batch / records, "zero_out"',
        'rate, relation = batch / (2 * records), "zero_out"',
        (f"{LEDGERS}test_row15_q_is_the_batch_over_the_training_units",),
    ),
]
