"""Faults of the average of weights: row 76."""

from tests.hazards.mutants.table import Mutant

RUN = "models/test_ema_run.py::"
TRAINER = "hazards/test_trainer.py::"
_UPDATE = (
    "        self.dp_optimizer.step("
    "self.clipped_sum.take(), self.books.noise_keys.take(self.step))\n"
)
_AVERAGE = (
    "        if self.average is not None:\n"
    "            self.average.update()  # of weights that are noised by now\n"
)

MUTANTS = [
    Mutant(
        76,
        "the average made before the noise is added",
        "train.py",
        _UPDATE + _AVERAGE,
        _AVERAGE + _UPDATE,
        (f"{TRAINER}test_row76_the_average_follows_weights_that_are_noised",),
        quick=True,
    ),
    Mutant(
        76,
        "the average follows the sum without noise",
        "train.py",
        _UPDATE + _AVERAGE,
        "        total = self.clipped_sum.take()\n"
        "        for name, average in self.average.state_dict()['weights'].items():\n"
        "            average.to_local().view(-1).sub_(total[name], alpha=lr)\n"
        "        self.dp_optimizer.step(total, self.books.noise_keys.take(self.step))\n"
        "        self.average.update()\n",
        (f"{RUN}test_row76_each_average_follows_from_released_weights_alone",),
    ),
    Mutant(
        76,
        "a release takes the other weights",
        "release/__main__.py",
        "if average and parameter.requires_grad else",
        "if not average and parameter.requires_grad else",
        (f"{RUN}test_a_release_is_of_the_average_unless_told_otherwise[option0-True]",),
    ),
]
