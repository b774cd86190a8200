"""Faults of noise that is correlated over steps: rows 58 and 62 to 64."""

from tests.hazards.mutants.table import Mutant

CHAIN = "privacy/test_banded.py::"
LEDGER = "ledger/test_banded.py::"
TRAINER = "hazards/test_trainer.py::"

MUTANTS = [
    Mutant(
        58,
        "groups by the order of units",
        "privacy/sampling.py",
        "    group = hashes % np.uint64(groups)\n",
        "    group = np.arange(len(hashes), dtype=np.uint64) % np.uint64(groups)\n",
        (f"{CHAIN}test_row58_a_units_group_is_its_own",),
        quick=True,
    ),
    Mutant(
        58,
        "one group drawn from at every step",
        "bookkeeping.py",
        "[step % mechanism.period]\n",
        "[0]\n",
        (f"{TRAINER}test_row58_a_step_draws_from_its_own_group_at_b_times_the_rate[3]",),
        quick=True,
    ),
    Mutant(
        58,
        "two copies of a run accounted for as one row of steps",
        "privacy/segments.py",
        "mechanism.composition(max(steps.values()) * mechanism.period)",
        "mechanism.composition(sum(steps.values()))",
        (f"{LEDGER}test_row58_two_copies_of_a_run_count_a_group_in_both",),
        quick=True,
    ),
    Mutant(
        58,
        "lost steps of several starts accounted for as one row of steps",
        "ledger/log.py",
        "sum(-(-part.steps // period) * period for part in lost)",
        "sum(part.steps for part in lost)",
        (f"{LEDGER}test_each_crash_loses_whole_rounds[1-4]",),
        quick=True,
    ),
    Mutant(
        62,
        "a chain that goes on after a load",
        "bookkeeping.py",
        "        self.noise_keys = NoiseChain(",
        "        self.noise_keys = getattr(self, 'noise_keys', 0) or NoiseChain(",
        (f"{TRAINER}test_row11_and_32_all_ranks_hold_one_key_and_each_start_another",),
    ),
    Mutant(
        63,
        "sensitivity 1 in the place of the column's norm",
        "privacy/banded.py",
        "    return math.sqrt(math.fsum(value**2 for value in column(bands)))\n",
        "    return 1.0\n",
        (f"{CHAIN}test_row63_the_best_attack_on_a_chain_reaches_what_its_rounds_claim",),
    ),
    Mutant(
        63,
        "rounds at the rate of a step",
        "privacy/mechanism.py",
        "GaussianSteps(self.noise_multiplier, self.draw_rate, -(-steps // self.bands))",
        "GaussianSteps(self.noise_multiplier, self.sample_rate, -(-steps // self.bands))",
        (f"{LEDGER}test_epsilon_is_that_of_the_rounds",),
        quick=True,
    ),
    Mutant(
        64,
        "earlier noise of another shard",
        "optimizer.py",
        "name=name, start=start, weight=weight)",
        "name=name, start=start if weight == 1.0 else 0, weight=weight)",
        ("hazards/test_noise.py::test_row64_correlated_noise_is_bit_identical_on_every_mesh",),
    ),
]
