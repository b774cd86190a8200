"""Faults by which a clock's decisions, and so records' lengths, are published: row 59."""

from tests.hazards.mutants.table import Mutant

CLOCKS = "hazards/test_clocks.py::"
LEDGER_TEST = "ledger/test_ledger.py::"
EXECUTED, ACCOUNT, STEPS = "ledger/executed.py", "ledger/account.py", "ledger/steps.py"

MUTANTS = [
    Mutant(
        59,
        "lost steps published exactly",
        EXECUTED,
        "        counted = self._by_blocks(lost)\n",
        "        counted = len(lost)\n",
        (f"{LEDGER_TEST}test_lost_steps_are_published_by_blocks",),
        quick=True,
    ),
    Mutant(
        59,
        "a crash that lost nothing is not counted",
        EXECUTED,
        "for name in {*by_start, *crashed - {self._start}}:",
        "for name in by_start:",
        (f"{LEDGER_TEST}test_lost_steps_are_published_by_blocks",),
        quick=True,
    ),
    Mutant(
        59,
        "fewer lost steps published than there were",
        EXECUTED,
        "-(-by_start[name] // block))",
        "1)",
        (f"{LEDGER_TEST}test_lost_steps_are_published_by_blocks",),
        quick=True,
    ),
    Mutant(
        59,
        "a smaller block tells what a crash had lost",
        EXECUTED,
        "block = self._starts[name].most_lost if name in self._starts else 1",
        "block = min((s.most_lost for s in self._starts.values()), default=1)",
        (f"{LEDGER_TEST}test_each_crash_counts_as_what_it_could_lose",),
        quick=True,
    ),
    Mutant(
        59,
        "a descendant forgets what its ancestor lost",
        "ledger/lineage.py",
        "self.published_lost(), *self.lost_before()]",
        "self.published_lost()]",
        (f"{LEDGER_TEST}test_a_descendant_counts_and_hides_the_steps_that_its_ancestor_lost",),
        quick=True,
    ),
    Mutant(
        59,
        "weights of a run show what each of its terms lost",
        "ledger/initial.py",
        "[step if step in kept else NamedStep(step.name, *worst) for step in begun]",
        "list(begun)",
        (f"{LEDGER_TEST}test_a_descendant_counts_and_hides_the_steps_that_its_ancestor_lost",),
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
        "                self.executed.begin_start(most_lost(self.job_config))\n",
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
