"""Faults by which a clock's decisions, and so records' lengths, are published: row 59."""

from tests.hazards.mutants.table import Mutant

CLOCKS = "hazards/test_clocks.py::"
LEDGER_TEST = "ledger/test_ledger.py::"
RELEASE = "release/test_release.py::"
LINEAGE, ACCOUNT, STEPS = "ledger/lineage.py", "ledger/account.py", "ledger/steps.py"

MUTANTS = [
    Mutant(
        59,
        "lost steps published exactly",
        LINEAGE,
        "steps=block * max(self.crashes, -(-lost.steps // block)))",
        "steps=lost.steps)",
        (f"{LEDGER_TEST}test_lost_steps_are_published_by_blocks",),
        quick=True,
    ),
    Mutant(
        59,
        "a crash that lost nothing is not counted",
        LINEAGE,
        "block * max(self.crashes, -(-lost.steps // block))",
        "block * -(-lost.steps // block)",
        (f"{RELEASE}test_what_is_claimed_does_not_depend_on_how_many_steps_a_crash_lost",),
    ),
    Mutant(
        59,
        "fewer lost steps published than there were",
        LINEAGE,
        "max(self.crashes, -(-lost.steps // block))",
        "self.crashes",
        (f"{LEDGER_TEST}test_lost_steps_are_published_by_blocks",),
        quick=True,
    ),
    Mutant(
        59,
        "a smaller block tells what a crash had lost",
        LINEAGE,
        "max(self.lost_steps_block, earlier.lost_steps_block)",
        "self.lost_steps_block",
        (f"{LEDGER_TEST}test_a_crash_never_comes_to_count_less",),
        quick=True,
    ),
    Mutant(
        59,
        "names show their start",
        STEPS,
        '    return hashlib.sha256(f"{start} {number}".encode()).hexdigest()[:16]\n',
        '    return f"{start}-{number}"\n',
        ("hazards/test_run.py::test_hazard_21_the_ledger_counts_optimizer_steps",),
    ),
    Mutant(
        59,
        "epsilon at points that follow from where a start began",
        ACCOUNT,
        "            total_steps=own + max(self._total - self._ledger.steps, 0),\n"
        "            first_step=own,\n",
        "            total_steps=2 * own + max(self._total - self._ledger.steps, 0),\n"
        "            first_step=own,\n",
        (f"{LEDGER_TEST}test_epsilon_does_not_show_where_a_start_began",),
        quick=True,
    ),
    Mutant(
        59,
        "a start is not recorded",
        "train.py",
        "                self.executed.begin_start()\n",
        "                pass\n",
        (f"{CLOCKS}test_row59_privacy_json_does_not_tell_one_from_the_other",),
    ),
    Mutant(
        59,
        "a stop as asked counts as a crash",
        "train.py",
        "            self.executed.end_start()",
        "            pass",
        (f"{CLOCKS}test_row59_privacy_json_does_not_tell_one_from_the_other",),
    ),
]
