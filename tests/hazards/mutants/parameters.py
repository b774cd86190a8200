"""Faults of recomputation, tied weights, the sum itself and who is trained: rows 27 to 29, 36."""

from tests.hazards.mutants.clipping import CLIP, HERE, LAYERS, ONE, SAMPLES, SUM
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
        27,
        "activations kept",
        "gradients/layers.py",
        "        ctx.save_for_backward(x, weight)\n",
        '        layer.__dict__.setdefault("kept", []).append(x)\n'
        "        ctx.save_for_backward(x, weight)\n",
        (f"{LAYERS}test_hooks_hold_activations_under_checkpointing_and_functions_do_not",),
        quick=True,
    ),
    Mutant(
        27,
        "activations leak from step to step",
        SUM,
        "        self.accumulating = True\n        for bundle_DN",
        '        self.accumulating = self.__dict__.setdefault("kept", []).append(clipped) is None\n'
        "        for bundle_DN",
        (f"{HERE}test_row27_live_tensors_stay_flat_over_16_steps[full-microbatch]",),
    ),
    Mutant(
        28,
        "a tied weight counted as two",
        "gradients/operands.py",
        "        gradients[name].add_(more)\n",
        "        gradients[name].square_().add_(more.square()).sqrt_()\n",
        (f"{SAMPLES}test_every_mesh[(1, 1, 1)-4-{{'tie_embeddings': True}}-V2]",),
    ),
    Mutant(
        28,
        "half of a tied weight",
        "gradients/operands.py",
        "        gradients[name].add_(more)\n",
        "        gradients[name] = more\n",
        (f"{SAMPLES}test_every_mesh[(1, 1, 1)-4-{{'tie_embeddings': True}}-V1]",),
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
        28,
        "noise keyed by a checkpointed name",
        "models/parameters.py",
        '.replace("_checkpoint_wrapped_module.", "")',
        "",
        (f"{OUTPUTS}test_row28_names_know_no_wrappers",),
        quick=True,
    ),
    Mutant(
        28,
        "tied weights untied",
        "models/llama3/model.py",
        "        if model_args.tie_embeddings:\n",
        "        if not model_args:\n",
        (f"{OUTPUTS}test_row28_a_tied_weight_is_one_parameter",),
        quick=True,
    ),
    Mutant(
        29,
        "the last sample replaces the sum",
        CLIP,
        "        accumulator.addcmul_(gradient, factor)\n",
        "        accumulator.copy_(gradient * factor)\n",
        (f"{ONE}test_row29_sums_add_up",),
        quick=True,
    ),
    Mutant(
        29,
        "the sum of the step before stays",
        SUM,
        "        self._whole.zero_()\n",
        "",
        (f"{HERE}test_row29_two_microbatches_are_the_explicit_sum[1-microbatch]",),
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
    Mutant(
        36,
        "a trained parameter not in the norm",
        SUM,
        "squared_norm(s.flatten(1)) for s in shards",
        "squared_norm(s.flatten(1)) for s in shards[:-1]",
        (
            f"{HERE}test_row36_frozen_is_bit_identical_and_the_rest_is_in_the_norm"
            "[layers.0.-grad_sample]",
        ),
    ),
    Mutant(
        36,
        "a frozen bias is given a gradient",
        "gradients/layers.py",
        "        if bias_needed and bias_needed[0]:\n",
        "        if bias_needed:\n",
        (f"{LAYERS}test_equals_a_loop_of_single_samples[frozen bias-4-(1, 1)]",),
        quick=True,
    ),
]
