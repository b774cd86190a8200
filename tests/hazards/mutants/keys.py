"""Faults of secrets: rows 11, 30, 39 and 40."""

from tests.hazards.mutants.table import Mutant

KEYS_TEST = "privacy/test_keys.py::"
ONE = "privacy/test_noise.py::"
TRAINER = "hazards/test_trainer.py::"
LEDGERS = "hazards/test_ledgers.py::"

NOISE = "privacy/noise.py"
KEYS = "privacy/keys.py"
BOOKS = "bookkeeping.py"
SECURE = "privacy/sampling.py"
SECURE_TEST = "privacy/test_sampling.py::"

MUTANTS = [
    Mutant(
        11,
        "the key kept when a checkpoint is loaded",
        BOOKS,
        "        self._draw_keys()\n        return loaded.steps\n",
        "        return loaded.steps\n",
        (f"{LEDGERS}test_row11_and_31_loading_takes_the_step_and_fresh_keys",),
        quick=True,
    ),
    Mutant(
        11,
        "a step served twice",
        KEYS,
        "if step <= self.__last:",
        "if step < self.__last:",
        (f"{KEYS_TEST}test_a_step_is_served_once_and_only_forwards",),
        quick=True,
    ),
    Mutant(
        11,
        "every rank has a key of its own",
        "distributed/agreement.py",
        "    dist.broadcast(shared, src=0)\n",
        "",
        (f"{TRAINER}test_row11_and_32_all_ranks_hold_one_key_and_each_start_another",),
    ),
    Mutant(
        30,
        "the key in the log",
        BOOKS,
        "        self.sampling_keys = ",
        "        logger.info(root.reveal().hex())\n        self.sampling_keys = ",
        (f"{TRAINER}test_row30_drawing_secrets_tells_nobody",),
        quick=True,
    ),
    Mutant(
        30,
        "a steps key in the checkpoint",
        "train.py",
        '            "ledger": self.ledger.to_json(),\n',
        '            "ledger": self.ledger.to_json(),\n'
        '            "rng": self.books.noise_keys.take(self.step + 1)[0][0].hex(),\n',
        (f"{LEDGERS}test_row44_a_checkpoint_holds_expectations_and_the_ledger",),
        quick=True,
    ),
    Mutant(
        30,
        "a fixed seed leaves the run private",
        "checkpoint/plan.py",
        "    if privacy.debug_seed is not None:\n",
        "    if privacy.debug_seed == 0:\n",
        (f"{TRAINER}test_row30_and_45_a_debug_seed_marks_the_run",),
        quick=True,
    ),
    Mutant(
        39,
        "32 bits from the operating system",
        KEYS,
        "secrets.token_bytes(KEY_BYTES)",
        "secrets.token_bytes(4) * 8",
        (f"{KEYS_TEST}test_row39_a_root_key_is_32_bytes_of_the_operating_systems_generator",),
        quick=True,
    ),
    Mutant(
        39,
        "32 bits reach Philox",
        NOISE,
        'np.random.Philox(key=int.from_bytes(key, "little"))',
        'np.random.Philox(key=int.from_bytes(key[:4], "little"))',
        (f"{ONE}test_all_128_bits_reach_both_generators",),
        quick=True,
    ),
    Mutant(
        40,
        "the draws key given to the noise",
        "train.py",
        "self.clipped_sum.take(), self.books.noise_keys.take(self.step))",
        "self.clipped_sum.take(), draw.key)",
        (f"{TRAINER}test_row40_noise_has_a_key_of_its_own",),
        quick=True,
    ),
    Mutant(
        39,
        "32 bits reach SHAKE-256",
        SECURE,
        "    domain = key + bytes(",
        "    domain = key[:4] + bytes(",
        (f"{SECURE_TEST}test_words_are_shake_256_of_key_purpose_and_position",),
        quick=True,
    ),
    Mutant(
        39,
        "units drawn by Philox with secure noise",
        BOOKS,
        "mechanism.draw_rate, secure=secure)",
        "mechanism.draw_rate, secure=False)",
        (f"{TRAINER}test_row39_with_secure_noise_units_are_drawn_by_shake_256",),
        quick=True,
    ),
    Mutant(
        39,
        "windows drawn by Philox with secure noise",
        "train_spec.py",
        "        secure_draws=job_config.privacy.secure_noise,\n",
        "",
        (f"{TRAINER}test_row39_with_secure_noise_choices_and_projections_are_shakes",),
        quick=True,
    ),
    Mutant(
        40,
        "every million units have the same coins",
        SECURE,
        'uint64s(key, "sampling", chunk, min(',
        'uint64s(key, "sampling", 0, min(',
        (f"{SECURE_TEST}test_a_large_population_is_the_same_whole_and_in_chunks",),
        quick=True,
    ),
    Mutant(
        40,
        "all units of a step choose alike",
        SECURE,
        'uint64s(self._key, "choice", self._position, self._used)',
        'uint64s(self._key, "choice", 0, self._used)',
        (f"{SECURE_TEST}test_choices_have_their_laws",),
        quick=True,
    ),
    Mutant(
        40,
        "all units of a step have one projection",
        SECURE,
        "words = uint64s(key, purpose, position, 2 * half)",
        "words = uint64s(key, purpose, 0, 2 * half)",
        (f"{SECURE_TEST}test_projections_of_units_and_layers_are_independent",),
        quick=True,
    ),
]
