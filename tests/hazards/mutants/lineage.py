"""Faults of lineage: segments of a run, initial weights and what they spent; rows 31, 45, 46."""

from tests.hazards.mutants.table import Mutant

LEDGER_TEST = "ledger/test_ledger.py::"
LEDGERS = "hazards/test_ledgers.py::"
COMMAND = "ledger/test_command.py::"

LINEAGE = "ledger/lineage.py"
INITIAL, TERMS = "checkpoint/initial.py", "checkpoint/plan.py"
STEPS = "ledger/settings.py"

MUTANTS = [
    Mutant(
        46,
        "finished segments forgotten",
        LINEAGE,
        "        return [*found, RunSegment(self.settings, left)]\n",
        "        return [RunSegment(self.settings, sum(s.steps for s in found) + left)]\n",
        (f"{LEDGER_TEST}test_a_segment_starts_where_the_settings_change",),
        quick=True,
    ),
    Mutant(
        31,
        "any term may change with a segment",
        LINEAGE,
        "            now.refuse_change_of_run(since=then)\n",
        "            pass\n",
        (f"{LEDGER_TEST}test_some_terms_no_segment_may_change",),
        quick=True,
    ),
    Mutant(
        45,
        "weights without a ledger accepted",
        INITIAL,
        "    if not config.privacy.initial_weights_public:\n",
        "    if not path:\n",
        (f"{LEDGERS}test_row45_weights_without_a_ledger_must_be_said_to_be_public",),
        quick=True,
    ),
    Mutant(
        45,
        "not private undone by an initial load",
        INITIAL,
        "        return Inheritance((*caveats, _NOT_PRIVATE), private=False)\n",
        "        return Inheritance((*caveats, _NOT_PRIVATE))\n",
        (f"{LEDGERS}test_row45_not_private_sticks_to_initial_weights",),
        quick=True,
    ),
    Mutant(
        45,
        "an ancestor forgotten by an initial load",
        INITIAL,
        "    lineage = (*earlier.ancestors, own, *initial.all_begun)\n",
        "    lineage = (*earlier.ancestors, *initial.all_begun)\n",
        (f"{LEDGERS}test_row45_initial_weights_bring_all_that_they_spent",),
        quick=True,
    ),
    Mutant(
        45,
        "weights of a run pass for public where no ledger lies beside them",
        INITIAL,
        "    for folder in (os.path.dirname(place), os.path.dirname(os.path.dirname(place))):\n",
        "    for folder in ():\n",
        (f"{COMMAND}test_weights_within_a_run_without_a_ledger_are_charged_all_that_was_begun",),
    ),
    Mutant(
        46,
        "steps of two starts taken for the same",
        STEPS,
        'hashlib.sha256(f"{start} {number}".encode())',
        'hashlib.sha256(f"{number}".encode())',
        (f"{LEDGER_TEST}test_a_step_counts_once_and_others_add_up",),
        quick=True,
    ),
    Mutant(
        46,
        "a log that lost lines accepted",
        TERMS,
        "    if executed.missing(ledger.taken()) or ",
        "    if ",
        (f"{COMMAND}test_a_log_that_lost_lines_is_refused",),
    ),
]
