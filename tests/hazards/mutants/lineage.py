"""Faults of lineage: lost steps, initial weights and what they spent; rows 31, 45, 46."""

from tests.hazards.mutants.table import Mutant

LEDGER_TEST = "ledger/test_ledger.py::"
LEDGERS = "hazards/test_ledgers.py::"
COMMAND = "ledger/test_command.py::"

LOG, LOG_TEST = "ledger/log.py", "ledger/test_log.py::"
INITIAL, TERMS = "checkpoint/initial.py", "checkpoint/plan.py"
STEPS = "ledger/settings.py"

MUTANTS = [
    Mutant(
        46,
        "a crash loses nothing",
        LOG,
        "[start.declared for start in starts if not start.ended]",
        "[]",
        (f"{LOG_TEST}test_a_crash_counts_as_what_it_could_lose[0]",),
        quick=True,
    ),
    Mutant(
        46,
        "a checkpoint that was damaged lost nothing",
        LOG,
        "        lost += [start.behind(at) for start, at in zip(starts, loads, strict=False)]\n",
        "",
        (f"{LOG_TEST}test_a_load_behind_a_saved_step_counts_whole_intervals[7-4]",),
        quick=True,
    ),
    Mutant(
        46,
        "more steps than a crash is counted to lose",
        LOG,
        "        if unsaved > declared:\n",
        "        if unsaved < 0:\n",
        (f"{LOG_TEST}test_a_step_beyond_what_a_crash_may_lose_is_refused",),
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
        "        return lineage.marked_not_private(_NOT_PRIVATE)\n",
        "        return lineage.with_caveats(_NOT_PRIVATE)\n",
        (f"{LEDGERS}test_row45_not_private_sticks_to_initial_weights",),
        quick=True,
    ),
    Mutant(
        45,
        "an ancestor forgotten by an initial load",
        INITIAL,
        "[*lineage.ancestors, *earlier.ancestors, own]",
        "[*lineage.ancestors, *earlier.ancestors]",
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
        "    if missing.steps or ",
        "    if ",
        (f"{COMMAND}test_a_log_that_lost_lines_is_refused",),
    ),
]
