"""Faults of what is claimed of a run, whatever its steps were: rows 50 to 55."""

from tests.hazards.mutants.table import Mutant

CLAIMS = "hazards/test_claims.py::"
LEDGER_TEST = (
    "ledger/test_ledger.py::"
    "test_a_resume_on_changed_terms_is_refused_with_both_values_and_the_remedy"
)
LEDGERS = "hazards/test_ledgers.py::"
LINEAGE = "ledger/lineage.py"
VERIFY = "ledger/runs.py"

MUTANTS = [
    Mutant(
        65,
        "the divisor is computed from the number of units",
        "checkpoint/terms.py",
        "        expected_batch_size=batch,\n",
        "        expected_batch_size=max(round(rate * units), 1),\n",
        (f"{CLAIMS}test_row65_the_divisor_and_all_terms_are_those_of_the_configuration",),
        quick=True,
    ),
    Mutant(
        51,
        "a choice by what initial weights showed is not an assumption",
        "checkpoint/initial.py",
        "    return replace(lineage, ancestors=tuple(ancestors))\n",
        "    return replace(lineage, ancestors=tuple(ancestors), caveats=())\n",
        (f"{LEDGERS}test_row45_what_initial_weights_showed_and_their_units_are_assumptions",),
        quick=True,
    ),
    Mutant(
        50,
        "the planned steps are not counted",
        "ledger/spending.py",
        "    if planned:\n        terms = ",
        "    if not planned:\n        terms = ",
        (f"{CLAIMS}test_row50_a_run_that_stopped_early_tells_what_was_planned",),
        quick=True,
    ),
    Mutant(
        52,
        "checkpoints of the baseline without a ledger",
        "train_spec.py",
        '        return {**super().state_dict(), "ledger": self._current().to_json()}\n',
        "        return super().state_dict()\n",
        (f"{CLAIMS}test_row52_a_checkpoint_of_the_baseline_holds_its_ledger",),
    ),
    Mutant(
        52,
        "a private run in the baselines folder",
        "checkpoint/plan.py",
        "    refuse_baseline_folder(folder)\n",
        "",
        (f"{CLAIMS}test_row52_its_folder_says_so_and_is_no_place_for_a_private_run",),
    ),
    Mutant(
        53,
        "an audits steps left out of the sum",
        LINEAGE,
        "return self.private or (self.audit is not None and self.audit.otherwise_private)",
        "return self.private",
        (f"{CLAIMS}test_row53_an_audit_adds_to_what_runs_spend",),
        quick=True,
    ),
    Mutant(
        54,
        "runs on other records are added up unasked",
        VERIFY,
        "    if not overlapping:\n",
        "    if overlapping:\n",
        (f"{CLAIMS}test_row54_runs_on_overlapping_records_can_be_added_up",),
        quick=True,
    ),
    Mutant(
        55,
        "any delta",
        "checkpoint/plan.py",
        "    if _reaches(delta, most):\n",
        "    if _reaches(delta, 1.0):\n",
        (
            f"{CLAIMS}test_row55_a_delta_that_publishes_units_is_refused_where_their_number_is_public",
        ),
        quick=True,
    ),
    Mutant(
        55,
        "secure noise toggled unseen",
        "ledger/settings.py",
        '        "privacy.secure_noise": settings.secure_noise,\n',
        "",
        (LEDGER_TEST,),
        quick=True,
    ),
]
