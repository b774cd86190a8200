"""Faults by which a run's end tells of its records: row 47."""

from tests.hazards.mutants.table import Mutant

REHEARSAL = "preflight/test_rehearsal.py::test_row47_"
NOTHING = f"{REHEARSAL}a_rehearsal_changes_nothing[microbatch]"
MEMORY = f"{REHEARSAL}out_of_memory_is_one_line_before_step_1[cpu]"
EXCERPTS = "data/samples/test_excerpts.py::test_row47_"
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
        "every record is read as far as one",
        "data/samples/excerpts.py",
        '            budget.text -= len(text.encode("utf-8"))\n',
        "            budget.text -= 0\n",
        (f"{EXCERPTS}a_sample_is_tokenized_from_bounded_text[many texts-16]",),
        quick=True,
    ),
]
