"""Faults of ghost clipping: rows 1, 4, 13, 22 and 28."""

from tests.hazards.mutants.clipping import EXACT, HERE
from tests.hazards.mutants.table import Mutant

GHOST = "gradients/test_ghost.py::"
SUMS = f"{GHOST}test_row28_a_sum_of_layers_has_the_norm_of_its_gradient"
CAP = f"{GHOST}test_row13_no_error_of_a_ghost_norm_moves_the_sum_by_more_than_C"

METHOD = "gradients/ghost.py"
NORMS = "gradients/ghost_norm.py"

MUTANTS = [
    Mutant(
        1,
        "ghost norms of the ranks parts",
        NORMS,
        "        for rank in range(ranks):\n",
        "        for rank in [dist.get_rank(cp)]:\n",
        (f"{GHOST}test_row01_pairs_across_ranks_belong_to_it[products-200]",),
    ),
    Mutant(
        1,
        "ghost norms without the other cp ranks",
        METHOD,
        "            dist.all_reduce(squares_LB, group=self._cp)\n",
        "            pass\n",
        (f"{EXACT}[ghost-(1, 1, 4)]",),
    ),
    Mutant(
        4,
        "all samples multiplied by the first ones factor",
        METHOD,
        "factor_B[samples] * cap_B",
        "factor_B[:1] * cap_B",
        (
            f"{HERE}test_row04_opposite_samples_in_one_microbatch_cancel_after_clipping"
            "[(1, 1, 1)-ghost]",
        ),
    ),
    Mutant(
        13,
        "what is added is not measured",
        METHOD,
        "(found_B / formed_B).sqrt(), 1.0)",
        "1.0, torch.ones_like(found_B))",
        (f"{CAP}[0.0001-1.0-(1, 1, 1)-one]", f"{CAP}[1.0-30.0-(1, 1, 1)-two]"),
    ),
    Mutant(
        13,
        "what is added is measured on one cp rank",
        METHOD,
        "                dist.all_reduce(formed_B, group=self._cp)\n",
        "                pass\n",
        (f"{CAP}[0.0001-1.0-(1, 1, 2)-one]",),
    ),
    Mutant(
        28,
        "the cross term of a tied weight left out",
        NORMS,
        "            total_B += 2 * _pairs(rows, columns, block_elements)\n",
        "            pass\n",
        (f"{SUMS}[products+rows-16777216]",),
        quick=True,
    ),
]
