"""Faults of runs that learn nothing, or something else: row 69's second half, and row 70."""

from tests.hazards.mutants.table import Mutant

TESTS = "hazards/test_not_finite.py::"
MANAGER = "checkpoint/manager.py"

MUTANTS = [
    Mutant(
        69,
        "a run goes on with weights that are not finite",
        "train.py",
        "        if overflows:\n",
        "        if False:\n",
        (f"{TESTS}test_row69_a_run_ends_at_the_step_after_which_weights_are_not_finite[100]",),
    ),
    Mutant(
        69,
        "a checkpoint of weights that are not finite",
        MANAGER,
        "        if last_step or saves:\n",
        "        if False:\n",
        (f"{TESTS}test_row69_no_checkpoint_is_written_of_such_weights",),
        quick=True,
    ),
    Mutant(
        69,
        "weights that are not finite are released",
        "release/__main__.py",
        "    if name := first_overflow(model.named_parameters()):\n",
        "    if name := '':\n",
        (f"{TESTS}test_row69_such_weights_are_not_released",),
        quick=True,
    ),
    Mutant(
        69,
        "weights that are not finite are exported",
        "models/hugging_face_weights.py",
        "        if not tensor.isfinite().all():\n",
        "        if False:\n",
        (f"{TESTS}test_row69_such_weights_are_not_exported",),
        quick=True,
    ),
    Mutant(
        70,
        "a resume follows the schedule of its checkpoint",
        MANAGER,
        "            LambdaLR(old.optimizer, old.lr_lambdas, last_epoch=self.start.step - 1)\n",
        "            old\n",
        (f"{TESTS}test_row70_the_steps_of_a_resume_are_its_configurations",),
        quick=True,
    ),
    Mutant(
        70,
        "a resume keeps the optimizer settings of its checkpoint",
        MANAGER,
        "                group.update(settings)\n",
        "                group.update(lr=settings['lr'], initial_lr=settings['initial_lr'])\n",
        (f"{TESTS}test_row70_the_steps_of_a_resume_are_its_configurations",),
        quick=True,
    ),
    Mutant(
        70,
        "a load leaves the configuration out",
        MANAGER,
        "        self._follow_configuration(configured)\n",
        "",
        (f"{TESTS}test_row70_a_finished_run_that_goes_on_follows_its_new_configuration",),
    ),
]
