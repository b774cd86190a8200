"""Faults of secrets: rows 11, 30, 39 and 40."""

from tests.hazards.mutants.table import Mutant

HERE = "hazards/test_noise.py::"
KEYS_TEST = "privacy/test_keys.py::"
ONE = "privacy/test_noise.py::"
TRAINER = "hazards/test_trainer.py::"
LEDGERS = "hazards/test_ledgers.py::"

NOISE = "privacy/noise.py"
KEYS = "privacy/keys.py"
SUM = "gradients/clipped_sum.py"

MUTANTS = [
    Mutant(
        11,
        "one key at every start",
        KEYS,
        "        return cls(secrets.token_bytes(KEY_BYTES))\n",
        "        return cls(bytes(KEY_BYTES))\n",
        (f"{KEYS_TEST}test_labels_steps_and_roots_give_distinct_keys",),
        quick=True,
    ),
    Mutant(
        11,
        "the key kept when a checkpoint is loaded",
        "train.py",
        '        self.ntokens_seen = state_dict["ntokens_seen"]\n        self._draw_secrets()\n',
        '        self.ntokens_seen = state_dict["ntokens_seen"]\n',
        (f"{LEDGERS}test_row11_and_31_loading_takes_the_step_and_fresh_secrets",),
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
        "a stream that can be rewound",
        KEYS,
        "        if label not in self.__streams:\n",
        "        if label:\n",
        (f"{KEYS_TEST}test_asking_for_the_stream_again_does_not_rewind_it",),
        quick=True,
    ),
    Mutant(
        11,
        "every rank has a key of its own",
        "train.py",
        "            dist.broadcast(shared, src=0)\n",
        "            pass\n",
        (f"{TRAINER}test_row11_and_32_all_ranks_hold_one_key_and_each_start_another",),
    ),
    Mutant(
        30,
        "the key in the log",
        "train.py",
        "        self.sampling_keys, self.noise_keys = ",
        "        logger.info(root.reveal().hex())\n        self.sampling_keys, self.noise_keys = ",
        ("hazards/test_run.py::test_hazard_30_no_file_holds_a_key",),
    ),
    Mutant(
        30,
        "a steps key in the checkpoint",
        "train.py",
        '            "ledger": self.ledger.to_json(),\n',
        '            "ledger": self.ledger.to_json(),\n'
        '            "rng": str(int.from_bytes(self.noise_keys.take(self.step + 1), "big")),\n',
        ("hazards/test_run.py::test_hazard_30_no_file_holds_a_key",),
    ),
    Mutant(
        30,
        "a key that can be pickled",
        KEYS,
        "    def __reduce__(self)",
        "    def reduce(self)",
        (f"{KEYS_TEST}test_nothing_shows_or_saves_a_key",),
        quick=True,
    ),
    Mutant(
        30,
        "a key that shows itself",
        KEYS,
        '        return f"<{type(self).__name__}: secret>"\n',
        "        return f\"<{type(self).__name__}: {getattr(self, 'reveal', id)()}>\"\n",
        (f"{KEYS_TEST}test_nothing_shows_or_saves_a_key",),
        quick=True,
    ),
    Mutant(
        30,
        "core dumps on",
        "process.py",
        "    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))\n",
        "    pass\n",
        ("test_process.py::test_no_core_dumps",),
        quick=True,
    ),
    Mutant(
        30,
        "core dumps not forbidden by the trainer",
        "train.py",
        "    forbid_core_dumps()\n",
        "",
        (f"{TRAINER}test_row30_secrets_are_guarded_before_anything_else",),
        quick=True,
    ),
    Mutant(
        30,
        "a fixed seed leaves the run private",
        "train.py",
        "            self.ledger.mark_not_private("
        '"privacy.debug_seed was set: the noise can be redrawn")\n',
        "",
        (f"{TRAINER}test_row30_and_45_a_debug_seed_marks_the_run",),
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
        "32 bits derived",
        NOISE,
        '.encode(), "sha256")[:16]',
        '.encode(), "sha256")[:4] * 4',
        (f"{ONE}test_row39_the_generators_keys_are_128_bits_of_hmac",),
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
        39,
        "96 bits reach Threefry",
        NOISE,
        "k = [key[0], key[1], key[2], key[3]]",
        "k = [key[0], key[1], key[2], key[2]]",
        (f"{ONE}test_all_128_bits_reach_both_generators",),
        quick=True,
    ),
    Mutant(
        39,
        "12 rounds of Threefry",
        NOISE,
        "for round_ in range(20):",
        "for round_ in range(12):",
        (f"{ONE}test_threefry_matches_random123",),
        quick=True,
    ),
    Mutant(
        39,
        "32 bits reach the draw",
        "privacy/sampling.py",
        "int.from_bytes(key[:16]",
        "int.from_bytes(key[:4]",
        ("privacy/test_sampling.py::test_128_bits_of_key_reach_the_draw",),
        quick=True,
    ),
    Mutant(
        40,
        "one stream for all purposes",
        KEYS,
        'hmac.digest(self.__secret, label.encode(), "sha256")',
        'hmac.digest(self.__secret, b"", "sha256")',
        (f"{KEYS_TEST}test_labels_steps_and_roots_give_distinct_keys",),
        quick=True,
    ),
    Mutant(
        40,
        "the draws key given to the noise",
        "train.py",
        "self.clipped_sum.take(), self.noise_keys.take(self.step))",
        "self.clipped_sum.take(), key)",
        (f"{TRAINER}test_row40_noise_has_a_key_of_its_own",),
        quick=True,
    ),
]
