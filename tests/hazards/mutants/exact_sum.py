"""Faults of the exact sum, and of what is said of the fp32 one: row 49."""

from tests.hazards.mutants.clipping import SUM
from tests.hazards.mutants.table import Mutant

FIXED = "privacy/fixed_point.py"
STEP = "gradients/step.py"

POINT = "privacy/test_fixed_point.py::test_row49_"
MOVED = "privacy/test_summation.py::test_row49_"
RANKS = "gradients/test_exact_sum.py::test_row49_"
TRAINER = "hazards/test_trainer.py::test_row49_the_trainer_sums_and_adds_noise_as_configured[True]"

MUTANTS = [
    Mutant(
        49,
        "an exact sum in fp32",
        FIXED,
        "        total_n.add_(units_n.copy_(scaled_n))\n",
        "        total_n.copy_(total_n.float().add_(scaled_n.float()))\n",
        (f"{MOVED}in_fixed_point_no_record_moves_the_sum_by_more_than_C[0.0009765625]",),
        quick=True,
    ),
    Mutant(
        49,
        "half the noise in units",
        FIXED,
        "std / math.sqrt(DRAWS) / unit",
        "std / DRAWS / unit",
        (f"{POINT}noise_is_the_secure_draws_rounded_to_units[0.7-0]",),
        quick=True,
    ),
    Mutant(
        49,
        "ranks reduced in fp32",
        SUM,
        "        chunk_N = self._whole[0]\n",
        "        chunk_N = self._whole[0].float().to(self._whole.dtype)\n",
        (f"{RANKS}whichever_rank_a_sample_is_dealt_to_no_bit_changes[(2, 1, 1)]",),
    ),
    Mutant(
        49,
        "the trainer adds noise of another kind",
        STEP,
        "            summation=self.summation,\n",
        "",
        (TRAINER,),
        quick=True,
    ),
]
