"""Faults by which a clock's decisions, and so records' lengths, are published: rows 59 and 73."""

from tests.hazards.mutants.table import Mutant

CLOCKS = "hazards/test_clocks.py::"
LEDGER_TEST = "ledger/test_ledger.py::"
ONE_JOB = "hazards/test_outputs.py::test_row73_trackers_get_what_one_job_would_send[9]"
OUTLETS = "watch/outlets.py"
EXECUTED, ACCOUNT = "ledger/log.py", "ledger/account.py"

MUTANTS = [
    Mutant(
        59,
        "lost steps published exactly",
        EXECUTED,
        "        return dataclasses.replace(lineage, lost=steps, heldout_losses=losses)\n",
        "        steps = self.count - lineage.steps\n"
        "        return dataclasses.replace(lineage, lost=steps, heldout_losses=losses)\n",
        (
            "ledger/test_histories.py::test_row59_what_is_published_follows_from_public_events_alone",
        ),
        quick=True,
    ),
    Mutant(
        59,
        "epsilon at points that follow from where a start began",
        ACCOUNT,
        "            total_steps=self._total,\n",
        "            total_steps=self._total + self._first.steps,\n",
        (f"{LEDGER_TEST}test_epsilon_does_not_show_where_a_start_began",),
        quick=True,
    ),
    Mutant(
        59,
        "a start is not recorded",
        "bookkeeping.py",
        "begin_start(self.ledger, losable(self._config))\n",
        "begin_start(self.ledger, losable(self._config)._replace(most=10**6))\n",
        (f"{CLOCKS}test_row59_privacy_json_does_not_tell_one_from_the_other",),
    ),
    Mutant(
        73,
        "a tracker gets a line when it is logged",
        OUTLETS,
        "                os.fsync(file.fileno())  # as",
        "                self.send()  # as",
        (ONE_JOB,),
        quick=True,
    ),
    Mutant(
        73,
        "a tracker gets what was logged of a lost step",
        OUTLETS,
        "self._read().items() if n <= step}",
        "self._read().items()}",
        (ONE_JOB,),
        quick=True,
    ),
    Mutant(
        73,
        "a tracker sees the planned epsilon of each start",
        OUTLETS,
        "line[_OF_ALL_STEPS] = newest\n",
        "pass\n",
        (ONE_JOB,),
        quick=True,
    ),
]
