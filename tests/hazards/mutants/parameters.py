"""Faults of recomputation, tied weights, the sum itself and who is trained: rows 27 to 29, 36."""

from tests.hazards.mutants.clipping import EXACT, HERE, LAYERS, SUM
from tests.hazards.mutants.table import Mutant

OUTPUTS = "hazards/test_outputs.py::"

MUTANTS = [
    Mutant(
        27,
        "recomputed layers count twice",
        "gradients/layers.py",
        "        ctx.save_for_backward(x, weight)\n",
        "        again = torch._C._current_graph_task_id() != -1\n"
        "        ctx.save_for_backward(x * (1 + again), weight)\n",
        (f"{LAYERS}test_checkpointed_gradients_equal_the_loop",),
        quick=True,
    ),
    Mutant(
        28,
        "half of a tied weight",
        "gradients/operands.py",
        "        gradients[name].add_(more)\n",
        "        gradients[name] = more\n",
        (f"{EXACT}[grad_sample, whole-(1, 2, 1)]",),
    ),
    Mutant(
        28,
        "noise keyed by a compiled name",
        "models/parameters.py",
        '.replace("_orig_mod.", "")',
        "",
        (f"{OUTPUTS}test_row28_names_know_no_wrappers",),
        quick=True,
    ),
    Mutant(
        29,
        "the sum of the step before stays",
        SUM,
        "        self._whole.zero_()\n",
        "",
        (f"{HERE}test_row17_draws_of_any_size_keep_ranks_in_lockstep[(1, 2, 1)-microbatch]",),
    ),
    Mutant(
        36,
        "frozen parameters trained",
        "models/parameters.py",
        "        for name, parameter in model.named_parameters()\n"
        "        if parameter.requires_grad\n",
        "        for name, parameter in model.named_parameters()\n",
        (
            f"{HERE}test_row36_frozen_is_bit_identical_and_the_rest_is_in_the_norm"
            "[layers.0.-microbatch]",
        ),
    ),
]
