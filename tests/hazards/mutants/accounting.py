"""Faults of accounting: rows 21, 23, 31, 37, 38 and 46."""

from tests.hazards.mutants.table import Mutant

ONE = "privacy/test_accounting.py::"
LEDGER_TEST = "ledger/test_ledger.py::"
TRAINER = "hazards/test_trainer.py::"
LEDGERS = "hazards/test_ledgers.py::"

ACCOUNTING = "privacy/accounting.py"
MEANING, MEANS = "privacy/meaning.py", "privacy/test_meaning.py::"
ONE_STEP = f"{MEANS}test_one_step_against_neyman_and_pearson_in_closed_form"
FILES, EXECUTED = "ledger/files.py", "ledger/log.py"
TERMS = "checkpoint/plan.py"
SETTINGS = "ledger/settings.py"
LOG_TEST = "ledger/test_log.py::"

MUTANTS = [
    Mutant(
        21,
        "microbatches counted",
        "train.py",
        "            statistics.add(loss_B, part.valid_B, clip)\n",
        "            statistics.add(loss_B, part.valid_B, clip)\n"
        "            self.books.begin_step(self.step)\n",
        (f"{TRAINER}test_row21_and_46_a_step_is_begun_once_before_its_one_update",),
        quick=True,
    ),
    Mutant(
        23,
        "a run without noise said to be private",
        TERMS,
        "    if sigma == 0:\n",
        "    if sigma < 0:\n",
        (f"{LEDGERS}test_row23_no_noise_is_not_private",),
    ),
    Mutant(
        31,
        "any change accepted",
        SETTINGS,
        "            if now.get(key) != before.get(key):\n",
        "            if now.get(key) is None:\n",
        (
            f"{LEDGER_TEST}test_a_resume_on_changed_terms_is_refused_with_both_values_and_the_remedy",
        ),
        quick=True,
    ),
    Mutant(
        31,
        "sigma found again",
        "checkpoint/terms.py",
        "    if before is not None:\n        return before.settings.mech",
        "    if before is not None and before.steps > units:\n        return before.settings.mech",
        (f"{LEDGERS}test_row15_and_31_and_45_a_start_goes_on_from_the_folders_ledger",),
    ),
    Mutant(
        31,
        "other data accepted",
        FILES,
        "    if not lines or lines[0] == fingerprint:\n",
        "    if not lines or lines:\n",
        (f"{LEDGER_TEST}test_other_data_is_refused",),
        quick=True,
    ),
    Mutant(
        37,
        "RDP without its conversion",
        "privacy/rdp.py",
        "- (math.log(delta) + np.log(orders)) / (orders - 1)\n",
        "- (math.log(delta) + 2 * np.log(orders)) / (orders - 1)\n",
        (
            f"{ONE}test_hazard_37_every_accountant_is_its_library_and_none_flatters[2.0-0.01-1000-1e-05]",
        ),
        quick=True,
    ),
    Mutant(
        37,
        "the harmless direction alone",
        "privacy/pld.py",
        "_aligned(total._pmf_remove, total._pmf_add)",
        "_aligned(total._pmf_add)",
        (ONE_STEP,),
        quick=True,
    ),
    Mutant(
        37,
        "false alarms on the wrong side",
        MEANING,
        "    second = 1 - np.exp(-epsilons) * np.maximum(1 - profile - alarms, 0.0)\n",
        "    second = 1 - np.exp(-epsilons) * np.maximum(1 - alarms, 0.0) + profile\n"
        "    second = np.minimum(second, np.exp(-epsilons) * (alarms + profile))\n",
        (ONE_STEP,),
        quick=True,
    ),
    Mutant(
        38,
        "the side that overshoots",
        ACCOUNTING,
        "    return high[0]  #",
        "    return low[0] - 0.01  #",
        (f"{ONE}test_hazard_38_sigma_never_overshoots_the_target",),
    ),
    Mutant(
        46,
        "a step counted after its update",
        "train.py",
        "        self.clipped_sum.reset()\n        self.lr_schedulers.step()\n",
        "        self.clipped_sum.reset()\n        self.books.begin_step(self.step)\n"
        "        self.lr_schedulers.step()\n",
        (f"{TRAINER}test_row21_and_46_a_step_is_begun_once_before_its_one_update",),
        quick=True,
    ),
    Mutant(
        46,
        "a torn line swallows the next step",
        EXECUTED,
        'f" {_TORN}\\n" * self._tail_is_torn + ',
        '"" * self._tail_is_torn + ',
        (f"{LOG_TEST}test_a_torn_line_of_a_step_swallows_nothing[1]",),
        quick=True,
    ),
    Mutant(
        46,
        "each rank its own ledger",
        "bookkeeping.py",
        "Lineage.from_json(broadcast_from_rank0(ledger.to_json()))\n",
        "Lineage.from_json(ledger.to_json())\n",
        ("distributed/test_agreement.py::test_ranks_keep_one_ledger",),
    ),
]
