"""Faults of a run that learns nothing: row 69."""

from tests.hazards.mutants.table import Mutant

LEARNING = "hazards/test_learning.py::test_row69_"
REFUSED = f"{LEARNING}a_run_with_nothing_to_learn_is_refused"
LEARNABLE = "data/test_learnable.py::"

MUTANTS = [
    Mutant(
        69,
        "any token counts as a target",
        "data/learnable.py",
        "            if head.learned:\n",
        "            if len(head.ids):\n",
        (f"{LEARNABLE}test_the_first_token_is_no_target",),
        quick=True,
    ),
    Mutant(
        69,
        "a run starts with nothing to learn",
        "data/learnable.py",
        "    if census.targets == 0 and not _has_target(",
        "    if census.targets < 0 and not _has_target(",
        (f"{REFUSED}[Assistant]", f"{REFUSED}[PDF]"),
        quick=True,
    ),
    Mutant(
        69,
        "a refusal after some units",
        "data/learnable.py",
        "    if census.targets == 0 and not _has_target(samples, units, word):\n",
        "    if census.targets == 0:\n",
        (f"{LEARNABLE}test_one_target_among_all_units_is_enough",),
        quick=True,
    ),
]
