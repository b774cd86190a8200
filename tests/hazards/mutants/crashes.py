"""Faults by which a run's end tells of its records: row 47."""

from tests.hazards.mutants.table import Mutant

REHEARSAL = "preflight/test_rehearsal.py::test_row47_"
NOTHING = f"{REHEARSAL}a_rehearsal_changes_nothing[microbatch]"
MEMORY = f"{REHEARSAL}what_fails_is_one_line_before_step_1[cpu]"
SAMPLES = "data/test_samples.py::test_row47_"
NEIGHBOURS = "hazards/test_crashes.py::test_row47_"

MUTANTS = [
    Mutant(
        47,
        "no rehearsal",
        "train.py",
        "            rehearse(self)\n",
        "            pass\n",
        (MEMORY,),
    ),
    Mutant(
        47,
        "only the shortest samples rehearsed",
        "preflight/rehearsal.py",
        "enumerate((rungs[0], *rungs))",
        "enumerate((rungs[0], *rungs[:1]))",
        (f"{NEIGHBOURS}neighbours_end_alike_in_the_rehearsal",),
    ),
    Mutant(
        47,
        "a rehearsed update is counted",
        "optimizer.py",
        "            value.zero_()\n",
        "            value.add_(0)\n",
        (NOTHING,),
    ),
    Mutant(
        47,
        "all records of a unit are read",
        "data/samples.py",
        "        while needed > 0 and place < places.stop:\n",
        "        while place < places.stop:\n",
        (f"{SAMPLES}no_more_ids_are_read_than_a_sample_has[many-concat]",),
        quick=True,
    ),
]
