"""Faults of what is claimed of a run, whatever its steps were: rows 50 to 55."""

from tests.hazards.mutants.table import Mutant

CLAIMS = "hazards/test_claims.py::"
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
        "a run whose terms followed from weights is resumed as a planned one",
        "ledger/lineage.py",
        '        if fields.pop("adaptive", False):\n',
        '        if fields.pop("adaptive", False) and False:\n',
        (f"{CLAIMS}test_row51_settings_that_followed_from_results_are_not_resumed",),
        quick=True,
    ),
    Mutant(
        50,
        "the planned steps are not counted",
        LINEAGE,
        "return [*self.executed(), *self.still_planned()]",
        "return self.executed()",
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
        (f"{CLAIMS}test_row55_what_a_step_was_taken_with_is_told_by_segment[secure_noise-True]",),
        quick=True,
    ),
]
