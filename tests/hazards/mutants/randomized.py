"""Faults of estimated norms: rows 1, 11, 13, 28, 35 and 75."""

from tests.hazards.mutants.table import Mutant

ESTIMATES = "gradients/test_randomized_norm.py::"
ACCOUNTS = "privacy/test_randomized.py::"
TOLD = "hazards/test_randomized.py::"
OTHERS = f"{ESTIMATES}test_row75_a_units_projections_do_not_depend_on_who_else_is_drawn"
MEAN = f"{ESTIMATES}test_row75_estimates_are_unbiased"

WRONG = f"{ESTIMATES}test_row13_no_error_of_an_estimate_moves_the_sum_by_more_than_is_accounted_for"

METHOD = "gradients/randomized_norm.py"

MUTANTS = [
    Mutant(
        1,
        "estimates of one ranks tokens",
        METHOD,
        "            dist.all_reduce(part, group=self._cp)\n",
        "            pass\n",
        (f"{ESTIMATES}test_every_mesh[(1, 1, 2)-hutchinson-one-accounted]",),
    ),
    Mutant(
        75,
        "projections numbered by slot",
        METHOD,
        "        self._positions = positions\n",
        "        self._positions = range(len(positions or ()))\n",
        (OTHERS,),
        quick=True,
    ),
    Mutant(
        11,
        "one key of projections for all steps",
        "train.py",
        "start_step(self.books.projection_keys.take(self.step))",
        "start_step(bytes(32))",
        (f"{TOLD}test_row11_and_67_a_step_has_a_projection_key_of_its_own",),
    ),
    Mutant(
        75,
        "projections that are not scaled",
        METHOD,
        "std=1 / math.sqrt(k)",
        "std=1.0",
        (f"{MEAN}[hutchinson]",),
        quick=True,
    ),
    Mutant(
        75,
        "the head of hutch++ left out",
        METHOD,
        "(_squares(head_BPK) + _squares(y_BDK))",
        "(_squares(y_BDK))",
        (f"{MEAN}[hutch++]",),
        quick=True,
    ),
    Mutant(
        13,
        "an estimate caps nothing",
        METHOD,
        "        self._largest_ratio = 1.0 if capped else largest_ratio(projections)\n",
        "        self._largest_ratio = 1e9\n",
        (f"{WRONG}[--privacy.underestimates=accounted-8-1e-06]",),
    ),
    Mutant(
        75,
        "estimates accounted for as capped that are not",
        METHOD,
        "        self._largest_ratio = 1.0 if capped else largest_ratio(projections)\n",
        "        self._largest_ratio = largest_ratio(projections)\n",
        (
            f"{TOLD}test_row75_what_is_capped_is_what_is_accounted_as_exact[options0-PoissonGaussian]",
        ),
    ),
    Mutant(
        75,
        "more projections accounted for than drawn",
        "privacy/mechanism.py",
        "    norms = (privacy.projections, privacy",
        "    norms = (4 * privacy.projections, privacy",
        (f"{TOLD}test_row75_what_is_accounted_is_what_is_drawn[32-hutchinson]",),
    ),
    Mutant(
        75,
        "estimated norms accounted for as exact",
        "privacy/pld.py",
        "    if ratios is not None:\n",
        "    if False:\n",
        (f"{ACCOUNTS}test_between_exact_norms_and_the_largest_ratio_always",),
        quick=True,
    ),
    Mutant(
        75,
        "an envelope rounded down",
        "privacy/randomized.py",
        "    probabilities = np.concatenate([[1 - above[0]], above[:-1] - above[1:]])\n",
        "    probabilities = -np.diff(np.concatenate([[1.0], above[1:], [0.0]]))\n",
        ("privacy/test_randomized.py::test_the_values_dominate_the_envelope[32]",),
        quick=True,
    ),
]
