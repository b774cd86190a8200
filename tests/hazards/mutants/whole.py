"""Faults that the distinguishing game alone is asked to see: row 35.

The game's own test plants its faults at run time; these are edits, and what flags them is that the
build is no longer under its claim. Half the noise needs more
trials than the clean build's test has: there it is a third.
"""

from tests.hazards.mutants.table import Mutant

CLEAN = "hazards/test_audit.py::test_row35_the_clean_build_stays_under_the_claim[microbatch]"

MUTANTS = [
    Mutant(
        35,
        "a third of the noise",
        "optimizer.py",
        "std, start = self._noise_std, self",
        "std, start = self._noise_std / 3, self",
        (CLEAN,),
    ),
    Mutant(
        35,
        "no clipping",
        "privacy/clipping.py",
        "        scale_B = (norm_B.reciprocal() * bound).clamp(max=1.0)\n",
        "        scale_B = torch.ones_like(norm_B)\n",
        (CLEAN,),
    ),
]
