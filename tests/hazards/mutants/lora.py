"""Faults of what is trained and what is frozen, with adapters, and of the game: row 56."""

from tests.hazards.mutants.table import Mutant

HERE = "models/test_lora.py::"
GAME = "hazards/test_audit.py::test_row35_and_56_adapters_left_out_of_the_norm_are_flagged"
PLAYED = (
    "hazards/test_audit.py::test_row35_and_56_with_adapters_it_stays_under_the_claim"
    "[(1, 1, 1)-microbatch]"
)

MUTANTS = [
    Mutant(
        56,
        "adapters of a layer not counted in the norm",
        "gradients/clipped_sum.py",
        "torch.stack([squared_norm(s.flatten(1)) for s in shards])",
        "torch.stack([squared_norm(s.flatten(1)) for s in shards[:-2]])",
        (f"{GAME}[B-None-70]", f"{GAME}[A-None-70]"),
    ),
    Mutant(
        56,
        "noise is named by adapted layer",
        "optimizer.py",
        "name=name, start=start, weight=weight)",
        'name=name.partition(".lora_")[0], start=start, weight=weight)',
        (PLAYED,),
    ),
    Mutant(
        56,
        "frozen weights given to AdamW",
        "models/lora.py",
        "    model.requires_grad_(False)\n",
        "",
        (f"{HERE}test_row56_what_is_frozen_is_not_paid_for_and_does_not_move[grad_sample]",),
    ),
    Mutant(
        56,
        "alpha over r left out of a merge",
        "models/lora.py",
        "a.float(), alpha=scaling)",
        "a.float())",
        (f"{HERE}test_merged_weights_give_the_same_logits",),
        quick=True,
    ),
]
