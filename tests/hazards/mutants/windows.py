"""Faults of several windows a unit: rows 5, 17 and 57."""

from tests.hazards.mutants.table import Mutant

FEED = "data/test_feed.py::"
SUMS = "gradients/test_windows.py::"
MEAN = f"{SUMS}test_row57_the_mean_is_clipped_once[(1, 2, 1)-()]"
MOVES = f"{SUMS}test_row57_a_unit_moves_the_sum_by_at_most_C"

MUTANTS = [
    Mutant(
        57,
        "each window clipped by itself and added",
        "train.py",
        "                self.gradients.hold(loss_B)\n",
        "                self.gradients.accumulate_clipped(loss_B, part.valid_B)\n",
        (f"{MOVES}[ann-0.5]",),
    ),
    Mutant(
        57,
        "a units windows are kept for the next unit",
        "gradients/microbatch.py",
        "        held, self._held = self._held, []\n",
        "        held = self._held\n",
        (MEAN,),
    ),
    Mutant(
        17,
        "padding has one window",
        "data/feed.py",
        "        slots = np.full(self.loader.batch_size * self.loader.windows, -1)\n",
        "        slots = np.full(self.loader.batch_size, -1)\n",
        (f"{FEED}test_row17_padding_has_as_many_windows",),
        quick=True,
    ),
]
