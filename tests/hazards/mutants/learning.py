"""Faults of a run that learns nothing: row 69."""

from tests.hazards.mutants.table import Mutant

LEARNING = "hazards/test_learning.py::test_row69_"
REFUSED = f"{LEARNING}a_run_with_nothing_to_learn_is_refused"
DATASET = "data/test_dataset.py::test_row69_"

MUTANTS = [
    Mutant(
        69,
        "any token counts as a target",
        "data/samples.py",
        "reduceat(places > 0,",
        "reduceat(places >= 0,",
        (f"{DATASET}the_first_id_is_no_target",),
        quick=True,
    ),
    Mutant(
        69,
        "a run starts with nothing to learn",
        "data/dataset.py",
        "        if not learned.any():\n",
        "        if not learned.any() and not lacks:\n",
        (f"{REFUSED}[Assistant]", f"{REFUSED}[PDF]"),
        quick=True,
    ),
    Mutant(
        69,
        "a refusal after some units",
        "data/dataset.py",
        "        if not learned.any():\n",
        "        if not learned[:100].any():\n",
        (f"{DATASET}one_target_among_all_units_is_enough[500]",),
        quick=True,
    ),
]
